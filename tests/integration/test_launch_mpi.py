"""Jobs through mpirun: a stand-in in the manner of Open MPI, the wheel's MPICH, Debian's Open MPI and MPICH."""
import signal
import sys
from pathlib import Path

import pytest

from tests.integration.launching import (
    DEBIANS,
    MEMBER,
    Launch,
    Way,
    by_mpirun,
    command_line,
    debians_mpirun,
    leaves_nothing_when_killed,
    marked,
    real_mpirun,
    stand_in_mpirun,
)

NO_MPI = pytest.mark.skipif(not real_mpirun(), reason="no mpiexec here")


@pytest.fixture(params=["stand-in", pytest.param("wheel", marks=NO_MPI),
                        *(pytest.param(name, marks=pytest.mark.slow) for name in DEBIANS)])
def mpi(request: pytest.FixtureRequest, tmp_path: Path) -> Way:
    """Options and environment of an MPI job on this machine."""
    if request.param in DEBIANS:
        return by_mpirun(debians_mpirun(request.param))
    return by_mpirun((request.param == "wheel" and real_mpirun()) or stand_in_mpirun(tmp_path))


def test_a_job_succeeds(mpi: Way) -> None:
    options, env = mpi
    with Launch("-n", 2, "-s", 1, *options, MEMBER, env=env) as launch:
        launch.wait_for_all_joined()
        assert launch.wait() == 0
    assert launch.said == ""


def test_mpirun_says_which_worker_of_its_host_each_is(mpi: Way) -> None:
    options, env = mpi
    show = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE"
    with Launch("-n", 2, "--store", "none", *options, "sh", "-c", show, env=env) as launch:
        assert launch.wait() == 0
    assert sorted(launch.output) == ["worker 0 | 0 2 0 2", "worker 1 | 1 2 1 2"]


def test_kill_9_of_a_worker_ends_the_job_and_names_it(mpi: Way) -> None:
    options, env = mpi
    with Launch("-n", 2, "-s", 1, *options, MEMBER, "children", env=env) as launch:
        launch.wait_for("worker 0 | has children", "worker 1 | has children")
        secret = marked(launch.mark)[launch.pid("worker 1")]["ODSGD_SECRET"]
        assert not any(secret in command_line(pid) for pid in marked(launch.mark))
        launch.kill("worker 1", signal.SIGKILL)
        assert launch.wait() == 137
    assert launch.said.startswith("worker 1 failed (host ")


def test_kill_9_of_the_launcher_leaves_nothing_behind(mpi: Way) -> None:
    options, env = mpi
    leaves_nothing_when_killed(*options, env=env)


def test_mpirun_that_cannot_start_is_told_with_its_own_words(tmp_path: Path) -> None:
    program = stand_in_mpirun(tmp_path, "sys.exit('not enough slots')")
    options, env = by_mpirun(program)
    with Launch("-n", 2, "-s", 0, *options, MEMBER, env=env) as launch:
        assert launch.wait() == 70
    assert launch.said == ("lost host of MPI (worker 0, worker 1): mpirun ended with exit code 1 before they started: "
                           "not enough slots")


def test_no_mpirun_is_one_line(tmp_path: Path) -> None:
    with Launch("-n", 2, "--launcher", "mpi", sys.executable, env={"ODSGD_MPIRUN": str(tmp_path / "none")}) as launch:
        assert launch.wait() == 64
    assert launch.said == f"--launcher mpi: cannot run {tmp_path / 'none'}: No such file or directory"
