"""The records that a run has left in metrics.jsonl, and what it came to."""
import itertools
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from kvstore.errors import ConfigError, printable
from odsgd.tools import aligned

METRICS = "metrics.jsonl"

FEW = 5
"""Epochs that an accuracy is averaged over."""

Record = Dict[str, Any]


class Outcome(NamedTuple):
    """Accuracy, speed and staleness of one run; of one on a virtual cluster, in its time."""

    name: str
    epochs: int
    test_accuracy: float  # of the last epoch, on the global weights; NaN where it was not evaluated
    samples_per_s: float  # of all workers together, the median epoch
    seconds: float        # all epochs together
    last_five: float = math.nan  # mean test accuracy of the last five epochs; NaN unless all five were evaluated
    staleness: Optional[Tuple[float, int, float]] = None  # of an asynchronous run: mean, maximum, updates per second
    virtual: bool = False
    asked: Optional[int] = None  # epochs that were to be, of a run that has not come to its end
    lacks: int = 0  # epochs whose metrics were lost: the time of all is not known


class Records(NamedTuple):
    """The metrics of one run, in order; what a resumed run has written twice counts once, the later."""

    folder: Path
    start: Record  # empty in metrics that were written by something else
    epochs: List[Record]
    intervals: List[Record]
    staleness: Optional[Record]  # of an asynchronous run that has come to its end
    ended: bool = True
    name: str = ""  # the end of the folder's path

    @property
    def virtual(self) -> bool:
        """Whether it ran on a virtual cluster."""
        return all("virtual_seconds" in epoch for epoch in self.epochs)

    def seconds(self) -> List[float]:
        """Seconds of the run at the end of each epoch, without the time between a failure and its resume; on a virtual
        cluster, the cluster's.
        """
        if self.virtual:
            return [number(epoch["virtual_seconds"]) for epoch in self.epochs]
        return list(itertools.accumulate(number(epoch.get("seconds")) for epoch in self.epochs))


def read_records(folder: Path) -> Records:
    """The records of one run; ConfigError that names the file if it has not finished an epoch."""
    path = folder / METRICS
    events = still_valid(events_of(path))
    epochs = _latest(events, "epoch", "epoch")
    if not epochs:
        raise ConfigError(f"{path}: no finished epoch. Did the run stop in its first one?")
    starts = _all(events, "start")
    counted = [event for event in events if event.get("event") in ("epoch", "interval", "staleness")][-1]
    last = [event["event"] for event in events if event.get("event") in ("start", "end")][-1:]
    return Records(folder.resolve(), starts[-1] if starts else {}, epochs, _latest(events, "interval", "iteration"),
                   counted if counted["event"] == "staleness" else None, last != ["start"], folder.resolve().name)


def outcome(records: Records) -> Outcome:
    epochs = records.epochs
    for field in ("samples_per_s", "seconds"):
        if any(field not in epoch for epoch in epochs):
            raise ConfigError(f"{records.folder / METRICS}: an epoch without '{field}'; expected samples_per_s and "
                              "seconds")
    count = max(len(epochs), epochs[-1]["epoch"])
    lacks = 0 if records.virtual else count - len(epochs)  # a virtual cluster's clock is in each record
    last, stale = [number(epoch.get("test_accuracy")) for epoch in epochs[-FEW:]], records.staleness
    return Outcome(
        name=records.name,
        epochs=count,
        test_accuracy=number(epochs[-1].get("test_accuracy")),
        samples_per_s=statistics.median(map(samples_per_s, epochs)),
        seconds=math.nan if lacks else records.seconds()[-1],
        last_five=statistics.fmean(last) if len(last) == FEW else math.nan,
        staleness=None if stale is None else (stale["staleness_mean"], stale["staleness_max"], stale["updates_per_s"]),
        virtual=records.virtual,
        asked=None if records.ended else _asked(records.start),
        lacks=lacks,
    )


def _asked(start: Record) -> Optional[int]:
    """The epochs that a run was to have."""
    config, per_epoch = start.get("config") or {}, start.get("batches_per_epoch") or 1
    if "epochs" not in config:
        return None
    return min(int(config["epochs"]), -(-int(config.get("iterations") or sys.maxsize) // per_epoch))


def number(value: Optional[float]) -> float:
    """NaN for null, by which the metrics mean a value that was not measured."""
    return math.nan if value is None else float(value)


def samples_per_s(record: Record) -> float:
    """Samples per second of all workers together; on a virtual cluster by its time."""
    return number(record.get("virtual_samples_per_s", record.get("samples_per_s")))


def still_valid(events: Sequence[Record]) -> List[Record]:
    """The events without those that an attempt wrote after the checkpoint from which a later attempt has gone on."""
    valid: List[Record] = []
    for event in events:
        if event.get("event") == "start":
            at = event.get("iteration", 0)
            valid = [one for one in valid if one.get("event") not in ("epoch", "interval")
                     or one.get("iteration", 0) <= at]
        valid.append(event)
    return valid


def _all(events: Sequence[Record], kind: str) -> List[Record]:
    return [event for event in events if event.get("event") == kind]


def _latest(events: Sequence[Record], kind: str, field: str) -> List[Record]:
    """One record for each value of the field, in its order."""
    by_field = {event[field]: event for event in _all(events, kind) if field in event}
    return [by_field[key] for key in sorted(by_field)]


def events_of(path: Path) -> List[Record]:
    """The records of one metrics file; ConfigError for any other file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; expected the folder of a run (--out)") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not text; expected the metrics of a run") from None
    events: List[Record] = []
    for at, line in enumerate(lines, start=1):
        try:
            events.append(dict(json.loads(line)))
        except (TypeError, ValueError):
            if at == len(lines):
                break  # a run that was killed may have left half a line
            raise ConfigError(f"{path}, line {at}: no JSON object") from None
    return events


def cells(outcomes: Sequence[Outcome]) -> List[List[str]]:
    """The outcomes as a table, its head first; staleness where one of the runs was asynchronous."""
    lines = [["run", "epochs", "test accuracy", f"mean of last {FEW}", "samples/s", "seconds"]]
    for one in outcomes:
        time = " virtual" if one.virtual else ""
        of = "" if one.asked is None else f" of {one.asked}"
        lines.append([one.name, f"{one.epochs}{of}", percent(one.test_accuracy),
                      percent(one.last_five), f"{one.samples_per_s:.0f}{time}",
                      "-" if math.isnan(one.seconds) else f"{one.seconds:.1f}{time}"])
    if any(one.staleness for one in outcomes):
        lines[0] += ["staleness", "max", "updates/s"]
        for line, one in zip(lines[1:], outcomes):
            line += ["-"] * 3 if one.staleness is None else "{:.2f} {} {:.0f}".format(*one.staleness).split()
            line[-1] += " virtual" * (one.virtual and one.staleness is not None)
    return lines


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as aligned text, for a terminal.

    >>> print(table([Outcome("odsgd", 20, 0.9694, 5210.4, 5.52, 0.9681), Outcome("ssgd", 4, 0.9722, 4876.0, 5.9)]))
    run    epochs  test accuracy  mean of last 5  samples/s  seconds
    odsgd      20        96.94 %         96.81 %       5210      5.5
    ssgd        4        97.22 %               -       4876      5.9
    """
    return aligned([list(map(printable, line)) for line in cells(outcomes)])


def compared(outcomes: Sequence[Outcome]) -> List[str]:
    """Which runs have not come to their end; of two that have, the first beside the second in two sentences.

    >>> compared([Outcome("odsgd", 8, 0.9778, 4031, 3.1), Outcome("ssgd", 8, 0.9722, 2150, 5.2)])
    ['Accuracy: odsgd 97.78 %, ssgd 97.22 %.', 'Time: odsgd took 40 % less than ssgd, 3.1 s against 5.2 s.']
    """
    stopped = [f"{one.name} has not come to its end: {one.epochs} of {one.asked} epochs." for one in outcomes
               if one.asked is not None]
    stopped += [f"The metrics of {one.name} lack {one.lacks} of its {one.epochs} epochs: the time of all is not known."
                for one in outcomes if one.lacks]
    if stopped or len(outcomes) != 2 or not all(one.seconds > 0 for one in outcomes):
        return stopped
    first, second = outcomes
    gain, alike = 1 - first.seconds / second.seconds, first.virtual == second.virtual and first.epochs == second.epochs
    kind = " of the virtual cluster" if first.virtual else ""
    accuracy = (f"Accuracy: {first.name} {percent(first.test_accuracy)}, {second.name} "
                f"{percent(second.test_accuracy)}.")
    time = (f"Time: {first.name} took {abs(gain):.0%} {'less' if gain >= 0 else 'more'} than {second.name}, "
            f"{first.seconds:.1f} s against {second.seconds:.1f} s{kind}.").replace("% ", " % ", 1)
    return [*([accuracy] if not math.isnan(first.test_accuracy + second.test_accuracy) else []),
            *([time] if alike else [])]


def percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.2%}".replace("%", " %")
