"""How much of each worker's time communication takes, and how much of that compute hides.

Time is divided in two by compute, and each part in two by exchanges:

    compute      the device computes; `hidden`: an exchange runs beside it
    exposed      an exchange runs, and the device waits
    idle         neither: gathering, updates, scattering, Python, input; or nothing to do

    compute + exposed + idle = 1

An iteration lasts from the begin of its compute to that of the next one's. The last one has no end, and the first one's
time is that of starting; both are left out unless they are asked for.
"""
from __future__ import annotations

import dataclasses
from typing import Dict, List, Optional, Tuple

from kvstore.errors import ConfigError
from odsgd.lab.tracing.files import Job, Process, Span

Interval = Tuple[float, float]


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


def shares(job: Job, first: Optional[int] = None, stop: Optional[int] = None) -> List[Shares]:
    """Of each worker, over iterations `first` to `stop` - 1."""
    return [_shares(worker, first, stop) for worker in job.workers]


def _shares(worker: Process, first: Optional[int], stop: Optional[int]) -> Shares:
    begin_s, end_s, iterations = bounds(worker, first, stop)
    compute = _clipped(worker.lane("compute"), begin_s, end_s)
    exchange = _clipped(worker.lane("exchange"), begin_s, end_s)
    whole, computing, exchanging = end_s - begin_s, _length(compute), _length(exchange)
    either = _length(_union(compute + exchange))
    return Shares(worker.about["rank"], iterations, whole / iterations, computing / whole,
                  (computing + exchanging - either) / whole, (either - computing) / whole, 1 - either / whole)


def bounds(worker: Process, first: Optional[int] = None, stop: Optional[int] = None) -> Tuple[float, float, int]:
    """Begin and end of iterations `first` to `stop` - 1, by default the second to the last but one; how many."""
    begins = begins_of(worker)
    numbers = sorted(begins)
    first = numbers[min(1, len(numbers) - 1)] if first is None and numbers else first
    stop = numbers[-1] if stop is None and numbers else stop
    if first not in begins or stop not in begins or not first < stop:
        seen = f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
        raise ConfigError(f"{worker.name}: iterations {first}:{stop} are not in the trace, which has {seen}; each "
                          "needs the begin of the next")
    return begins[first], begins[stop], sum(first <= number < stop for number in numbers)


def begins_of(worker: Process) -> Dict[int, float]:
    """When each iteration's compute began."""
    begins: Dict[int, float] = {}
    for span in worker.lane("compute"):
        begins.setdefault(span.args["iteration"], span.start_s)
    return begins


def _clipped(spans: List[Span], begin_s: float, end_s: float) -> List[Interval]:
    return _union([(max(span.start_s, begin_s), min(span.end_s, end_s)) for span in spans
                   if span.start_s < end_s and span.end_s > begin_s])


def _union(intervals: List[Interval]) -> List[Interval]:
    """The same times, without overlaps."""
    merged: List[Interval] = []
    for begin_s, end_s in sorted(intervals):
        if merged and begin_s <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end_s)
        else:
            merged.append((begin_s, end_s))
    return merged


def _length(intervals: List[Interval]) -> float:
    return sum(end_s - begin_s for begin_s, end_s in intervals)


def table(rows: List[Shares]) -> str:
    """The shares as text.

    >>> print(table([Shares(0, 10, 0.2831, 0.961, 0.95, 0.021, 0.018)]))
    worker  iterations  ms each  compute  hidden  exposed   idle
    0               10    283.1   96.1 %  95.0 %    2.1 %  1.8 %
    """
    lines = [["worker", "iterations", "ms each", "compute", "hidden", "exposed", "idle"]]
    for row in rows:
        lines.append([str(row.worker_rank), str(row.iterations), f"{1000 * row.iteration_s:.1f}",
                      *(f"{100 * part:.1f} %" for part in (row.compute, row.hidden, row.exposed, row.idle))])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join([first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:]))])
                     for first, *rest in lines)
