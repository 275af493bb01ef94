"""What this process does when, for a timeline: the file, and how it is filled.

`on` is None, or the `Recorder` of this process. Nothing on the way of the data looks at it: where it is on, calls are
wrapped from outside (`wraps`), with a bar added after the operation has been queued:

    recorder.span("gather", bucket, reads=grads, writes=[flat])

Times are the engine's, not those at which Python queues. An operation's bar begins when all that it reads has been
written and, in its lane, the bar before has ended; it ends when what it writes has been written. Probes see to that:
operations that read these arrays and look at the clock. They can hold up only what writes the same arrays next, and on
the data path that is an iteration later. What one operation writes and another reads is looked at once.

A recorder writes a Chrome trace (Perfetto opens it), an array of events, a quarter of a second behind; where a process
was killed only the closing bracket is missing. `odsgd.lab.tracing` puts the files of a job together.
"""
import atexit
import collections
import hashlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, Deque, Dict, Optional, Sequence, Set, Tuple

from kvstore.buckets import WIRE_DTYPE, Bucket
from kvstore.engine import engine
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import ConfigError
from kvstore.job import control

LANES = ("compute", "gather", "copy", "local update", "scatter", "merge", "update", "exchange")
"""Each is one row of a process, but exchanges of different buckets overlap: each bucket has a row (`row`)."""

BEHIND_S = 0.25

folder: Optional[str] = os.environ.get("ODSGD_TRACE") or None
"""Where this job's traces go; None: nowhere."""

on: Optional["Recorder"] = None


def row(lane: str, args: Dict[str, Any]) -> Tuple[int, str]:
    """Number and name of the row for a bar with these `args`."""
    number = LANES.index(lane)
    return (number, lane) if lane != "exchange" else (number + args["bucket"], f"exchange {args['bucket']}")


def begin(role: str, rank: int) -> Optional["Recorder"]:
    """Record from here on, if a folder is named. Once per process. Returns `on`."""
    global on
    if folder is not None and on is None:
        on = Recorder(Path(folder) / f"{role}-{rank}.json", role, rank)
    return on


def end() -> None:
    """Nothing more will be added."""
    if on is not None:
        on.close()


atexit.register(end)  # early, so that it comes late: a worker has left its job by then
atexit.register(mx.nd.waitall)  # and before that


class Moment:
    """When something had been written, once it has."""

    def __init__(self) -> None:
        self.s = 0.0


class Recorder:
    """Writes one process's trace. `add` may be called on any thread, the rest on the thread that queues operations."""

    def __init__(self, path: Path, role: str, rank: int) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the trace `{path}`: {error.strerror}; name another folder") from None
        self._pid = os.getpid()
        self._events: Deque[Tuple[str, str, float, float, Dict[str, Any]]] = collections.deque()
        self._adding, self._writing = threading.Lock(), threading.Lock()
        self._rows: Set[int] = set()  # that have their names
        self._ends: Dict[str, float] = {}  # of the last bar in each lane
        self._rounds: Dict[Tuple[str, int], int] = {}
        self._written: Dict[int, Moment] = {}  # by id of array: when the operation queued last had written it
        self._alive: Dict[int, NDArray] = {}  # so that an id means one array
        self.iterations = 0
        self._file.write("[\n" + self._metadata("process_name", {"name": f"{role} {rank}"}))
        self._file.write(",\n" + self._metadata("odsgd", {
            "role": role, "rank": rank, "host": socket.gethostname(), "boot": boot(), "job": job(),
            "wall_s": time.time(), "monotonic_s": time.monotonic()}))
        threading.Thread(target=self._write_behind, name="kvstore-trace", daemon=True).start()

    # -- what the rest of the package tells ----------------------------------------------------------------------

    def span(self, lane: str, bucket: Bucket, reads: Sequence[NDArray], writes: Sequence[NDArray],
             numbered: bool = True) -> None:
        """An operation on a bucket has been queued, which reads these arrays and writes those; none is in both.

        `numbered`: the nth of its kind is the nth on every other process.
        """
        args = {"bucket": bucket.id, "bytes": bucket.size * WIRE_DTYPE.itemsize}
        if numbered:
            args["round"] = self.round(lane, bucket.id)
        known = [self._written[id(array)] for array in reads if id(array) in self._written]
        unknown = [array for array in reads if id(array) not in self._written]
        began = [*known, self.moment(unknown)] if unknown else known
        ended = Moment()
        if len(writes) == 1:
            self._written[id(writes[0])] = ended
            self._alive.setdefault(id(writes[0]), writes[0])

        def add() -> None:
            ended.s = time.monotonic()
            self.add(lane, lane, max(moment.s for moment in began), ended.s, **args)
        engine.push(add, writes, [])

    def moment(self, arrays: Sequence[NDArray]) -> Moment:
        """When these arrays have been written."""
        moment = Moment()

        def look() -> None:
            moment.s = time.monotonic()
        engine.push(look, arrays, [])
        return moment

    def compute(self, weights: Sequence[NDArray]) -> "Passes":
        """An iteration begins, which reads `weights` first."""
        self.iterations += 1
        return Passes(self, self.iterations - 1, weights)

    def round(self, lane: str, bucket_id: int) -> int:
        """Counts the operations of a lane on a bucket, from 0."""
        number = self._rounds.get((lane, bucket_id), 0)
        self._rounds[lane, bucket_id] = number + 1
        return number

    def add(self, lane: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """A bar; `args` are numbers, or lists of them."""
        start_s = min(start_s or end_s, end_s)  # two probes at almost the same time may run in the wrong order
        with self._adding:
            if lane != "exchange":
                start_s = max(start_s, self._ends.get(lane, 0.0))
                self._ends[lane] = end_s = max(start_s, end_s)
            self._events.append((lane, name, start_s, end_s, args))

    # -- the file ------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write down what has been added."""
        with self._writing:
            if self._file.closed:
                return
            while self._events:
                self._file.write(self._line(self._events.popleft()))
            self._file.flush()

    def _line(self, event: Tuple[str, str, float, float, Dict[str, Any]]) -> str:
        lane, name, start_s, end_s, args = event
        number, title = row(lane, args)
        new = ""
        if number not in self._rows:
            self._rows.add(number)
            new = (",\n" + self._metadata("thread_name", {"name": title}, number)
                   + ",\n" + self._metadata("thread_sort_index", {"sort_index": number}, number))
        numbers = ", ".join(f'"{key}": {value}' for key, value in args.items())  # json.dumps takes three times as long
        return (f'{new},\n{{"ph": "X", "name": "{name}", "cat": "{lane}", "pid": {self._pid}, "tid": {number}, '
                f'"ts": {1e6 * start_s:.1f}, "dur": {1e6 * (end_s - start_s):.1f}, "args": {{{numbers}}}}}')

    def _metadata(self, name: str, args: Dict[str, Any], number: int = 0) -> str:
        return json.dumps({"ph": "M", "name": name, "pid": self._pid, "tid": number, "args": args})

    def _write_behind(self) -> None:
        while not self._file.closed:
            time.sleep(BEHIND_S)
            self.flush()

    def close(self) -> None:
        """Nothing more will be added."""
        self.flush()
        with self._writing:
            if not self._file.closed:
                self._file.write("\n]\n")
                self._file.close()


class Passes:
    """One iteration's forward and backward pass, as far as arrays show them."""

    def __init__(self, recorder: Recorder, number: int, weights: Sequence[NDArray]) -> None:
        self._recorder, self._number = recorder, number
        self._began = recorder.moment(weights)

    def passes(self, losses: Sequence[NDArray], grads: Sequence[NDArray]) -> None:
        """Both have been queued: the forward pass ends with `losses`, the backward pass with `grads`."""
        self._bar("forward", losses)
        self._bar("backward", grads)

    def _bar(self, name: str, writes: Sequence[NDArray]) -> None:
        began, self._began = self._began, Moment()
        ended = self._began

        def add() -> None:
            ended.s = time.monotonic()
            self._recorder.add("compute", name, began.s, ended.s, iteration=self._number)
        engine.push(add, writes, [])


def boot() -> str:
    """The same on all processes that share a monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def job() -> str:
    """The same on all processes of a job."""
    return hashlib.sha256(b"trace " + control.job_key()).hexdigest()[:12]
