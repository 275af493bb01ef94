"""Staleness as a result: what the servers of an asynchronous job have counted."""
import collections
from dataclasses import dataclass
from typing import Any, Counter, Dict, List


@dataclass(frozen=True)
class Staleness:
    """Counts over all buckets; one push of one bucket counts one.

    Buckets are updated independently of each other, so `updates_per_bucket`, the mean of their versions, is what
    compares with iterations.
    """

    pushes: int
    updates_per_bucket: float
    lr_mean: float  # mean effective learning rate of a gradient: the trainer's, as its staleness has reduced it
    by_worker: Dict[int, Dict[int, int]]  # worker rank -> tau -> pushes

    @classmethod
    def of(cls, buckets: List[Dict[str, Any]]) -> "Staleness":
        """Add up the `statistics` of rules."""
        by_worker: Dict[int, Counter[int]] = collections.defaultdict(collections.Counter)
        for bucket in buckets:
            for worker_rank, tau, count in bucket["staleness"]:
                by_worker[worker_rank][tau] += count
        pushes = sum(sum(counts.values()) for counts in by_worker.values())
        return cls(pushes, sum(bucket["version"] for bucket in buckets) / len(buckets),
                   sum(bucket["lr_sum"] for bucket in buckets) / max(pushes, 1),
                   {rank: dict(sorted(by_worker[rank].items())) for rank in sorted(by_worker)})

    @property
    def histogram(self) -> Dict[int, int]:
        """tau -> pushes, of all workers."""
        total = sum(map(collections.Counter, self.by_worker.values()), collections.Counter())
        return dict(sorted(total.items()))

    @property
    def mean(self) -> float:
        return mean(self.histogram)

    @property
    def max(self) -> int:
        return max(self.histogram, default=0)


def mean(histogram: Dict[int, int]) -> float:
    return sum(tau * count for tau, count in histogram.items()) / max(sum(histogram.values()), 1)
