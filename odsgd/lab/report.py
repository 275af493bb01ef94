"""A table of finished runs, from the metrics they left: ``python -m odsgd.report runs/demo/odsgd runs/demo/ssgd``."""
from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

METRICS = "metrics.jsonl"


class Row(NamedTuple):
    """What a run came to."""

    name: str
    epochs: int
    test_accuracy: float  # of the last epoch, on the global weights; NaN where it was not evaluated
    samples_per_s: float  # of all workers together, the median epoch
    seconds: float        # all epochs together
    staleness: Optional[Tuple[float, int, float]] = None  # of an asynchronous run: mean, maximum, updates per second


def read_run(folder: Path) -> Row:
    """The row of one run; ValueError with the path and what was expected if its metrics cannot be read."""
    path = folder / METRICS
    events = _events(path)
    epochs = _epochs(events)
    if not epochs:
        raise ValueError(f"{path}: no finished epoch. Did the run stop in its first one?")
    try:
        return Row(
            name=folder.name,
            epochs=len(epochs),
            test_accuracy=_number(epochs[-1].get("test_accuracy")),
            samples_per_s=statistics.median(_number(epoch["samples_per_s"]) for epoch in epochs),
            seconds=sum(_number(epoch["seconds"]) for epoch in epochs),
            staleness=_staleness(events),
        )
    except KeyError as error:
        raise ValueError(f"{path}: an epoch without {error}; expected samples_per_s and seconds") from None


def _number(value: Optional[float]) -> float:
    """What was not measured is null in the metrics."""
    return math.nan if value is None else float(value)


def _staleness(events: Sequence[Dict[str, Any]]) -> Optional[Tuple[float, int, float]]:
    """What a run that came to its end, the last time it was resumed, says of it."""
    found = [event for event in events if event.get("event") == "staleness"]
    return (found[-1]["staleness_mean"], found[-1]["staleness_max"], found[-1]["updates_per_s"]) if found else None


def _epochs(events: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """The epochs, in order; a resumed run may have written one twice, the later counts."""
    epochs = {event["epoch"]: event for event in events if event.get("event") == "epoch"}
    return [epochs[number] for number in sorted(epochs)]


def _events(path: Path) -> List[Dict[str, Any]]:
    """The records of one metrics file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; expected the folder of a run (--out)") from None
    events: List[Dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            events.append(json.loads(line))
        except ValueError:
            if number == len(lines):
                break  # a run that was killed may have left half a line
            raise ValueError(f"{path}, line {number}: not JSON") from None
    return events


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text, for a terminal; staleness where one of the runs was asynchronous.

    >>> print(table([Row("odsgd", 20, 0.9694, 5210.4, 5.52), Row("ssgd", 20, 0.9722, 4876.0, 5.9)]))
    run    epochs  test accuracy  samples/s  seconds
    odsgd      20        96.94 %       5210      5.5
    ssgd       20        97.22 %       4876      5.9
    """
    lines = [["run", "epochs", "test accuracy", "samples/s", "seconds"]]
    for row in rows:
        lines.append([row.name, str(row.epochs), f"{row.test_accuracy:.2%}".replace("%", " %"),
                      f"{row.samples_per_s:.0f}", f"{row.seconds:.1f}"])
    if any(row.staleness for row in rows):
        lines[0] += ["staleness", "max", "updates/s"]
        for cells, row in zip(lines[1:], rows):
            cells += _staleness_cells(row)
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join([name.ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(cells, widths[1:])])
        for name, *cells in lines)


def _staleness_cells(row: Row) -> List[str]:
    if row.staleness is None:
        return ["-"] * 3
    mean, maximum, updates_per_s = row.staleness
    return [f"{mean:.2f}", str(maximum), f"{updates_per_s:.0f}"]


def main(argv: Sequence[str]) -> int:
    """Print the table of the runs named; 64 for bad usage, 1 if one of them cannot be read."""
    if not argv or argv[0].startswith("-"):
        print("usage: python -m odsgd.report RUN...", file=sys.stderr)
        return 64
    try:
        print(table([read_run(Path(name)) for name in argv]))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
