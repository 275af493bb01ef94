"""Traits that make a method faster are said by each class whose code they speak of."""
from typing import Any, List

import numpy as np
import pytest

import kvstore
from kvstore import methods
from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError
from kvstore.methods import fit
from kvstore.methods.sync import SSGD, Synchronous, SyncRule
from kvstore.transports.in_process import Stage
from tests.jobs import alone

seen: List[List[float]] = []


class Looks(Synchronous):
    """Reads its gradient after it has been sent, as any method may."""

    def iterate(self, grad: Any, step: Any) -> Any:
        answer = super().iterate(grad, step)
        seen.append(grad.asnumpy().tolist())
        return answer


class Looking(SSGD):
    name = "looking"
    worker = Looks


def test_a_method_may_read_a_gradient_that_the_one_it_derives_from_has_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods.METHODS, "looking", Looking)
    store = kvstore.create("looking", Stage(1).worker(0))
    w = alone(store, mx.nd.array([1.0, 3.0]), learning_rate=0.5)
    seen.clear()
    for _ in range(2):
        store.pushpull("w", mx.nd.array([5.0, 7.0]), w)
        w.wait_to_read()
    assert seen == [[5.0, 7.0]] * 2
    assert w.asnumpy().tolist() == [-4.0, -4.0]


def test_a_rule_with_lines_of_its_own_does_not_inherit_that_it_looks_at_elements() -> None:
    class Clipped(SyncRule):
        def receive(self, header: Any, total: np.ndarray, w: np.ndarray) -> None:
            """Nothing."""

    assert SyncRule.by_element and not Clipped.by_element


def test_nor_that_it_knows_what_a_push_that_is_left_out_is_to_it() -> None:
    class Clipped(SyncRule):
        def receive(self, header: Any, total: np.ndarray, w: np.ndarray) -> None:
            """Nothing."""

    class Knows(Clipped):
        skip = SyncRule.skip

    class Clipping(SSGD):
        rule = Clipped

    options = Clipping.Options(on_nan="skip")
    with pytest.raises(ConfigError, match="Clipped does not say what a push that is left out does"):
        fit.check(Clipping, options, "server")
    fit.check(Clipping, options, "ring")
    Clipping.rule = Knows
    fit.check(Clipping, options, "server")
