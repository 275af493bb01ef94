"""Server and scheduler of a job on sockets: sums, and who learns where the servers listen."""
import contextlib
import errno
import os
import queue
import socket
import struct
import threading
from pathlib import Path
from typing import Any, Iterator, List, Optional, Tuple

import numpy as np
import pytest

from kvstore.errors import ProtocolError
from kvstore.job import commands, ending
from kvstore.transports.outbox import Outbox
from kvstore.weights.servers import courier, sockets
from kvstore.weights.servers.sums import OrderedSums

PATIENCE_S = 300


def part(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def test_a_sum_is_added_in_the_order_of_ranks_whoever_comes_first() -> None:
    in_order = (part(1e8)[0] + part(-1e8)[0]) + part(1)[0]
    sums = OrderedSums(3)
    for rank, number in ((2, 1.0), (0, 1e8), (1, -1e8)):
        assert not list(sums.take())
        sums.add(rank, 1, part(number))
    [(number, ranks, total)] = sums.take()
    assert (number, ranks) == (1, [0, 1, 2]) and total.view(np.float32) == in_order and not sums.parts


def test_sums_may_overtake_each_other_and_are_answered_in_their_order() -> None:
    sums = OrderedSums(2)
    sums.add(0, 1, part(1))
    sums.add(0, 2, part(10))
    sums.add(1, 1, part(2))
    sums.add(1, 2, part(20))
    assert [total.view(np.float32)[0] for _, _, total in sums.take()] == [3, 30]


def test_a_sum_goes_on_without_a_worker_that_was_given_up_and_does_not_hear_it_later(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sums, lost = OrderedSums(2), tmp_path / "lost"
    monkeypatch.setenv("ODSGD_LOST", str(lost))
    sums.add(0, 1, part(5))
    assert not list(sums.take())
    lost.write_text("1\n")
    assert [(ranks, total.view(np.float32)[0]) for _, ranks, total in sums.take()] == [([0], 5)]
    sums.add(1, 1, part(7))
    assert not sums.parts


def test_a_worker_that_was_given_up_after_its_part_gets_no_sum_and_nobody_in_its_place_does(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sums, lost = OrderedSums(2), tmp_path / "lost"
    monkeypatch.setenv("ODSGD_LOST", str(lost))
    sums.add(1, 1, part(7))
    lost.write_text("1\n+1\n")
    sums.add(0, 1, part(5))
    assert [(ranks, total.view(np.float32)[0]) for _, ranks, total in sums.take()] == [([0], 12)]


def test_workers_that_make_different_calls_are_named() -> None:
    sums = OrderedSums(2)
    sums.add(0, 1, part(1, 2))
    with pytest.raises(ProtocolError, match="workers 0 and 1 add up 2 and 3 numbers"):
        sums.add(1, 1, part(1, 2, 3))


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> int:
    """The port of one, which waits for two servers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    for name, value in {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "DMLC_NUM_SERVER": "2",
                        "ODSGD_SECRET": "of this test"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("DMLC_LOCAL", raising=False)
    threading.Thread(target=sockets.introduce, daemon=True).start()
    return port


@pytest.fixture
def down(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The errors of the first calls, as far as none has met them."""
    call, down = courier.call, iter([errno.EHOSTUNREACH, errno.ENETUNREACH])

    def tried(*arguments: Any, **said: Any) -> socket.socket:
        for number in down:
            raise OSError(number, os.strerror(number))
        return call(*arguments, **said)

    monkeypatch.setattr(courier, "call", tried)
    return down


def test_all_learn_where_the_servers_listen_once_the_last_one_is_there_and_a_link_up_again(
        scheduler: int, down: Iterator[int]) -> None:
    found: queue.Queue[List[str]] = queue.Queue()
    for sender, said in ((0, {}), (1, {"listens": "b:2"}), (0, {"listens": "a:1"})):
        threading.Thread(target=lambda sender=sender, said=said: found.put(
            sockets.addresses(sender, PATIENCE_S, **said)), daemon=True).start()
    assert [found.get(timeout=PATIENCE_S) for _ in range(3)] == [["a:1", "b:2"]] * 3 and not [*down]


def test_a_worker_calls_a_server_again_when_the_link_is_up_again(
        scheduler: int, down: Iterator[int], tmp_path: Path) -> None:
    courier.take_calls(courier.listen_at(f"{tmp_path}/server"), PATIENCE_S, lambda *_: None)
    Outbox([f"{tmp_path}/server"], 0, PATIENCE_S)
    assert not [*down]


def test_a_call_for_which_there_is_no_thread_ends_and_the_next_one_is_taken(
        scheduler: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(**_: Any) -> None:
        raise RuntimeError("can't start new thread")

    taken: queue.Queue[socket.socket] = queue.Queue()
    courier.take_calls(courier.listen_at(f"{tmp_path}/server"), PATIENCE_S, lambda call, *_: taken.put(call))
    with monkeypatch.context() as patched, socket.socket(socket.AF_UNIX) as caller:
        patched.setattr(threading, "Thread", none_left)
        caller.connect(f"{tmp_path}/server")
        assert caller.recv(1) == b""
    with courier.call(f"{tmp_path}/server", 0, PATIENCE_S):
        taken.get(timeout=PATIENCE_S).close()


def test_a_process_of_another_job_is_told_that_it_is_a_stranger(
        scheduler: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sign = commands.Signer
    monkeypatch.setattr(commands, "Signer", lambda sender, key: sign(sender, b"another secret"))
    with pytest.raises(ProtocolError, match=f"at 127.0.0.1:{scheduler} has hung up: .* ODSGD_SECRET is not the job's"):
        sockets.addresses(0, PATIENCE_S)


def test_a_scheduler_whose_connection_is_reset_is_said_to_have_hung_up(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setenv("DMLC_PS_ROOT_URI", "127.0.0.1")
    monkeypatch.setenv("DMLC_PS_ROOT_PORT", str(listener.getsockname()[1]))
    monkeypatch.setenv("DMLC_NUM_SERVER", "1")

    def reset() -> None:
        connection, _ = listener.accept()
        connection.sendall(os.urandom(courier.CHALLENGE_NBYTES))
        connection.recv(1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    threading.Thread(target=reset, daemon=True).start()
    with listener, pytest.raises(ProtocolError, match="has hung up"):
        sockets.addresses(0, PATIENCE_S)


def test_a_firewall_does_not_forget_a_connection_on_which_nothing_is_sent_for_hours() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        gone: queue.Queue[str] = queue.Queue()
        for connection in (one, listener.accept()[0]):
            courier.Courier(connection, lambda *_: np.empty(0), lambda *_: None, gone.put)
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
        one.shutdown(socket.SHUT_RDWR)
        assert [gone.get(timeout=PATIENCE_S) for _ in range(2)]


def test_a_process_of_another_version_ends_who_hears_it(scheduler: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told: queue.Queue[Tuple[str, threading.Thread]] = queue.Queue()

    def die(message: str, *_: object) -> None:
        told.put((message, threading.current_thread()))
        raise SystemExit  # of its thread

    monkeypatch.setattr(ending, "die", die)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    connection: Optional[socket.socket] = None
    while connection is None:
        with contextlib.suppress(ConnectionRefusedError):  # it may not listen yet
            connection = courier.call(f"127.0.0.1:{scheduler}", 3, PATIENCE_S, version="0.0.0")
    with connection:
        said, thread = told.get(timeout=PATIENCE_S)
        thread.join(PATIENCE_S)  # while `excepthook` is ours
        assert said.startswith("a process of this job (rank 3) runs odsgd 0.0.0, this one ")
