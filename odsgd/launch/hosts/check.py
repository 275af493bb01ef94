"""Asks hosts by ssh: before a job starts all of them, at once, whether they can take part; and later those that it had
to leave out, whether they are back (`odsgd launch -n MIN:MAX --grow`).

The question is one line for any shell. The host answers with what it lacks; if it cannot answer, ssh says why.
"""
import contextlib
import os
import shlex
import signal
import subprocess
import threading
import time
from concurrent import futures
from typing import Dict, Iterable, List, Optional, Tuple

from odsgd.launch.hostfile import Host
from odsgd.launch.hosts.ssh import ReachError, quoted, ssh_to, working_directory
from odsgd.launch.plan import Job, path_on_hosts

ANSWERED_WITHIN_S, LOOK_EVERY_S = 20.0, 0.1
AT_A_TIME = 64
ASKED_EVERY_S, CONNECTED_WITHIN_S, BACK_WITHIN_S = 10.0, 10, 30.0
"""A missing host that accepts a connection and then says nothing is not back."""
MISSING, READY = "odsgd misses ", "odsgd has looked"


def check_hosts(job: Job) -> None:
    """ReachError, with a line for each host that cannot take part.

    A job that can do with fewer workers asks no host: it leaves out the hosts that do not come.
    """
    if job.launcher != "ssh" or job.least_workers:
        return
    hosts = list(dict.fromkeys(job.slots))
    given_up = threading.Event()
    with futures.ThreadPoolExecutor(min(len(hosts), AT_A_TIME)) as pool:
        try:
            found = [why for why in pool.map(lambda host: _ask(job, host, given_up), hosts) if why]
        finally:  # after Ctrl-C, too: the pool waits for its threads
            given_up.set()
    if found:
        raise ReachError("\n  ".join([f"{len(found)} of {len(hosts)} hosts cannot take part; nothing was started",
                                      *found]))


def _ask(job: Job, host: Host, given_up: threading.Event) -> Optional[str]:
    """What is wrong with a host; None if nothing is."""
    within_s = min(job.startup_timeout_s or ANSWERED_WITHIN_S, ANSWERED_WITHIN_S)
    try:
        asked = subprocess.Popen([*ssh_to(job, host), host.target, question(job)], stdin=subprocess.DEVNULL,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        return f"{host.address}: cannot run ssh: {error.strerror}"
    with asked:
        answer = _answer(asked, time.monotonic() + within_s, given_up)
    if answer is None:
        return f"{host.address}: ssh has not answered for {within_s:g} s"
    told, said = (stream.decode("utf-8", "replace").splitlines() for stream in answer)
    if READY not in told:
        return ": ".join([host.address, f"ssh ended with exit code {asked.returncode}", *said[-1:]])
    missing = [line[len(MISSING):] for line in told if line.startswith(MISSING)]
    return f"{host.address}: there is no {' and no '.join(missing)}" if missing else None


def _answer(asked: "subprocess.Popen[bytes]", deadline: float, given_up: threading.Event
            ) -> Optional[Tuple[bytes, bytes]]:
    """The output of ssh on both streams; None if it is late or not wanted any more: then it is killed."""
    while time.monotonic() < deadline and not given_up.is_set():
        with contextlib.suppress(subprocess.TimeoutExpired):
            return asked.communicate(timeout=LOOK_EVERY_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(asked.pid, signal.SIGKILL)
    return None


def question(job: Job) -> str:
    """The question, in sh, which every shell can run. Files that will be copied to the host are left out."""
    looks = ["echo"]  # ends a line that a shell has begun
    there = [path for path in job.reads if not job.sync_dst_dir or os.path.isabs(path_on_hosts(path, job))]
    if not job.sync_dst_dir:
        folder = working_directory(job)
        misses = shlex.quote(f"{MISSING}folder {folder}")
        looks.append(f"cd {quoted(folder)} || {{ echo {misses}; echo {READY}; exit; }}")
    looks += [*(_look("test -e", path) for path in there), _look("command -v", job.remote_python)]
    return f"exec sh -c {shlex.quote('; '.join([*looks, f'echo {READY}']))}"


def _look(test: str, path: str) -> str:
    return f"{test} {quoted(path)} >/dev/null || echo {shlex.quote(MISSING + path)}"


class MissingHosts:
    """Asks each host by ssh now and then, from `since` on; the launching machine is always there."""

    def __init__(self, job: Job, hosts: Iterable[Host], since: float) -> None:
        self._job, self.hosts, self._ask_at = job, list(hosts), since
        self._asked: Dict[Host, subprocess.Popen[bytes]] = {}
        self._answered: Dict[Host, bool] = {}  # whether the host has answered the last question

    def ask(self, now: float) -> None:
        """Take the answers that have come; ask again, if it is time."""
        for host, question in list(self._asked.items()):
            if now > self._ask_at - ASKED_EVERY_S + BACK_WITHIN_S:
                question.kill()
                question.wait()
            if question.poll() is not None:
                del self._asked[host]
                self._answered[host] = question.returncode == 0
        if self.hosts and now >= self._ask_at and not self._asked:
            self._ask_at = now + ASKED_EVERY_S
            self._answered.update((host, True) for host in self.hosts if host.here)
            for host in self.hosts:
                with contextlib.suppress(OSError):  # no process can be started now
                    if not host.here:
                        command = [*ssh_to(self._job, host, CONNECTED_WITHIN_S), host.target, "true"]
                        self._asked[host] = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True,
                                                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    @property
    def back(self) -> List[Host]:
        """The hosts that have answered the last question."""
        return [host for host in self.hosts if self._answered.get(host)]

    def close(self) -> None:
        """Ask no more."""
        for question in self._asked.values():
            question.kill()
            question.wait()
        self._asked = {}
