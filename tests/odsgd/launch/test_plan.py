"""The hostfile, and which process runs where with which environment."""
import sys
from pathlib import Path
from typing import List, Tuple

import pytest

from kvstore.errors import ConfigError, ProtocolError
from kvstore.job import commands
from odsgd.launch import plan as planning
from odsgd.launch.hostfile import Host, read_hostfile
from odsgd.launch.hosts import ssh
from odsgd.launch.hosts.ssh import AgentConnection, orders
from odsgd.launch.messages import Channel, RemoteSocket
from odsgd.launch.plan import FIRST_NUMBER, Job, exposure, forwarded, make_plan, path_on_hosts, place, scrubbed
from odsgd.launch.policy.failures import Member
from odsgd.launch.policy.judge import Judge
from odsgd.launch.policy.membership import next_place, why_closed
from tests.odsgd.launch.jobs import ROOT, A, B, C, job


@pytest.mark.parametrize("workers, servers, slots, expected", [
    (2, 2, [A, B], ([A, B], [A, B])),  # one server beside every worker
    (3, 1, [A, B, C], ([A, B, C], [A])),  # the server after the last slot: on the first again
    (2, 1, [A, B, C], ([A, B], [C])),  # a slot is left for the server
    (4, 2, [A, A, B, B], ([A, A, B, B], [A, A])),
    (5, 1, [A, B], ([A, B, A, B, A], [B])),
])
def test_workers_take_slots_in_order_and_servers_go_on(workers: int, servers: int, slots: List[Host],
                                                     expected: Tuple[List[Host], List[Host]]) -> None:
    assert place(job(workers, servers, *slots)) == expected


def test_auto_puts_server_k_beside_worker_k_whatever_the_slots() -> None:
    workers, servers = place(job(3, 3, A, A, B, C, servers_beside_workers=True))
    assert workers == servers == [A, A, B]


def test_processes_of_a_local_job_meet_at_files_of_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DMLC_LOCAL", raising=False)
    asked = job(2, 1)
    plan = make_plan(asked, ROOT)
    sockets = orders(asked, plan.processes, remote=False).sockets
    assert len(sockets) == 5 and list(sockets.values()).count(True) == 1  # for messages with codecs
    assert all(int(Path(path).name) >= FIRST_NUMBER for path in sockets)
    assert {process.env["DMLC_PS_ROOT_PORT"] for process in plan.processes} == {Path(next(iter(sockets))).name}
    assert not any(set(sockets) & set(process.sockets) for process in make_plan(asked, ROOT).processes)


@pytest.mark.parametrize("asked", [job(2, 1, A), job(2, 0), job(2, 1, port=4000), job(2, 1, env={"DMLC_LOCAL": "0"})])
def test_others_meet_by_tcp(asked: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMLC_LOCAL", "1")  # of the user's shell
    plan = make_plan(asked, ROOT)
    assert {process.env["DMLC_LOCAL"] for process in plan.processes} == {"0"}
    assert all(not process.sockets and "PORT" not in process.env for process in plan.processes)
    assert plan.processes[0].env["DMLC_PS_ROOT_PORT"] == str(ROOT[1])


def test_processes_of_a_secure_job_bind_no_address_of_a_network_and_their_sockets_are_told_to_every_tunnel() -> None:
    asked = job(2, 1, A, B, secure=True)
    plan = make_plan(asked, ROOT, certificate="PEM")
    for process in plan.processes:
        assert (process.env["DMLC_LOCAL"], process.env["DMLC_NODE_HOST"], process.env["DMLC_PS_ROOT_URI"]) == (
            "1", "127.0.0.1", "127.0.0.1")
    agents = [AgentConnection(host.address, plan.on(host), Channel(0, 1), tunnel=at, socket_namespace=namespace)
              for host, at, namespace in (
        (plan.processes[0].host, "10.0.0.9:7", "x"), (A, "10.0.0.1:8", "x"), (B, "10.0.0.2:9", "y"))]
    from_a, none, others = (made for _, made in ssh.remote_sockets(agents))
    assert none == []  # the launching machine and A have one folder, and remote sockets once
    sockets = {process.name: process.sockets for process in plan.processes}
    assert from_a == [RemoteSocket(path, "10.0.0.2:9", lasting=False) for path in sockets["worker 1"]]
    assert [remote.tunnel for remote in others] == ["10.0.0.9:7", "10.0.0.1:8", "10.0.0.1:8", "10.0.0.1:8"]
    assert {remote.name: remote.lasting for remote in others} == {
        **sockets["scheduler"], **sockets["server 0"], **sockets["worker 0"]}
    told = ssh.tunnel_orders(asked, plan, B)
    assert (told.certificate, told.address, told.sockets) == ("PEM", B.address, list(sockets["worker 1"]))


def test_workers_of_a_secure_ring_have_a_port_of_loopback_each_and_remote_sockets_lead_to_other_hosts() -> None:
    asked = job(3, 0, A, B, secure=True, env_worker={"X": "1"})
    plan = make_plan(asked, ROOT, certificate="PEM")
    ports = [int(process.env["FI_TCP_PORT_LOW_RANGE"]) for process in plan.processes]
    assert len(set(ports)) == 3 and set(ports) <= set(planning.MPI_PORTS)
    for process, port in zip(plan.processes, ports):
        assert process.env["FI_TCP_PORT_HIGH_RANGE"] == str(port) and process.env["FI_TCP_IFACE"] == "lo"
        assert process.env["DMLC_NODE_HOST"] == "127.0.0.1" and process.env["X"] == "1"
        assert process.sockets == {f"127.0.0.1:{port}": True} and not process.files
    agents = [AgentConnection(host.address, plan.on(host), Channel(0, 1), tunnel=host.address,
                              socket_namespace=host.address) for host in (A, B)]
    assert [[(remote.name, remote.tunnel) for remote in made] for _, made in ssh.remote_sockets(agents)] == [
        [(f"127.0.0.1:{ports[1]}", B.address)], [(f"127.0.0.1:{port}", A.address) for port in (ports[0], ports[2])]]
    assert ssh.orders(asked, plan.on(A), remote=True).sockets == {}  # files, which it would take away


@pytest.mark.parametrize("count", [1, 2, 3, 64, 4096])
def test_ports_of_workers_lie_where_the_kernel_takes_none(count: int) -> None:
    assert all(set(planning.new_ports(count)) <= set(planning.MPI_PORTS) for _ in range(100))
    assert len(planning.new_ports(count)) == count


def test_a_job_that_is_started_again_is_told_what_it_has_saved() -> None:
    first, second = make_plan(job(1, 1), ROOT), make_plan(job(1, 1), ROOT, attempts_before=2, saved=40)
    before_it_began = make_plan(job(1, 1), ROOT, attempts_before=1)
    assert not any("ODSGD_SAVED" in process.env for process in (*first.processes, *before_it_began.processes))
    assert {(one.env["ODSGD_RESTARTS"], one.env["ODSGD_SAVED"]) for one in second.processes} == {("2", "40")}


def test_attempts_with_one_secret_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODSGD_SECRET", "ab" * 32)
    keys = []
    for _ in range(2):
        plan = make_plan(job(1, 1, secret="ab" * 32), ROOT)
        (attempt,) = {process.env["ODSGD_ATTEMPT"] for process in plan.processes}
        monkeypatch.setenv("ODSGD_ATTEMPT", attempt)
        keys.append(commands.job_key())
    with pytest.raises(ProtocolError, match="not signed with this job's secret"):
        commands.Verifier(keys[1]).verify(commands.Signer(0, keys[0]).sign("open", {}))


def test_a_local_job_in_a_shell_of_torchruns_is_not_taken_for_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    asked = job(1, 0)
    assert "TORCHELASTIC_RUN_ID" in orders(asked, make_plan(asked, ROOT).processes, remote=False).drop


def test_names_and_environment_of_an_ssh_job() -> None:
    plan = make_plan(job(2, 1, A, B, env={"X": "1"}, env_server={"X": "2"}), ROOT)
    by_name = {process.name: process for process in plan.processes}
    assert list(by_name) == ["scheduler", "server 0", "worker 0", "worker 1"]
    assert {name: process.env["DMLC_NODE_HOST"] for name, process in by_name.items()} == {
        "scheduler": "10.0.0.9", "server 0": "10.0.0.1", "worker 0": "10.0.0.1", "worker 1": "10.0.0.2"}
    assert [by_name[name].env["X"] for name in by_name] == ["1", "2", "1", "1"]
    assert by_name["worker 1"].command == (sys.executable, "train.py", "--lr", "0.1")
    assert by_name["server 0"].command == (sys.executable, "-m", "kvstore.weights.servers")


def test_workers_without_servers_have_no_scheduler_and_are_told_their_place_in_mpi() -> None:
    plan = make_plan(job(2, 0), ROOT)
    assert [process.name for process in plan.processes] == ["worker 0", "worker 1"]
    for rank, env in enumerate(process.env for process in plan.processes):
        assert (env["PMI_SIZE"], env["PMI_RANK"]) == ("2", str(rank))


def test_workers_of_servers_are_told_nothing_of_mpi() -> None:
    assert not any(name.startswith("PMI") for process in make_plan(job(2, 1), ROOT).processes for name in process.env)


def test_workers_have_their_places_under_the_names_of_pytorch_and_servers_have_none() -> None:
    plan = make_plan(job(5, 1, A, A, B, env={"MASTER_PORT": "7"}), ROOT)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert [" ".join(worker.env[name] for name in names) for worker in plan.workers] == [
        "0 5 0 4 0 10.0.0.1 7", "1 5 1 4 0 10.0.0.1 7", "2 5 0 1 1 10.0.0.1 7", "3 5 2 4 0 10.0.0.1 7",
        "4 5 3 4 0 10.0.0.1 7"]
    assert not any(name in process.env for process in plan.processes if process.role != "worker" for name in names[:6])


@pytest.mark.parametrize("asked", [job(2, 0, A, B, known_hosts=True), job(2, 0, launcher="mpi")])
def test_no_place_to_meet_is_named_where_it_is_not_protected_or_not_known(asked: Job) -> None:
    assert not any("MASTER_ADDR" in worker.env for worker in make_plan(asked, ROOT).workers)


def test_only_a_py_file_is_run_with_this_python() -> None:
    plan = make_plan(job(1, 0, command=("python3", "train.py")), ROOT)
    assert plan.processes[0].command == ("python3", "train.py")


def test_every_job_has_its_own_secret() -> None:
    assert make_plan(job(1, 1), ROOT).secret != make_plan(job(1, 1), ROOT).secret


def test_plan_forwards_the_switches_of_the_libraries_and_nothing_of_another_job() -> None:
    environ = {"MXNET_ENGINE_TYPE": "x", "PS_VERBOSE": "1", "DMLC_INTERFACE": "eth0", "HOME": "/root", "PATH": "/bin",
               "DMLC_ROLE": "worker", "ODSGD_SECRET": "s", "PSMODULE": "1", "PORT": "80", "UCX_TLS": "tcp",
               "MPIR_CVAR_CH4_NETMOD": "ofi", "PMI_FD": "7", "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    assert set(forwarded(environ)) == {"MXNET_ENGINE_TYPE", "PS_VERBOSE", "DMLC_INTERFACE", "UCX_TLS",
                                       "MPIR_CVAR_CH4_NETMOD"}
    assert set(scrubbed(environ)) == set(environ) - {"DMLC_ROLE", "ODSGD_SECRET", "PORT", "PMI_FD"}


def test_paths_below_a_copied_directory_are_relative_to_the_copy(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    copied, shared = job(1, 1, A, sync_dst_dir="/there"), job(1, 1, A)
    inside, outside = str(tmp_path / "lib"), "/opt/lib"
    assert [path_on_hosts(path, copied) for path in (inside, outside, str(tmp_path))] == ["lib", outside, "."]
    assert [path_on_hosts(path, shared) for path in (inside, outside)] == [inside, outside]


def test_a_job_that_the_internet_may_reach_is_warned_of() -> None:
    assert [exposure(address) for address in ("127.0.0.1", "10.1.2.3", "192.168.0.7", "172.16.0.1")] == [None] * 4
    warning = exposure("8.8.8.8")
    assert warning is not None and "the job listens at 8.8.8.8, which is no private address" in warning


def hostfile(tmp_path: Path, text: str) -> str:
    path = tmp_path / "hosts"
    path.write_text(text)
    return str(path)


def test_a_host_stands_there_once_per_slot_in_the_files_order(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "# two racks\n\na\nme@b slots=2  # big\n10.0.0.7:2\nc port=2222\na\n")
    b, ip = Host("b", "me"), Host("10.0.0.7")
    assert read_hostfile(path) == [Host("a"), b, b, ip, ip, Host("c", port=2222), Host("a")]


@pytest.mark.parametrize("line, complaint", [
    ("a b", "cannot read `b`; expected `slots=NUMBER`"),
    ("a slots=many", "cannot read `slots=many`"),
    ("a:2 slots=3", "cannot read `slots=3`"),
    ("a:x", "cannot read `a:x`; expected `[user@]host`"),
    ("fd77::1", "cannot read `fd77::1`; expected `[user@]host`, `host slots=4` or `host:4` (of an IPv6 host"),
    ("-oProxyCommand=evil", "cannot read `-oProxyCommand=evil`"),
    ("a slots=0", "0 slots; expected at least 1"),
    ("a:22", "22 slots? For an ssh port write `port=22`"),
    ("a:2222", "2222 slots? For an ssh port write `port=2222`"),
])
def test_an_error_names_file_and_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = hostfile(tmp_path, "fine\n" + line + "\n")
    with pytest.raises(ConfigError) as error:
        read_hostfile(path)
    assert str(error.value).startswith(path + ", line 2: " + complaint)


def test_a_file_that_is_absent_or_empty_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read `.*absent`, a hostfile.*: No such file"):
        read_hostfile(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="names no host"):
        read_hostfile(hostfile(tmp_path, "# nobody\n"))


def test_spare_workers_are_planned_and_not_started_and_the_place_lost_longest_ago_is_taken_after_them() -> None:
    plan = make_plan(job(4, 1, A, B, spare=2, on_worker_loss="continue"), ROOT)
    assert [worker.name for worker in plan.workers] == ["worker 0", "worker 1"]
    assert [(worker.name, worker.host) for worker in plan.spare] == [("worker 2", A), ("worker 3", B)]
    assert {worker.env["DMLC_NUM_WORKER"] for worker in (*plan.workers, *plan.spare)} == {"4"}
    members = [Member(process.name, process.role, "host") for process in plan.processes]
    judge = Judge(job(4, 1, on_worker_loss="continue"), members, 0.0)
    assert "still starting" in why_closed(plan, judge)
    for member in members:
        judge.reported(member.name, {"event": "joined"}, 0.0)
    judge.tick(0.0)
    taken = []
    while not why_closed(plan, judge):
        process = next_place(plan, judge)
        assert process is not None
        taken.append(process.name)
        judge.joins(Member(process.name, process.role, "host"), 1.0)
    assert taken == ["worker 2", "worker 3"] and "--spare" in why_closed(plan, judge)
    for now, name in ((10.0, "worker 2"), (20.0, "worker 1")):
        judge.exited(name, 3, now)
        judge.tick(now + 5)
    assert why_closed(plan, judge) == ""
    over = Judge(job(2, 1, on_worker_loss="continue"), members, 0.0)
    for member in members:
        over.reported(member.name, {"event": "joined"}, 0.0)
    over.tick(0.0)
    for member in members:
        over.exited(member.name, 0, 1.0)
    assert why_closed(plan, over) == "its workers have finished"
    for expected in (plan.spare[0], plan.workers[1]):
        assert next_place(plan, judge) == expected
        judge.joins(Member(expected.name, "worker", "host"), 30.0)
