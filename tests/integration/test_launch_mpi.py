"""Jobs through mpirun: a stand-in in the manner of Open MPI, and the real one where there is one."""
import os
import shutil
import signal
import sys

import pytest
from launching import MEMBER, Launch, command_line, leaves_nothing_when_killed, marked, python_program

OPEN_MPI = """# Like Open MPI: ranks in OMPI_*, and only the variables named by -x reach them.
import os, subprocess, sys
words = sys.argv[1:]
if words == ["--version"]:
    sys.exit(print("mpirun (Open MPI) 4.1.4"))
keep = {{name: os.environ[name] for name in ("PATH", "HOME", "LAUNCH_TEST_MARK")}}
while words[0].startswith("-"):
    option = words.pop(0)
    value = None if option == "--oversubscribe" else words.pop(0)
    if option == "-n":
        count = int(value)
    elif option == "-x":
        keep[value] = os.environ[value]
{note}
ranks = [subprocess.Popen(words, env=dict(keep, OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_LOCAL_SIZE=str(count)))
         for rank in range(count)]
sys.exit(max(rank.wait() for rank in ranks))
"""
REAL = shutil.which("mpiexec") or shutil.which("mpiexec", path=os.path.dirname(sys.executable))


def stand_in(folder, note=""):
    return python_program(folder / "mpirun", OPEN_MPI.format(note=note))


@pytest.fixture(params=["stand-in", pytest.param("real", marks=pytest.mark.skipif(not REAL, reason="no mpiexec here"))])
def mpi(request, tmp_path):
    """Options and environment of an MPI job on this machine."""
    program = stand_in(tmp_path) if request.param == "stand-in" else REAL
    return ["--launcher", "mpi", "--host-ip", "127.0.0.1"], {"ODSGD_MPIRUN": program, "HYDRA_LAUNCHER": "fork"}


def test_a_job_succeeds(mpi):
    options, env = mpi
    with Launch("-n", 2, "-s", 1, *options, MEMBER, env=env) as launch:
        launch.wait_for_all_joined()
        assert launch.wait() == 0
    assert launch.said == ""


def test_kill_9_of_a_worker_ends_the_job_and_names_it(mpi):
    options, env = mpi
    with Launch("-n", 2, "-s", 1, *options, MEMBER, "children", env=env) as launch:
        launch.wait_for("worker 0 | has children", "worker 1 | has children")
        secret = marked(launch.mark)[launch.pid("worker 1")]["ODSGD_SECRET"]
        assert not any(secret in command_line(pid) for pid in marked(launch.mark))
        launch.kill("worker 1", signal.SIGKILL)
        assert launch.wait() == 137
    assert launch.said.startswith("worker 1 failed (host ")


def test_kill_9_of_the_launcher_leaves_nothing_behind(mpi):
    options, env = mpi
    leaves_nothing_when_killed(*options, env=env)


def test_mpirun_that_cannot_start_is_told_with_its_own_words(tmp_path):
    program = stand_in(tmp_path, "sys.exit('not enough slots')")
    with Launch("-n", 2, "-s", 0, "--launcher", "mpi", "--host-ip", "127.0.0.1", MEMBER,
                env={"ODSGD_MPIRUN": program}) as launch:
        assert launch.wait() == 70
    assert launch.said == ("lost host of MPI (worker 0, worker 1): mpirun ended with exit code 1 before they started\n"
                           "  what was heard from there:\n    | not enough slots")


def test_no_mpirun_is_one_line(tmp_path):
    with Launch("-n", 2, "--launcher", "mpi", sys.executable, env={"ODSGD_MPIRUN": str(tmp_path / "none")}) as launch:
        assert launch.wait() == 64
    assert launch.said == "--launcher mpi: cannot run %s: No such file or directory" % (tmp_path / "none")
