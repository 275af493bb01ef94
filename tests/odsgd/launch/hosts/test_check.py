"""Asking the hosts, with a stand-in `ssh` that never answers."""
import os
import signal
import threading
from pathlib import Path
from typing import Iterator

import pytest

from odsgd.launch.hostfile import Host
from odsgd.launch.hosts import check
from odsgd.launch.hosts.ssh import ReachError
from odsgd.launch.linux import state
from odsgd.launch.plan import Job
from tests.jobs import until

HOSTS = tuple(Host(f"host{number}") for number in range(3))
JOB = Job(("true",), 3, 0, launcher="ssh", slots=HOSTS)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file with the pid of each ssh, and of a process below it that keeps its output open."""
    pids = tmp_path / "pids"
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\nsleep 1000 &\necho $$ >> {pids}; echo $! >> {pids}\nwait\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("ODSGD_SSH", str(ssh))
    yield pids
    left = pids.read_text().split() if pids.exists() else []
    until(lambda: all(state(int(pid)) in ("", "Z") for pid in left))


def all_asked(pids: Path) -> bool:
    return pids.exists() and len(pids.read_text().split()) == 2 * len(HOSTS)


def test_ctrl_c_ends_the_questions_at_once(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ANSWERED_WITHIN_S", 100.0)

    def interrupt() -> None:
        until(lambda: all_asked(asked))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests' shell may have it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            check.check_hosts(Job(("true",), 3, 0, launcher="ssh", slots=HOSTS, startup_timeout_s=0))
    finally:
        signal.signal(signal.SIGINT, before)


def test_hosts_that_do_not_answer_are_named(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ANSWERED_WITHIN_S", 0.5)
    with pytest.raises(ReachError) as caught:
        check.check_hosts(JOB)
    assert str(caught.value).splitlines() == [
        "3 of 3 hosts cannot take part; nothing was started",
        *(f"  host{number}: ssh has not answered for 0.5 s" for number in range(3))]
