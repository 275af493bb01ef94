"""The file of one process of a timeline: a Chrome trace, which Perfetto opens.

An array of events; where a process was killed only the closing bracket is missing. `odsgd.timeline` puts the files
of a job together.
"""
import json
import os
from pathlib import Path
from typing import Any, Dict, Set, Tuple

from kvstore.errors import ConfigError
from kvstore.job.aside import without_waiting

LANES = ("compute", "gather", "copy", "local update", "scatter", "merge", "update", "exchange")
"""Each is one row of a process, but exchanges of different buckets overlap: each bucket has a row (`row`)."""

Event = Tuple[str, str, float, float, Dict[str, Any]]
"""A bar: lane, name, start and end in seconds, arguments."""


def row(lane: str, args: Dict[str, Any]) -> Tuple[int, str]:
    """Number and name of the row for a bar with these `args`."""
    number = LANES.index(lane)
    return (number, lane) if lane != "exchange" else (number + args["bucket"], f"exchange {args['bucket']}")


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
        self._ends: Dict[str, float] = {}  # of the last bar in each lane
        self._rounds: Dict[Tuple[str, int], int] = {}
        self._file.write("[\n" + self._metadata("process_name", {"name": f"{about['role']} {about['rank']}"}))
        self._file.write(",\n" + self._metadata("odsgd", about))

    def round(self, lane: str, bucket_id: int) -> int:
        """Counts the operations of a lane on a bucket, from 0."""
        number = self._rounds.get((lane, bucket_id), 0)
        self._rounds[lane, bucket_id] = number + 1
        return number

    def add(self, lane: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """A bar; `args` are numbers, or lists of them. It begins when the one before in its lane has ended."""
        start_s = min(start_s, end_s)
        if lane != "exchange":
            start_s = max(start_s, self._ends.get(lane, 0.0))
            self._ends[lane] = end_s = max(start_s, end_s)
        self._put((lane, name, start_s, end_s, args))

    def _put(self, event: Event) -> None:
        lane, name, start_s, end_s, args = event
        number, title = row(lane, args)
        if number not in self._rows:
            self._rows.add(number)
            self._file.write(",\n" + self._metadata("thread_name", {"name": title}, number)
                             + ",\n" + self._metadata("thread_sort_index", {"sort_index": number}, number))
        numbers = ", ".join(f'"{key}": {value}' for key, value in args.items())  # json.dumps takes three times as long
        self._file.write(f',\n{{"ph": "X", "name": "{name}", "cat": "{lane}", "pid": {self._pid}, "tid": {number}, '
                         f'"ts": {1e6 * start_s:.1f}, "dur": {1e6 * (end_s - start_s):.1f}, "args": {{{numbers}}}}}')

    def _metadata(self, name: str, args: Dict[str, Any], number: int = 0) -> str:
        return json.dumps({"ph": "M", "name": name, "pid": self._pid, "tid": number, "args": args})

    def close(self) -> None:
        """Nothing more will be added."""
        if not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()
