"""Jobs through a real Slurm: slurmctld on the head of an emulated cluster, slurmd on each of its hosts."""
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, NamedTuple

import pytest

from odsgd.lab.cluster import Cluster
from tests.integration import debian
from tests.integration.launching import MEMBER, PATIENCE_S, Launch, Word, leaves_nothing_when_killed, words
from tests.integration.test_emulated_cluster import WHY_NOT
from tests.jobs import ROOT, until

pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT), pytest.mark.slow]

CONFIGURATION = """
ClusterName=test
SlurmctldHost=head(10.0.0.254)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=5
NodeName=host[0-2] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE
"""


class Slurm(NamedTuple):
    """Three nodes, and this cluster's variables."""

    cluster: Cluster
    folder: Path
    env: Dict[str, str]

    def salloc(self, asked: str, *arguments: Word) -> Launch:
        """`odsgd launch` beside the allocation, on the login node."""
        return Launch("--launcher", "slurm", *arguments, env=self.env, cluster=self.cluster,
                      within=("salloc", "-Q", *asked.split()))

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return self.cluster.run(command, env=self.env, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    programs = debian.provide({"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client",
                               "salloc": "slurm-client", "sbatch": "slurm-client", "munged": "munge"})
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # unused, and not to be looked for
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    munged = [programs["munged"], "--foreground", "--force", f"--socket={folder}/munge.socket",
              f"--key-file={folder}/munge.key", f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munge.seed",
              f"--log-file={folder}/munged.log"]
    env = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": debian.PATH}
    quiet: Dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with Cluster.up(hosts=3) as cluster:
        up = Slurm(cluster, folder, env)
        cluster.popen(munged, **quiet)
        until((folder / "munge.socket").exists, PATIENCE_S)
        cluster.popen([programs["slurmctld"], "-D"], env=env, **quiet)
        for host in range(3):
            cluster.popen([programs["slurmd"], "-D"], env=env, host=host, **quiet)
        until(lambda: up.run("sinfo", "-h", "-o", "%T %D").stdout.split() == ["idle", "3"], PATIENCE_S)
        yield up


def test_a_job_trains_in_a_script_of_sbatch(slurm: Slurm, tmp_path: Path) -> None:
    """Without the user's environment, as sites have it that ask for --export=NONE."""
    launch = [sys.executable, str(ROOT / "scripts" / "launch.py"), "-n", "2", "-s", "1", "--launcher", "slurm",
              sys.executable, "-m", "odsgd", "train", "--dataset", "digits", "--model", "mlp", "--epochs", "1", "--out",
              str(tmp_path / "runs")]
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\n#SBATCH --nodes=3 --export=NONE --output={tmp_path}/output\n"
                      f"export SLURM_CONF={slurm.env['SLURM_CONF']} OMP_NUM_THREADS=1 PYTHONPATH={ROOT}\n"
                      f"exec {words(*launch)}\n")
    number = slurm.run("sbatch", "--parsable", "--chdir", str(tmp_path), str(script)).stdout.strip()
    told = ""

    def has_ended() -> bool:
        nonlocal told
        told = slurm.run("scontrol", "show", "job", number).stdout
        return not any(state in told for state in ("PENDING", "RUNNING", "COMPLETING"))
    until(has_ended, PATIENCE_S)
    output = (tmp_path / "output").read_text()
    assert "JobState=COMPLETED" in told and "ExitCode=0:0" in told, told + output
    assert list((tmp_path / "runs").rglob("metrics.jsonl"))
    assert set(re.findall("odsgd launch: (.{13})", output)) <= {"warning: star"}  # of a start that takes long


@pytest.mark.parametrize("asked, hosts", [("-N 3", "0120"), ("-N 3 --ntasks-per-node=2", "0011")])
def test_workers_are_placed_on_the_nodes_of_the_allocation(slurm: Slurm, tmp_path: Path, asked: str,
                                                           hosts: str) -> None:
    show = tmp_path / "show.py"
    show.write_text("import os, socket\nprint(socket.gethostname(), os.environ['DMLC_NODE_HOST'], os.environ['GIVEN'], "
                    "os.getcwd())\n")
    with slurm.salloc(asked, "-n", 4, "--store", "none", "--env", "GIVEN:a b'c", show) as launch:
        assert launch.wait() == 0, launch
    assert sorted(launch.output) == [f"worker {rank} | host{host} 10.0.0.{int(host) + 1} a b'c {os.getcwd()}"
                                     for rank, host in enumerate(hosts)]


def test_a_job_that_has_failed_starts_again_in_the_same_allocation(slurm: Slurm) -> None:
    with slurm.salloc("-N 2", "-n", 2, "--store", "none", "--max-restarts", 1, "sh", "-c",
                      "echo attempt ${ODSGD_RESTARTS:-0}; test -n \"$ODSGD_RESTARTS\" || exit 3") as launch:
        assert launch.wait() == 0, launch
    assert "restart 1 of 1" in launch.said
    assert {f"worker {rank} | attempt 1" for rank in (0, 1)} <= set(launch.output)


def test_kill_9_of_a_worker_names_it_and_its_node(slurm: Slurm) -> None:
    with slurm.salloc("-N 2", "-n", 2, "-s", 1, MEMBER, "children") as launch:
        launch.wait_for("worker 0 | has children", "worker 1 | has children")
        launch.kill("worker 1", signal.SIGKILL)
        assert launch.wait() == 137
    assert re.match(r"worker 1 failed \(host host\d, pid \d+\): killed by SIGKILL", launch.said)


def test_kill_9_of_the_launcher_leaves_nothing_on_any_node(slurm: Slurm) -> None:
    leaves_nothing_when_killed("--launcher", "slurm", env=slurm.env, cluster=slurm.cluster,
                               within=("salloc", "-Q", "-N", "2"))


def test_a_job_that_is_cancelled_ends_on_every_node(slurm: Slurm) -> None:
    with slurm.salloc("-N 2", "-n", 2, "-s", 1, MEMBER, "children") as launch:
        launch.wait_for("worker 0 | has children", "worker 1 | has children")
        number = slurm.run("squeue", "-h", "-t", "RUNNING", "-o", "%i").stdout.split()[0]
        assert slurm.run("scancel", number).returncode == 0
        assert launch.wait() == 143
    assert re.match(r"lost host host\d \(.*\): its agent was told to end by SIGTERM", launch.said)


def test_srun_that_cannot_start_is_told_with_its_own_words(slurm: Slurm) -> None:
    with slurm.salloc("-N 1", "-n", 1, "-s", 0, "--remote-python", "/no/such/python", MEMBER) as launch:
        assert launch.wait() == 70
    assert launch.said.startswith("lost host of Slurm (worker 0): srun ended with exit code 2 before they started")
    assert "/no/such/python" in launch.said and "No such file or directory" in launch.said


def test_without_an_allocation_nothing_starts(slurm: Slurm) -> None:
    with Launch("--launcher", "slurm", "-n", 2, MEMBER, env=slurm.env, cluster=slurm.cluster) as launch:
        assert launch.wait() == 64
    assert launch.said == ("--launcher slurm needs an allocation, and runs in none: run it in a script for sbatch, or "
                           "from here as `salloc --nodes=N odsgd launch ...`")
