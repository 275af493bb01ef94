"""The test of weights, all of it at once, or a batch at a time beside training.

In an asynchronous job nobody stops for it: the worker that evaluates takes a copy of the global weights as its epoch
ends (`Store.snapshot`), and shows them to the network for one batch of the test after each of its own iterations.
"""
from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, List, Optional

from kvstore.fronts.gluon.store import Store
from kvstore.job.pulse import pulse
from odsgd.training.metrics import Meter, Sums

TestBatch = Callable[[List[Any], List[Any]], List[Any]]
"""Queues the passes of one batch of the test; the tallies of its devices."""


def test(batches: Iterator[Any], compute: TestBatch) -> Sums:
    """Loss and right answers of the weights that the network holds. Waits."""
    evaluation = _Evaluation(batches, compute)
    while evaluation.next():
        pass
    return evaluation.sums()


def as_metrics(sums: Sums) -> Dict[str, float]:
    """As records have them."""
    return {"test_loss": sums.mean_loss, "test_accuracy": sums.accuracy}


class _Evaluation:
    """A test that has begun."""

    def __init__(self, batches: Iterator[Any], compute: TestBatch) -> None:
        self._batches, self._compute, self._number, self._sums = batches, compute, 0, Sums()
        self._meter = Meter(lambda _, part: self._sums.add(part))

    def next(self) -> bool:
        """Queue a batch; whether there was one."""
        for xs, ys in self._batches:
            pulse.part = self._number
            self._meter.add(self._number, self._compute(xs, ys), sum(len(y) for y in ys))
            self._number += 1
            return True
        return False

    def sums(self) -> Sums:
        """What was counted. Waits."""
        self._meter.drain()
        return self._sums


class Beside:
    """The evaluation of the global weights of now, beside training. `done` is called with its metrics."""

    def __init__(self, store: Store, batches: Iterator[Any], compute: TestBatch,
                 done: Callable[[Dict[str, float]], None]) -> None:
        self._store, self._snapshot, self._done = store, store.snapshot(), done
        self._evaluation: Optional[_Evaluation] = _Evaluation(batches, compute)

    def advance(self) -> bool:
        """Queue a batch; whether there is more to do."""
        if self._evaluation is None:
            return False
        with self._store.showing(self._snapshot):
            more = self._evaluation.next()
        if not more:
            evaluation, self._evaluation = self._evaluation, None
            self._done(as_metrics(evaluation.sums()))
        return more

    def finish(self) -> None:
        """All that is left. Waits."""
        while self.advance():
            pass
