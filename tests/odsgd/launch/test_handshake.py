"""How agents that mpirun starts and their launcher find each other."""
import socket
import threading
from typing import Collection, Iterator, List, Optional, Sequence

import pytest

from odsgd.launch.handshake import NODE, RANKS, admit, arrive, pack, unpack

SECRET = 64 * "a"


class Door:
    """A launcher's door, at which one visitor after the other is let in or not."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.admitted: List[Optional[int]] = []

    def orders(self, secret: str = SECRET, nodes: Sequence[str] = ()) -> str:
        """What an agent is given for three ranks."""
        return pack({"launcher": self.listener.getsockname(), "secret": secret, "common": {"directory": "/here"},
                     "nodes": nodes,
                     "ranks": [{"processes": [{"name": f"worker {rank}"}]} for rank in range(3)]})

    def open(self, expected: Collection[int]) -> threading.Thread:
        """Let one visitor in, beside the test."""
        def let_in() -> None:
            connection, _ = self.listener.accept()
            with connection:
                admitted = admit(connection, SECRET, expected)
                self.admitted.append(admitted and admitted[0])
                connection.sendall(b"first message\n")
        thread = threading.Thread(target=let_in)
        thread.start()
        return thread


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    with door.listener:
        yield door


@pytest.fixture
def rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is MPI rank 1."""
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(RANKS[-1], "1")


def test_jobs_survive_the_way_through_an_environment_variable() -> None:
    jobs = {"ranks": [{"env": {"A": "ü'\" \n"}}] * 200}
    assert unpack(pack(jobs)) == jobs and len(pack(jobs)) < 2000


@pytest.mark.usefixtures("rank_1")
def test_an_agent_gets_the_orders_of_its_rank_and_a_connection_that_goes_on(door: Door) -> None:
    thread = door.open(expected={0, 1, 2})
    orders, fd = arrive(door.orders())
    with socket.socket(fileno=fd) as connection:
        connection.settimeout(60)
        assert connection.recv(100) == b"first message\n"
    thread.join()
    assert orders == {"directory": "/here", "processes": [{"name": "worker 1"}]} and door.admitted == [1]


def test_an_agent_of_slurm_gets_the_orders_of_its_node(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NODE, "b")
    thread = door.open(expected={0, 1, 2})
    orders, fd = arrive(door.orders(nodes=["a", "b", "c"]))
    socket.socket(fileno=fd).close()
    thread.join()
    assert orders["processes"] == [{"name": "worker 1"}] and door.admitted == [1]
    with pytest.raises(SystemExit, match="SLURMD_NODENAME is b"):
        arrive(door.orders(nodes=["a", "c"]))


@pytest.mark.usefixtures("rank_1")
@pytest.mark.parametrize("secret, expected", [(64 * "b", {0, 1, 2}), (SECRET, {0, 2})],
                         ids=["another job's", "a rank that has been here"])
def test_a_visitor_that_is_not_expected_is_not_let_in(door: Door, secret: str, expected: Collection[int]) -> None:
    thread = door.open(expected)
    _, fd = arrive(door.orders(secret))
    socket.socket(fileno=fd).close()
    thread.join()
    assert door.admitted == [None]


@pytest.mark.parametrize("answer", [b"GET / HTTP/1.1\r\n", b"{}\n", b"[1]\n",
                                    b'{"rank": "x", "proof": "", "nonce": ""}\n', b"\xff\n", b""])
def test_a_visitor_that_is_no_agent_is_not_let_in(door: Door, answer: bytes) -> None:
    thread = door.open(expected={0})
    with socket.create_connection(door.listener.getsockname()) as visitor:
        visitor.recv(100)
        visitor.sendall(answer)
        visitor.shutdown(socket.SHUT_WR)
        thread.join()
    assert door.admitted == [None]
