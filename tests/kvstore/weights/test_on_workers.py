"""Weights on workers: who updates what of parts and keeps what of U's state; how long a ring's sums last."""
import dataclasses
import gc
from typing import Any, ClassVar, Dict, List, Tuple

import numpy as np
import pytest

import kvstore
from kvstore import methods
from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError, ProtocolError
from kvstore.messages.buckets import Bucket, Parameter, Segment
from kvstore.messages.seam import Saved, TrafficSettings, Transport
from kvstore.methods.contract import Step
from kvstore.methods.pipelined import PipeSGD
from kvstore.methods.sync import SSGD, Synchronous
from kvstore.transports.in_process import Stage
from kvstore.transports.ring import cuts, part
from kvstore.transports.rounds import Round
from kvstore.weights.on_workers import Parts
from tests.jobs import alone

SHAPES = {"w1": (7, 3), "w2": (10,), "z": (1,)}


def buckets(*sizes: int) -> List[Bucket]:
    return [Bucket(number, 0, (Segment(Parameter(number, f"w{number}", (size,)), 0, size, 0),))
            for number, size in enumerate(sizes)]


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("whole", [False, True])
def test_every_element_has_one_owner(workers: int, whole: bool) -> None:
    for bucket in buckets(1, 4, 23, 2):
        owners = np.zeros(bucket.size)
        for rank in range(workers):
            owners[part(cuts([bucket], workers, whole)[bucket.id], rank)] += 1
        assert np.all(owners == 1)


def test_whole_buckets_are_owned_by_turns() -> None:
    cut = cuts(buckets(5, 5, 5, 5), 3, whole=True)
    owners = [[rank for rank in range(3) if part(cut[number], rank) == slice(0, 5)] for number in range(4)]
    assert owners == [[0], [1], [2], [0]]


def steps(transport: Transport, optimizer: str) -> Tuple[Dict[str, int], Saved]:
    """Floats of the optimizer's state on this worker by bucket, and what all of them have."""
    store = kvstore.create("ssgd", transport, bucket_nbytes=64)
    store.set_optimizer(mx.optimizer.create(optimizer, learning_rate=0.1))
    weights = {name: mx.nd.ones(shape) for name, shape in SHAPES.items()}
    for name, weight in weights.items():
        store.broadcast(name, weight, weight)
    for _ in range(3):
        for name, weight in weights.items():
            store.pushpull(name, weight - transport.worker_rank, weight)
    store.wait()
    holder = store.session.weights_holder
    kept = {} if not isinstance(holder, Parts) else {
        bucket.label: sum(array.size for array in holder.updates[bucket.id].arrays().values())
        for bucket in holder.buckets if holder.sharded.part(bucket).start < holder.sharded.part(bucket).stop}
    return kept, store.server_state()


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_the_workers_together_keep_one_state_which_is_that_of_the_servers(optimizer: str) -> None:
    stage = Stage(2)
    found = stage.run(lambda transport: steps(transport, optimizer), stage.sharded_worker)
    _, (expected, _) = Stage(2).run(lambda transport: steps(transport, optimizer))[0]
    floats = [sum(kept.values()) for kept, _ in found]
    assert sum(floats) == sum(array.size for array in expected.values()) == 2 * 32
    assert optimizer == "lamb" or max(floats) < 2 * 32 * 0.6  # whole parameters cannot be shared evenly
    for _, (arrays, _) in found:
        assert list(arrays) == list(expected)
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, expected[name], err_msg=name)


class TwoDimensional(mx.optimizer.SGD):
    """As `groupadagrad`, it looks at a weight's shape."""

    def create_state(self, index: int, weight: mx.nd.NDArray) -> mx.nd.NDArray:
        return mx.nd.zeros((weight.shape[0], weight.shape[1]))


def test_an_optimizer_that_looks_at_shapes_sees_a_matrix_where_a_worker_owns_nothing_of_it() -> None:
    def work(transport: Transport) -> float:
        store, w = kvstore.create("ssgd", transport), mx.nd.ones((2, 3))
        store.set_optimizer(TwoDimensional(learning_rate=0.5))
        store.broadcast(0, w, w)
        store.pushpull(0, mx.nd.ones((2, 3)), out=w)
        return float(w.sum().asscalar())

    stage = Stage(2)
    assert stage.run(work, stage.sharded_worker) == [3, 3]


def test_nothing_of_a_sum_is_kept_once_it_is_there() -> None:
    stage, stores = Stage(2), []

    def work(transport: Transport) -> None:
        store = kvstore.create("ssgd", transport)
        w = alone(store, mx.nd.ones(3), learning_rate=0.1)
        for _ in range(3):
            store.pushpull("w", mx.nd.ones(3), out=w)
        stores.append(store)

    stage.run(work, stage.sharded_worker)
    gc.collect()
    assert stores and [one for one in gc.get_objects() if type(one) is Round] == []  # PyTorch has objects that warn


class ReadsLate(PipeSGD):
    """Two sums in flight, and room for one."""

    name = "late"

    def traffic(self, whole: bool) -> TrafficSettings:
        return dataclasses.replace(super().traffic(whole), depth=1)


def test_a_sum_that_is_read_when_its_array_is_in_use_again_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods.METHODS, "late", ReadsLate)

    def work(transport: Transport) -> None:
        store = kvstore.create("late", transport)
        w = alone(store, mx.nd.ones(3), learning_rate=0.1)
        for _ in range(2):
            store.pushpull("w", mx.nd.ones(3), out=w)

    stage = Stage(2)
    with pytest.raises(ProtocolError, match=r"the result of an `allreduce` is read too late, .* a larger `depth`"):
        stage.run(work, stage.ring_worker)


class AddsAlone(Synchronous):
    """Does not say what the global weights are."""

    def iterate(self, grad: Any, step: Step) -> Any:
        return self.weights_holder.allreduce(self.bucket, grad, step.lr).result()


class AddsBeside(Synchronous):
    """Sums something else, too."""

    def iterate(self, grad: Any, step: Step) -> Any:
        self.weights_holder.allreduce(self.bucket, grad * grad, step.lr).result()
        return super().iterate(grad, step)


class Adding(SSGD):
    name = "adding"
    worker = AddsAlone
    transports: ClassVar = ("server", "ring", "sharded")


def shown(transport: Transport) -> float:
    """The global weights after a step from 1 at the rate 1/2, by the gradient 1."""
    store = kvstore.create("adding", transport)
    w = alone(store, mx.nd.ones(3), learning_rate=0.5)
    store.pushpull("w", mx.nd.ones(3), out=w)
    with store.global_weights():
        return float(w.asnumpy()[0])


@pytest.mark.parametrize("kind, said", [
    ("worker", "which only a ring has"), ("sharded_worker", "which only a ring has"),
    ("ring_worker", r"AddsAlone calls `allreduce`, .*; write its `global_weights\(step\)`")])
def test_a_sum_is_had_of_a_ring_and_is_not_taken_for_weights(kind: str, said: str,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods.METHODS, "adding", Adding)
    stage = Stage(2)
    with pytest.raises(ConfigError, match=said):
        stage.run(shown, getattr(stage, kind))


def test_a_ring_that_also_brings_weights_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods.METHODS, "adding", Adding)
    monkeypatch.setattr(Adding, "worker", AddsBeside)
    stage = Stage(2)
    assert stage.run(shown, stage.ring_worker) == [0.5] * 2
