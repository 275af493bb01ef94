"""Jobs without servers, whose workers find each other through the launcher and send by MPI; real MPI processes."""
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Iterator, List, Set, Union

import pytest

from odsgd.lab.cluster import Cluster
from odsgd.launch.linux import descendants
from tests.integration.launching import (
    HERE,
    MARK,
    PATIENCE_S,
    ROOT,
    Launch,
    Way,
    by_mpirun,
    by_ssh,
    command_line,
    marked,
    real_mpirun,
    stand_in_mpirun,
    stand_in_ssh,
)
from tests.integration.test_emulated_cluster import WHY_NOT
from tests.jobs import until

MEMBER = os.path.join(HERE, "launch_ring_member.py")

VENDOR = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"


def why_not() -> str:
    """Why these tests cannot run here."""
    if importlib.util.find_spec("mpi4py") is None:
        return "no mpi4py here"
    asked = subprocess.run([sys.executable, "-c", VENDOR], capture_output=True, timeout=300)
    if asked.returncode:
        return "mpi4py finds no MPI here"
    return "Open MPI does not speak PMI-1" if b"Open MPI" in asked.stdout else ""


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def shared_memory(launch: Launch) -> Set[str]:
    """Files of the memory that the job's processes share by MPICH, whether they still have a name or not."""
    found: Set[str] = set()

    def look() -> bool:
        for pid in marked(launch.mark):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
                found.update(re.findall(r" (/dev/shm/mpich_\w+)(?: \(deleted\))?$", maps.read(), re.MULTILINE))
        return bool(found)
    until(look, PATIENCE_S)
    return found


@pytest.fixture(params=["local", "ssh", "mpi"])
def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> Way:
    """Options and environment of a job on two hosts, both this machine, or on one."""
    if request.param == "ssh":
        return by_ssh(tmp_path, "127.0.0.1\n127.0.0.2\n")
    return by_mpirun(real_mpirun() or stand_in_mpirun(tmp_path)) if request.param == "mpi" else ([], {})


def test_workers_meet_and_have_the_launchers_ranks(launcher: Way) -> None:
    options, env = launcher
    with Launch("-n", 3, "-s", 0, *options, MEMBER, env=env) as launch:
        assert launch.wait() == 0
    assert sorted(launch.output) == [f"worker {rank} | rank {rank} of 3, sum 6, by lo" for rank in range(3)]
    assert launch.said == ""


def test_kill_9_of_a_worker_in_the_middle_of_sums_ends_the_job_and_names_it(launcher: Way) -> None:
    options, env = launcher
    with Launch("-n", 2, "-s", 0, *options, MEMBER, "sums", env=env) as launch:
        launch.wait_for(*(f"worker {rank} | rank {rank} of 2, sum 3, by lo" for rank in range(2)))
        memory = shared_memory(launch)
        launch.kill("worker 1", signal.SIGKILL)
        assert launch.wait() == 137
    assert launch.said.startswith("worker 1 failed (host ") and "killed by SIGKILL" in launch.said
    assert not any(map(os.path.exists, memory))


def test_kill_9_of_a_worker_that_owns_parts_ends_the_job_and_names_it() -> None:
    with Launch("-n", 2, "-s", 0, MEMBER, "parts") as launch:
        launch.wait_for("worker 0 | training", "worker 1 | training")
        launch.kill("worker 1", signal.SIGKILL)
        assert launch.wait() == 137
    assert launch.said.startswith("worker 1 failed (host ") and "killed by SIGKILL" in launch.said


def test_a_worker_that_owns_parts_and_stands_still_is_missed_at_the_deadline() -> None:
    with Launch("-n", 2, "-s", 0, "--env-worker", "MEMBER_ROUND_TIMEOUT_S:5", MEMBER, "stall parts") as launch:
        assert launch.wait() == 75
    assert "nothing has moved on the ring for 5 s; worker 1, from which this one receives" in launch.said


FOREIGN = """from mpi4py import MPI
import time
print("rank %d of %d" % (MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()))
time.sleep(600)
"""


def test_a_script_of_mpi4py_is_served_and_ctrl_c_leaves_nothing_of_it(launcher: Way, tmp_path: Path) -> None:
    options, env = launcher
    script = tmp_path / "foreign.py"
    script.write_text(FOREIGN)
    with Launch("-n", 2, "-s", 0, *options, script, env=env) as launch:
        launch.wait_for("worker 0 | rank 0 of 2", "worker 1 | rank 1 of 2")
        memory = shared_memory(launch)
        assert any(map(os.path.exists, memory))
        launch.process.send_signal(signal.SIGINT)
        assert launch.wait() == 130
    assert launch.said == "stopped by SIGINT; nothing of the job is left"
    assert not any(map(os.path.exists, memory))


def test_workers_who_meet_by_mpi_need_no_store(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text("from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n")
    with Launch("-n", 2, "-s", 0, script) as launch:
        assert launch.wait() == 0
    assert launch.said == ""


def test_mpi_abort_ends_the_job_with_its_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "aborts.py"
    script.write_text("from mpi4py import MPI\nif MPI.COMM_WORLD.Get_rank() == 1:\n    MPI.COMM_WORLD.Abort(7)\n"
                      "MPI.COMM_WORLD.Barrier()\n")
    with Launch("-n", 2, "-s", 0, script) as launch:
        assert launch.wait() == 7
    assert launch.said.startswith("worker 1 failed (host 127.0.0.1, pid ")
    assert ": its MPI has aborted, exit code 7" in launch.said


def test_a_library_without_what_it_is_to_send_by_is_told() -> None:
    with Launch("-n", 1, "-s", 0, "--env", "MPIR_CVAR_CH4_NETMOD:carrier-pigeon", MEMBER) as launch:
        assert launch.wait() != 0
    assert "MPI is to send by `carrier-pigeon` (MPIR_CVAR_CH4_NETMOD; --secure" in launch.said


def test_a_worker_that_stands_still_is_missed_at_the_deadline() -> None:
    with Launch("-n", 2, "-s", 0, "--env-worker", "MEMBER_WORKER_1:stop", "--env-worker", "MEMBER_TIMEOUT_S:5",
                MEMBER) as launch:
        memory = shared_memory(launch)
        assert launch.wait() == 75
    assert not any(map(os.path.exists, memory))
    assert launch.said.startswith("worker 0 failed")
    assert "the job did not come up within 5 s: 2 workers expected to meet; check that each was" in launch.said


def test_a_worker_that_stands_still_in_mid_job_is_missed_at_the_deadline() -> None:
    with Launch("-n", 2, "-s", 0, "--env-worker", "MEMBER_ROUND_TIMEOUT_S:5", MEMBER, "stall") as launch:
        assert launch.wait() == 75
    assert launch.said.startswith("worker 0 failed") and "late, stopped or unreachable" in launch.said


def test_a_worker_that_does_not_come_is_missed_though_there_is_no_scheduler() -> None:
    for timeout_s in (3, 20, 80):  # how soon the other has come is the machine's affair
        with Launch("-n", 2, "-s", 0, "--startup-timeout", timeout_s, "--env-worker", "MEMBER_WORKER_1:late",
                    MEMBER) as launch:
            assert launch.wait() == 75
        if "missing: worker 0" not in launch.said:
            break
    assert launch.said.startswith(f"the job has not come up within {timeout_s} s; missing: worker 1 (1 of 2)")


def test_two_jobs_at_once_do_not_meet() -> None:
    with Launch("-n", 2, "-s", 0, MEMBER) as one, Launch("-n", 2, "-s", 0, MEMBER) as two:
        assert one.wait() == 0 and two.wait() == 0
    assert sorted(one.output) == sorted(two.output)


def test_what_the_launcher_does_not_serve_is_told() -> None:
    with Launch("-n", 2, "-s", 0, "--env-worker", "MEMBER_WORKER_1:spawn", MEMBER) as launch:
        assert launch.wait() != 0
    assert "worker 1: its MPI asked for " in launch.said


def test_a_program_between_that_closes_descriptors_is_told() -> None:
    between = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, {MEMBER!r}]).returncode)"
    with Launch("-n", 1, "-s", 0, sys.executable, "-c", between) as launch:
        assert launch.wait() != 0
    assert "the descriptor by which MPI finds the other workers (PMI_FD) has been closed" in launch.said


@pytest.mark.parametrize("options, complaint", [
    (["-s", 1], "this store sends from worker to worker and the job has 1 server; launch it with `-s 0`"),
    (["-s", 0, "--on-worker-loss", "continue"], "--on-worker-loss continue is for asynchronous stores"),
])
def test_a_script_whose_store_does_not_go_with_the_job_says_so(options: List[Union[str, int]], complaint: str) -> None:
    with Launch("-n", 1, *options, MEMBER) as launch:
        assert launch.wait() == 1
    assert complaint in launch.said


# -- hosts with networks of their own ---------------------------------------------------------------------------------

def ip(*words: str) -> bytes:
    return subprocess.run(["ip", *words], check=True, capture_output=True).stdout


def wait_for_carrier(name: str, interface: str) -> None:
    until(lambda: b"state UP" in ip("-n", name, "link", "show", interface, "up"), PATIENCE_S)


def can_make_namespaces() -> bool:
    if not shutil.which("ip"):
        return False
    name = f"odsgd-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made.returncode == 0


@pytest.fixture
def networks() -> Iterator[List[str]]:
    """Two namespaces joined by `e0`; each has another interface besides, of the same address, as Docker makes."""
    if not can_make_namespaces():
        pytest.skip("needs root and iproute2")
    names = [f"odsgd-{os.getpid()}-{number}" for number in (1, 2)]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "add", "d0", "type", "veth", "peer", "name", "d1")
            ip("-n", name, "addr", "add", "172.17.0.1/16", "dev", "d0")
            for interface in ("lo", "d0", "d1"):
                ip("-n", name, "link", "set", interface, "up")
        ip("link", "add", "e0", "netns", names[0], "type", "veth", "peer", "name", "e0", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "e0")
            ip("-n", name, "link", "set", "e0", "up")
        for name in names:
            wait_for_carrier(name, "e0")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.PIPE)


def test_mpi_takes_the_network_that_leads_to_the_others(networks: List[str], tmp_path: Path) -> None:
    options, _ = by_ssh(tmp_path, "10.77.0.1\n10.77.0.2\n")
    ssh = stand_in_ssh(tmp_path, f"""
exec ip netns exec odsgd-{os.getpid()}-${{host##*.}} env -i PATH="$PATH" HOME="$HOME" {MARK}="${MARK}" sh -c "$*" """)
    env = {"ODSGD_SSH": ssh, "UCX_TLS": "tcp,self"}  # one kernel: it would take its memory for a network
    with Launch("-n", 2, "-s", 0, *options, MEMBER, env=env, within=("ip", "netns", "exec", networks[0])) as launch:
        assert launch.wait() == 0, str(launch)
    assert sorted(launch.output) == [f"worker {rank} | rank {rank} of 2, sum 3, by e0" for rank in range(2)]


# -- hosts that see of each other a tunnel's port and nothing else -----------------------------------------------------

@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    with Cluster.up(hosts=3) as hosts:
        yield hosts


def test_a_secure_job_trains_to_the_bits_of_another(hosts: Cluster, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("host0 slots=2\nhost1\n")
    weights = []
    for options, transport in ([], "ring"), (["--secure"], "sharded"):  # with the same bits
        train = ["train", "--dataset", "digits", "--kvstore", "odsgd", "--transport", transport, "--lr", "0.1",
                 "--iterations", "8", "--checkpoint-every", "8", "--out", str(tmp_path / transport)]
        job = hosts.run([sys.executable, "-m", "odsgd", "launch", *options, "-n", "3", "-H", str(tmp_path / "hosts"),
                         sys.executable, "-m", "odsgd", *train], env={"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"},
                        timeout=PATIENCE_S)
        assert job.returncode == 0, job.stdout + job.stderr
        weights.append((tmp_path / transport / "checkpoints" / "8" / "weights.params").read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.parametrize("victim", ["worker 1", "tunnel"])
def test_kill_9_of_a_worker_or_a_tunnel_of_a_secure_job_is_named(hosts: Cluster, victim: str) -> None:
    with Launch("--secure", "-n", 3, "-s", 0, "-H", "@hosts", "--env", MARK, MEMBER, "sums", cluster=hosts) as launch:
        launch.wait_for(*(f"worker {rank} | rank {rank} of 3, sum 6, by lo" for rank in range(3)))
        if victim == "tunnel":
            os.kill(next(pid for pid in descendants(launch.process.pid)
                         if "odsgd.launch.connections.tunnel" in command_line(pid)), signal.SIGKILL)
            assert launch.wait() == 70
            assert launch.said.startswith("lost host host") and "the tunnel of this host has ended" in launch.said
        else:
            launch.kill(victim, signal.SIGKILL)
            assert launch.wait() == 137
            assert launch.said.startswith("worker 1 failed (host host1") and "killed by SIGKILL" in launch.said
