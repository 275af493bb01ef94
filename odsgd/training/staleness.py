"""Staleness while an asynchronous job runs and when it is over, from what its servers have counted.

    staleness = StalenessReader(store, clock)  after the first step: from here on updates are counted per second
    staleness.interval()                       {"staleness_mean": …, "updates_per_s": …} since the last call
    staleness.result()                         what goes to staleness.json

Only worker 0 asks. An answer waits only for the servers, so the other workers are not held up. Seconds are worker
0's of training, or virtual ones; they stand still during evaluations and checkpoints, in which nobody pushes. What the
numbers mean: docs/explanation/staleness.md.
"""
from __future__ import annotations

from typing import Any, Dict, Union

from kvstore.fronts.gluon.store import Store
from kvstore.job import environment
from kvstore.session.staleness import Staleness, mean
from odsgd.training.metrics import Clock, VirtualClock


class StalenessReader:
    """Reads a store's statistics against the clock."""

    def __init__(self, store: Store, clock: Union[Clock, VirtualClock]) -> None:
        self._store, self._clock = store, clock
        self._first = self._last = self._read()
        self.arrived: Dict[int, int] = {}
        """Gradients by their staleness, between the last two calls of `interval`."""

    def interval(self) -> Dict[str, float]:
        """Mean staleness of the gradients that arrived since the last call, and updates of the weights per second."""
        before, self._last = self._last, self._read()
        earlier = before.counted.histogram
        self.arrived = {tau: count - earlier.get(tau, 0) for tau, count in self._last.counted.histogram.items()
                        if count > earlier.get(tau, 0)}
        return {"staleness_mean": self._last.mean_since(before), "updates_per_s": self._last.speed_since(before)}

    def result(self) -> Dict[str, Any]:
        """All that was counted, for a JSON file; after a resume of the whole run, but the speed of what came since.

        `lost_workers`: those without whom the job has gone on (`--on-worker-loss continue`); what they pushed counts.
        """
        reading = self._read()
        counted = reading.counted
        return {"store": self._store.type, "num_workers": self._store.num_workers,
                "staleness_mean": counted.mean, "staleness_max": counted.max,
                "pushes": counted.pushes, "updates_per_bucket": counted.updates_per_bucket,
                "updates_per_s": reading.speed_since(self._first), "lr_mean": counted.lr_mean,
                "histogram": counted.histogram, "lost_workers": sorted(environment.absent_workers()),
                "workers": {rank: {"staleness_mean": mean(taus), "staleness_max": max(taus),
                                   "pushes": sum(taus.values()), "histogram": taus}
                            for rank, taus in counted.by_worker.items()}}

    def _read(self) -> _Reading:
        return _Reading(self._store.statistics(), self._clock.read() or 0.0)


class _Reading:
    """What was counted at an instant of the clock."""

    def __init__(self, counted: Staleness, clock_s: float) -> None:
        self.counted, self.clock_s = counted, clock_s
        self.tau_sum = sum(tau * pushes for tau, pushes in counted.histogram.items())

    def mean_since(self, before: _Reading) -> float:
        """0 if nothing has arrived."""
        return (self.tau_sum - before.tau_sum) / max(self.counted.pushes - before.counted.pushes, 1)

    def speed_since(self, before: _Reading) -> float:
        """Updates of a bucket per second; 0 if no time has passed."""
        seconds = self.clock_s - before.clock_s
        return (self.counted.updates_per_bucket - before.counted.updates_per_bucket) / seconds if seconds > 0 else 0.0
