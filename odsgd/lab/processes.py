"""Processes whose output is read: to their end, or line by line, and never for longer than was allowed."""
from __future__ import annotations

import select
import subprocess
import time
from typing import IO, Any, Dict, Optional, Tuple

GRACE_S = 10.0
"""Between SIGTERM and SIGKILL for a command that has run out of its time."""

READ_TO_THE_END: Dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
                                   "universal_newlines": True}
"""Options of `Popen` for `completed`."""

READ_BY_LINE: Dict[str, Any] = {"stdout": subprocess.PIPE, "bufsize": 0}
"""Options of `Popen` for `next_line`: lines in a buffer of Python's would not wake it."""


def completed(process: subprocess.Popen[str], timeout_s: Optional[float]) -> subprocess.CompletedProcess[str]:
    """Wait for the end of a process and take its output.

    After `timeout_s` it gets a SIGTERM, later a SIGKILL, and `subprocess.TimeoutExpired` carries its output.
    """
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except BaseException as error:
        said = _stopped(process)
        if isinstance(error, subprocess.TimeoutExpired):
            error.output, error.stderr = said
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def _stopped(process: subprocess.Popen[str]) -> Tuple[Any, Any]:
    """End a process and take the rest of its output."""
    for end in (process.terminate, process.kill):
        end()
        try:
            return process.communicate(timeout=GRACE_S)
        except subprocess.TimeoutExpired as overdue:
            said = overdue.stdout, overdue.stderr
    for stream in (process.stdout, process.stderr):
        if stream:
            stream.close()  # a child of it holds the other end
    return said


def next_line(stream: Optional[IO[bytes]], deadline: float) -> Optional[str]:
    """The next line from a pipe; None if none has come by `deadline` (`time.monotonic`), "" where there is no more."""
    assert stream
    ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
    return stream.readline().decode("utf-8", "replace") if ready else None
