"""The file of a training run that is over: all that the pages are made from, with a checksum of it.

    schema       of this form
    paper, item, scale, cell, seed
    asked        options and virtual cluster, as declared
    config       all options, as resolved
    versions     of what decides about bits, and the commit, or the commits if the run was taken up again with another
    machine      processor, cores
    parameters   of the network
    starts       how often the run was begun or taken up again
    seconds      of training and evaluation, real ones
    curve        columns, and a row for each epoch; of many epochs some
    staleness    of an asynchronous run: mean, max, lr_mean, histogram
    checksum     SHA-256 of all that
"""
from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence

from kvstore.errors import ConfigError, shown
from odsgd.config.files import read_text

if TYPE_CHECKING:
    from odsgd.lab.reproduce.declarations import Trial

SCHEMA = 1
"""Grows when the form changes, or what a run means."""

MOST_NBYTES = 1 << 22

COLUMNS = ("epoch", "iteration", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "virtual_seconds")

ROWS = 60
"""Epochs that are kept, beside the last few."""


@dataclasses.dataclass(frozen=True)
class Result:
    """One file's content."""

    trial: Dict[str, Any]  # paper, item, scale, cell, seed
    asked: Dict[str, Any]
    config: Dict[str, Any]
    versions: Dict[str, str]
    machine: Dict[str, Any]
    parameters: int
    starts: int
    seconds: float
    rows: List[List[Optional[float]]]
    staleness: Optional[Dict[str, Any]]

    def column(self, name: str) -> List[float]:
        """One number of every epoch that was kept; NaN where it was not finite."""
        place = COLUMNS.index(name)
        return [math.nan if row[place] is None else float(row[place]) for row in self.rows]  # type: ignore[arg-type]

    def numbers(self) -> Dict[str, Any]:
        """What a second run of the same has to give."""
        return {"curve": self.rows, "staleness": self.staleness}


def thinned(rows: Sequence[List[Any]]) -> List[List[Any]]:
    """At most `ROWS` epochs evenly, and the last five, which are averaged.

    >>> [row[0] for row in thinned([[epoch] for epoch in range(1, 141)])][-8:]
    [131, 133, 135, 136, 137, 138, 139, 140]
    """
    if len(rows) <= ROWS:
        return list(rows)
    evenly = {round(number * (len(rows) - 1) / (ROWS - 1)) for number in range(ROWS)}
    return [rows[number] for number in sorted(evenly | set(range(len(rows) - 5, len(rows))))]


def write(result: Result, path: Path) -> None:
    """Whole, or not at all."""
    content = _content(result)
    content["checksum"] = _checksum(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(_as_text(content), encoding="utf-8")
    draft.replace(path)


def read(path: Path) -> Result:
    """What a file says; ConfigError unless `write` has written it, in this form."""
    text = read_text(path, "the result of a run", MOST_NBYTES)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"`{shown(path)}` is no JSON: {shown(error)}; restore it, or remove it and run its cell again"
                          ) from None
    if not isinstance(content, dict) or "schema" not in content:
        raise ConfigError(f"`{shown(path)}`: expected the result of a run, which begins with its schema")
    if content["schema"] != SCHEMA:
        raise ConfigError(f"`{shown(path)}` is of another version: schema {shown(content['schema'])}, here {SCHEMA}; "
                          "remove it and run its cell again, or take the version that wrote it")
    said = content.pop("checksum", None)
    if said != _checksum(content):
        raise ConfigError(f"`{shown(path)}` was changed by hand or damaged: its checksum is another; restore it, or "
                          "remove it and run its cell again")
    curve = content.pop("curve")
    names = ("paper", "item", "scale", "cell", "seed")
    return Result(trial={key: content[key] for key in names}, rows=curve["rows"],
                  **{key: content[key] for key in content if key not in (*names, "schema")})


def read_of(trial: Trial, folder: Path) -> Optional[Result]:
    """The result of a trial; None if there is none yet, ConfigError if its file is of another declaration."""
    path = folder / trial.file
    return checked(read(path), trial, path) if path.exists() else None


def checked(result: Result, trial: Trial, path: Path) -> Result:
    """The result; ConfigError unless it was made as the trial is declared now."""
    asked = trial.asked
    for part in ("options", "cluster"):
        for key in sorted({*asked[part], *result.asked[part]}):
            then, now = (one[part].get(key, "nothing") for one in (result.asked, asked))
            if then != now:
                raise ConfigError(f"`{path}` was made with {key}: {shown(then)}, and declared is {shown(now)}; remove "
                                  "it and run its cell again")
    return result


def _content(result: Result) -> Dict[str, Any]:
    fields = dataclasses.asdict(result)
    trial, rows = fields.pop("trial"), fields.pop("rows")
    return {"schema": SCHEMA, **trial, **fields, "curve": {"columns": list(COLUMNS), "rows": rows}}


def _checksum(content: Dict[str, Any]) -> str:
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        return ""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _as_text(content: Dict[str, Any]) -> str:
    """A line for each key, and for each row."""
    curve = content.pop("curve")
    lines = [f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in content.items()]
    rows = ",\n  ".join(json.dumps(row, allow_nan=False) for row in curve["rows"])
    lines.append(f'"curve": {{"columns": {json.dumps(curve["columns"])}, "rows": [\n  {rows}]}}')
    return "{" + ",\n ".join(lines) + "}\n"
