"""Training runs that are over: all that the pages are made from, a line of JSON each, those of an item at a scale in a
file.

    cell, seed   with the item and scale what was run
    schema       of this form
    paper, item, scale
    asked        options and virtual cluster, as declared
    config       all options, as resolved
    versions     of what decides about bits; the commit, and `tree`, a hash of the source that ran, which is the same
                 after a rebase; all of them if the run was taken up again with others. No tree: not known which source
    machine      processor, cores
    parameters   of the network
    starts       how often the run was begun or taken up again
    seconds      of training and evaluation, real ones
    curve        columns, and a row for each epoch; of many epochs some
    staleness    of an asynchronous run: mean, max, lr_mean, histogram
    checksum     SHA-256 of all that

Lines are sorted as text. So files of several machines are put together by `cat A B | LC_ALL=C sort -u`.
"""
from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from kvstore.errors import ConfigError, shown
from odsgd.config.files import read_text

if TYPE_CHECKING:
    from odsgd.lab.reproduce.declarations import Trial

SCHEMA = 2
"""Grows when the form changes, or what a run means."""

MOST_NBYTES = 1 << 24

MOST_REFUSED = 100
"""Lines, after which a file is not one of results."""

COLUMNS = ("epoch", "iteration", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "virtual_seconds")

ROWS = 60
"""Epochs that are kept, beside the last few."""

NAMES = ("cell", "seed", "paper", "item", "scale")


@dataclasses.dataclass(frozen=True)
class Result:
    """One line's content."""

    trial: Dict[str, Any]  # NAMES
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

    @property
    def source_is_known(self) -> bool:
        return "tree" in self.versions


FIELDS = {"schema", "checksum", "curve", *NAMES, *(one.name for one in dataclasses.fields(Result))} - {"trial", "rows"}


class Found(NamedTuple):
    """What a file holds: results by cell and seed, and for each line that is none a sentence that names it."""

    results: Dict[Tuple[str, int], Result]
    refused: List[str]


def thinned(rows: Sequence[List[Any]]) -> List[List[Any]]:
    """At most `ROWS` epochs evenly, and the last five, which are averaged.

    >>> [row[0] for row in thinned([[epoch] for epoch in range(1, 141)])][-8:]
    [131, 133, 135, 136, 137, 138, 139, 140]
    """
    if len(rows) <= ROWS:
        return list(rows)
    evenly = {round(number * (len(rows) - 1) / (ROWS - 1)) for number in range(ROWS)}
    return [rows[number] for number in sorted(evenly | set(range(len(rows) - 5, len(rows))))]


# --- writing ----------------------------------------------------------------------------------------------------------

def add(result: Result, path: Path) -> Optional[Result]:
    """Put a result into its file, which is whole at all times, whoever else adds to it; the one that it replaces.

    Lines that nobody can read stay.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        lines = read_text(path, "results of runs", MOST_NBYTES).split("\n") if path.exists() else []
        same = [line for line in lines if _named(line) == (result.trial["cell"], result.trial["seed"])]
        before = _found(same, path).results if same else {}
        draft = path.with_suffix(".draft")
        draft.write_text("\n".join(sorted({*lines} - {*same, ""} | {line_of(result)})) + "\n", encoding="utf-8")
        draft.replace(path)
    return next(iter(before.values()), None)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Alone among those who add to the files of a folder."""
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def line_of(result: Result) -> str:
    """As it stands in its file, without the end of the line."""
    fields = dataclasses.asdict(result)
    trial, rows = fields.pop("trial"), fields.pop("rows")
    names = {name: trial[name] for name in NAMES}
    content = {"cell": names.pop("cell"), "seed": names.pop("seed"), "schema": SCHEMA, **names, **fields,
               "curve": {"columns": list(COLUMNS), "rows": rows}}
    return json.dumps({**content, "checksum": _checksum(content)}, allow_nan=False)


def _checksum(content: Dict[str, Any]) -> str:
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        return ""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


# --- reading ----------------------------------------------------------------------------------------------------------

def read(path: Path) -> Found:
    """What `add` has written; lines that it has not written so are refused, and the rest is read. ConfigError for a
    file that is none of results at all.
    """
    return _found(read_text(path, "results of runs", MOST_NBYTES).split("\n"), path)


def _found(lines: Sequence[str], path: Path) -> Found:
    results: Dict[Tuple[str, int], Result] = {}
    places: Dict[str, str] = {}
    twice: Dict[Tuple[str, int], str] = {}
    refused: List[str] = []
    for number, line in enumerate(lines, start=1):
        if not line or line in places:
            continue
        places[line] = f"`{shown(path)}`, line {number}{_called(line)}"
        try:
            result = _parsed(line)
        except ConfigError as error:
            refused.append(f"{places[line]}: {error}")
            if len(refused) > MOST_REFUSED:
                raise ConfigError(f"`{shown(path)}` has more than {MOST_REFUSED} lines that are no results; restore it"
                                  ) from None
            continue
        key = result.trial["cell"], result.trial["seed"]
        if key in results:
            twice[key] = places[line]
        results[key] = result
    for key, place in twice.items():
        del results[key]
        refused.append(f"{place}: stands in another line with other content, and neither counts; remove one")
    return Found(results, refused)


def _parsed(line: str) -> Result:
    """What a line says; ConfigError unless `line_of` has written it, in this form."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError("cut off, or no JSON; restore the line, or remove it and run its cell again") from None
    if not isinstance(content, dict) or "schema" not in content:
        raise ConfigError("expected the result of a run, with its schema")
    if content["schema"] != SCHEMA:
        raise ConfigError(f"of another version: schema {shown(content['schema'])}, here {SCHEMA}; remove the line and "
                          "run its cell again, or take the version that wrote it")
    said = content.pop("checksum", None)
    if said != _checksum(content) or {*content, "checksum"} != FIELDS:
        raise ConfigError("changed by hand or damaged: its checksum is another; restore the line, or remove it and run "
                          "its cell again")
    names, rows = {name: content.pop(name) for name in NAMES}, content.pop("curve")["rows"]
    del content["schema"]
    return Result(trial=names, rows=rows, **content)


def _named(line: str) -> Optional[Tuple[str, int]]:
    """Cell and seed of a line, as far as it goes."""
    match = re.match(r'\{"cell": "([a-z0-9-]{1,99})", "seed": (\d{1,9}),', line)
    return (match[1], int(match[2])) if match else None


def _called(line: str) -> str:
    named = _named(line)
    return f" ({named[0]}, seed {named[1]})" if named else ""


def read_of(trial: Trial, folder: Path) -> Optional[Result]:
    """The result of a trial; None if there is none, or none of what is declared now."""
    path = folder / trial.file
    result = read(path).results.get((trial.cell.name, trial.seed)) if path.exists() else None
    return result if result and not otherwise(result, trial) else None


def otherwise(result: Result, trial: Trial) -> str:
    """In which option a result was made otherwise than the trial is declared now; empty: in none."""
    asked = trial.asked
    for part in ("options", "cluster"):
        for key in sorted({*asked[part], *result.asked[part]}):
            then, now = (one[part].get(key, "nothing") for one in (result.asked, asked))
            if then != now:
                return (f"{trial}: was made with {key}: {shown(then)}, and declared is {shown(now)}; run its "
                        "cell again, or remove its line")
    return ""
