"""What a signal does to the launcher before it has a job: it says one line and ends, with exit code 128 + signal.

In a launcher `import odsgd` calls `end_on_signals` first, because the other imports take a while.
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
    """The odsgd command on this process's command line; empty for another program."""
    ours = os.path.basename(sys.argv[0]) in ("odsgd", "-m")
    return sys.argv[1] if ours and len(sys.argv) > 1 else ""


def ending_signals() -> List[signal.Signals]:
    """The signals that end a job, without ignored ones (nohup, a shell's `&`); empty off the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def end_on_signals(end: Callable[[int], object] = os._exit) -> None:
    """From now on a signal ends this process, by `end`."""
    def ended(number: int, frame: object) -> None:
        text = f"odsgd launch: stopped by {signal.Signals(number).name}; nothing of the job is left\n"
        with contextlib.suppress(OSError):
            if select.select([], [2], [], 0)[1]:  # else it would hang, e.g. on a stopped terminal
                os.write(2, text.encode())
        end(128 + number)

    for number in ending_signals():
        signal.signal(number, ended)


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Meanwhile a signal raises SystemExit, so that `finally` undoes what was begun."""
    handlers = {number: signal.getsignal(number) for number in ending_signals()}
    end_on_signals(sys.exit)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
