"""How processes of a job speak beside the data: reports to the launcher, signed commands, deadlines.

Commands. A worker's command to the servers is a line of text: sender, counter, signature, JSON. The signature is an
HMAC over all the rest under the job's secret; the counter of each sender only grows, so a recorded command
cannot be played again. A server acts on nothing else.
A foreign tracker gives no secret. Then commands are signed with a key that anyone on the network could derive, and
servers take only optimizers and methods of MXNet's and this package's (`trusted`).
"""
import atexit
import contextlib
import hashlib
import hmac
import json
import os
import select
import sys
import threading
import time
import traceback
from typing import Any, Callable, Dict, Iterator, Optional, Set, Tuple, Type

from kvstore.errors import EXIT_DEADLINE, EXIT_FAILURE, EXIT_INTERRUPTED, ProtocolError
from kvstore.job.pulse import Pulse

DEFAULT_TIMEOUT_S = 600.0

serving = False  # this process is a server or scheduler already, whatever it may import from here on
lean = False  # no script of a user's runs in this process, so MXNet is imported without what only scripts ask for


# -- reports to the launcher ------------------------------------------------------------------------------

def report(event: str, **fields: Any) -> None:
    """Tell the launcher, if there is one: connecting, joined, failed, done. With `connecting` the pulse begins."""
    descriptor = os.environ.get("ODSGD_REPORT_FD")
    if descriptor is None:
        return
    if event == "connecting":
        pulse.start()
    with contextlib.suppress(OSError, ValueError):  # the launcher may be gone; it is not ours to die of that
        _tell(int(descriptor), json.dumps(dict(fields, event=event)).encode(), event == "beat")


TOLD_WITHIN_S = 1.0
"""How long a report waits for room in the pipe: an agent that is stopped, or that waits itself, does not read it."""
MOST_SHOWN = 1000
"""Characters of an error that the launcher is told; the whole of it is printed."""
_telling = threading.Lock()
_untold = bytearray()  # reports that the pipe has not taken, the first perhaps in part
os.register_at_fork(after_in_child=_untold.clear)


def _tell(descriptor: int, line: bytes, beat: bool) -> None:
    """Write a line, and never wait for ever. What does not fit goes with the next report; of beats one is enough.

    The end of line before it keeps it apart from whatever another process has left half written.
    """
    if not _telling.acquire(timeout=TOLD_WITHIN_S):
        return
    try:
        os.set_blocking(descriptor, False)
        if not (beat and _untold):
            _untold.extend(b"\n" + line + b"\n")
        _flush(descriptor, time.monotonic() + (0.0 if beat else TOLD_WITHIN_S))
    finally:
        _telling.release()


def _flush(descriptor: int, until: float) -> None:
    """Write what is untold, as far as the pipe takes it by then."""
    while _untold:
        try:
            del _untold[:os.write(descriptor, _untold)]
        except BlockingIOError:
            left_s = until - time.monotonic()
            if left_s <= 0 or not select.select([], [descriptor], [], left_s)[1]:
                return
        except OSError:
            _untold.clear()
            raise


def launched() -> bool:
    """Whether our launcher started this process."""
    return "ODSGD_REPORT_FD" in os.environ


def who() -> str:
    """This process, as log lines and errors call it."""
    role = os.environ.get("DMLC_ROLE", "worker")
    rank = os.environ.get(f"ODSGD_{role.upper()}_RANK")
    return role if rank is None else f"{role} {rank}"


SWITCH_S = 1e-4
"""Python's switch interval, at most, where threads of ours wait for its lock. The ring's asks for it some thousand
times a second: beside one thread of plain Python, 16.8 MB at 1 Gbit/s took 1100 ms with the usual 5 ms, and 260 so."""


def share_python() -> None:
    """Let a thread that wants Python's lock have it soon, whatever the script computes beside."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))


DEAD_WITHIN_S = 5.0
"""A process that dies waits no longer for a reader of its last words, who may be stopped."""


def die(message: str, status: int, consequence: bool = False) -> None:
    """End this process at once, saying why; `consequence`: another process is to blame, if one fails as well.

    Not sys.exit: ps-lite waits for every other process in its destructors, and would wait for ever.
    """
    name = "" if message.startswith((f"{who()}, ", f"{who()}: ")) else f"{who()}: "  # errors may say it themselves
    with contextlib.suppress(RuntimeError):  # no thread begins once Python is ending
        last = threading.Timer(DEAD_WITHIN_S, os._exit, [status])
        last.daemon = True
        last.start()
    try:
        print(f"{name}{message}", file=sys.stderr, flush=True)
        report("failed", error=message.strip().splitlines()[-1][:MOST_SHOWN], consequence=consequence)
        sys.stdout.flush()
    finally:  # the reader of our output may be gone
        os._exit(status)


@contextlib.contextmanager
def dying_of(kind: Type[Exception]) -> Iterator[None]:
    """An error of this kind ends the process, with its message; for threads on which nobody could catch it."""
    try:
        yield
    except kind as error:
        die(str(error), EXIT_FAILURE)


def end_well(leave: Callable[[], None]) -> None:
    """However this process ends, it must neither wait for others for ever nor let them wait for it.

    It leaves its job by `leave` if all is well, and otherwise dies, saying why.
    """
    previous = sys.excepthook

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        if previous is not sys.__excepthook__:
            previous(kind, error, trace)
        if issubclass(kind, KeyboardInterrupt):
            die("interrupted", EXIT_INTERRUPTED)
        die("".join(traceback.format_exception(kind, error, trace)), EXIT_FAILURE)

    def end() -> None:
        if hasattr(sys, "last_type") and not hasattr(sys, "ps1"):
            die(f"ended by {sys.last_type}", EXIT_FAILURE)  # another excepthook has told the rest
        leave()

    sys.excepthook = hook
    atexit.register(end)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Meanwhile files and sockets are made for this user alone."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def restarts() -> int:
    """How often the launcher has started this job again after a failure (`--max-restarts`)."""
    return int(os.environ.get("ODSGD_RESTARTS") or 0)


def saved_iteration() -> int:
    """The last checkpoint that the launcher has heard of, when it has started this job again; 0: none."""
    return int(os.environ.get("ODSGD_SAVED") or 0)


def most_workers() -> Optional[int]:
    """How many workers the job is to have, where it may go on with fewer (``-n MIN:MAX``); None: there are as many."""
    most = os.environ.get("ODSGD_MOST_WORKERS")
    return int(most) if most else None


def lost_workers() -> Set[int]:
    """Ranks of workers that the launcher has given up (`--on-worker-loss continue`); asynchronous jobs only."""
    path = os.environ.get("ODSGD_LOST")
    if not path:
        return set()
    with contextlib.suppress(FileNotFoundError), open(path) as file:
        return {int(line) for line in file}
    return set()


# -- deadlines ----------------------------------------------------------------------------------------------

class Watch:
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
            self._due[wait] = (now, now + timeout_s, message)
            self._start()

    def follow(self, what: object, timeout_s: float, state: Callable[[], Any], message: Callable[[], str]) -> None:
        """Look at `state()` now and then: not None means that something is awaited, a change that it moves on.

        It is overdue when nothing has moved for `timeout_s`. `state` runs on the watch's thread; it must only look.
        """
        with self._lock:
            self._followed[what] = _Followed(timeout_s, state, message)
            self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="kvstore-watch", daemon=True)
            self._thread.start()

    def end(self, wait: object) -> None:
        with self._lock:
            self._due.pop(wait, None)
            self._followed.pop(wait, None)

    @contextlib.contextmanager
    def deadline(self, timeout_s: float, message: str) -> Iterator[None]:
        wait = object()
        self.begin(wait, timeout_s, message)
        try:
            yield
        finally:
            self.end(wait)

    def waiting(self) -> Optional[float]:
        """For how many seconds this process has waited for others; None: it waits for nothing."""
        with self._lock:
            since = [began for began, _, _ in self._due.values()]
            since += [one.since for one in self._followed.values() if one.awaits]
        return time.monotonic() - min(since) if since else None

    def _watch(self) -> None:
        while True:
            time.sleep(self.TICK_S)
            now = time.monotonic()
            with self._lock:
                overdue = [message for _, due, message in sorted(self._due.values()) if due < now]
                overdue += [one.text() for one in self._followed.values() if one.overdue(now)]
            if overdue:
                self._on_overdue(overdue[0])
                return


class _Followed:
    """Something that should move on."""

    def __init__(self, timeout_s: float, state: Callable[[], Any], message: Callable[[], str]) -> None:
        self._timeout_s, self._state, self._message = timeout_s, state, message
        self._last: Any = None
        self._failure = ""
        self.since = time.monotonic()

    @property
    def awaits(self) -> bool:
        """Whether something was awaited when it was last looked at."""
        return self._last is not None

    def overdue(self, now: float) -> bool:
        """A look that fails sees no movement, so the deadline stands; nothing is printed here, which could block."""
        try:
            state = self._state()
            if state is None or state != self._last:
                self._last, self.since = state, now
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


watch = Watch()
pulse = Pulse(report, watch.waiting)


# -- signed commands ------------------------------------------------------------------------------------------

def trusted() -> bool:
    """Whether this job has a secret of its own."""
    return bool(os.environ.get("ODSGD_SECRET"))


def secure() -> bool:
    """Whether it tells nothing to hosts that ssh does not know (`--secure`)."""
    return bool(os.environ.get("ODSGD_SECURE"))


def job_key() -> bytes:
    secret = os.environ.get("ODSGD_SECRET")
    if not secret:
        secret = ":".join(os.environ.get(name, "") for name in ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"))
    return secret.encode()


MOST_DIGITS = 18
"""Of a sender or counter."""


class Signer:
    """Signs one sender's commands, each with the next number."""

    def __init__(self, sender: int, key: bytes) -> None:
        self._sender, self._key, self._counter = sender, key, 0

    def sign(self, name: str, payload: Dict[str, Any]) -> str:
        self._counter += 1
        text = json.dumps([name, payload], ensure_ascii=True)
        return f"{self._sender} {self._counter} {_signature(self._key, self._sender, self._counter, text)} {text}"


class Verifier:
    """Checks commands; the other half of `Signer`."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._last: Dict[int, int] = {}

    def open(self, message: str) -> Tuple[int, str, Dict[str, Any]]:
        """Sender, name and payload of `message`; ProtocolError unless it is signed and new."""
        try:
            sender_text, counter_text, signature, text = message.split(" ", 3)
            if max(len(sender_text), len(counter_text)) > MOST_DIGITS:
                raise ValueError
            sender, counter = int(sender_text), int(counter_text)
            if [str(sender), str(counter)] != [sender_text, counter_text]:  # int() takes blanks, signs, other scripts
                raise ValueError
            expected = _signature(self._key, sender, counter, text).encode()
            given = signature.encode()
        except ValueError:
            raise ProtocolError("an unsigned command reached this server and was not executed; "
                                "is a stock MXNet worker (or a stranger) connected to this job?") from None
        if not hmac.compare_digest(given, expected):
            raise ProtocolError(f"a command from worker {sender} is not signed with this job's secret "
                                "(ODSGD_SECRET) and was not executed; workers and servers must come from one launch")
        if counter <= self._last.get(sender, 0):
            raise ProtocolError(f"command {counter} of worker {sender} came a second time and was not executed")
        self._last[sender] = counter
        try:
            name, payload = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            name = payload = None
        if not isinstance(name, str) or not isinstance(payload, dict):
            raise ProtocolError(f"command {counter} of worker {sender} is signed, and is not a name and its arguments; "
                                "workers and servers must run the same version")
        return sender, name, payload


def _signature(key: bytes, sender: int, counter: int, text: str) -> str:
    return hmac.new(key, f"{sender} {counter} {text}".encode(), hashlib.sha256).hexdigest()
