"""Signals that reach the launcher while there is nothing of a job to end: one line, and a signal's exit code.

`import odsgd` calls `end_on_signals` first in a process that will be the launcher: its other imports take a while.
"""
import contextlib
import os
import select
import signal
import sys
import threading
from typing import Callable, Iterator, List

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def command() -> str:
    """The command of odsgd that this process runs, by its command line, all that is known at its start; or empty."""
    ours = os.path.basename(sys.argv[0]) in ("odsgd", "-m")
    return sys.argv[1] if ours and len(sys.argv) > 1 else ""


def heard() -> List[signal.Signals]:
    """Those that a job ends by: none that is ignored (nohup, a shell's `&`), and none off the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def end_on_signals(end: Callable[[int], object] = os._exit) -> None:
    """From here on a signal ends this process by `end`."""
    def ended(number: int, frame: object) -> None:
        text = f"odsgd launch: stopped by {signal.Signals(number).name}; nothing of the job is left\n"
        with contextlib.suppress(OSError):
            if select.select([], [2], [], 0)[1]:  # else it would hang where nobody reads, e.g. on a stopped terminal
                os.write(2, text.encode())
        end(128 + number)

    for number in heard():
        signal.signal(number, ended)


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Meanwhile a signal raises SystemExit, so that what has been begun is taken back."""
    handlers = {number: signal.getsignal(number) for number in heard()}
    end_on_signals(sys.exit)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
