"""How much of each worker's time communication takes, and how much of that compute hides.

docs/how-to/timelines.md explains the shares; compute + exposed + idle = 1. An iteration lasts from the begin of its
compute to the begin of the next iteration's. So the last iteration has no end, and no shares. The first one includes
the start-up, and is left out unless it is asked for.
"""
import dataclasses
from typing import Dict, List, Optional, Tuple

from kvstore.errors import ConfigError
from kvstore.tracing.trace import Bar
from odsgd.timeline.timeline import Timeline, Track
from odsgd.tools import aligned

Stretch = Tuple[float, float]
"""Begin and end, in seconds."""


@dataclasses.dataclass(frozen=True)
class Shares:
    """One worker's time; all but `iteration_s` as parts of the whole."""

    worker_rank: int
    iterations: int
    iteration_s: float
    compute: float
    hidden: float
    exposed: float
    idle: float


def shares(timeline: Timeline, first: Optional[int] = None, stop: Optional[int] = None) -> List[Shares]:
    """The shares of each worker, over iterations `first` to `stop` - 1."""
    return [_shares(worker, first, stop) for worker in timeline.workers]


def _shares(worker: Track, first: Optional[int], stop: Optional[int]) -> Shares:
    (begin_s, end_s), iterations = iterated(worker, first, stop)
    compute = _clipped(worker.of("compute"), begin_s, end_s)
    exchange = _clipped(worker.of("exchange"), begin_s, end_s)
    whole, computing, exchanging = end_s - begin_s, _length(compute), _length(exchange)
    either = _length(_union(compute + exchange))
    parts = computing, computing + exchanging - either, either - computing, whole - either
    return Shares(worker.about["rank"], iterations, whole / iterations,
                  *(max(0.0, part / whole) for part in parts))  # sums of floats may come out below 0


def iterated(worker: Track, first: Optional[int] = None, stop: Optional[int] = None) -> Tuple[Stretch, int]:
    """When iterations `first` to `stop` - 1 ran, by default the second to the last but one; and how many they are."""
    begins = begins_of(worker)
    numbers = sorted(begins)
    first = numbers[min(1, len(numbers) - 1)] if first is None and numbers else first
    stop = numbers[-1] if stop is None and numbers else stop
    if first not in begins or stop not in begins or not first < stop:
        seen = f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
        raise ConfigError(f"{worker.name}: iterations {first}:{stop} are not in the trace, which has {seen}; each "
                          "needs the begin of the next")
    return (begins[first], begins[stop]), sum(first <= number < stop for number in numbers)


def begins_of(worker: Track) -> Dict[int, float]:
    """When each iteration's compute began."""
    begins: Dict[int, float] = {}
    for bar in worker.of("compute"):
        begins.setdefault(bar.args["iteration"], bar.start_s)
    return begins


def common(timeline: Timeline) -> List[int]:
    """The iterations that all workers have begun."""
    numbers = [set(begins_of(worker)) for worker in timeline.workers]
    return sorted(set.intersection(*numbers)) if numbers else []


def _clipped(bars: List[Bar], begin_s: float, end_s: float) -> List[Stretch]:
    return _union([(max(bar.start_s, begin_s), min(bar.end_s, end_s)) for bar in bars
                   if bar.start_s < end_s and bar.end_s > begin_s])


def _union(stretches: List[Stretch]) -> List[Stretch]:
    """The same stretches, those that overlap as one."""
    merged: List[Stretch] = []
    for begin_s, end_s in sorted(stretches):
        if merged and begin_s <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end_s)
        else:
            merged.append((begin_s, end_s))
    return merged


def _length(stretches: List[Stretch]) -> float:
    return sum(end_s - begin_s for begin_s, end_s in stretches)


def table(found: List[Shares]) -> str:
    """The shares as text.

    >>> print(table([Shares(0, 10, 0.2831, 0.961, 0.95, 0.021, 0.018)]))
    worker  iterations  ms each  compute  hidden  exposed   idle
    0               10    283.1   96.1 %  95.0 %    2.1 %  1.8 %
    """
    lines = [["worker", "iterations", "ms each", "compute", "hidden", "exposed", "idle"]]
    for one in found:
        lines.append([str(one.worker_rank), str(one.iterations), f"{1000 * one.iteration_s:.1f}",
                      *(f"{100 * part:.1f} %" for part in (one.compute, one.hidden, one.exposed, one.idle))])
    return aligned(lines)
