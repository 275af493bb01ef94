"""Reports to the launcher, through a pipe, of what this process does: connecting, joined, failed, done …"""
import contextlib
import json
import os
import select
import threading
import time
from typing import Any

TOLD_WITHIN_S = 1.0
"""How long a report waits for room in the pipe: an agent that is stopped, or that waits itself, does not read it."""
_telling = threading.Lock()
_untold = bytearray()  # reports that the pipe has not taken, the first perhaps in part
os.register_at_fork(after_in_child=_untold.clear)


def report(event: str, **fields: Any) -> None:
    """Tell the launcher, if this process has one."""
    descriptor = os.environ.get("ODSGD_REPORT_FD")
    if descriptor is not None:
        with contextlib.suppress(OSError, ValueError):  # the launcher may be gone, which is no reason to die
            _tell(int(descriptor), json.dumps(dict(fields, event=event)).encode(), event == "beat")


def _tell(descriptor: int, line: bytes, beat: bool) -> None:
    """Write a line, and never wait for ever. What does not fit goes with the next report; beats are dropped until then.

    A line end before it keeps the line apart from whatever another process has left half written.
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
            del _untold[:os.write(descriptor, bytes(_untold))]  # a copy, lest a fork meanwhile cannot clear it
        except BlockingIOError:
            left_s = until - time.monotonic()
            if left_s <= 0 or not select.select([], [descriptor], [], left_s)[1]:
                return
        except OSError:
            _untold.clear()
            raise
