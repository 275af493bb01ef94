"""Workers whose data are not of one length: those that have ended join, and a mean is that of the others."""
from typing import Any, List, Optional

import numpy as np
import pytest

import kvstore
from kvstore import ConfigError, ProtocolError
from kvstore.engine._mxnet import mx
from kvstore.fronts.gluon.store import Store
from kvstore.methods.sync import SSGD, Synchronous
from kvstore.transports.in_process import Stage
from tests import methods
from tests.jobs import alone
from tests.kvstore.fronts.uneven import LENGTHS, LR_LOCAL, TARGETS, W_0, by_numpy, lr


def descend(store: Store, rank: int, ends: str) -> List[float]:
    sgd = mx.optimizer.SGD(learning_rate=lr(0))
    store.set_optimizer(sgd)
    w = mx.nd.array([W_0])
    store.broadcast("w", w, w)
    seen = []
    for t in range(LENGTHS[rank]):
        sgd.set_learning_rate(lr(t))
        seen.append(w.asscalar())
        store.pushpull("w", w - TARGETS[rank], w)
    if ends == "join":
        store.join()
        assert store.iteration == max(LENGTHS)
    with store.global_weights():
        seen.append(w.asscalar())
    store.close()
    return seen


@pytest.mark.parametrize("ends", ["join", "evaluate"])
@pytest.mark.parametrize("name, kind, options, expected", [
    ("ssgd", None, {}, {}), ("ssgd", None, {"reduction": "sum"}, {"sums": True}), ("ssgd", "sharded", {}, {}),
    ("odsgd", None, {"warmup": 0, "lr_local": LR_LOCAL}, {"delay": True}), ("dsync", "ring", {}, {}),
    ("odsgd", "ring", {"warmup": 0, "lr_local": LR_LOCAL}, {"delay": True}),
    ("delayed", None, {}, {"delay": True, "local": False})])
def test_a_mean_is_that_of_the_workers_that_have_a_gradient(ends: str, name: str, kind: Optional[str], options: Any,
                                                            expected: Any) -> None:
    stage = Stage(len(TARGETS))
    make = {"ring": stage.ring_worker, "sharded": stage.sharded_worker}.get(kind or "", stage.worker)

    def work(transport: Any) -> List[float]:
        store = kvstore.create(name, transport, uneven="join", **options)
        return descend(store, transport.worker_rank, ends)

    for mine, path in zip(stage.run(work, make), by_numpy(**expected)):
        np.testing.assert_allclose(mine, path, rtol=1e-6)


def test_a_worker_may_have_no_data_at_all() -> None:
    def work(transport: Any) -> float:
        store = kvstore.create("ssgd", transport, uneven="join")
        w = alone(store, mx.nd.ones(1), learning_rate=0.5)
        if store.rank == 0:
            store.pushpull("w", w, w)
        store.join()
        store.close()
        return float(w.asscalar())

    assert Stage(2).run(work) == [0.5, 0.5]


class Clipping(Synchronous):
    """Sends no gradient of its own above 0.125."""

    def iterate(self, grad: Any, step: Any) -> Any:
        own = mx.nd.clip(grad / step.counts, -0.125, 0.125)
        assert own.asscalar() == (0 if step.joined else 0.125)
        return super().iterate(own * step.counts, step)


class Clipped(SSGD):
    name, worker = "clipped", Clipping


def test_a_method_is_told_by_what_a_gradient_was_multiplied() -> None:
    def work(transport: Any) -> List[float]:
        store = kvstore.create("clipped", transport, uneven="join")
        w = alone(store, mx.nd.array([W_0]), learning_rate=1.0)
        seen = []
        for _ in range(4 - 2 * store.rank):
            store.pushpull("w", mx.nd.array([10.0]), w)
            seen.append(W_0 - w.asscalar())
        store.join()
        store.close()
        return seen

    with methods.as_they_were():
        kvstore.register_method(Clipped)
        assert Stage(2).run(work) == [[0.125, 0.25, 0.375, 0.5], [0.125, 0.25]]


def test_asking_for_a_state_that_all_share_joins_first() -> None:
    stage = Stage(2)

    def work(transport: Any) -> Any:
        store = kvstore.create("ssgd", transport, uneven="join")
        w = alone(store, mx.nd.ones(3), learning_rate=0.5, momentum=0.5)
        for _ in range(1 + store.rank):
            store.pushpull("w", w, w)
        arrays, _ = store.server_state()
        store.close()
        return arrays["optimizer/state/w"].tolist(), w.asnumpy().tolist()

    first, second = stage.run(work, stage.sharded_worker)
    assert first == second and set(map(len, first)) == {3}


@pytest.mark.parametrize("kind", ["worker", "ring_worker"])
@pytest.mark.parametrize("saved_by_1", ["later", "none"])
def test_saved_states_that_are_not_of_one_moment_are_told(kind: str, saved_by_1: str) -> None:
    def train(store: Store, state: Any = None) -> Any:
        store.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
        w = mx.nd.ones(3)
        if state is not None:
            store.load_state(*state)
        store.broadcast("w", w, w)
        states = []
        for _ in range(2):
            store.pushpull("w", w, w)
            states.append((store.worker_state(), store.server_state()))
        return states

    def first(transport: Any) -> Any:
        return train(kvstore.create("odsgd", transport, warmup=0))

    def again(transport: Any) -> None:
        other = {"later": saved[1][1], "none": None}[saved_by_1]
        train(kvstore.create("odsgd", transport, warmup=0), [saved[0][0], other][transport.worker_rank])

    stage = Stage(2)
    saved = stage.run(first, getattr(stage, kind))
    stage = Stage(2)
    with pytest.raises(ProtocolError, match="workers 0 and 1 differ in"):
        stage.run(again, getattr(stage, kind))


def test_join_is_for_stores_that_were_made_for_it() -> None:
    with pytest.raises(ConfigError, match='make the store with uneven="join"'):
        kvstore.create("local").join()
    with pytest.raises(ConfigError, match="join: workers of an asynchronous store, as `asgd`, do not wait"):
        kvstore.create("asgd", Stage(1).worker(0)).join()
    with pytest.raises(ConfigError, match="uneven has no meaning in store asgd, whose workers wait for nobody"):
        kvstore.create("asgd", Stage(1).worker(0), uneven="join")
    store = kvstore.create("local", uneven="join")
    store.set_optimizer(mx.optimizer.SGD())
    arrays = [mx.nd.ones(1), mx.nd.ones(1)]
    store.init([0, 1], arrays)
    store.push(0, arrays[0])
    with pytest.raises(ProtocolError, match="join in the middle of an iteration, when gradients of it"):
        store.join()
    store.push(1, arrays[1])
    store.close()
