"""Jobs over several hosts through a real ssh, sshd and rsync; each host has namespaces of its own, on this machine."""
from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple

import pytest

from odsgd.lab.cluster import Cluster
from odsgd.launch.linux import descendants
from tests.integration import debian
from tests.integration.launching import (
    MARK,
    MEMBER,
    PATIENCE_S,
    Launch,
    Word,
    command_line,
    leaves_nothing_when_killed,
    marked,
    words,
)
from tests.integration.test_emulated_cluster import WHY_NOT
from tests.jobs import until

pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT), pytest.mark.slow]

SSHD = """
HostKey {folder}/host
AuthorizedKeysFile {folder}/client.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
AcceptEnv {mark}
"""
SSH = """
IdentityFile {folder}/{key}
IdentitiesOnly yes
UserKnownHostsFile {folder}/known
SendEnv {mark}
"""
REAL_SERVER = {"LAUNCH_TEST_SERVER": words(sys.executable, "-m", "kvstore.weights.servers"), "OMP_NUM_THREADS": "1"}


class Hosts(NamedTuple):
    """Three hosts: two with sshd, the last without."""

    cluster: Cluster
    folder: Path

    def launch(self, *arguments: Word, key: str = "client", cwd: Path | None = None, listed: str = "host0\nhost1\n",
               **env: str) -> Launch:
        """`odsgd launch` on the head of the cluster."""
        (self.folder / "hosts").write_text(listed)
        return Launch("-H", self.folder / "hosts", *arguments, env={**self.environment(key), **env}, cwd=cwd,
                      cluster=self.cluster)

    def environment(self, key: str = "client") -> Dict[str, str]:
        return {"ODSGD_SSH": f"ssh -F {self.folder / key}.config"}

    def ssh(self, host: str) -> bool:
        """Whether one gets there."""
        return self.cluster.run([*shlex.split(self.environment()["ODSGD_SSH"]), "-o", "StrictHostKeyChecking=no", host,
                                 "true"], timeout=PATIENCE_S).returncode == 0


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    programs = debian.provide({"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client",
                               "rsync": "rsync"})
    folder = tmp_path_factory.mktemp("ssh")
    for key in ("host", "client", "stranger"):
        subprocess.run([programs["ssh-keygen"], "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True,
                       timeout=PATIENCE_S)
        (folder / f"{key}.config").write_text(SSH.format(folder=folder, key=key, mark=MARK))
    (folder / "sshd.config").write_text(SSHD.format(folder=folder, mark=MARK))
    if not os.path.isdir("/run/sshd"):
        debian.ask("sshd needs /run/sshd")
        os.makedirs("/run/sshd")
    with Cluster.up(hosts=3) as cluster:
        up = Hosts(cluster, folder)
        for number in (0, 1):
            cluster.popen([programs["sshd"], "-D", "-f", str(folder / "sshd.config")], host=number,
                          stdin=subprocess.DEVNULL)
        until(lambda: up.ssh("host0") and up.ssh("host1"), PATIENCE_S)
        (folder / "known").unlink()  # each host is new to the first job
        yield up


def test_a_job_trains_from_a_copy_of_its_folder(hosts: Hosts, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    (here / "digits.yaml").write_text("dataset: digits\nmodel: mlp\nepochs: 1\nbatch_size: 64\nlr: 0.1\n")
    with hosts.launch("-n", 2, "-s", 1, "--sync-dst-dir", there, sys.executable, "-m", "odsgd", "train", "--config",
                      "digits.yaml", "--out", "runs", cwd=here, **REAL_SERVER) as launch:
        assert launch.wait() == 0, launch
    assert launch.said == "" and not any("known hosts" in line for line in launch.errors)
    assert list((there / "runs").rglob("metrics.jsonl")) and not (here / "runs").exists()


def test_kill_9_of_a_worker_on_another_host_names_both(hosts: Hosts) -> None:
    with hosts.launch("-n", 2, "-s", 1, MEMBER, "children") as launch:
        launch.wait_for("worker 0 | has children", "worker 1 | has children")
        launch.kill("worker 1", signal.SIGKILL)
        assert launch.wait() == 137
    assert launch.said.startswith("worker 1 failed (host host1, pid") and "killed by SIGKILL" in launch.said


def test_kill_9_of_the_launcher_leaves_nothing_on_any_host(hosts: Hosts) -> None:
    (hosts.folder / "hosts").write_text("host0\nhost1\n")
    leaves_nothing_when_killed("-H", hosts.folder / "hosts", env=hosts.environment(), cluster=hosts.cluster)


def test_a_connection_that_breaks_is_told_and_ends_what_was_at_its_other_end(hosts: Hosts) -> None:
    with hosts.launch("-n", 2, "-s", 1, MEMBER, "children") as launch:
        launch.wait_for("worker 0 | has children", "worker 1 | has children")
        worker = launch.pid("worker 1")
        served = [pid for pid in sessions() if worker in descendants(pid)]
        os.kill(max(served), signal.SIGKILL)
        assert launch.wait() == 70
    assert launch.said.startswith("lost host host1 (worker 1): ssh ended with exit code 255")


def sessions() -> List[int]:
    """The processes of sshd that serve a connection."""
    return [int(pid) for pid in filter(str.isdigit, os.listdir("/proc")) if command_line(pid).startswith("sshd: root")]


@pytest.mark.parametrize("host, key, said", [
    ("host2", "client", "ssh: connect to host host2 port 22: Connection refused"),
    ("10.0.0.77", "client", "ssh: connect to host 10.0.0.77 port 22: No route to host"),
    ("host1", "stranger", "root@host1: Permission denied (publickey).")], ids=["no sshd", "no host", "no key"])
def test_a_host_that_does_not_answer_is_one_line_with_sshs_own_words(hosts: Hosts, host: str, key: str,
                                                                     said: str) -> None:
    with hosts.launch("-n", 1, "-s", 0, MEMBER, "wait", listed=f"{host}\n", key=key) as launch:
        assert launch.wait() == 70
    assert launch.said == ("1 of 1 hosts cannot take part; nothing was started\n"
                           f"  {host}: ssh ended with exit code 255: {said}")


def test_a_host_whose_key_has_changed_is_refused(hosts: Hosts) -> None:
    known = hosts.folder / "known"
    before = known.read_text() if known.exists() else ""
    known.write_text("host0 " + (hosts.folder / "stranger.pub").read_text())
    try:
        with hosts.launch("-n", 1, "-s", 0, MEMBER, "wait", listed="host0\n") as launch:
            assert launch.wait() == 70
    finally:
        known.write_text(before)
    assert launch.said.startswith("1 of 1 hosts cannot take part; nothing was started\n  host0: ssh ended with exit")
    assert "Host key verification failed" in str(launch)


def test_a_copy_that_fails_is_one_line_with_its_cause(hosts: Hosts, tmp_path: Path) -> None:
    host, folder = "host1", "/proc/no/copy"
    said = "rsync: [Receiver] change_dir#3 \"/proc/no\" failed: No such file or directory (2)"
    with hosts.launch("-n", 1, "-s", 0, "--sync-dst-dir", folder, MEMBER, listed=f"{host}\n", cwd=tmp_path) as launch:
        assert launch.process.wait(PATIENCE_S) == 70
    until(lambda: not marked(launch.mark), PATIENCE_S)  # rsync over there, which hears of the end last
    # rsync ends its ssh when it fails, now and then before what was said over there has come through.
    failed = re.escape(f"copying the working directory to {host}:{folder} failed: rsync ended with exit code ")
    why = rf"(: ({re.escape(said)}|rsync: connection unexpectedly closed.*|rsync error: .*))?"
    assert re.fullmatch(rf"{failed}\d+{why}", launch.said), launch.said
