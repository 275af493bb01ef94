"""How long a worker waits for weights, where that is known."""
import threading
import time
import types

import pytest

import kvstore
from kvstore.engine import engine
from kvstore.engine._mxnet import mx
from kvstore.fronts.gluon import waits
from kvstore.fronts.gluon.lanes import Keyed
from kvstore.fronts.gluon.waits import Waits
from kvstore.job.pulse import pulse
from kvstore.messages.buckets import Parameter
from tests.jobs import train_once


class Clock:
    """Goes on when it is told to, and counts those who look at it."""

    def __init__(self) -> None:
        self.now, self.looks = 100.0, threading.Semaphore(0)

    def monotonic(self) -> float:
        self.looks.release()
        return self.now

    def goes_on(self, seconds: float, after_looks: int) -> None:
        for _ in range(after_looks):
            assert self.looks.acquire(timeout=300)
        self.now += seconds


def test_an_exchange_that_is_waited_for_counts_and_a_backward_pass_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange of an iteration begins when the store has looked at the clock twice: as it hears of the gradients,
    and when these have been written.
    """
    monkeypatch.setattr(waits, "SAMPLED_S", 0.0)
    clock, of = Clock(), Waits()
    monkeypatch.setattr(waits, "time", types.SimpleNamespace(monotonic=clock.monotonic))
    one = Keyed(Parameter(0, "w", (4,)), [mx.nd.zeros(4)])
    one.grads = [mx.nd.zeros(4)]
    for _ in range(5):
        engine.push(lambda: clock.goes_on(20.0, 0), one.weights, one.grads)
        with of.around([one]):
            engine.push(lambda: clock.goes_on(3.0, 2), one.grads, one.weights)
        mx.nd.waitall()
        clock.looks.acquire()  # the last look, at the weights
    assert of.seconds == 5 * 3.0


def test_an_iteration_that_is_looked_at_stands_for_those_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of 6 is looked at, and the last, which stands for 5."""
    moments = iter([100.0, 101, 102, 103, 104, 106])
    monkeypatch.setattr(waits, "SAMPLED_S", 5.5)
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


def test_a_beat_tells_how_long_all_stores_of_a_process_have_been_waited_for() -> None:
    """As the two networks of a GAN have; a store that is gone has been waited for, too."""
    waited = []
    for seconds in (5.0, 7.0):
        store, net = kvstore.create("local"), mx.gluon.nn.Dense(1, in_units=1)
        net.initialize()
        train_once(net, store)
        mx.nd.waitall()
        waited.append(pulse.more["waited_s"]())
        store._waits.seconds += seconds
    del store
    assert pulse.more["waited_s"]() - waited[0] == pytest.approx(12.0, abs=1.0)
