"""A job on a terminal, and watched from another one."""
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import List

import pytest

from tests.integration.launching import PATIENCE_S
from tests.jobs import ROOT, environment

COLUMNS = 130


class Terminal:
    """A program on a terminal of its own, and all that it has written there."""

    def __init__(self, *words: str) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
        self.fd, self.text = ours, ""
        self.process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT,
                                        env={**environment(), "NO_COLOR": "1"}, start_new_session=True)
        os.close(theirs)

    def read(self, deadline: float) -> bool:
        """Some more; False when the program has closed it."""
        came = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))[0]
        assert came, f"nothing more came:\n{self.text}"
        try:
            self.text += os.read(self.fd, 65536).decode("utf-8", "replace")
        except OSError:
            return False
        return True

    def wait_for(self, pattern: str) -> "re.Match[str]":
        """Until this has been written."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = re.search(pattern, self.text)
            if found:
                return found
            assert self.read(deadline), f"never saw {pattern}:\n{self.text}"


def odsgd(*words: str) -> List[str]:
    return [sys.executable, "-m", "odsgd", *words]


def watched(run: str) -> str:
    """What `odsgd watch` prints of a job that runs."""
    return subprocess.run(odsgd("watch", run), cwd=ROOT, env=environment(), capture_output=True, text=True,
                          timeout=PATIENCE_S, check=True).stdout


def cells(seen: str) -> List[List[str]]:
    """Of the rows of processes, from `at` on."""
    rows = [row.replace("(slow)", "").split() for row in seen.splitlines() if re.match(r"(worker|server) \d", row)]
    return [row[3:] for row in rows]


def test_a_terminal_that_stays_silent_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PATIENCE_S", 0.2)
    terminal = Terminal("sleep", "600")
    try:
        with pytest.raises(AssertionError, match="nothing more came"):
            terminal.wait_for("x")
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.fd)


@pytest.mark.slow
def test_a_job_has_a_line_on_its_terminal_and_a_table_for_those_who_watch(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    job = Terminal(*odsgd("launch", "-n", "2", "-s", "1"), *odsgd(
        "train", "--dataset", "synthetic", "--batch-size", "4", "--kvstore", "asgd", "--lr", "0.01", "--epochs", "9",
        "--emulate-compute", "20ms", "--iterations", "600", "--log-interval", "10", "--out", out))
    try:
        line = job.wait_for(r"epoch \d/9: [^\r]* \d+/600 \[[^\r]*, emulated compute, \d+ samples/s, staleness "
                            r"\d\.\d\d\]").group()
        assert len(line) < COLUMNS
        seen = watched(out)
        # Until rates can be told; how far behind a worker is may not be.
        while len(cells(seen)) < 3 or any("-" in (row[0], *row[2:7]) for row in cells(seen)[:2]):
            seen = watched(out)
        while job.read(time.monotonic() + PATIENCE_S):
            pass
        assert job.process.wait(PATIENCE_S) == 0, job.text
    finally:
        job.process.kill()
        job.process.wait()
        os.close(job.fd)
    assert "iteration 10/600" not in job.text and "done after 600 iterations" in job.text
    assert re.search(r"\r\x1b\[K\Z", job.text) or "samples/s" not in job.text.splitlines()[-1]  # nothing of it is left
    assert re.findall(r"(?m)^(worker 0|worker 1|server 0) ", seen) == ["worker 0", "worker 1", "server 0"]
    for at, _, rate, waiting, own_ms, mb_per_s, staleness, doing in cells(seen)[:2]:
        assert 0 < int(at) < 600 and float(rate) > 0 and waiting.endswith("%") and float(own_ms) > 0, seen
        assert float(mb_per_s) > 0 and float(staleness) >= 0 and doing == "training", seen
    gone = subprocess.run(odsgd("watch", out), cwd=ROOT, env=environment(), capture_output=True, text=True,
                          timeout=PATIENCE_S)
    assert gone.returncode == 64 and gone.stderr.startswith("odsgd watch: ") and gone.stderr.count("\n") == 1
