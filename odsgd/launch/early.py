"""What a signal does to the launcher before it has a job: it says one line and ends, with exit code 128 + signal.

In a launcher `import odsgd` calls `end_on_signals` first, because the other imports take a while.
"""
import contextlib
import functools
import os
import select
import signal
import sys
import threading
from typing import Any, Callable, ContextManager, Iterator, List

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def command() -> str:
    """The odsgd command on this process's command line; empty for another program."""
    ours = os.path.basename(sys.argv[0]) in ("odsgd", "-m")
    return sys.argv[1] if ours and len(sys.argv) > 1 else ""


def ending_signals() -> List[signal.Signals]:
    """The signals that end a job, without ignored ones (nohup, a shell's `&`); empty off the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def end_on_signals() -> None:
    """From now on a signal ends this process."""
    for number in ending_signals():
        signal.signal(number, functools.partial(_end, os._exit))


def exit_on_signals() -> ContextManager[None]:
    """Meanwhile a signal raises SystemExit, so that `finally` undoes what was begun."""
    return handled_by(functools.partial(_end, sys.exit))


@contextlib.contextmanager
def handled_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Meanwhile `handler` is called with the signals that end a job."""
    before = {number: signal.signal(number, handler) for number in ending_signals()}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)


def _end(leave: Callable[[int], object], number: int, frame: object) -> None:
    text = f"odsgd launch: stopped by {signal.Signals(number).name}; nothing of the job is left\n"
    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0)[1]:  # else it would hang, e.g. on a stopped terminal
            os.write(2, text.encode())
    leave(128 + number)
