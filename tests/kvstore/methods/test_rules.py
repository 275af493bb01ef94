"""The servers' rules by themselves: what they refuse."""
from typing import Any, Type

import numpy as np
import pytest

from kvstore.errors import ProtocolError
from kvstore.messages.header import ASYNC_MODULUS, Header
from kvstore.methods.asgd import AsyncRule
from kvstore.methods.common import Options
from kvstore.methods.contract import Rule, Update
from kvstore.methods.sync import SyncRule


class Descent(Update):
    """Plain SGD, by the book."""

    def __call__(self, w: np.ndarray, grad: np.ndarray, lr: float, gradient_weight: float = 1.0,
                 out: Any = None) -> np.ndarray:
        w -= np.float32(lr * gradient_weight) * grad
        return w


def started(rule: Type[Rule], workers: int = 3) -> Rule:
    made = rule(7, Options(), workers, Descent())
    made.start(np.zeros(2, np.float32))
    return made


def receive(rule: Rule, version: int, worker_rank: int) -> np.ndarray:
    """The weights after a push of ones, at rate 1/2, on weights of zero."""
    w = np.zeros(2, np.float32)
    rule.receive(Header(version, 0.5, worker_rank), np.ones(2, np.float32), w)
    return w


def test_a_round_of_all_workers_at_one_version_is_an_update() -> None:
    rule = started(SyncRule)
    for version in range(3):
        np.testing.assert_allclose(receive(rule, 3 * version, 0 + 1 + 2), -0.5 / 3)
        assert rule.version == version + 1


@pytest.mark.parametrize("version, ranks", [(0, 0 + 1 + 1), (1, 0 + 1 + 2), (3, 0 + 1 + 2)])
def test_a_round_with_a_push_that_does_not_belong_to_it_is_refused(version: int, ranks: int) -> None:
    with pytest.raises(ProtocolError, match=r"bucket 7: in this round the ranks add up to .* a worker pushed twice"):
        receive(started(SyncRule), version, ranks)


def test_versions_are_counted_round_without_an_error() -> None:
    rule = started(SyncRule, workers=1)
    rule.version = 4095
    receive(rule, 4095, 0)
    receive(rule, 0, 0)
    assert rule.version == 4097


def test_staleness_is_counted_per_worker_and_past_the_end_of_what_a_float_can_count() -> None:
    rule = started(AsyncRule)
    rule.version = ASYNC_MODULUS + 1
    receive(rule, ASYNC_MODULUS - 1, 2)
    assert rule.statistics()["staleness"] == [[2, 2, 1]]


def test_a_gradient_from_the_future_is_refused() -> None:
    with pytest.raises(ProtocolError, match="worker 1 pushed a gradient of version 5, the weights are at version 0"):
        receive(started(AsyncRule), 5, 1)
