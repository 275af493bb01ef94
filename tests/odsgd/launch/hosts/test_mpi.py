"""The command line of mpirun."""
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from odsgd.launch.hostfile import Host
from odsgd.launch.hosts.mpi import mpirun_command, open_mpirun
from odsgd.launch.plan import make_plan
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


def test_more_agents_than_a_variable_has_room_for_are_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODSGD_MPIRUN", "echo")
    asked = job(4096, 0, launcher="mpi", host_ip="127.0.0.1")
    with pytest.raises(ConfigError, match=r"the orders of 4096 agents have \d+ KiB, and Linux hands on at most 128"):
        open_mpirun(asked, make_plan(asked, ("127.0.0.1", 4000)))
