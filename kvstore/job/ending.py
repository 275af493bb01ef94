"""How this process ends: it dies, saying why, or leaves its job; and, for what runs at exit, how its script has ended.

An error leaves `sys.last_type`. SystemExit leaves nothing, so two things are kept: the frame in which the script runs,
which stands at a return if it came to its end, and what `sys.exit` was given last.
"""
import atexit
import contextlib
import functools
import opcode
import os
import sys
import threading
import traceback
import types
from typing import Any, Callable, Iterator, Optional, Type

from kvstore.errors import EXIT_FAILURE, EXIT_INTERRUPTED
from kvstore.job.environment import who
from kvstore.job.report import report

DEAD_WITHIN_S = 5.0
"""A process that dies waits no longer for a reader of its last words, who may be stopped."""
MOST_SHOWN = 1000
"""Characters of an error that the launcher is told; the whole of it is printed."""
_script: Optional[types.FrameType] = None
_status: Any = "unknown"


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


def follow() -> None:
    """Let `failed` know what happens from now on. A second call does nothing."""
    global _script
    if _script is None:
        _script = sys._current_frames()[threading.main_thread().ident or 0]
        while _script.f_back:
            _script = _script.f_back
        sys.exit = _noting(sys.exit)


def _noting(leave: Any) -> Any:
    @functools.wraps(leave)
    def exit(*status: Any) -> None:
        global _status
        _status = status[0] if status else None
        leave(*status)

    return exit


def failed() -> bool:
    """Whether the script ended by an error, or by a SystemExit that is not known to mean success.

    A script that raises SystemExit itself, without `sys.exit`, counts as failed: its status cannot be known here.
    """
    return hasattr(sys, "last_type") or (_broken_off() and _status not in (None, 0))


def _broken_off() -> bool:
    assert _script is not None
    at = opcode.opname[_script.f_code.co_code[_script.f_lasti]]
    return at not in ("RETURN_VALUE", "RETURN_CONST")
