"""What this process does when, for a timeline: how its file is filled.

`on` is None, or the `Recorder` of this process. Nothing on the way of the data looks at it: where it is on, calls are
wrapped from outside (`wraps`), with a bar added after the operation has been queued:

    recorder.span("gather", bucket, reads=grads, writes=[flat])

Times are the engine's, not the times at which Python queues. The bar of an operation that has been queued begins when
its inputs have been written and the bar before of its stage has ended; it ends when its outputs have been written.
Probes measure this: operations that read these arrays and look at the clock. They delay only the next writer of the
same arrays, on the data path an iteration later. An array that one operation writes and another reads has one probe.

A recorder writes its `trace.Trace` a quarter of a second behind.
"""
import atexit
import collections
import contextlib
import hashlib
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, Deque, Dict, Iterator, Optional, Sequence

from kvstore.engine import engine
from kvstore.engine.engine import NDArray
from kvstore.job import commands
from kvstore.job.aside import guarded
from kvstore.messages.buckets import WIRE_DTYPE, Bucket
from kvstore.tracing.trace import Bar, Trace

BEHIND_S = 0.25
ARRAYS = 32  # of a bucket whose times of writing are kept
WRITTEN_WITHIN_S = 10.0

folder: Optional[str] = os.environ.get("ODSGD_TRACE") or None
"""Where this job's traces go; None: nowhere."""

on: Optional["Recorder"] = None


def begin(role: str, rank: int, num_workers: int) -> Optional["Recorder"]:
    """Record from here on, if a folder is named. Once per process. Returns `on`."""
    global on
    if folder is not None and on is None:
        on = Recorder(Path(folder), role, rank, num_workers)
    return on


def end() -> None:
    """Nothing more will be added."""
    if on is not None:
        on.close()


atexit.register(end)  # early, so that it comes late: a worker has left its job by then
atexit.register(engine.wait_at_end)  # and before that


class Moment:
    """When something was written; 0 until then."""

    s = 0.0


class Recorder(Trace):
    """Writes this process's trace. `add` may be called on any thread, the rest on the thread that queues operations."""

    def __init__(self, folder: Path, role: str, rank: int, num_workers: int) -> None:
        super().__init__(folder, {"role": role, "rank": rank, "host": socket.gethostname(), "boot": boot(),
                                  "job": job(), "workers": num_workers, "wall_s": time.time(),
                                  "monotonic_s": time.monotonic()})
        self._bars: Deque[Bar] = collections.deque()
        self._over = False  # or the file has failed
        self._adding, self._writing = threading.Lock(), threading.Lock()
        self._written: Dict[int, engine.CachedById] = collections.defaultdict(lambda: engine.CachedById(ARRAYS))
        """By bucket and array: when the operation queued last had written it."""
        self.iterations = 0  # whose compute has been queued
        self._iteration = -1  # that what is asked for is part of; -1: none
        threading.Thread(target=self._write_behind, name="kvstore-trace", daemon=True).start()

    # -- what the rest of the package tells ----------------------------------------------------------------------

    @guarded("the trace")
    def span(self, stage: str, bucket: Bucket, reads: Sequence[NDArray], writes: Sequence[NDArray],
             numbered: bool = True) -> None:
        """An operation on a bucket has been queued, which reads these arrays and writes those; none is in both.

        `numbered`: the nth of its kind is the nth on every other process.
        """
        asked_s = time.monotonic()
        args = {"bucket": bucket.id, "bytes": bucket.size * WIRE_DTYPE.itemsize}
        if numbered:
            args["round"] = self.round(stage, bucket.id)
        if stage == "exchange" and self._iteration >= 0:
            args["iteration"] = self._iteration
        written = self._written[bucket.id]
        began = [moment for moment in map(written.get, reads) if moment is not None]
        if len(began) < len(reads):
            began.append(self.moment([array for array in reads if written.get(array) is None]))
        ended = self._bar(stage, stage, began, writes, asked_s, **args)
        if len(writes) == 1:
            written.put(writes[0], ended)

    def _bar(self, stage: str, name: str, began: Sequence[Moment], writes: Sequence[NDArray], asked_s: float = 0.0,
             **args: int) -> Moment:
        """When it ends: once `writes` have been written."""
        ended = Moment()

        def add() -> None:
            ended.s = time.monotonic()
            began_s = max(moment.s for moment in began)
            self.add(stage, name, began_s and max(began_s, asked_s), ended.s, **args)
        engine.push(add, writes, [])
        return ended

    def moment(self, arrays: Sequence[NDArray]) -> Moment:
        """When these arrays have been written."""
        moment = Moment()

        def look() -> None:
            moment.s = time.monotonic()
        engine.push(look, arrays, [])
        return moment

    def passes(self, began: Moment, losses: Sequence[NDArray], grads: Sequence[NDArray]) -> None:
        """An iteration has been queued: the forward pass ends with `losses`, the backward pass with `grads`."""
        for name, writes in (("forward", losses), ("backward", grads)):
            began = self._bar("compute", name, [began], writes, iteration=self.iterations)
        self.iterations += 1

    @contextlib.contextmanager
    def iterating(self) -> Iterator[None]:
        """Inside, exchanges are those of the iteration whose compute has been queued last."""
        self._iteration = self.iterations - 1
        try:
            yield
        finally:
            self._iteration = -1

    @guarded("the trace")
    def add(self, stage: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """A bar. Two probes at almost the same time may run in the wrong order; then it has no start, and no length."""
        with self._adding:
            super().add(stage, name, start_s or end_s, end_s, **args)

    # -- the file ------------------------------------------------------------------------------------------------

    def _put(self, bar: Bar) -> None:
        if not self._over:
            self._bars.append(bar)

    @guarded("the trace")
    def flush(self, last: bool = False) -> None:
        """Write down what has been added, and close the file after the last time. A file that takes nothing is left as
        it is from then on."""
        if self._over:
            return
        if not self._writing.acquire(timeout=WRITTEN_WITHIN_S):
            self._over = True
            raise TimeoutError(f"its file has taken nothing for {WRITTEN_WITHIN_S:g} s")
        try:
            if not self._over:  # else another thread has closed it meanwhile
                while self._bars:
                    super()._put(self._bars.popleft())
                self._file.flush()
                if last:
                    self._over = True
                    super().close()
        except Exception:
            self._over = True
            raise
        finally:
            self._writing.release()

    def _write_behind(self) -> None:
        while not self._over:
            time.sleep(BEHIND_S)
            self.flush()

    def close(self) -> None:
        self.flush(last=True)


def boot() -> str:
    """A text that is the same on all processes of one monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def job() -> str:
    """A text that is the same on all processes of a job."""
    return hashlib.sha256(b"trace " + commands.job_key()).hexdigest()[:12]
