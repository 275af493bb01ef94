"""Where the time of a run's iterations went.

By the timeline that it has recorded (``odsgd train --trace``), four parts make up an iteration: only compute, compute
beside which an exchange runs (that exchange is hidden), an exchange for which the device waits (it is exposed), and
neither. Iterations in which an epoch ends are left out, since an evaluation and a checkpoint may lie in them, and so is
the first one, in which everything starts.

Without a timeline there are two parts, by worker 0's samples (`kvstore.fronts.gluon.waits`): what is waited for, and
the rest.
"""
import dataclasses
import datetime
import math
from pathlib import Path
from typing import Dict, List, Optional

from kvstore.errors import ConfigError
from odsgd.report.runs import Records, number
from odsgd.timeline.summary import Shares, common, shares
from odsgd.timeline.timeline import Timeline, read_timeline

TRACED = ("compute alone", "compute, exchange hidden", "exchange exposed", "neither")
SAMPLED = ("not waiting", "waiting")
PARTS = TRACED + SAMPLED

Breakdown = Dict[str, float]
"""The mean iteration of all workers: milliseconds of each of its `PARTS`, which add up to the whole."""


def breakdown_of(records: Records) -> Optional[Breakdown]:
    """None where the run has neither a timeline with a whole iteration nor samples."""
    return _traced(records) or _sampled(records)


def _sampled(records: Records) -> Optional[Breakdown]:
    """The breakdown of the median epoch, by worker 0's samples."""
    found = sorted((number(epoch["iteration_ms"]), number(epoch["waiting_ms"])) for epoch in records.epochs
                   if epoch.get("waiting_ms") is not None and epoch.get("iteration_ms") is not None)
    if not found:
        return None
    iteration_ms, waiting_ms = found[len(found) // 2]
    waiting_ms = min(waiting_ms, iteration_ms)
    return dict(zip(SAMPLED, (iteration_ms - waiting_ms, waiting_ms)))


def _traced(records: Records) -> Optional[Breakdown]:
    timeline = timeline_of(records)
    if timeline is None:
        return None
    try:
        found = [one for part in stretches(timeline, records) for one in shares(timeline, part.start, part.stop)]
    except ConfigError:
        return None
    return _mean(found) if found else None


def timeline_of(records: Records) -> Optional[Timeline]:
    """What `--trace` recorded of the run, by the run's name; None where it did not, or it cannot be read, or a later
    job has written to the folder.
    """
    named = (records.start.get("config") or {}).get("trace")
    candidates = [Path(str(named)), records.folder / Path(str(named)).name] if named else []  # from here, or in the run
    folder = next((folder for folder in candidates if folder.is_dir()), None)
    if folder is None:
        return None
    try:
        timeline = dataclasses.replace(read_timeline(folder), name=records.name)
        its_own = timeline.tracks[0].about.get("wall_s", 0.0) <= _ended_s(records)
    except (ConfigError, TypeError, ValueError):
        return None
    return timeline if its_own else None


def _ended_s(records: Records) -> float:
    """When the run's last epoch had ended, by the wall clock; infinite where that is not known."""
    if "time" not in records.start:
        return math.inf
    began_s = datetime.datetime.fromisoformat(records.start["time"]).timestamp() + 1  # it is cut to whole seconds
    return began_s + (records.epochs[-1].get("seconds_since_start") or 0.0)


def stretches(timeline: Timeline, records: Records) -> List[range]:
    """The iterations of the trace, which begins where the run did, between the ends of epochs."""
    last = max(common(timeline), default=0)
    per_epoch = int(records.start.get("batches_per_epoch") or last + 1)
    position = int(records.start.get("iteration") or 0) % per_epoch
    ends = [*range(per_epoch - position - 1, last, per_epoch), last]  # iterations in which an epoch ends
    begins = [1, *(end + 1 for end in ends)]
    return [range(begin, end) for begin, end in zip(begins, ends) if begin < end]


def _mean(found: List[Shares]) -> Breakdown:
    """The mean of some stretches, weighted by the time that each took."""
    def ms(one: Shares, share: float) -> float:
        return 1000 * one.iterations * one.iteration_s * share

    iterations = sum(one.iterations for one in found)
    parts = [sum(ms(one, share) for one, share in zip(found, column)) / iterations for column in zip(*(
        (one.compute - one.hidden, one.hidden, one.exposed, one.idle) for one in found))]
    return dict(zip(TRACED, parts))
