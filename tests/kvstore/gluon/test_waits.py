"""How long a worker waits for weights, where that is known."""
import time

import pytest

from kvstore.buckets import Parameter
from kvstore.engine import engine
from kvstore.engine._mxnet import mx
from kvstore.gluon import waits
from kvstore.gluon.lanes import Keyed
from kvstore.gluon.waits import Waits


def trained(iterations: int, exchange_s: float) -> Waits:
    """So many iterations: the backward pass takes 20 ms, and the weights are there `exchange_s` after it."""
    of, one = Waits(), Keyed(Parameter(0, "w", (4,)), [mx.nd.zeros(4)])
    one.grads = [mx.nd.zeros(4)]
    for _ in range(iterations):
        engine.push(lambda: time.sleep(0.02), one.weights, one.grads)
        with of.around([one]):
            engine.push(lambda: time.sleep(exchange_s), one.grads, one.weights)
        one.weights[0].wait_to_read()
    mx.nd.waitall()
    return of


def test_an_exchange_that_is_waited_for_counts_and_a_backward_pass_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "EVERY_S", 0.0)
    assert trained(5, 0.03).seconds >= 0.15
    assert trained(5, 0.0).seconds < 5 * 0.02 / 2


def test_an_iteration_that_is_looked_at_stands_for_those_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of 6 is looked at, and the last, which stands for 5."""
    moments = iter([100.0, 101, 102, 103, 104, 106])
    monkeypatch.setattr(waits, "EVERY_S", 5.5)
    of, one = Waits(), Keyed(Parameter(0, "w", (4,)), [mx.nd.zeros(4)])
    one.grads = [mx.nd.zeros(4)]
    real = time.monotonic
    for _ in range(6):
        at = next(moments)
        monkeypatch.setattr(time, "monotonic", lambda at=at: at)
        with of.around([one]):
            monkeypatch.setattr(time, "monotonic", real)
            engine.push(lambda: time.sleep(0.02), one.grads, one.weights)
        mx.nd.waitall()
    assert of.seconds >= 6 * 0.02
