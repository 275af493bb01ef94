"""The orders of agents, and how agents are started elsewhere: by ssh, mpirun and srun."""
import dataclasses
from pathlib import Path
from typing import Sequence

import pytest

from kvstore.errors import ConfigError
from odsgd.launch.hostfile import Host
from odsgd.launch.hosts import slurm, ssh
from odsgd.launch.hosts.mpi import mpirun_command, open_mpirun
from odsgd.launch.hosts.ssh import check_tunnels, orders, remote_command, ssh_to
from odsgd.launch.plan import make_plan
from tests.odsgd.launch.jobs import ROOT, A, job


def test_what_all_processes_share_is_told_once() -> None:
    asked = job(2, 1, port=4000)
    plan = make_plan(asked, ("127.0.0.1", 4000))
    told = orders(asked, plan.workers, remote=False)
    assert told.sockets == {} and told.tunnel is None
    assert told.env["ODSGD_SECRET"] == plan.secret
    assert [process.env for process in told.processes] == [
        {"DMLC_WORKER_ID": rank, "ODSGD_WORKER_RANK": rank, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]


def test_only_a_job_that_goes_on_tells_of_losses() -> None:
    plan = make_plan(job(2, 0), ROOT)
    told = [orders(job(2, 0, on_worker_loss=policy), plan.processes, remote=False).tells_losses
            for policy in ("fail", "continue")]
    assert told == [False, True]


def test_a_host_whose_key_has_changed_is_refused_and_with_secure_a_new_one_as_well() -> None:
    said = {secure: [word for word in ssh_to(job(1, 1, A, secure=secure), A) if "HostKey" in word]
            for secure in (False, True)}
    assert said == {False: ["StrictHostKeyChecking=accept-new"], True: []}


def test_the_remote_command_is_quoted_for_the_shell_over_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "it's here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    command = remote_command(job(1, 1, A, remote_python="/opt/py 3/python"))
    assert command.startswith("cd '" + str(tmp_path) + "/it'\"'\"'s here' && exec env ")
    assert command.endswith(" '/opt/py 3/python' -c '" + ssh.AGENT[1] + "'")
    command = remote_command(job(1, 1, A, remote_python="~/my venv/bin/python", sync_dst_dir="~/work"))
    assert command.startswith('cd "$HOME"/work && exec ') and " \"$HOME\"/'my venv/bin/python' -c " in command


@pytest.mark.parametrize("hosts, scheduler, told", [
    (("10.0.0.1", "10.0.0.9"), "10.0.0.9", "10.0.0.9 of the hostfile is the launching machine"),
    (("10.0.0.1", "127.0.1.1"), "10.0.0.9", "127.0.1.1 of the hostfile is the launching machine"),
    (("10.0.0.1", "10.0.0.1", "alice@10.0.0.1"), "10.0.0.9",
     "alice@10.0.0.1 of the hostfile is the same machine as 10.0.0.1"),
])
def test_two_tunnels_at_one_port_of_one_machine_are_refused(hosts: Sequence[str], scheduler: str, told: str) -> None:
    slots = [Host(address, user or None) for user, _, address in (text.rpartition("@") for text in hosts)]
    asked = job(2, 1, *slots, launcher="ssh", port=7000, secure=True)
    with pytest.raises(ConfigError) as caught:
        check_tunnels(asked, scheduler)
    assert str(caught.value) == (f"--secure --port 7000: {told}, where a tunnel listens at that port already; "
                                 "leave the host out, or leave out --port")
    check_tunnels(dataclasses.replace(asked, port=0), scheduler)
    check_tunnels(dataclasses.replace(asked, slots=tuple(slots[:1])), scheduler)
    check_tunnels(dataclasses.replace(asked, num_workers=1, num_servers=0), scheduler)  # the others have no process


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


def test_a_variable_has_room_for_what_any_number_of_agents_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODSGD_MPIRUN", "env")
    asked = job(4096, 0, launcher="mpi", host_ip="127.0.0.1")
    listener = open_mpirun(asked, make_plan(asked, ("127.0.0.1", 4000)))
    assert listener.starter
    listener.starter.communicate(timeout=60)
    listener.close()
    assert len(listener.waiting) == 4096


@pytest.mark.parametrize("value", ["0", "two", "²", "9" * 5000, "-1"])
def test_a_number_of_slots_that_is_none_is_told(value: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_NTASKS_PER_NODE is"):
        slurm._slots(value)


def test_no_allocation_is_told_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"needs an allocation.*salloc"):
        slurm.allocated({"SLURM_JOB_ID": "1"})


def test_a_node_runs_one_agent_and_nothing_secret_is_on_the_command_line() -> None:
    command = slurm.srun_command(["a", "b"])
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=a,b", "--export=ALL"} <= set(command)
