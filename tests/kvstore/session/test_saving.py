"""A session's state by names that are declared, beside what a method and an optimizer really keep."""
import collections
import json
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import numpy as np
import pytest

import kvstore
from kvstore import methods
from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError
from kvstore.fronts.gluon.store import Store
from kvstore.messages.buckets import Parameter
from kvstore.messages.seam import Saved, Transport
from kvstore.optimizers.compensated import DCASGD_A, DCASGD_C, AdamW
from kvstore.session.session import Session
from kvstore.state.npz import write_npz
from kvstore.transports.in_process import Stage
from tests import paper

SIZE = 5


def stepped(name: str, transport: Transport, steps: int = 1, momentum: float = 0.0,
            states: Optional[Sequence[Any]] = None, shared: bool = False, wd: float = 0.0, **options: Any) -> Store:
    """A store that has done some steps of one parameter `w`; `shared`: from what all workers had in common."""
    store = kvstore.create(name, transport, **options)
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.25, momentum=momentum, wd=wd))
    if states is not None and shared:
        store.load_shared(states[0][1]["iteration"], states[1] if transport.worker_rank == 0 else None,
                          states[0][1].get("left_out", 0), states[0][1].get("since", 0))
    elif states is not None:
        store.load_state(*states)
    w = mx.nd.ones(SIZE) if states is None else mx.nd.array(states[0][0]["global/w" if shared else "local/w"])
    store.broadcast("w", w, w)
    store.begin()
    for _ in range(steps):
        store.pushpull("w", w - transport.worker_rank, w)
    store.wait()
    return store


def alone(name: str, **settings: Any) -> Tuple[Store, Stage]:
    """The same in a job of one worker."""
    stage = Stage(1)
    transport = stage.ring_worker(0) if methods.find(name).transports == ("ring",) else stage.worker(0)
    return stepped(name, transport, **settings), stage


@pytest.mark.parametrize("name, settings, worker, servers", [
    ("ssgd", {"momentum": 0.5}, [], ["optimizer/state"]),
    ("odsgd", {"warmup": 0, "momentum_local": 0.5, "momentum": 0.5}, ["optimizer_local/state"], ["optimizer/state"]),
    ("odsgd", {"warmup": 0, "optimizer_local": "dcasgd_a"},
     ["optimizer_local/state/w_read", "optimizer_local/state/mean_square"], []),
    ("dcasgd_a", {"momentum": 0.5}, [], ["optimizer/state", "rule/backups/0", "rule/mean_square"]),
    ("softsync", {}, [], ["rule/sum"]),
    ("downpour", {"T": 1}, ["worker/accrued"], []),
    ("eamsgd", {"T": 1}, ["worker/x", "worker/v", "worker/centres/0"], []),
    ("sasgd", {}, ["worker/x_shared", "worker/accumulated"], []),
    ("pipesgd", {"K": 3, "momentum": 0.5}, ["worker/in_flight/0"], ["optimizer/state"]),
])
def test_a_saved_state_carries_the_declared_names(name: str, settings: Dict[str, Any], worker: List[str],
                                                  servers: List[str]) -> None:
    store, _ = alone(name, **settings)
    (mine, my_meta), (theirs, their_meta) = store.worker_state(), store.server_state()
    assert list(mine) == [f"{part}/w" for part in ("global", "local", *worker)]
    assert list(theirs) == [f"{part}/w" for part in servers] and their_meta["arrays"] == {"w@0": servers}
    assert all(array.shape == (SIZE,) and array.dtype == np.float32 for array in {**mine, **theirs}.values())
    assert (my_meta["store"], my_meta["iteration"]) == (name, 1)
    assert json.loads(json.dumps([my_meta, their_meta])) == [my_meta, their_meta]


@pytest.mark.parametrize("name", methods.METHODS)
def test_every_array_that_a_worker_or_a_rule_makes_is_declared(name: str) -> None:
    """Else a resumed run would begin it anew, and the memory report would not count it."""
    every = {"H": 1} if "H" in methods.METHODS[name].option_names() else {}
    store, stage = alone(name, steps=2, **every)
    given = {"last_exchange"}  # by the session
    for worker in store.session.workers.values():
        made = {key for key, value in vars(worker).items() if list(arrays_in(value))}
        assert made - given <= {*worker.arrays}, type(worker)
        assert {*worker.arrays, *worker.facts} <= set(vars(worker)), type(worker)
    for entry in stage.shards[0]._entries.values():
        made = {key for key, value in vars(entry.rule).items() if list(arrays_in(value))}
        assert made <= {*entry.rule.arrays} <= set(vars(entry.rule)), type(entry.rule)
        assert set(entry.rule.facts) <= set(vars(entry.rule)), type(entry.rule)


def arrays_in(value: Any) -> Iterator[Any]:
    if isinstance(value, (np.ndarray, mx.nd.NDArray)):
        yield value
    elif isinstance(value, (list, tuple, collections.deque)):
        for part in value:
            yield from arrays_in(part)
    elif hasattr(value, "untaken"):
        yield value.untaken()


@pytest.mark.parametrize("name", methods.METHODS)
def test_the_memory_report_names_what_a_method_declares(name: str) -> None:
    store, _ = alone(name, steps=2)
    kind, counted = store.session.method.worker, store.memory()
    meant = {f"{array}: {meaning}" for array, meaning in kind.arrays.items()}
    there: Set[str] = {label for label in meant if any(
        list(arrays_in(getattr(worker, label.partition(":")[0]))) for worker in store.session.workers.values())}
    if store.session.method.takes == "weights":  # which the session keeps
        there |= {"local weights: what the trainer's optimizer makes of them",
                  "theta: the global weights that the last exchange brought",
                  "in flight: what the next one sends and brings"}
    assert set(counted) - {"residual: what the codec has left of the gradients"} == there
    two_sums = {label for label in counted if name == "acco" and label.startswith("in_flight")}
    assert all(nbytes == (8 if label in two_sums else 4) * SIZE for label, nbytes in counted.items()), counted


def test_the_memory_report_counts_every_sum_in_flight_and_the_local_optimizer() -> None:
    store, _ = alone("pipesgd", K=4, steps=5)
    assert store.memory() == {"w: weights, the same on every worker": 4 * SIZE,
                              "in_flight: sums that have not been applied": 3 * 4 * SIZE}
    store, _ = alone("odsgd", warmup=0, optimizer_local="dcasgd_a", momentum_local=0.5)
    assert store.memory()["state of the local optimizer"] == 3 * 4 * SIZE
    with pytest.raises(ConfigError, match="memory before the first step"):
        kvstore.create("local").memory()


def states_after(workers: int, name: str, each: Sequence[Any] = (), **settings: Any) -> List[Tuple[Saved, Saved]]:
    """Each worker's state, and the servers', after some steps; `each`: the states that the workers begin from."""
    stage = Stage(workers)

    def work(transport: Transport) -> Tuple[Saved, Saved]:
        begun = {"states": each[transport.worker_rank]} if each else {}
        store = stepped(name, transport, **begun, **settings)
        worker = store.worker_state()
        store.barrier()
        return worker, store.server_state()
    ring = methods.find(name).transports == ("ring",)
    return stage.run(work, stage.ring_worker if ring else stage.worker)


def test_a_worker_that_had_not_stepped_goes_on_from_its_own_iteration_whatever_others_had_pushed() -> None:
    """Its schedule would begin late."""
    states, stage = states_after(2, "asgd", steps=3), Stage(2)
    states[0][0][1]["iteration"] = 0
    stores = stage.run(lambda wire: stepped("asgd", wire, 0, states=states[wire.worker_rank]), stage.worker)
    assert [store.iteration for store in stores] == [0, 3]


@pytest.mark.parametrize("again", [False, True])
def test_fewer_workers_go_on_from_the_global_weights_and_the_global_momentum(again: bool) -> None:
    """`again`: they save before their first push, and go on once more."""
    before = states_after(4, "ssgd", steps=3, momentum=0.5)[0]
    if again:
        before = states_after(2, "ssgd", steps=0, momentum=0.5, states=before, shared=True)[0]
    after = states_after(2, "ssgd", steps=2, momentum=0.5, states=before, shared=not again)[0]
    update, w = paper.Sgd(0.25, momentum=0.5), np.ones(SIZE, np.float32)
    for t, workers in enumerate([4, 4, 4, 2, 2]):
        w = update(w, np.mean([w - m for m in range(workers)], axis=0), t, w)
    np.testing.assert_allclose(after[0][0]["global/w"], w, rtol=1e-6)
    assert (after[0][1]["iteration"], after[1][1]["w@0"]["optimizer"]["count"]) == (5, 5)


@pytest.mark.parametrize("settings, said", [({"momentum": 0.25}, "momentum 0.5, and this store's has 0.25"),
                                            ({"momentum": 0.5, "wd": 0.5}, "wd 0.0, and this store's has 0.5")])
def test_a_state_of_the_optimizer_with_other_settings_is_refused(settings: Dict[str, Any], said: str) -> None:
    """Servers would go on with those of the state, the trainer and local steps with theirs."""
    before = states_after(1, "ssgd", momentum=0.5)[0]
    with pytest.raises(ConfigError, match=f"^the saved state is of a global optimizer with {said}; make it as it"):
        states_after(1, "ssgd", states=before, shared=True, **settings)


def test_where_workers_decay_the_weights_an_update_does_not_whatever_saved_its_state() -> None:
    before = states_after(1, "ssgd", momentum=0.5, wd=0.5)[0]
    after = states_after(1, "downpour", momentum=0.5, wd=0.5, states=before, shared=True, T=1)[0]
    assert [state[1][1]["w@0"]["optimizer"]["settings"]["wd"] for state in (before, after)] == [0.5, 0.0]
    with pytest.raises(ConfigError, match=r"with wd 0.0, and this store's has 0.5"):
        states_after(1, "ssgd", momentum=0.5, wd=0.5, states=after, shared=True)


def test_fewer_workers_go_on_with_the_count_of_what_was_left_out_and_with_the_optimizer_s_schedule() -> None:
    before = states_after(3, "ssgd", steps=3)[0]
    before[0][1].update(left_out=2, since=1)
    after = states_after(2, "ssgd", steps=1, states=before, shared=True)[0][0][1]
    assert (after["iteration"], after["left_out"], after["since"]) == (4, 2, 1)


@pytest.mark.parametrize("name, settings", [
    ("odsgd", {"warmup": 0, "momentum_local": 0.5}), ("odsgd", {"warmup": 0, "optimizer_local": "dcasgd_a"}),
    ("dcasgd_a", {}), ("softsync", {}), ("downpour", {"T": 2}), ("eamsgd", {"T": 2, "alpha": 0.2}), ("sasgd", {"T": 2}),
    ("diloco", {"H": 9, "momentum_outer": 0.5}), ("pipesgd", {"K": 3}), ("acco", {})])
def test_what_each_worker_kept_begins_anew_with_fewer_of_them(name: str, settings: Dict[str, Any]) -> None:
    """Two that go on where three were do what two would that had begun with those weights."""
    before = states_after(3, name, steps=4, **settings)[0]
    after = states_after(2, name, steps=4, states=before, shared=True, **settings)
    anew = [(before[0][0], {"iteration": 0}), None]
    begun = states_after(2, name, steps=4, states=anew, shared=True, **settings)
    for one, other in zip(after, begun):
        np.testing.assert_array_equal(one[0][0]["global/w"], other[0][0]["global/w"])
        np.testing.assert_array_equal(one[0][0]["local/w"], other[0][0]["local/w"])


@pytest.mark.parametrize("name, settings", [
    ("dcasgd_a", {"momentum": 0.5}), ("softsync", {"n": 1}), ("downpour", {"T": 2}), ("eamsgd", {"T": 2}),
    ("sasgd", {"T": 2}), ("pipesgd", {"K": 3}), ("acco", {}), ("odsgd", {"warmup": 1, "momentum_local": 0.5})])
def test_what_was_saved_is_saved_again_as_it_was_by_a_store_that_has_taken_it_up(name: str,
                                                                                 settings: Dict[str, Any]) -> None:
    states = states_after(2, name, steps=3, **settings)
    for before, after in zip(states, states_after(2, name, states, steps=0, **settings)):
        for (arrays, meta), (arrays_again, meta_again) in zip(before, after):
            assert meta == meta_again and list(arrays) == list(arrays_again)
            for key, array in arrays.items():
                np.testing.assert_array_equal(array, arrays_again[key], err_msg=key)


@pytest.mark.parametrize("optimizer, path", [
    (DCASGD_C(), "kvstore.engine.optimizers:DCASGD_C"), (DCASGD_A(), "kvstore.engine.optimizers:DCASGD_A"),
    (AdamW(), "kvstore.engine.formulas:AdamW")], ids=["dcasgd_c", "dcasgd_a", "torch"])
def test_a_state_of_an_optimizer_of_ours_that_lay_in_another_module_is_gone_on_with(
        optimizer: mx.optimizer.Optimizer, path: str) -> None:
    def servers(store: Store, saved: Optional[Saved] = None) -> Saved:
        store.set_optimizer(optimizer)
        if saved is not None:
            store.load_shared(1, saved)
        store.broadcast("w", mx.nd.ones(SIZE), mx.nd.ones(SIZE))
        store.begin()
        store.pushpull("w", mx.nd.ones(SIZE), mx.nd.ones(SIZE))
        store.wait()
        return store.server_state()

    arrays, meta = servers(kvstore.create("ssgd", transport=Stage(1).worker(0)))
    meta["w@0"]["optimizer"]["class"] = path
    _, after = servers(kvstore.create("ssgd", transport=Stage(1).worker(0)), (arrays, meta))
    assert after["w@0"]["optimizer"]["count"] == 2
    meta["w@0"]["optimizer"]["class"] = "mxnet.optimizer.optimizer:" + path.partition(":")[2]
    with pytest.raises(ConfigError, match="the saved state is of mxnet"):
        servers(kvstore.create("ssgd", transport=Stage(1).worker(0)), (arrays, meta))


def test_buckets_that_keep_something_of_their_own_are_not_cut_anew() -> None:
    store, _ = alone("pipesgd", steps=3, K=3, bucket_nbytes=8)
    states = store.worker_state(), store.server_state()
    alone("pipesgd", K=3, states=states)
    states[0][1]["facts"]["w@0"]["rates"] = [1.0, 2.0]
    with pytest.raises(ConfigError, match="has 3 buckets that begin elsewhere than the 1 of this run, and each has "
                                          "something of its own; go on with the `bucket_nbytes` it was saved with"):
        alone("pipesgd", K=3, states=states)


def test_a_state_that_is_kept_does_not_change_while_training_goes_on() -> None:
    def work(transport: Transport) -> None:
        store = stepped("pipesgd", transport, steps=4, K=3)
        _, meta = store.worker_state()
        before = json.dumps(meta)
        w = mx.nd.ones(SIZE)
        store.pushpull("w", w, w)
        store.wait()
        assert json.dumps(meta) == before
    stage = Stage(1)
    stage.run(work, stage.ring_worker)


@pytest.mark.parametrize("when, refused", [("before", False), ("after", True), ("after, and weights are set", False)])
def test_a_first_gradient_at_other_weights_than_the_saved_ones_is_refused(when: str, refused: bool) -> None:
    def work(transport: Transport) -> None:
        rank = transport.worker_rank
        store = kvstore.create("diloco", transport, H=3)
        store.set_optimizer(mx.optimizer.SGD(learning_rate=0.25))
        w = mx.nd.array(saved[rank][0][0]["local/w"])
        if when == "before":
            store.load_state(*saved[rank])
        store.broadcast("w", w, w)
        if when != "before":
            store.load_state(*saved[rank])
        if "set" in when:
            w[:] = saved[rank][0][0]["local/w"]
        if refused and rank:
            with pytest.raises(ConfigError, match="at the first step the network does not hold this worker's"):
                store.begin()
        else:
            store.begin()

    saved = states_after(2, "diloco", steps=2, H=3)
    Stage(2).run(work)


def test_a_store_that_has_arrays_of_its_own_goes_on_though_the_script_cannot_write_them() -> None:
    def made() -> Any:
        store, w = kvstore.create("local"), mx.nd.zeros(2)
        store.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
        store.init("w", w)
        return store, w

    def step(store: Any, w: Any) -> List[float]:
        store.push("w", mx.nd.ones(2))
        store.pull("w", w)
        return list(w.asnumpy())

    store, w = made()
    step(store, w)
    worker, server = store.worker_state(), store.server_state()
    store.close()
    store, w = made()
    store.load_state(worker, server)
    w[:] = worker[0]["local/w"]
    assert step(store, w) == [-1, -1]


def test_states_of_another_form_are_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "states"
    with open(file, "wb") as out:
        write_npz(out, {"0/w": np.zeros(3)}, {"w@0": {"count": 3}})
    store = kvstore.create("local")
    with pytest.raises(ConfigError, match="holds no state of servers"):
        store.load_optimizer_states(str(file))
    with pytest.raises(ConfigError, match="is not one of a worker, as"):
        store.load_state(({}, {"store": "local", "iteration": 3}))


LR, STEPS = 0.25, 4
SHAPES = {"first": (3, 2), "last": (5,)}


def targets(worker_rank: int, size: int) -> np.ndarray:
    return np.arange(size, dtype=np.float32) + worker_rank


def trained(transport: Transport, name: str, **options: Any) -> List[np.ndarray]:
    """The weights, bucket by bucket, after some steps towards the workers' targets."""
    method = methods.find(name)
    session = Session(method, method.Options(bucket_nbytes=16, **options), transport)
    session.use(mx.optimizer.SGD())
    buckets = session.plan([Parameter(key, key, shape) for key, shape in SHAPES.items()])
    assert len(buckets) > 2
    session.begin(lambda bucket: mx.nd.zeros(bucket.size))
    w = {bucket.id: mx.nd.zeros(bucket.size) for bucket in buckets}
    for _ in range(STEPS):
        step = session.next_step(LR, None)
        for bucket in buckets:
            grad = w[bucket.id] - mx.nd.array(targets(transport.worker_rank, bucket.size))
            w[bucket.id] = session.iterate(bucket, grad, step)
    session.wait()
    return [session.global_weights(bucket).asnumpy() for bucket in buckets]


@pytest.mark.parametrize("name, ring", [("ssgd", False), ("dsync", True)])
def test_flat_arrays_go_in_and_the_papers_weights_come_out(name: str, ring: bool) -> None:
    stage = Stage(2)
    for weights in stage.run(lambda transport: trained(transport, name), stage.ring_worker if ring else stage.worker):
        for flat in weights:
            mean = (targets(0, flat.size) + targets(1, flat.size)) / 2
            np.testing.assert_allclose(flat, mean * (1 - (1 - LR) ** STEPS), rtol=1e-6)
