"""Training runs that are over: all that the pages are made from, a line of JSON each, those of an item at a scale in a
file.

    cell, seed   with the item and scale what was run
    schema       of this form
    paper, item, scale
    asked        options and virtual cluster, as declared
    config       all options, as resolved
    versions     of what decides about bits; the commit, and `tree`, a hash of the source that ran, which is the same
                 after a rebase; all of them if the run was taken up again with others
    machine      processor, cores, and its widest vectors (since November 2026)
    parameters   of the network
    starts       how often the run was begun or taken up again
    seconds      of training and evaluation, real ones
    curve        columns, and a row for each epoch
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
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

from kvstore.errors import ConfigError, shown
from odsgd.config.files import read_text

SCHEMA = 2
"""Grows when the form changes, or what a run means."""

MOST_NBYTES = 1 << 24

COLUMNS = ("epoch", "iteration", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "virtual_seconds")

ENCODING = "latin-1"
"""What `line_of` writes is ASCII. Any other byte is read, refused with its line, and left as it is."""

Key = Tuple[str, str, str, int]
"""Item, scale, cell and seed."""

refused: Set[str] = set()
"""Lines that do not count, of all that this process has read: where each stands, and why."""


@dataclasses.dataclass(frozen=True)
class Result:
    cell: str
    seed: int
    paper: str
    item: str
    scale: str
    asked: Dict[str, Any]
    config: Dict[str, Any]
    versions: Dict[str, str]
    machine: Dict[str, Any]
    parameters: int
    starts: int
    seconds: float
    rows: List[List[Optional[float]]]
    staleness: Optional[Dict[str, Any]]

    @property
    def key(self) -> Key:
        return self.item, self.scale, self.cell, self.seed

    @property
    def framework(self) -> str:
        """It draws the first weights, and the order of the data: from one seed each draws its own."""
        return "torch" if "torch" in self.versions else "mxnet"

    def column(self, name: str) -> List[float]:
        """One number of every epoch that was kept; NaN where it was not finite."""
        place = COLUMNS.index(name)
        return [math.nan if row[place] is None else float(row[place]) for row in self.rows]  # type: ignore[arg-type]

    def numbers(self) -> Dict[str, Any]:
        """What a second run of the same has to give."""
        return {"curve": self.rows, "staleness": self.staleness}


FIELDS = {"schema", "checksum", "curve", *(one.name for one in dataclasses.fields(Result))} - {"rows"}


def add(result: Result, path: Path) -> None:
    """Put a result into its file, which is whole at all times, whoever else adds to it. Other lines stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        line = line_of(result)
        cell = line[:line.index('"schema"')]
        lines = [line, *(one for one in _lines(path) if not one.startswith(cell))]
        draft = path.with_suffix(".draft")
        draft.write_text("\n".join(sorted(lines)) + "\n", encoding=ENCODING)
        draft.replace(path)


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
    curve = {"columns": list(COLUMNS), "rows": fields.pop("rows")}
    content = {"cell": result.cell, "seed": result.seed, "schema": SCHEMA, **fields, "curve": curve}
    return json.dumps({**content, "checksum": _checksum(content)}, allow_nan=False)


def _checksum(content: Dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def read(path: Path) -> Dict[Key, Result]:
    """What `add` has written there. A line that it has not written so is refused by name, and the rest is read."""
    found: Dict[Key, Result] = {}
    twice: Set[Key] = set()
    for number, line in enumerate(_lines(path), start=1):
        where = f"`{shown(path)}`, line {number}"
        try:
            result = _parsed(line)
        except ConfigError as error:
            refuse(f"{where}: {error}")
            continue
        if result.key not in found:
            found[result.key] = result
            continue
        content = "the same content, and counts once"
        if found[result.key] != result:
            twice.add(result.key)
            content = "other content, and neither counts"
        refuse(f"{where}: {shown(' '.join(map(str, result.key)))} stands in another line with {content}; remove one")
    return {key: result for key, result in found.items() if key not in twice}


def refuse(line: str) -> None:
    """Say on stderr, once, that a line does not count."""
    if line not in refused:
        refused.add(line)
        print(f"refused: {line}", file=sys.stderr)


def _lines(path: Path) -> List[str]:
    text = read_text(path, "results of runs", MOST_NBYTES, ENCODING) if path.exists() else ""
    return [line for line in text.split("\n") if line]


def _parsed(line: str) -> Result:
    """What a line says; ConfigError unless `line_of` has written it, in this form."""
    try:
        content = json.loads(line)
        said = content.pop("checksum")
        known = content["schema"] == SCHEMA
        whole = said == _checksum(content) and {*content, "checksum"} == FIELDS
        rows = content.pop("curve")["rows"]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ConfigError("cut off, or no result of a run; restore the line, or remove it and run its cell again"
                          ) from None
    if not known:
        raise ConfigError(f"of another version: schema {shown(content['schema'])}, here {SCHEMA}; remove the line and "
                          "run its cell again, or take the version that wrote it")
    if not whole:
        raise ConfigError("changed by hand or damaged: its checksum is another; restore the line, or remove it and run "
                          "its cell again")
    del content["schema"]
    return Result(rows=rows, **content)
