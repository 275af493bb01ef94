"""The orders of agents, and how agents are started elsewhere."""
import dataclasses
from pathlib import Path
from typing import Sequence

import pytest

from kvstore.errors import ConfigError
from odsgd.launch.hostfile import Host
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
    assert command.endswith(" '/opt/py 3/python' -m odsgd.launch.agent")


@pytest.mark.parametrize("hosts, root, told", [
    (("10.0.0.1", "10.0.0.9"), "10.0.0.9", "10.0.0.9 of the hostfile is the launching machine"),
    (("10.0.0.1", "127.0.1.1"), "10.0.0.9", "127.0.1.1 of the hostfile is the launching machine"),
    (("10.0.0.1", "10.0.0.1", "alice@10.0.0.1"), "10.0.0.9",
     "alice@10.0.0.1 of the hostfile is the same machine as 10.0.0.1"),
])
def test_two_tunnels_at_one_port_of_one_machine_are_refused(hosts: Sequence[str], root: str, told: str) -> None:
    slots = [Host(address, user or None) for user, _, address in (text.rpartition("@") for text in hosts)]
    asked = job(2, 1, *slots, launcher="ssh", port=7000, secure=True)
    with pytest.raises(ConfigError) as caught:
        check_tunnels(asked, root)
    assert str(caught.value) == (f"--secure --port 7000: {told}, where a tunnel listens at that port already; "
                                 "leave the host out, or leave out --port")
    check_tunnels(dataclasses.replace(asked, port=0), root)
    check_tunnels(dataclasses.replace(asked, slots=tuple(slots[:1])), root)
    check_tunnels(dataclasses.replace(asked, num_workers=1, num_servers=0), root)  # the others have no process
