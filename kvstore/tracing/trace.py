"""The file of one process of a timeline: a Chrome trace, which Perfetto opens.

An array of events; where a process was killed only the closing bracket is missing. `odsgd.timeline` puts the files
of a job together.
"""
import json
import os
from pathlib import Path
from typing import Any, Dict, NamedTuple, Set, Tuple

from kvstore.errors import ConfigError
from kvstore.job.aside import without_waiting

STAGES = ("compute", "gather", "copy", "local update", "scatter", "merge", "update", "exchange")
"""Each is one row of a process, but exchanges of different buckets overlap: each bucket has a row (`Bar.row`)."""


class Bar(NamedTuple):
    """A stretch of time in which a process was busy with one stage of an iteration."""

    stage: str
    name: str
    start_s: float
    end_s: float
    args: Dict[str, Any]

    def row(self) -> Tuple[int, str]:
        """Number and name of its row."""
        number = STAGES.index(self.stage)
        if self.stage != "exchange":
            return number, self.stage
        return number + self.args["bucket"], f"exchange {self.args['bucket']}"


class Trace:
    """Writes one process's trace. `about`: its role, rank, host, job and clock."""

    def __init__(self, folder: Path, about: Dict[str, Any]) -> None:
        path = folder / f"{about['role']}-{about['rank']}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.fdopen(without_waiting(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w",
                                   encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the trace `{path}`: {error.strerror}; name another folder") from None
        self._pid = os.getpid()
        self._rows: Set[int] = set()  # that have their names
        self._ends: Dict[str, float] = {}  # of the last bar of each stage
        self._rounds: Dict[Tuple[str, int], int] = {}
        self._file.write("[\n" + self._metadata("process_name", {"name": f"{about['role']} {about['rank']}"}))
        self._file.write(",\n" + self._metadata("odsgd", about))

    def round(self, stage: str, bucket_id: int) -> int:
        """Counts the operations of a stage on a bucket, from 0."""
        number = self._rounds.get((stage, bucket_id), 0)
        self._rounds[stage, bucket_id] = number + 1
        return number

    def add(self, stage: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """A bar; `args` are numbers, or lists of them. It begins when the one before of its stage has ended."""
        start_s = min(start_s, end_s)
        if stage != "exchange":
            start_s = max(start_s, self._ends.get(stage, 0.0))
            self._ends[stage] = end_s = max(start_s, end_s)
        self._put(Bar(stage, name, start_s, end_s, args))

    def _put(self, bar: Bar) -> None:
        number, title = bar.row()
        if number not in self._rows:
            self._rows.add(number)
            self._file.write(",\n" + self._metadata("thread_name", {"name": title}, number)
                             + ",\n" + self._metadata("thread_sort_index", {"sort_index": number}, number))
        numbers = ", ".join(f'"{key}": {value}' for key, value in bar.args.items())  # json.dumps takes longer
        self._file.write(f',\n{{"ph": "X", "name": "{bar.name}", "cat": "{bar.stage}", "pid": {self._pid}, '
                         f'"tid": {number}, "ts": {1e6 * bar.start_s:.1f}, '
                         f'"dur": {1e6 * (bar.end_s - bar.start_s):.1f}, "args": {{{numbers}}}}}')

    def _metadata(self, name: str, args: Dict[str, Any], number: int = 0) -> str:
        return json.dumps({"ph": "M", "name": name, "pid": self._pid, "tid": number, "args": args})

    def close(self) -> None:
        """Nothing more will be added."""
        if not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()
