"""``odsgd report``: a table of finished runs, from the metrics that they left."""
from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from kvstore.errors import ConfigError
from odsgd.config.flags import Parser
from odsgd.lab.command import aligned

METRICS = "metrics.jsonl"

FEW = 5
"""Epochs that an accuracy is averaged over."""


class Outcome(NamedTuple):
    """Accuracy, speed and staleness of one finished run."""

    name: str
    epochs: int
    test_accuracy: float  # of the last epoch, on the global weights; NaN where it was not evaluated
    samples_per_s: float  # of all workers together, the median epoch
    seconds: float        # all epochs together
    last_five: float = math.nan  # mean test accuracy of the last five epochs; NaN unless all five were evaluated
    staleness: Optional[Tuple[float, int, float]] = None  # of an asynchronous run: mean, maximum, updates per second


def main(argv: List[str]) -> int:
    """Print the table of the runs named."""
    parser = Parser("; `odsgd report --help` says how", prog="odsgd report",
                    description="Print a table of finished runs: accuracy, speed and, of asynchronous ones, staleness.")
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="the folder of a run, its --out")
    print(table([read_run(folder) for folder in parser.parse_args(argv).runs]))
    return 0


def read_run(folder: Path) -> Outcome:
    """The outcome of one run; ConfigError that names the file if its metrics cannot be read."""
    path = folder / METRICS
    events = events_of(path)
    # In order; a resumed run may have written an epoch twice: the later counts.
    by_number = {event["epoch"]: event for event in events if event.get("event") == "epoch"}
    epochs = [by_number[number] for number in sorted(by_number)]
    if not epochs:
        raise ConfigError(f"{path}: no finished epoch. Did the run stop in its first one?")
    try:
        return Outcome(
            name=folder.name,
            epochs=len(epochs),
            test_accuracy=_number(epochs[-1].get("test_accuracy")),
            samples_per_s=statistics.median(_number(epoch["samples_per_s"]) for epoch in epochs),
            seconds=sum(_number(epoch["seconds"]) for epoch in epochs),
            last_five=_mean([_number(epoch.get("test_accuracy")) for epoch in epochs[-FEW:]]),
            staleness=_staleness(events),
        )
    except KeyError as error:
        raise ConfigError(f"{path}: an epoch without {error}; expected samples_per_s and seconds") from None


def _mean(accuracies: Sequence[float]) -> float:
    """Of five; the papers smooth so."""
    return statistics.fmean(accuracies) if len(accuracies) == FEW else math.nan


def _number(value: Optional[float]) -> float:
    """NaN for null, which the metrics have for values that were not measured."""
    return math.nan if value is None else float(value)


def _staleness(events: Sequence[Dict[str, Any]]) -> Optional[Tuple[float, int, float]]:
    """From the last record of it: a run has one for each time that it came to its end."""
    found = [event for event in events if event.get("event") == "staleness"]
    return (found[-1]["staleness_mean"], found[-1]["staleness_max"], found[-1]["updates_per_s"]) if found else None


def events_of(path: Path) -> List[Dict[str, Any]]:
    """The records of one metrics file; ConfigError if it is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; expected the folder of a run (--out)") from None
    events: List[Dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            events.append(json.loads(line))
        except ValueError:
            if number == len(lines):
                break  # a run that was killed may have left half a line
            raise ConfigError(f"{path}, line {number}: not JSON") from None
    return events


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as aligned text, for a terminal; staleness where one of the runs was asynchronous.

    >>> print(table([Outcome("odsgd", 20, 0.9694, 5210.4, 5.52, 0.9681), Outcome("ssgd", 4, 0.9722, 4876.0, 5.9)]))
    run    epochs  test accuracy  mean of last 5  samples/s  seconds
    odsgd      20        96.94 %         96.81 %       5210      5.5
    ssgd        4        97.22 %               -       4876      5.9
    """
    lines = [["run", "epochs", "test accuracy", f"mean of last {FEW}", "samples/s", "seconds"]]
    for outcome in outcomes:
        lines.append([outcome.name, str(outcome.epochs), _percent(outcome.test_accuracy),
                      "-" if math.isnan(outcome.last_five) else _percent(outcome.last_five),
                      f"{outcome.samples_per_s:.0f}", f"{outcome.seconds:.1f}"])
    if any(outcome.staleness for outcome in outcomes):
        lines[0] += ["staleness", "max", "updates/s"]
        for cells, outcome in zip(lines[1:], outcomes):
            cells += _staleness_cells(outcome)
    return aligned(lines)


def _percent(accuracy: float) -> str:
    return f"{accuracy:.2%}".replace("%", " %")


def _staleness_cells(outcome: Outcome) -> List[str]:
    if outcome.staleness is None:
        return ["-"] * 3
    mean, maximum, updates_per_s = outcome.staleness
    return [f"{mean:.2f}", str(maximum), f"{updates_per_s:.0f}"]
