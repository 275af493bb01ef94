"""A signal to the launcher before there is a job to end: one line, and a signal's exit code.

In a process that will be the launcher `import odsgd` calls `end_on_signals` first: its other imports take a while.
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
    """The command of odsgd that this process runs, by its command line; empty if it runs none."""
    ours = os.path.basename(sys.argv[0]) in ("odsgd", "-m")
    return sys.argv[1] if ours and len(sys.argv) > 1 else ""


def ending_signals() -> List[signal.Signals]:
    """The signals that end a job: not those that are ignored (nohup, a shell's `&`); off the main thread, no signal."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def end_on_signals(end: Callable[[int], object] = os._exit) -> None:
    """Let a signal end this process by `end` from now on."""
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
    """Let a signal raise SystemExit meanwhile, so that what has been begun is taken back."""
    handlers = {number: signal.getsignal(number) for number in ending_signals()}
    end_on_signals(sys.exit)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
