"""Evaluation of weights on the test set: all at once, or a batch at a time beside training.

In an asynchronous job nobody stops for it: the worker that evaluates takes a copy of the global weights as its epoch
ends (`Store.snapshot`), and shows them to the network for one batch of the test after each of its own iterations.
"""
import dataclasses
from typing import Any, Callable, Dict, Iterator, List, Optional

import numpy as np

from kvstore.fronts.gluon.store import Store
from kvstore.job import environment
from kvstore.job.pulse import pulse
from odsgd.config.train import TrainConfig
from odsgd.training.checkpoint import resuming
from odsgd.training.metrics import Meter, Sums
from odsgd.training.run_log import RunLog

TestBatch = Callable[[List[Any], List[Any]], List[Any]]
"""Queues the passes of one batch of the test; the tallies of its devices."""


def _tested(batches: Iterator[Any], compute: TestBatch, sums: Sums) -> Iterator[bool]:
    """Queue a batch of the test at each step; after the last one, `sums` has loss and right answers. Waits then."""
    meter = Meter(lambda _, part: sums.add(part))
    for number, (xs, ys) in enumerate(batches):
        pulse.substep = number
        meter.add(number, compute(xs, ys), sum(len(y) for y in ys))
        yield True
    meter.drain()


class Evaluator:
    """Evaluates the global weights when an epoch ends: at once, or beside the next epoch.

    Parameters
    ----------
    batches, compute : of the test
    take_over : called before an evaluation; this worker may have to speak and evaluate from here on
    untold : the record of an epoch that is over, and not evaluated yet; it changes with the run
    """

    def __init__(self, config: TrainConfig, store: Store, batches: Callable[[], Iterator[Any]], compute: TestBatch,
                 run_log: RunLog, take_over: Callable[[], None], untold: Optional[Dict[str, Any]]) -> None:
        self._config, self._store, self._batches, self._compute = config, store, batches, compute
        self._run_log, self._take_over, self.untold = run_log, take_over, untold
        self.beside: Optional[Iterator[bool]] = None
        """The evaluation beside the training, batch by batch, while one is under way."""
        self._sums = Sums()  # of that one

    @pulse.doing("evaluation")
    def evaluate(self) -> Dict[str, float]:
        """The global weights on the test set. Collective; worker 0 computes, the others go on to their next exchange
        and wait there for it, as long as `timeout_s` allows.

        In an asynchronous job no exchange makes them wait. They do it here, or else worker 0 would come back with
        weights that the others have long left behind, and its next gradient would be stale by a whole evaluation. If
        the job loses worker 0 meanwhile, its successor evaluates.
        """
        while True:
            self._take_over()
            sums = Sums()
            with self._store.global_weights():
                if not self._run_log.silent:
                    for _ in _tested(self._batches(), self._compute, sums):
                        pass
            if not self._config.asynchronous or environment.joined():  # nobody sums up with a joiner
                return sums.named("test")
            told = sum_over_workers(self._store, sums)
            if told.examples:
                return (told if self._run_log.silent else sums).named("test")

    def begin_beside(self, record: Dict[str, Any]) -> None:
        """Evaluate the global weights of now beside the next epoch; the record of this epoch is written after that."""
        snapshot = self._store.snapshot()

        def compute(xs: List[Any], ys: List[Any]) -> List[Any]:
            with self._store.showing(snapshot):
                return self._compute(xs, ys)
        self.untold, self._sums = record, Sums()
        self.beside = _tested(self._batches(), compute, self._sums)

    def advance(self) -> None:
        """After an iteration: queue the next batch of the evaluation beside it, if there is one."""
        if self.beside is not None and not next(self.beside, False):
            self.beside = None
            self._tell(self._sums.named("test"))

    @pulse.doing("evaluation")
    def finish(self) -> None:
        """Wait for the evaluation beside the training, if there is one."""
        while self.beside is not None:
            self.advance()

    def tell_untold(self, begin: Callable[[], None]) -> Dict[str, float]:
        """Evaluate the checkpoint's weights for an epoch that is untold, unless the metrics have it. `begin` gets the
        store ready for that. Returns loss and accuracy, if they were evaluated. Collective.
        """
        if self.untold is None:
            return {}
        if resuming.from_worker_0(self._store, self._run_log.has_epoch(self.untold["epoch"])):
            self.untold = None
            return {}
        begin()
        tested = self.evaluate() if self._config.eval_every else {}
        self._tell(tested)
        return tested

    def _tell(self, tested: Dict[str, float]) -> None:
        assert self.untold is not None
        record, self.untold = {**self.untold, **tested}, None
        self._run_log.epoch(record)


def sum_over_workers(store: Store, sums: Sums) -> Sums:
    """The sums of all workers together. Collective; waits."""
    return Sums(*map(float, store.allreduce(np.array(dataclasses.astuple(sums), np.float32))))
