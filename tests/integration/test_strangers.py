"""What comes of strangers at the ports of a job: with sockets in the file system there is none to come to, and a tunnel
between hosts turns them away."""
import contextlib
import glob
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

import pytest

from kvstore.errors import EXIT_DEADLINE
from odsgd.lab.cluster import Cluster
from odsgd.launch.plan import FIRST_NUMBER, SOCKETS
from tests.integration.launching import PATIENCE_S, ROOT, Launch, command_line, marked, words
from tests.integration.test_emulated_cluster import WHY_NOT, sees_us
from tests.integration.test_faults import FAULTY, SERVER
from tests.integration.test_launch_ring import pytestmark as needs_mpi
from tests.jobs import until
from tests.stranger import DEEDS

EVERYONE = ("scheduler", "server 0", "worker 0", "worker 1")
BY_TCP = ("--env", "DMLC_LOCAL:0")


def sockets() -> Set[str]:
    """Of jobs of this machine, in the file system."""
    return {path for path in glob.glob(os.path.join(SOCKETS, "[0-9]*"))
            if os.path.basename(path).isdigit() and int(os.path.basename(path)) >= FIRST_NUMBER}


def listens_at(pid: int) -> List[int]:
    """The TCP ports at which a process takes connections."""
    links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd") if os.path.islink(entry.path)]
    return [port for port, inode in listening(Path(f"/proc/{pid}/net/tcp").read_text()) if f"socket:[{inode}]" in links]


def listening(table: str, alone: Tuple[bool, ...] = (False, True)) -> List[Tuple[int, str]]:
    """The ports that somebody listens at, for others or for the host `alone`, and their inodes."""
    rows = [line.split() for line in table.splitlines()[1:]]
    return [(int(row[1].split(":")[1], 16), row[9]) for row in rows
            if row[3] == "0A" and row[1].startswith("0100007F:") in alone]


def numbers(launch: Launch) -> Set[str]:
    """The sockets that the processes of a job have been given."""
    return {os.path.join(SOCKETS, env["PORT"]) for env in marked(launch.mark).values() if "PORT" in env}


@pytest.fixture
def training(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Launch]:
    """A job that trains in an empty folder."""
    with Launch("-n", 2, "-s", 1, *getattr(request, "param", ()), FAULTY, "none", env=SERVER, cwd=tmp_path) as launch:
        launch.wait_for("worker 0 | trains", "worker 1 | trains")
        yield launch


def test_a_local_job_listens_nowhere_and_its_sockets_are_closed_when_all_have_met(training: Launch) -> None:
    assert len(numbers(training)) == len(EVERYONE)
    assert not [port for pid in marked(training.mark) for port in listens_at(pid)]
    until(lambda: not sockets() & numbers(training), PATIENCE_S)
    folder = os.readlink(f"/proc/{training.pid('server 0')}/cwd")
    assert os.listdir(folder) == [] and os.stat(folder).st_mode & 0o777 == 0o700
    training.process.send_signal(signal.SIGINT)
    assert training.wait() == 128 + signal.SIGINT
    assert not os.path.exists(folder)


@pytest.mark.parametrize("victim", ["agent", "launcher"])
def test_sockets_of_a_job_that_has_not_met_do_not_outlive_it(victim: str) -> None:
    script = f"test $ODSGD_WORKER_RANK = 1 && exec sleep 600; exec {words(sys.executable, FAULTY)}"
    with Launch("-n", 2, "-s", 1, "sh", "-c", script, env=SERVER) as launch:
        until(lambda: sockets() & numbers(launch), PATIENCE_S)
        mine = numbers(launch)
        assert all(os.stat(path).st_mode & 0o077 == 0 for path in sockets() & mine)
        agent = next(pid for pid in marked(launch.mark) if "odsgd.launch.agent" in command_line(pid))
        os.kill(agent if victim == "agent" else launch.process.pid, signal.SIGKILL)
        launch.process.wait(PATIENCE_S)
    until(lambda: not sockets() & mine, PATIENCE_S)


@pytest.mark.parametrize("training", [BY_TCP], indirect=True)
@pytest.mark.parametrize("victim, deed", [("scheduler", "garbage"), ("server 0", "http_get"), ("worker 0", "garbage")])
def test_foreign_bytes_at_a_tcp_port_end_the_job_which_says_what_that_looks_like(training: Launch, victim: str,
                                                                              deed: str) -> None:
    for port in listens_at(training.pid(victim)):
        DEEDS[deed](("127.0.0.1", port))
    assert training.wait() == 128 + signal.SIGABRT
    assert f"{victim} failed" in training.said.splitlines()[0]
    assert "something that is not part of this job" in training.said


@pytest.mark.parametrize("victim", ["server 0", "worker 0"])
def test_a_message_that_ends_a_process_deafens_it_and_the_job_ends_with_a_line(victim: str, tmp_path: Path) -> None:
    train = ["odsgd", "train", "--dataset", "digits", "--lr", "0.01", "--epochs", "10000", "--out", "run"]
    with Launch("-n", 2, "-s", 1, *BY_TCP, "--hang-timeout", 6, sys.executable, "-m", *train,
                env={**SERVER, "PYTHONPATH": ROOT}, cwd=tmp_path) as launch:
        metrics = tmp_path / "run" / "metrics.jsonl"
        until(lambda: metrics.exists() and '"epoch": 2' in metrics.read_text(), PATIENCE_S)
        (port,) = listens_at(launch.pid(victim))
        DEEDS["terminate"](("127.0.0.1", port))
        code = launch.wait()
    if code == 128 + signal.SIGABRT:  # it was about to send a message just then
        assert launch.said.startswith(f"{victim} failed") and "ready_: call Start() first" in launch.said
    else:
        assert code == EXIT_DEADLINE and "every worker has waited" in launch.said
        assert "messages between them do not come through" in launch.said


@pytest.mark.parametrize("training", [BY_TCP], indirect=True)
def test_commands_to_the_profiler_write_where_nothing_is_and_silent_visitors_do_nothing(training: Launch,
                                                                                     tmp_path: Path) -> None:
    ports = {name: listens_at(training.pid(name)) for name in EVERYONE}
    folder = Path(os.readlink(f"/proc/{training.pid('server 0')}/cwd"))
    for name in EVERYONE:
        for port in ports[name]:
            DEEDS["scan"](("127.0.0.1", port))

    def written() -> List[Path]:  # four connections, whose commands a busy server may take in another order
        DEEDS["profiler"](("127.0.0.1", ports["server 0"][0]))
        return list(folder.glob("*profile.json"))
    until(written, PATIENCE_S)
    with pytest.raises(subprocess.TimeoutExpired):  # it goes on
        training.process.wait(2)
    training.process.send_signal(signal.SIGINT)
    training.wait()
    assert not folder.exists() and not list(tmp_path.iterdir())


class Training(NamedTuple):
    """A job that trains on two hosts of an emulated cluster."""

    hosts: Cluster
    job: "subprocess.Popen[Any]"
    said: Path
    metrics: Path

    def trains(self) -> bool:
        """Whether the first epoch is over."""
        return self.metrics.exists() and '"epoch": 1' in self.metrics.read_text()

    def ports(self, alone: bool = False) -> Dict[Optional[int], List[int]]:
        """Where anybody listens for others, or for the host alone; None: on the launching machine."""
        return {host: [port for port, _ in listening(self.hosts.run(["cat", "/proc/net/tcp"], host=host).stdout,
                                                     (alone,))] for host in (None, 0, 1)}

    def visited(self, *deeds: str, alone: bool = False) -> None:
        """Strangers come from a host to all ports of the others, or from each to those that it has alone."""
        visits = []
        for host, ports in self.ports(alone).items():
            address = "127.0.0.1" if alone else "10.0.0.254" if host is None else f"10.0.0.{host + 1}"
            visits += [self.hosts.popen([sys.executable, "-m", "tests.stranger", address, str(port), deed],
                                        host=host if alone else int(host != 1), cwd=ROOT, env={"PYTHONPATH": ROOT},
                                        stderr=subprocess.DEVNULL) for port in ports for deed in deeds]
        for visit in visits:
            visit.wait(PATIENCE_S)

    def goes_on(self) -> None:
        """Until it has trained for a while."""
        before = self.metrics.stat().st_size
        until(lambda: self.metrics.stat().st_size > before + 1000 or self.job.poll() is not None, PATIENCE_S)
        assert self.job.poll() is None, self.said.read_text()


@contextlib.contextmanager
def on_two_hosts(*options: str, store: str = "odsgd", own_tmp: bool = True) -> Iterator[Training]:
    launch = [sys.executable, "-m", "odsgd", "launch", "-n", "2", "-H", "@hosts", *options]
    train = [sys.executable, "-m", "odsgd", "train", "--dataset", "digits", "--lr", "0.01", "--epochs", "10000",
             "--kvstore", store, "--emulate-compute", "10ms"]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))  # /tmp is each host's own
        hosts = stack.enter_context(Cluster.up(hosts=2, own_tmp=own_tmp))
        said = stack.enter_context(open(folder / "said", "w"))
        job = stack.enter_context(hosts.popen(
            [*launch, *train, "--checkpoint-every", "10000epochs", "--out", str(folder / "run")],
            env={"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, stdout=said, stderr=said))
        stack.callback(job.kill)
        training = Training(hosts, job, folder / "said", folder / "run" / "metrics.jsonl")
        until(lambda: job.poll() is not None or training.trains(), PATIENCE_S)
        assert job.poll() is None, training.said.read_text()
        yield training


@sees_us
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize("store, tunnels, wire", [("odsgd", 3, "ps-lite"),
                                                  pytest.param("odsgd", 3, "sockets", marks=pytest.mark.again),
                                                  pytest.param("dsync", 2, "ps-lite", marks=needs_mpi)])
def test_with_a_tunnel_strangers_on_the_network_reach_nothing_and_the_job_goes_on(store: str, tunnels: int,
                                                                                  wire: str) -> None:
    with on_two_hosts("--secure", "--wire", wire, store=store) as training:
        assert [len(ports) for ports in training.ports().values()] == [tunnels - 2, 1, 1]
        training.visited(*DEEDS)
        if store == "dsync":  # at a worker's own port there is MPI, and a remote socket lets this user's processes in
            assert [len(ports) for ports in training.ports(alone=True).values()] == [0, 2, 2]
            training.visited(*DEEDS, alone=True)
        training.goes_on()
        training.job.send_signal(signal.SIGTERM)
        assert training.job.wait(PATIENCE_S) == 128 + signal.SIGTERM, training.said.read_text()
        warnings = [line for line in training.said.read_text().splitlines() if "warning: host" in line]
        assert len(warnings) == tunnels and all("without this job's certificate" in line for line in warnings)
        assert not any(training.ports().values()) and not any(training.ports(alone=True).values())


@sees_us
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_without_a_tunnel_one_of_them_ends_it() -> None:
    with on_two_hosts() as training:
        assert sum(map(len, training.ports().values())) == 5
        training.visited("http_get")
        assert training.job.wait(PATIENCE_S) == 128 + signal.SIGABRT, training.said.read_text()
        assert "something that is not part of this job" in training.said.read_text()


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_at_the_ports_of_a_job_on_sockets_strangers_are_cut_off_and_the_job_goes_on() -> None:
    with on_two_hosts("--wire", "sockets", own_tmp=False) as training:
        assert sum(map(len, training.ports().values())) == 3  # of the scheduler and the servers
        training.visited(*DEEDS)
        training.goes_on()
