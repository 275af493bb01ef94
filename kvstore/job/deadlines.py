"""Deadlines: every wait for another process has one."""
import contextlib
import os
import threading
import time
from typing import Any, Callable, ContextManager, Dict, Iterator, Optional, Tuple

from kvstore.errors import EXIT_DEADLINE
from kvstore.job.ending import die

CALLS = "does not make a call that is for all workers, as `global_weights` and `state_dict` are"
"""What may be wrong if all others are alive."""
STOOD_STILL_S = 5.0
"""If a sleep lasts so much longer, this process was stopped, or its whole host."""


class Deadlines:
    """Waits with a deadline, for calls into MXNet that have none. One thread, started when first needed.

    Invariant: an entry of `_due` is a wait under way: when it began, when it is overdue, and what to print then.
    """

    TICK_S = 0.2

    def __init__(self, on_overdue: Callable[[str], None] = lambda message: die(message, EXIT_DEADLINE)) -> None:
        self._due: Dict[object, Tuple[float, float, str]] = {}
        self._followed: Dict[object, _Followed] = {}
        self._lock = threading.Lock()
        self._thread: Any = None
        self._on_overdue = on_overdue

    def begin(self, wait: object, timeout_s: float, message: str) -> None:
        """`wait` (any hashable name) has begun; it is overdue after `timeout_s`."""
        now = time.monotonic()
        with self._lock:
            self._start()
            self._due[wait] = (now, now + timeout_s, message)

    def follow(self, what: object, timeout_s: float, state: Callable[[], Any], message: Callable[[], str]) -> None:
        """Look at `state()` now and then: it is None if nothing is awaited, and a change means that things move on.

        It is overdue when nothing has moved for `timeout_s`. `state` runs on another thread; it must only look.
        """
        with self._lock:
            self._start()
            self._followed[what] = _Followed(timeout_s, state, message)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="kvstore-deadlines", daemon=True)
            self._thread.start()

    def forget(self) -> None:
        """Forget the parent's waits and thread: this is a forked child."""
        self._due, self._followed, self._lock, self._thread = {}, {}, threading.Lock(), None

    def end(self, wait: object) -> None:
        with self._lock:
            self._due.pop(wait, None)
            self._followed.pop(wait, None)

    @contextlib.contextmanager
    def within(self, timeout_s: float, message: str) -> Iterator[None]:
        wait = object()
        self.begin(wait, timeout_s, message)
        try:
            yield
        finally:
            self.end(wait)

    def waiting_for(self, what: str, timeout_s: float, who: str = "another worker or a server is late, stopped or "
                    "unreachable") -> ContextManager[None]:
        """`within` for a wait for other processes; `who` says who may be to blame."""
        return self.within(timeout_s, f"{what} was not over within {timeout_s:g} s: {who}. Check that all are alive, "
                           "or raise `timeout_s`")

    def waiting(self) -> Optional[float]:
        """For how many seconds this process has waited for others; None: it waits for nothing."""
        with self._lock:
            since = [began for began, _, _ in self._due.values()]
            since += [one.since for one in self._followed.values() if one.last is not None]
        return time.monotonic() - min(since) if since else None

    def _put_off(self, seconds: float) -> None:
        with self._lock:
            self._due = {wait: (began, due + seconds, message) for wait, (began, due, message) in self._due.items()}
            for one in self._followed.values():
                one.since += seconds

    def _watch(self) -> None:
        while True:
            asleep = time.monotonic()
            time.sleep(self.TICK_S)
            now = time.monotonic()
            held_up_s = now - asleep - self.TICK_S
            if held_up_s > STOOD_STILL_S:  # perhaps all of the job was, too: this time does not count
                self._put_off(held_up_s)
            with self._lock:
                overdue = [message for _, due, message in sorted(self._due.values()) if due < now]
                followed = list(self._followed.items())
            # Without the lock: `state()` may take long, or begin and end waits itself.
            still = [(what, one) for what, one in followed if one.overdue(now)]
            overdue += [one.text() for what, one in still if self._followed.get(what) is one]  # else it has ended
            if overdue:
                self._on_overdue(overdue[0])
                return


class _Followed:
    """Something that should move on."""

    def __init__(self, timeout_s: float, state: Callable[[], Any], message: Callable[[], str]) -> None:
        self._timeout_s, self._state, self._message = timeout_s, state, message
        self.last: Any = None  # what `state()` gave last; None: nothing is awaited
        self._failure = ""
        self.since = time.monotonic()

    def overdue(self, now: float) -> bool:
        """If `state()` fails, nothing has moved, so the deadline stands. Nothing is printed, which could block."""
        try:
            state = self._state()
            if state is None or state != self.last:
                self.last, self.since = state, now
            self._failure = ""
        except Exception as error:
            self._failure = f" (the last look at it failed: {type(error).__name__}: {error})"
        return now - self.since > self._timeout_s

    def text(self) -> str:
        """What to print when it is overdue."""
        try:
            return self._message() + self._failure
        except Exception as error:
            return (f"nothing that is awaited has moved for {self._timeout_s:g} s, and what it is cannot be told: "
                    f"{type(error).__name__}: {error}{self._failure}")


deadlines = Deadlines()
os.register_at_fork(after_in_child=deadlines.forget)
