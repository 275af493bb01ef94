"""How agents that mpirun starts and their launcher find each other."""
import contextlib
import hashlib
import hmac
import json
import os
import resource
import socket
import threading
from typing import Iterator, List, Optional, Sequence

import pytest

from odsgd.launch.connections.handshake import NODE, RANKS, call_as_told, pack, receive_orders
from odsgd.launch.hosts import listener as listening
from odsgd.launch.hosts.listener import AgentListener
from odsgd.launch.hosts.ssh import AgentConnection
from odsgd.launch.messages import Ping, ProcessOrders
from odsgd.launch.plan import LOCAL, Process
from tests.jobs import until
from tests.odsgd.launch.jobs import job

SECRET = 64 * "a"
PATIENCE_S = 60.0
PROCESSES = [Process("worker", rank, LOCAL, ("true",), {"ODSGD_SECRET": SECRET, "A": "ü'\" \n"}) for rank in range(3)]


class Launcher:
    """A launcher's port for three agents, and the loop that it is a part of."""

    def __init__(self) -> None:
        expected = {process.name: [process] for process in PROCESSES}
        self.listener = AgentListener(job(3, 0), expected, SECRET, "127.0.0.1")
        self.at = self.listener.socket.getsockname()
        self.arrived: List[AgentConnection] = []
        self.over = threading.Event()
        self.turns = 0
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _greet(self, agent: AgentConnection) -> None:
        self.arrived.append(agent)  # before the test hears of it
        agent.channel.send(Ping(7.5))

    def _run(self) -> None:
        while not self.over.wait(0.01):
            for agent in self.listener.arrivals():
                self._greet(agent)
            self.turns += 1

    def close(self) -> None:
        self.over.set()
        self.thread.join(PATIENCE_S)
        self.listener.close()
        for agent in self.arrived:
            agent.close()

    def told(self, secret: str = SECRET, nodes: Sequence[str] = ()) -> str:
        """What an agent is given."""
        return pack({"launcher": self.at, "secret": secret, "directory": os.getcwd(), "nodes": nodes})

    @property
    def let_in(self) -> List[str]:
        return [process.name for agent in self.arrived for process in agent.processes]


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    launcher.thread.start()
    with contextlib.closing(launcher):
        yield launcher


def heard(fd: int) -> bytes:
    """What an agent hears first on its connection; nothing, if it is hung up on."""
    with socket.socket(fileno=fd) as connection:
        connection.settimeout(PATIENCE_S)
        try:
            return connection.recv(100)
        except ConnectionResetError:
            return b""


@pytest.fixture
def rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is MPI rank 1."""
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(RANKS[-1], "1")


@pytest.mark.usefixtures("rank_1")
def test_an_agent_gets_the_orders_of_its_rank_and_a_connection_that_goes_on(launcher: Launcher) -> None:
    orders, fd = call_as_told(launcher.told())
    assert json.loads(heard(fd)) == {"message": "Ping", "at": 7.5}
    assert orders.processes == [ProcessOrders("worker 1", ["true"], {})] and orders.env == PROCESSES[1].env
    assert launcher.let_in == ["worker 1"]


@pytest.mark.usefixtures("rank_1")
def test_a_firewall_does_not_forget_the_connection_of_an_agent(launcher: Launcher) -> None:
    with socket.socket(fileno=call_as_told(launcher.told())[1]) as connection:
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


@pytest.mark.usefixtures("rank_1")
def test_a_launcher_that_may_open_no_more_files_lets_agents_in_when_it_may(launcher: Launcher) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as caller:
        free = os.dup(caller.fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            caller.connect(launcher.at)
            turns = launcher.turns
            until(lambda: launcher.turns > turns + 2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        _, fd = call_as_told(launcher.told())
        assert heard(fd) and launcher.let_in == ["worker 1"]


def test_an_agent_of_slurm_gets_the_orders_of_its_node(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NODE, "b")
    orders, fd = call_as_told(launcher.told(nodes=["a", "b", "c"]))
    assert heard(fd) and [process.name for process in orders.processes] == launcher.let_in == ["worker 1"]
    with pytest.raises(SystemExit, match="SLURMD_NODENAME is b"):
        call_as_told(launcher.told(nodes=["a", "c"]))


@pytest.mark.usefixtures("rank_1")
def test_an_agent_of_another_job_or_one_that_has_been_here_is_not_let_in(launcher: Launcher) -> None:
    with pytest.raises(OSError, match="the launcher has hung up"):
        call_as_told(launcher.told(secret=64 * "b"))
    assert heard(call_as_told(launcher.told())[1])
    with pytest.raises(OSError, match="the launcher has hung up"):
        call_as_told(launcher.told())
    assert launcher.let_in == ["worker 1"]


def visit(launcher: Launcher, answer: Optional[bytes] = None) -> socket.socket:
    """A caller that is no agent, and says this, or nothing."""
    caller = socket.create_connection(launcher.at, PATIENCE_S)
    assert len(caller.recv(100)) == 33
    if answer is not None:
        caller.sendall(answer)
    return caller


@pytest.mark.parametrize("answer", [b"GET / HTTP/1.1\r\n", b"{}\n", b"[1]\n",
                                    b'{"rank": "x", "proof": "", "nonce": ""}\n', b"\xff\n", 1100 * b"x", b""])
def test_a_caller_that_is_no_agent_is_not_let_in(launcher: Launcher, answer: bytes) -> None:
    with visit(launcher, answer) as caller:
        with contextlib.suppress(OSError):  # it may have been hung up on already
            caller.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert caller.recv(1) == b""
    assert launcher.let_in == []


@pytest.mark.usefixtures("rank_1")
def test_a_silent_caller_holds_nobody_up_and_has_to_go(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    with visit(launcher) as silent:
        assert heard(call_as_told(launcher.told())[1])
        monkeypatch.setattr(listening, "ANSWERED_WITHIN_S", 0.0)
        assert silent.recv(1) == b""


@pytest.mark.usefixtures("rank_1")
def test_however_many_strangers_there_are_an_agent_comes_in(launcher: Launcher, monkeypatch: pytest.MonkeyPatch
                                                            ) -> None:
    monkeypatch.setattr(listening, "MOST_STRANGERS", 0)
    monkeypatch.setattr(listening, "ANSWERED_WITHIN_S", 1e6)
    monkeypatch.setattr(listening, "UNDISTURBED_S", 0.5)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(visit(launcher)) for _ in range(4)]  # three agents are awaited
        assert heard(call_as_told(launcher.told())[1])
        assert [caller.recv(1) for caller in silent[:3]] == [b"", b"", b""]


def test_strangers_who_come_later_do_not_push_an_agent_out(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "MOST_STRANGERS", 0)
    monkeypatch.setattr(listening, "UNDISTURBED_S", 1e6)
    with contextlib.ExitStack() as stack:
        agent = stack.enter_context(socket.create_connection(launcher.at, timeout=PATIENCE_S))
        nonce = agent.recv(100).decode().strip()
        for _ in range(5):
            stack.enter_context(socket.create_connection(launcher.at, timeout=PATIENCE_S))
        proof = hmac.new(bytes.fromhex(SECRET), f"agent 1 {nonce}".encode(), hashlib.sha256).hexdigest()
        agent.sendall(json.dumps({"rank": 1, "proof": proof, "nonce": "n"}).encode() + b"\n")
        assert agent.recv(100)


def test_what_answers_in_the_launchers_place_may_say_anything() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"\xff\xfe\n")
        with pytest.raises(OSError, match="does not know the job's secret"):
            receive_orders(ours, SECRET, "n")
