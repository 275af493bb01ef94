"""What only observes may neither end nor hang what it observes.

`guarded` is for code that may raise. A `BackgroundThread` is for code that may also block, because a disk or a reader
holds it up. Files are opened by `without_waiting`.
"""
import contextlib
import functools
import os
import queue
import sys
import threading
import time
from typing import Callable, Iterator, Optional, Set

SLICE_S = 1.0
"""The longest wait in one piece: Python handles a signal that comes just as a wait begins only after that wait."""
_failed: Set[str] = set()


def tell(line: str) -> None:
    """Print on standard error, which may be gone or full. In one write: another thread may print meanwhile."""
    with contextlib.suppress(OSError, ValueError):
        print(f"{line}\n", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def guarded(what: str, say: Callable[[str], None] = tell) -> Iterator[None]:
    """An error in here goes no further; `say` gets the first one of this process that is of `what`."""
    try:
        yield
    except Exception as error:
        if what not in _failed:
            _failed.add(what)
            say(f"warning: {what} failed, and the job goes on without: {type(error).__name__}: {error}")


def without_waiting(path: str, flags: int) -> int:
    """An opener of files that does not wait for a reader if the file is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


class BackgroundThread:
    """Makes calls one after the other on a daemon thread. The first error is printed."""

    def __init__(self, what: str, most: int = 1000) -> None:
        self._what, self._calls = what, queue.Queue(most)  # type: str, queue.Queue[Callable[[], object]]
        self._thread: Optional[threading.Thread] = None

    @property
    def empty(self) -> bool:
        """Whether no call waits; one may be running."""
        return self._calls.empty()

    def do(self, call: Callable[[], object], within_s: float = 0.0) -> None:
        """Make the call soon. TimeoutError if `most` calls still wait after `within_s`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="kvstore-aside", daemon=True)
            self._thread.start()
        if not _wait(functools.partial(self._has_put, call), within_s):
            raise TimeoutError(f"{self._calls.maxsize} writes wait for one that hangs")

    def finish(self, call: Callable[[], object], within_s: float) -> None:
        """Make this call last. TimeoutError if not all calls are done after `within_s`."""
        done = threading.Event()
        deadline = time.monotonic() + within_s
        self.do(call, within_s)
        self.do(done.set, deadline - time.monotonic())
        if not _wait(done.wait, deadline - time.monotonic()):
            raise TimeoutError(f"not all is written after {within_s:g} s")

    def _has_put(self, call: Callable[[], object], within_s: float) -> bool:
        try:
            self._calls.put(call, within_s > 0, within_s)
        except queue.Full:
            return False
        return True

    def _work(self) -> None:
        while True:
            with guarded(self._what):
                self._calls.get()()


def _wait(comes: Callable[[float], bool], within_s: float) -> bool:
    """Whether it comes in time; `comes` waits as many seconds as it is given."""
    deadline = time.monotonic() + within_s
    while not comes(max(0.0, min(SLICE_S, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            return False
    return True
