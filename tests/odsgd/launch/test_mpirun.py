"""The command line of mpirun."""
from pathlib import Path

import pytest

from odsgd.launch.hosts import Host
from odsgd.launch.mpirun import mpirun_command
from tests.odsgd.launch.jobs import job


@pytest.mark.parametrize("version, options", [
    ("mpirun (Open MPI) 4.1.4", "--bind-to none --oversubscribe --host a:2,b:1 -x ODSGD_AGENT_JOBS -x PYTHONPATH"),
    ("HYDRA build details:", "-hosts a:2,b:1 -genvlist ODSGD_AGENT_JOBS,PYTHONPATH"),
])
def test_mpirun_is_spoken_to_in_its_own_dialect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                version: str, options: str) -> None:
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho '{}'\n".format(version))
    program.chmod(0o755)
    monkeypatch.setenv("ODSGD_MPIRUN", str(program))
    command = mpirun_command(job(3, 1, Host("a"), Host("b"), Host("a"), launcher="mpi", remote_python="python3"))
    assert command == [str(program), "-n", "3", *options.split()]
