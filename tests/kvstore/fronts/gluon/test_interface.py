"""What MXNet's scripts may call of a KVStore: one key or lists of keys, one array or one per device.

The optimizer `test` of MXNet adds the gradient, so that after n rounds W = W_0 + n mean_m g_m. MXNet's own stores add
the workers up; these take the mean.
"""
import contextlib
import io
from functools import partial
from typing import Any, Callable, Dict, List

import numpy as np
import pytest

import kvstore
from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError, ProtocolError, StoreClosedError
from kvstore.fronts.gluon.legacy import LegacyStore
from kvstore.job import agreement, environment
from kvstore.session.session import Session
from kvstore.state.npz import write_npz
from kvstore.transports.in_process import Stage
from tests.jobs import take_step

WORKERS, ROUNDS = 3, 4
SHAPES = {"3": (2, 3), "4": (5,), 99: (40, 30)}
MEAN = (1 + 2 + 3) / 3


def on_workers(check: Callable[[LegacyStore], Any], name: str = "ssgd", optimizer: str = "test") -> List[Any]:
    def worker(transport: Any) -> Any:
        store = kvstore.create(name, transport=transport)
        store.set_optimizer(mx.optimizer.create(optimizer, rescale_grad=1.0))
        return check(store)

    return Stage(WORKERS).run(worker)


def gradient(store: LegacyStore, shape: Any, dtype: str = "float32") -> Any:
    return mx.nd.full(shape, store.rank + 1, dtype=dtype)


def is_everywhere(array: Any, value: float) -> bool:
    return bool(np.all(array.asnumpy() == np.float32(value)))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_push_and_pull_of_one_key_at_a_time(dtype: str) -> None:
    def check(store: LegacyStore) -> None:
        for key, shape in SHAPES.items():
            store.init(key, mx.nd.full(shape, 1 if store.rank == 0 else 7, dtype=dtype))
        for round_ in range(ROUNDS):
            for key, shape in SHAPES.items():
                out = mx.nd.zeros(shape, dtype=dtype)
                store.pull(key, out=out)
                assert is_everywhere(out, 1 + round_ * MEAN), key  # worker 0's, and those of all rounds so far
            for key, shape in SHAPES.items():
                store.push(key, gradient(store, shape, dtype))

    on_workers(check)


@pytest.mark.parametrize("reduction, value", [("mean", 2.0), ("sum", 6.0)])
def test_a_store_without_an_optimizer_adds_up_what_workers_push(reduction: str, value: float) -> None:
    """As MXNet's tutorial of KVStore has it: the last round's sum, or what an updater makes of it."""
    def worker(transport: Any) -> None:
        store = kvstore.create("ssgd", transport=transport, reduction=reduction)
        for key, shape in SHAPES.items():
            store.init(key, mx.nd.ones(shape))
        for key in (99, "3", 99):  # in any order, and a key more often than others
            out = [mx.nd.zeros(SHAPES[key]) for _ in range(2)]
            store.push(key, gradient(store, SHAPES[key]))
            store.pull(key, out=out)
            assert all(is_everywhere(array, value) for array in out)
        grads = mx.nd.ones((5,)) * (store.rank + 1)
        store.pushpull("4", [grads, grads])  # two devices
        assert is_everywhere(grads, 2 * value)
        store._set_updater(lambda key, pushed, kept: kept.__iadd__(2 * pushed))
        store.push("4", gradient(store, (5,)))
        store.pull("4", out=grads)
        assert is_everywhere(grads, 4 * value)

    Stage(WORKERS).run(worker)


def test_a_pushpull_without_an_optimizer_leaves_the_mean_in_row_sparse_gradients() -> None:
    def worker(transport: Any) -> None:
        store = kvstore.create("ssgd", transport=transport)
        store.init("3", mx.nd.zeros((4, 3)))
        grads = [rows((4, 3), [store.rank], store.rank + 1) for _ in range(2)]  # two devices
        store.pushpull("3", grads)
        for grad in grads:
            assert grad.stype == "row_sparse" and grad.indices.asnumpy().tolist() == [0, 1, 2]
            np.testing.assert_allclose(grad.asnumpy()[:, 0], [2 / 3, 4 / 3, 2, 0], rtol=1e-6)

    Stage(WORKERS).run(worker)


def test_arrays_of_the_script_are_not_the_stores() -> None:
    """As in MXNet: gradients that are summed, or weights that the script overwrites, change no value of the store."""
    def summed(transport: Any) -> None:
        store, w = kvstore.create("ssgd", transport=transport), mx.nd.full(3, 10 + transport.worker_rank)
        store.broadcast("w", w, out=w)
        grad = gradient(store, (3,))
        store.pushpull("w", grad, out=grad)
        assert is_everywhere(w, 10) and is_everywhere(grad, MEAN)
        w[:] = 7
        store.pull("w", out=w)
        assert is_everywhere(w, MEAN)

    Stage(WORKERS).run(summed)


@pytest.mark.parametrize("order", ["optimizer first", "keys first", "another optimizer"])
def test_multipliers_are_those_that_the_optimizer_has_at_the_first_step(order: str) -> None:
    """MXNet's tutorial calls `init` before `set_optimizer`: w - lr lr_mult (g + wd wd_mult w), no decay of a bias."""
    def check(transport: Any) -> None:
        store, keys = kvstore.create("ssgd", transport=transport), [0, 1]
        optimizer = mx.optimizer.SGD(learning_rate=1.0, wd=0.5, param_idx2name={0: "a_weight", 1: "a_bias"})
        optimizer.set_lr_mult({0: 0.5})
        if order != "keys first":
            store.set_optimizer(optimizer if order == "optimizer first" else mx.optimizer.SGD())
        store.init(keys, [mx.nd.ones(1), mx.nd.ones(1)])
        if order != "optimizer first":
            store.set_optimizer(optimizer)
        outs = [mx.nd.zeros(1), mx.nd.zeros(1)]
        store.pushpull(keys, [mx.nd.ones(1), mx.nd.ones(1)], out=outs)
        assert [out.asscalar() for out in outs] == [1 - 0.5 * 1.5, 0.0]

    Stage(1).run(check)


def test_keys_of_one_name_are_refused() -> None:
    """Saved states would hold only one of them."""
    store = kvstore.create("ssgd", transport=Stage(1).worker(0))
    with pytest.raises(ConfigError, match="2 keys of this `ssgd` store have the name 3, and what is saved goes by nam"):
        store.init([3, "3"], [mx.nd.ones(1), mx.nd.ones(1)])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_pull_brings_the_stores_weights_back(dtype: str) -> None:
    """Of a key in one bucket, and of one in several."""
    def check(store: LegacyStore) -> None:
        shapes = {"small": (5, 3), "large": (700, 200)}
        w = {key: mx.nd.ones(shape, dtype=dtype) for key, shape in shapes.items()}
        store.broadcast("small", w["small"], out=w["small"])
        store.init("large", w["large"])
        grads = [gradient(store, shape, dtype) for shape in shapes.values()]
        store.push("small", grads[0])
        store.pushpull("large", grads[1])  # where the weights are to be, too
        for array in (*w.values(), *grads):
            array[:] = 7
        rows = mx.nd.sparse.zeros("row_sparse", shapes["large"], dtype=dtype)
        store.row_sparse_pull("large", out=rows, row_ids=mx.nd.array([699]))
        assert is_everywhere(rows.data, 1 + MEAN)
        store.pull(list(w), out=list(w.values()))
        assert all(is_everywhere(array, 1 + MEAN) for array in w.values())

    on_workers(check)


@pytest.mark.parametrize("pushed, others", [(2 ** 24 + 1, 0), (2 ** 23, 2 ** 23), (2 ** 24, -1)])
def test_whole_numbers_that_single_precision_does_not_hold_are_refused(pushed: int, others: int) -> None:
    def worker(transport: Any) -> None:
        store = kvstore.create("ssgd", transport=transport, reduction="sum")
        store.init("count", mx.nd.zeros(1, dtype="int64"))
        mine = mx.nd.array([7 if transport.worker_rank else 8], dtype="int64")
        store.pushpull("count", mine)
        assert mine.asnumpy().tolist() == [8 + 7 * (WORKERS - 1)]
        store.push("count", mx.nd.array([others if transport.worker_rank else pushed], dtype="int64"))

    with pytest.raises(ConfigError, match=r"push of count: .* holds whole numbers below 16777216"):
        Stage(WORKERS).run(worker)


def test_pushpull_and_broadcast_of_lists() -> None:
    def check(store: LegacyStore) -> None:
        keys, outs = list(SHAPES), [mx.nd.zeros(shape) for shape in SHAPES.values()]
        store.broadcast(keys, [mx.nd.full(shape, store.rank) for shape in SHAPES.values()], out=outs)
        assert all(is_everywhere(out, 0) for out in outs)
        for round_ in range(1, ROUNDS):
            store.pushpull(keys, [gradient(store, shape) for shape in SHAPES.values()], out=outs)
            assert all(is_everywhere(out, round_ * MEAN) for out in outs)

    on_workers(check)


def one_by_one(store: LegacyStore, grads: Dict[Any, Any], outs: Dict[Any, Any]) -> None:
    for key in grads:
        store.push(key, grads[key])
    for key in outs:
        store.pull(key, out=outs[key])


def in_lists(store: LegacyStore, grads: Dict[Any, Any], outs: Dict[Any, Any]) -> None:
    store.push(list(grads), list(grads.values()))
    store.pull(list(outs), out=list(outs.values()))


def at_once(store: LegacyStore, grads: Dict[Any, Any], outs: Dict[Any, Any]) -> None:
    for key in grads:
        store.pushpull(key, grads[key], out=outs[key])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("call", [one_by_one, in_lists, at_once])
def test_several_devices_add_up_and_all_get_the_weights(call: Callable[..., None], dtype: str) -> None:
    """Whatever devices the initial weights lie on, of each key and in each round; MXNet's stores do the same."""
    def everywhere(value: float, devices: List[int]) -> Dict[Any, Any]:
        return {key: [mx.nd.full(shape, value, mx.cpu(device), dtype) for device in devices if key != "4" or device]
                for key, shape in SHAPES.items()}

    def check(store: LegacyStore) -> None:
        for key, shape in SHAPES.items():
            store.init(key, mx.nd.zeros(shape, dtype=dtype))
        expected = dict.fromkeys(SHAPES, 0.0)
        for devices in ([0, 1], [0, 1], [1], [0, 1, 2], [2, 1, 1]):  # the weights of 4 are never on the first
            outs = everywhere(7, devices[::-1])
            call(store, everywhere(store.rank + 1, devices), outs)
            for key, arrays in outs.items():
                expected[key] += MEAN * len(arrays)
                assert all(is_everywhere(array, expected[key]) for array in arrays), (key, devices)

    on_workers(check)


@pytest.mark.parametrize("sparse_first", [True, False])
def test_a_trainer_with_row_sparse_and_other_weights_on_two_devices_walks_mxnets_path(sparse_first: bool) -> None:
    def train(store: Any) -> List[Any]:
        devices = [mx.cpu(0), mx.cpu(1)]
        sparse = mx.gluon.Parameter("w", shape=(6, 2), stype="row_sparse", grad_stype="row_sparse", init="ones")
        dense = mx.gluon.Parameter("b", shape=(2,), init="ones")
        for parameter in (sparse, dense):
            parameter.initialize(ctx=devices)
        trainer = mx.gluon.Trainer([sparse, dense] if sparse_first else [dense, sparse], "sgd", {"learning_rate": 0.1},
                                   kvstore=store)
        for _ in range(3):
            with mx.autograd.record():
                ids = [mx.nd.array([number, number + 1], ctx=device) for number, device in enumerate(devices)]
                losses = [mx.nd.Embedding(its, sparse.row_sparse_data(its), 6, 2, sparse_grad=True) * dense.data(device)
                          for its, device in zip(ids, devices)]
            mx.autograd.backward(losses)
            trainer.step(4)
        return [array.asnumpy() for array in (sparse.row_sparse_data(mx.nd.arange(6)), *dense.list_data())]

    kvstore.register()
    for ours, mxnets in zip(train(kvstore.create("ssgd", Stage(1).worker(0))), train("local")):
        np.testing.assert_allclose(ours, mxnets, rtol=1e-6)


def test_weights_of_a_dense_gradient_are_not_pulled_before_all_keys_are_in() -> None:
    store = kvstore.create("ssgd", Stage(1).worker(0))
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
    weights = [mx.nd.ones(2), mx.nd.ones(2)]
    store.broadcast([0, 1], weights, weights)
    store.push(0, mx.nd.ones(2))
    with pytest.raises(ProtocolError, match="pull of key 0 in the middle of iteration 1"):
        store.pull(0, out=mx.nd.zeros(2))


def test_barrier_rank_and_dead_nodes() -> None:
    def check(store: LegacyStore) -> Any:
        store._barrier()
        return store.rank, store.num_workers, store.num_dead_node, store.type

    assert on_workers(check) == [(rank, WORKERS, 0, "ssgd") for rank in range(WORKERS)]


def rows(shape: Any, ids: List[int], value: float) -> Any:
    """A row-sparse array with this value in these rows."""
    return mx.nd.sparse.row_sparse_array((mx.nd.full((len(ids), *shape[1:]), value), ids), shape=shape)


@pytest.mark.parametrize("name", ["ssgd", "asgd"])
def test_row_sparse_gradients_and_pulls(name: str) -> None:
    """Worker m has gradients of m + 1 in rows 0 and m alone; asynchronous servers add, synchronous ones average."""
    shape, share = (4, 3), 1 if name == "asgd" else WORKERS

    def check(store: LegacyStore) -> None:
        store.init(["3", "4"], [rows(shape, [0, 1, 2, 3], 1), mx.nd.zeros(5)])
        for _ in range(2):
            store.push("3", rows(shape, [0, store.rank], store.rank + 1) if store.rank else rows(shape, [0], 1))
            store.push("4", gradient(store, (5,)))
        store.barrier()
        if name == "asgd":  # an answer has what had come before it
            with store.global_weights():
                taken = store._known("3").weights[0].asnumpy()
        else:
            out, dense = mx.nd.sparse.zeros("row_sparse", shape), mx.nd.zeros(shape)
            store.row_sparse_pull("3", out=out, row_ids=mx.nd.array([2, 0, 2], dtype="int64"))
            assert out.stype == "row_sparse" and out.indices.asnumpy().tolist() == [0, 2]
            store.pull("3", out=dense)
            taken = dense.asnumpy()
            np.testing.assert_array_equal(out.asnumpy()[[0, 2]], taken[[0, 2]])
            assert not out.asnumpy()[[1, 3]].any()
            store.row_sparse_pull("3", out=out, row_ids=mx.nd.array([]))
            assert not out.asnumpy().any()
        np.testing.assert_allclose(taken[:, 0], [1 + 2 * 6 / share, 1 + 2 * 2 / share, 1 + 2 * 3 / share, 1], rtol=1e-6)

    on_workers(check, name)


def test_a_trainer_with_row_sparse_gradients_walks_the_path_of_dense_ones() -> None:
    """Decay and momentum touch all rows."""
    def train(sparse: bool) -> List[Any]:
        def worker(transport: Any) -> Any:
            net = mx.gluon.nn.Sequential()
            net.add(mx.gluon.nn.Embedding(7, 3, sparse_grad=sparse, prefix="first_"),
                    mx.gluon.nn.Dense(2, in_units=12, prefix="second_"))
            net.initialize(mx.init.Constant(0.5))
            trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.1},
                                       kvstore=kvstore.create("odsgd", transport=transport, warmup=1))
            seen = []
            for t in range(4):
                if t == 2:  # the network gets other arrays
                    net.collect_params().reset_ctx(mx.cpu())
                take_step(trainer, lambda x: (net(x) ** 2).sum(),
                          mx.nd.array([[0, transport.worker_rank, 2, t], [5, 5, 2, 2]]), batch=2)
                seen.append(net[0].weight.data().asnumpy())
            return np.array(seen)

        return Stage(2).run(worker)

    kvstore.register()
    for ours, theirs in zip(train(sparse=True), train(sparse=False)):
        np.testing.assert_array_equal(ours, theirs)
        assert len(np.unique(ours[-1][:, 0])) > 3


@pytest.mark.parametrize("name", ["ssgd", "odsgd"])
def test_a_trainer_with_row_sparse_weights_walks_the_path_of_dense_ones(name: str) -> None:
    """They lie in the store; a worker pulls the rows that it reads, while its gradients are recorded."""
    def train(stype: str) -> List[Any]:
        def worker(transport: Any) -> Any:
            weight = mx.gluon.Parameter("w", shape=(5, 3), stype=stype, grad_stype="row_sparse", init="ones")
            weight.initialize()
            store = kvstore.create(name, transport=transport)
            trainer = mx.gluon.Trainer([weight], "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=store)
            everything = mx.nd.arange(5)
            seen = []
            for t in range(4):
                with mx.autograd.record():
                    rows = mx.nd.array([transport.worker_rank, 2 + t % 2])
                    w = weight.data() if stype == "default" else weight.row_sparse_data(rows)
                    loss = (mx.nd.Embedding(rows, w, 5, 3, sparse_grad=True) ** 2).sum()
                loss.backward()
                trainer.step(1)
                with store.global_weights():
                    w = weight.data() if stype == "default" else weight.row_sparse_data(everything)
                    seen.append(w.asnumpy())
            return np.array(seen)

        return Stage(2).run(worker)

    kvstore.register()
    for ours, theirs in zip(train("row_sparse"), train("default")):
        np.testing.assert_array_equal(ours, theirs)
        assert len(np.unique(ours[-1][:, 0])) > 3


@pytest.mark.parametrize("call, said", [
    (lambda store: store.pull("5", out=mx.nd.zeros(1)), "key 5 was not broadcast, nor initialized by `init`"),
    (lambda store: store.push("5", mx.nd.zeros(1)), "key 5 was not broadcast"),
    (lambda store: store.pushpull("5", mx.nd.zeros(1), out=mx.nd.zeros(1)), "key 5 was not broadcast"),
    (lambda store: store.push(["3", "4"], [mx.nd.zeros(1)]), "2 keys, and not as many values"),
    (lambda store: store.row_sparse_pull("3", out=mx.nd.zeros(1)), "row_sparse_pull of 3 without row_ids"),
    (lambda store: store.pushpull(["4", "3"], [mx.nd.zeros(1), rows((1,), [0], 1)]),
     "the array for the weights of 3 is row_sparse; give pushpull a dense `out`"),
    (lambda store: store.set_optimizer(mx.optimizer.create("lamb")), "LAMB looks at each parameter as a whole, and"),
    (lambda store: store.set_optimizer(mx.optimizer.SGD(param_idx2name={"3": "b_bias"}, wd=0.1)),
     r"with other multipliers: lr_mult and wd_mult of 3 were \[1.0, 1.0\] and are \[1.0, 0.0\]"),
])
def test_what_cannot_be_is_one_line(call: Callable[[LegacyStore], None], said: str) -> None:
    def check(store: LegacyStore) -> None:
        store.init(["3", "4"], [mx.nd.zeros(1), mx.nd.zeros(1)])
        store.push(["3", "4"], [mx.nd.zeros(1), mx.nd.zeros(1)])
        with pytest.raises(ConfigError, match=said):
            call(store)

    on_workers(check)


def test_weights_that_lack_a_gradient_which_was_pushed_are_not_handed_out() -> None:
    """In MXNet each key is updated by itself; a script that pushes and pulls one by one expects that."""
    def check(store: LegacyStore) -> None:
        outs = [mx.nd.zeros((1, 1)), mx.nd.zeros((1, 1))]
        store.init(["3", "4"], outs)
        store.push("3", mx.nd.ones((1, 1)))
        for pull in (store.pull, partial(store.row_sparse_pull, row_ids=mx.nd.array([0]))):
            with pytest.raises(ProtocolError, match=r"pull of key 3 in the middle of iteration 1: its gradient was "
                                                    r"pushed, and 1 other key has .*push all before you pull.*\.md"):
                pull("3", out=mx.nd.sparse.zeros("row_sparse", (1, 1)) if pull != store.pull else outs[0])
        store.pull("4", out=outs[1])  # has all that it was given
        store.pull("3", out=store._known("3").weights)  # will hold the next
        store.push("4", mx.nd.ones((1, 1)))
        store.pull(["3", "4"], out=outs)
        assert all(is_everywhere(out, 1) for out in outs)

    on_workers(check)


def test_states_of_the_optimizer_go_from_store_to_store(tmp_path: Any) -> None:
    """Momentum, saved after three rounds and loaded before the fourth, gives the bits of four rounds in one."""
    file = str(tmp_path / "states")

    def rounds(store: LegacyStore, number: int, w: Any) -> Any:
        out = mx.nd.array(w)
        store.broadcast("3", out, out=out)
        for _ in range(number):
            store.pushpull("3", gradient(store, (2, 3)) * 0.1, out=out)
        return out.asnumpy()

    def train(number: int, w: Any, load: bool = False, save: bool = False) -> Any:
        def worker(transport: Any) -> Any:
            store = kvstore.create("ssgd", transport=transport)
            store.set_optimizer(mx.optimizer.create("sgd", momentum=0.9, learning_rate=0.3))
            if load:
                store.load_optimizer_states(file)
            weights = rounds(store, number, w)
            if save and store.rank == 0:
                store.save_optimizer_states(file)
            store.barrier()
            return weights

        return Stage(WORKERS).run(worker)[0]

    start = np.ones((2, 3), np.float32)
    whole, parts = train(4, start), train(3, start, save=True)
    assert np.array_equal(train(1, parts, load=True), whole)


@pytest.mark.parametrize("call", [lambda store: store.set_optimizer(mx.optimizer.SGD()),
                                  lambda store: store.load_optimizer_states("none")])
def test_an_optimizer_changes_between_two_iterations(call: Callable[[LegacyStore], None]) -> None:
    def check(store: LegacyStore) -> None:
        store.init(["3", "4"], [mx.nd.zeros(1), mx.nd.zeros(1)])
        store.push("3", mx.nd.zeros(1))
        with pytest.raises(ProtocolError, match="in the middle of an iteration, when gradients of it have been handed"):
            call(store)

    on_workers(check)


def test_workers_that_set_different_optimizers_hear_of_it() -> None:
    def check(store: LegacyStore) -> None:
        store.init("3", mx.nd.zeros(1))
        store.push("3", mx.nd.zeros(1))
        store.set_optimizer(mx.optimizer.SGD(learning_rate=0.1 + store.rank))

    with pytest.raises(ProtocolError, match=r"differ in what they call now \(set_optimizer\)(.|\n)*\+.*\"lr\": 1.1"):
        on_workers(check)


def test_workers_of_an_asynchronous_job_set_an_optimizer_after_as_many_iterations_as_each_has_data_for() -> None:
    """The one in use, with other settings, has been counted on by each for itself."""
    def check(store: LegacyStore) -> None:
        store.init("3", mx.nd.zeros(1))
        optimizer: Any = store.session.optimizer
        for _ in range(1 + store.rank):
            store.push("3", mx.nd.ones(1))
        optimizer.rescale_grad = 0.5
        store.set_optimizer(optimizer)
        store.push("3", mx.nd.ones(1))
        assert optimizer.num_update == 2 + store.rank
        store.barrier()

    on_workers(check, "asgd")


def test_a_worker_that_makes_another_call_instead_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is a lost one, which adds nothing to a sum either."""
    monkeypatch.setattr(environment, "HEARD_WITHIN_S", 0.0)
    def check(transport: Any) -> None:
        if transport.worker_rank == 1:
            transport.total(np.zeros((WORKERS, 32)))
        else:
            agreement.check(transport, "the weather", ["fine"])

    with pytest.raises(ProtocolError, match=r"^worker 1 has made another call where others compare the weather"):
        Stage(WORKERS).run(check)


def test_a_schedule_begins_with_its_optimizer_and_goes_on_with_one_that_was_in_use() -> None:
    """A factor of 1/2 after every second update; W falls by the rate with every gradient of 1."""
    def scheduled(lr: float) -> Any:
        return mx.optimizer.SGD(learning_rate=lr, lr_scheduler=mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=lr))

    def check(store: LegacyStore) -> List[float]:
        first, second, out = scheduled(1.0), scheduled(8.0), mx.nd.zeros(1)
        store.init("3", mx.nd.zeros(1))
        fell = []
        for optimizer in (first, second, first):
            store.set_optimizer(optimizer)
            for _ in range(3):
                before = out.asscalar()
                store.push("3", mx.nd.ones(1))
                store.pull("3", out=out)
                fell.append(before - out.asscalar())
        return fell

    assert on_workers(check) == [[1, 1, 0.5, 8, 8, 4, 0.5, 0.25, 0.25]] * WORKERS


def file_of(meta: Any) -> bytes:
    """A file of no arrays."""
    file = io.BytesIO()
    write_npz(file, {}, meta)
    return file.getvalue()


@pytest.mark.parametrize("name, transport", [("ssgd", "worker"), ("asgd", "worker"), ("dsync", "ring_worker")])
def test_states_that_cannot_be_loaded_are_refused_on_every_worker_which_may_go_on(tmp_path: Any, name: str,
                                                                                  transport: str) -> None:
    """Worker 0 alone reads; the others are told what it found, and wait for nothing."""
    file = str(tmp_path / "states")
    others = {"empty": b"", "an array": b"\x93NUMPY" + bytes(100), "a list": file_of([]),
              **{f"form {number}": file_of(meta) for number, meta in enumerate([
                  {"arrays": 3}, {"arrays": []}, {"arrays": [[]], "3": {"optimizer": {}}},
                  {"arrays": ["local"], "store": name, "iteration": 3},  # a worker's
                  {"arrays": ["optimizer/state"], "3": {"optimizer": {"class": "Test"}}}])}}
    for other, content in others.items():
        (tmp_path / other).write_bytes(content)

    def check(transport: Any) -> Any:
        store, out = kvstore.create(name, transport=transport), mx.nd.zeros(1)
        store.set_optimizer(mx.optimizer.create("test"))
        store.init("3", mx.nd.zeros(1))
        store.push("3", mx.nd.ones(1))
        store.barrier()
        if store.rank == 0:
            store.save_optimizer_states(file)
        store.set_optimizer(mx.optimizer.Adam())
        with pytest.raises(ConfigError, match="worker 0 could not load the optimizer's state: the saved state is of "
                                              "Test with optimizer/state, the global optimizer is Adam with "
                                              "optimizer/state/0, optimizer/state/1; make it as it was"):
            store.load_optimizer_states(file)
        with pytest.raises(ConfigError, match=r"worker 0 could not load the optimizer's state: .*No such file"):
            store.load_optimizer_states(str(tmp_path / "none"))
        for other in others:
            with pytest.raises(ConfigError, match="worker 0 could not load the optimizer's state: "):
                store.load_optimizer_states(str(tmp_path / other))
        with pytest.raises(ConfigError, match=r"worker 0 could not load the optimizer's state: .*null"):
            store.load_optimizer_states("\0")
        store.set_optimizer(mx.optimizer.create("test"))
        store.push("3", mx.nd.ones(1))
        store.barrier()
        with store.global_weights():
            store.pull("3", out=out)
        return out.asscalar()

    stage = Stage(WORKERS)
    assert stage.run(check, make=getattr(stage, transport)) == [6.0 if name == "asgd" else 2.0] * WORKERS


def test_if_who_tells_the_servers_of_an_optimizer_is_lost_another_worker_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time nobody has told them."""
    led = [False, True]
    monkeypatch.setattr(Session, "leads", property(lambda session: led.pop(0)))

    def check(transport: Any) -> None:
        store, out = kvstore.create("asgd", transport=transport), mx.nd.zeros(1)
        store.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
        store.init("3", out)
        store.pushpull("3", mx.nd.ones(1), out=out)
        store.set_optimizer(mx.optimizer.create("test"))
        store.pushpull("3", mx.nd.ones(1), out=out)
        assert out.asscalar() == -0.5 + 1

    Stage(1).run(check)
    assert not led


@pytest.mark.parametrize("when", ["at once", "after a step"])
def test_what_is_saved_where_an_optimizer_has_changed_is_gone_on_with(when: str) -> None:
    """Adam from the third iteration on, with a schedule: a run that is saved there, or one later, has the same bits."""
    def begin(transport: Any, optimizer: Any) -> Any:
        store = kvstore.create("odsgd", transport=transport, warmup=1)
        store.set_optimizer(optimizer())
        return store

    def sgd() -> Any:
        return mx.optimizer.SGD(learning_rate=0.3, momentum=0.9)

    def adam() -> Any:
        return mx.optimizer.create("adam", lr_scheduler=mx.lr_scheduler.FactorScheduler(1, 0.5, base_lr=0.1))

    def steps(store: LegacyStore, out: Any, number: int) -> Any:
        for _ in range(number):
            store.pushpull("3", out - store.rank, out=out)
        return out.asnumpy()

    def whole(transport: Any) -> Any:
        store, out = begin(transport, sgd), mx.nd.ones(5)
        store.broadcast("3", out, out=out)
        steps(store, out, 3)
        store.set_optimizer(adam())
        steps(store, out, 0 if when == "at once" else 1)
        saved = store.worker_state(), store.server_state()
        return saved, steps(store, out, 4)

    def resumed(transport: Any) -> Any:
        worker, servers = kept[transport.worker_rank]
        store, out = begin(transport, adam), mx.nd.array(worker[0]["local/3"])
        store.load_state(worker, servers)
        store.broadcast("3", out, out=out)
        return steps(store, out, 4)

    kept, paths = zip(*Stage(2).run(whole))
    for ours, straight in zip(Stage(2).run(resumed), paths):
        np.testing.assert_array_equal(ours, straight)


@pytest.mark.parametrize("codec_weights", ["none", "float16"])
def test_codecs_go_on_when_the_optimizer_changes(tmp_path: Any, codec_weights: str) -> None:
    """Numbers that float16 has: both ways, with momentum's state saved and loaded meanwhile."""
    def check(transport: Any) -> List[float]:
        store = kvstore.create("ssgd", transport=transport, codec="float16", codec_weights=codec_weights)
        store.set_optimizer(mx.optimizer.SGD(learning_rate=1.0, momentum=0.5))
        store.init("3", mx.nd.zeros(1))
        out, seen, file = mx.nd.zeros(1), [], str(tmp_path / f"states-{codec_weights}")
        for t in range(4):
            if t == 1 and store.rank == 0:
                store.save_optimizer_states(file)
            if t == 2:
                store.set_optimizer(mx.optimizer.SGD(learning_rate=2.0, momentum=0.5))
            if t == 3:
                store.load_optimizer_states(file)
            store.push("3", mx.nd.full(1, 2 * store.rank))
            store.pull("3", out=out)
            seen.append(out.asscalar())
        return seen

    # v = -1, -1.5; anew -2; that after the first step, -1: -0.5 - 2
    assert Stage(2).run(check) == [[-1, -2.5, -4.5, -7]] * 2


def test_two_bits_with_threshold_and_residual_as_mxnet_documents_them() -> None:
    """A worker sends +t or -t where gradient and residual together reach that, else 0; the rest waits for the next."""
    threshold, gradients = 0.5, [0.3, 0.3, -0.2, 1.4]

    def check(store: LegacyStore) -> None:
        store.set_gradient_compression({"type": "2bit", "threshold": threshold})
        store.init("3", mx.nd.zeros((40, 30)))
        w, residual, out = 0.0, 0.0, mx.nd.zeros((40, 30))
        for grad in gradients:
            store.push("3", mx.nd.full((40, 30), grad))
            store.pull("3", out=out)
            residual += grad
            sent = threshold * (residual >= threshold) - threshold * (residual <= -threshold)
            residual -= sent
            w += sent  # all workers send the same, which is its own mean
            np.testing.assert_allclose(out.asnumpy(), w, atol=1e-6)
        assert w == 2 * threshold

    on_workers(check)


def test_an_optimizer_that_is_none_of_mxnets_is_told() -> None:
    with pytest.raises(ConfigError, match=r"set_optimizer of a str; expected an optimizer of MXNet's, as mx\.opt"):
        kvstore.create("local").set_optimizer("sgd")


def test_a_step_that_has_sent_nothing_may_be_taken_again() -> None:
    store, array = kvstore.create("local"), mx.nd.ones(3)
    optimizer = mx.optimizer.SGD(learning_rate=0.5)
    store.set_optimizer(optimizer)
    store.init("w", array)
    for lr in (0.5, None, 0.25):
        optimizer.lr = lr
        with contextlib.nullcontext() if lr else pytest.raises(TypeError):
            store.pushpull("w", mx.nd.ones(3), out=array)
    assert array.asnumpy().tolist() == [0.25] * 3 and store.iteration == 2


@pytest.mark.parametrize("rate", [-1.0, True, "x", float("nan"), [1]])
def test_a_local_rate_is_checked_as_the_option_is(rate: Any) -> None:
    store = kvstore.create("odsgd", Stage(1).worker(0), lr_local=0.5)
    with pytest.raises(ConfigError, match=r"^store\.lr_local: expected a number, at least 0, got `"):
        store.lr_local = rate
    assert store.lr_local == 0.5
    for rate, kept in (("0.1", 0.1), (np.float32(0.25), 0.25), (None, None)):
        store.lr_local = rate
        assert store.lr_local == kept and type(store.lr_local) is type(kept)


def test_an_error_that_a_script_handles_is_told_before_it_waits_for_others(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(store: LegacyStore) -> None:
        try:
            if store.rank == 1:
                raise ValueError("bad batch, made up")
        finally:
            store.allreduce(np.ones(1))

    with pytest.raises(ValueError, match="made up"):
        on_workers(fails)
    said = capsys.readouterr().err
    assert said.count("ValueError: bad batch, made up (test_interface.py, line ") == 1
    assert "while the script handles it, it makes a call that is for all workers (global_weights, state_dict" in said


@pytest.mark.parametrize("uneven", ["wait", "join"])
def test_a_store_that_is_made_and_used_while_an_error_is_handled_says_nothing_of_it(
        uneven: str, capsys: pytest.CaptureFixture[str]) -> None:
    def without(transport: Any) -> None:
        try:
            raise ImportError("no such module, as many scripts ask for")
        except ImportError:
            store = kvstore.create("ssgd", transport, uneven=uneven)
            assert store.allreduce(np.ones(1)) == 2
            store.close()
            with pytest.raises(StoreClosedError):
                store.allreduce(np.ones(1))

    Stage(2).run(without)
    assert "handles it" not in capsys.readouterr().err
