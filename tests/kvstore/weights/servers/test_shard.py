"""A server's buckets by themselves: what a gradient that is not a number meets there."""
from typing import Any, Dict

import numpy as np
import pytest

from kvstore import methods
from kvstore.engine._mxnet import mx
from kvstore.errors import DivergedError
from kvstore.messages.header import Header
from kvstore.methods.sync import SyncRule
from kvstore.optimizers.described import describe
from kvstore.weights.servers.shard import Shard

FIRST, SIZE = 100, 5000
"""Floats of the bucket's first parameter, and of the bucket."""


class OfItsOwn(SyncRule):
    """Reads a push before U does."""

    def receive(self, header: Header, total: np.ndarray, w: np.ndarray) -> None:
        w -= np.float32(header.lr) * total
        self.version += 1


def shard(optimizer: Any, store: str = "ssgd", **options: Any) -> Shard:
    made, method = Shard(0, 2, trusted=True), methods.find(store)
    bucket = {"server_rank": 0, "size": SIZE, "shape": None, "names": [("first", FIRST), ("second", SIZE)]}
    made.command("open", {"method": methods.where(method), "options": method.Options(**options).plain(),
                          "optimizer": describe(optimizer), "local_step": {}, "buckets": {"7": bucket}})
    return made


def test_nobody_can_join_a_store_that_has_ended() -> None:
    made = shard(mx.optimizer.create("sgd"), "asgd")
    assert b'"7"' in made.opened()
    made.forget([7])
    assert made.opened() == b"[]"


def push(to: Shard, nans: Dict[int, float], marks: int = 1 + 2) -> np.ndarray:
    """The weights after a push of twos at rate 1/2, but for these places, on weights of zero."""
    pushed, stored = mx.nd.full(SIZE + 4, 2.0), mx.nd.zeros(SIZE + 4)
    pushed[-4:] = mx.nd.array([0, 0.5, 0, marks])
    for place, value in nans.items():
        pushed[place] = value
    to.handle_push(7, pushed, stored)
    return np.asarray(stored.asnumpy()[:SIZE])


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("store, who", [("ssgd", "update 1"), ("asgd", "worker 0, at update 1"), ("own", "update")])
@pytest.mark.parametrize("place, name", [(FIRST - 1, "first"), (FIRST, "second"), (SIZE // 2, "second"),
                                         (SIZE - 1, "second")])
def test_one_number_that_is_none_is_found_wherever_it_is(
        optimizer: str, store: str, who: str, place: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if store == "own":
        store = "ssgd"
        monkeypatch.setattr(methods.find("ssgd"), "rule", OfItsOwn)
    made = shard(mx.optimizer.create(optimizer), store)
    with pytest.raises(DivergedError, match=f"^{who}.*: 1 elements of the gradient of {name} are .*first: -inf"):
        push(made, {place: -np.inf}, marks=1 if store == "asgd" else 1 + 2)


def test_what_is_finite_is_applied_and_so_is_the_rest_with_continue() -> None:
    np.testing.assert_array_equal(push(shard(mx.optimizer.SGD()), {}), -0.5)
    w = push(shard(mx.optimizer.SGD(), on_nan="continue"), {SIZE // 2: np.nan})
    assert np.flatnonzero(w != -0.5).tolist() == [SIZE // 2] and np.isnan(w[SIZE // 2])
