"""A hub and its couriers on loopback: who may speak, what arrives, and what is said of what cannot be."""
import contextlib
import errno
import functools
import os
import queue
import socket
import threading
from types import SimpleNamespace
from typing import Any, List, Tuple

import numpy as np
import pytest

from kvstore._version import VERSION
from kvstore.engine import engine
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import ProtocolError
from kvstore.job import commands, ending
from kvstore.messages.buckets import Bucket, Parameter, Segment
from kvstore.messages.codecs import codec
from kvstore.messages.coded import CodedAnswer, CodedPush, DirectBucket
from kvstore.messages.header import BEGIN, FETCH, HEADER
from kvstore.messages.seam import TrafficSettings
from kvstore.transports.buffers import Buffer
from kvstore.transports.outbox import Outbox
from kvstore.weights.servers import courier
from kvstore.weights.servers.courier import Courier
from kvstore.weights.servers.hub import Hub
from tests.jobs import until

SIZE, KEY, PATIENCE_S = 1000, 7, 300
PUSHED = np.array([0, 0, 0, 1], np.float32)  # the header of a push
ZEROS = np.zeros(SIZE, np.float32)


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMLC_NODE_HOST", "127.0.0.1")
    monkeypatch.setenv("ODSGD_SECRET", "of this test")


class Client:
    """A worker's courier: sends what it is told, keeps what arrives."""

    def __init__(self, hub: Hub, rank: int, joined: int = 0) -> None:
        self.answers: queue.Queue[Tuple[List[float], np.ndarray]] = queue.Queue()
        self.disconnected: queue.Queue[str] = queue.Queue()
        self.connection = courier.call(hub.address, rank, PATIENCE_S, joined=joined)
        self._courier = Courier(self.connection, self._receive, self._arrived, self.disconnected.put)

    def _receive(self, key: int, nbytes: int, sender_code: float) -> np.ndarray:
        return np.empty(nbytes, np.uint8)

    def _arrived(self, key: int, header: np.ndarray, message: np.ndarray) -> None:
        self.answers.put((header.tolist(), message))

    def ask(self, message: np.ndarray, *header: float) -> None:
        self._courier.send(KEY, np.array(header, np.float32), message)

    def answer(self) -> Tuple[List[float], np.ndarray]:
        return self.answers.get(timeout=PATIENCE_S)

    def begin(self, w: np.ndarray = ZEROS) -> List[float]:
        """Send the first weights."""
        self.ask(w.view(np.uint8), 0, 0, 0, BEGIN)
        return self.answer()[0]


def add(key: int, pushed: NDArray, stored: NDArray) -> None:
    """W <- W + sum, as a shard would; the version is the sum of the marks."""
    total, w = engine.view(pushed), engine.view(stored)
    if total[-1] != FETCH:
        w[:-HEADER] += total[:-HEADER]
    w[-HEADER:] = [total[-1], 0, 0, 0]


@pytest.fixture
def hub() -> Hub:
    return Hub(2, PATIENCE_S, add, lambda key, header, stored: float(engine.view(stored)[0]) >= 2, threading.RLock())


def test_a_round_is_answered_when_all_have_pushed_however_long_the_messages(hub: Hub) -> None:
    size = 3_000_000  # no socket holds it
    traffic = TrafficSettings(codec="quantize")
    w = hub.open({KEY: size}, traffic)[KEY]
    first, second = Client(hub, 0), Client(hub, 1)
    start = np.arange(size, dtype=np.float32)
    first.begin(start)
    np.testing.assert_array_equal(w, start)
    ones = CodedPush(traffic, size).encode(np.ones(size, np.float32))
    second.ask(ones, 0, 0, 0, 2)
    first.ask(ones, 0, 0, 0, 1)
    for client in (first, second):
        header, message = client.answer()
        assert header == [3, 0, 0, 0]
        np.testing.assert_array_equal(message.view(np.float32), start + 2)
    assert second.disconnected.empty()


def test_an_asynchronous_hub_answers_each_push(hub: Hub) -> None:
    traffic = TrafficSettings(asynchronous=True, codec="float16", codec_weights="float16")
    hub.open({KEY: SIZE}, traffic)
    client, answer = Client(hub, 1), CodedAnswer(traffic, ZEROS)
    client.begin()
    for count in (1, 2, 3):
        client.ask(CodedPush(traffic, SIZE).encode(ZEROS + 1), 0, 0, 0, 2)
        message = np.append(ZEROS, PUSHED)
        answer.room(message)[:] = client.answer()[1]
        answer.decode(message, PUSHED)
        assert set(message[:-HEADER].tolist()) == {count}


def test_where_servers_have_rounds_a_push_is_answered_without_weights_and_who_asks_waits(hub: Hub) -> None:
    hub.open({KEY: SIZE}, TrafficSettings(asynchronous=True, quorum=2))
    one = np.ones(SIZE, np.float32).view(np.uint8)
    first, second = Client(hub, 0), Client(hub, 1)
    first.begin()
    first.ask(one, 0, 0, 0, 1)
    assert first.answer()[1].size == 0
    first.ask(one[:0], 0, 1, 0, FETCH)
    second.ask(one[:0], 0, 0, 0, FETCH)  # only looks
    np.testing.assert_array_equal(second.answer()[1].view(np.float32), ZEROS + 1)
    second.ask(one, 0, 0, 0, 2)
    for client, size in ((second, 0), (first, SIZE)):
        np.testing.assert_array_equal(client.answer()[1].view(np.float32), np.full(size, 2, np.float32))


def test_a_worker_that_was_given_up_and_still_sends_does_not_reach_who_has_joined_in_its_place(hub: Hub) -> None:
    """This server's host has heard neither of the loss nor of the joiner."""
    w = hub.open({KEY: SIZE}, TrafficSettings(asynchronous=True))[KEY]
    old, ones = Client(hub, 1), np.ones(SIZE, np.float32)
    old.begin()
    before = hub._connections[1]
    room = hub._room(1, before, KEY, ones.nbytes, 2)
    joiner = Client(hub, 1, joined=2)
    assert old.disconnected.get(timeout=60)
    with hub._lock:  # which is held until the joiner is there
        pass
    for late in (room, hub._room(1, before, KEY, ones.nbytes, 2)):  # what had come before the connection ended
        assert not np.shares_memory(late, hub._room(1, hub._connections[1], KEY, ones.nbytes, 2))
        late[:] = (ones * 100).view(np.uint8)
        hub._arrived(1, before, KEY, PUSHED, late)
    joiner.ask(ones.view(np.uint8), 0, 0, 0, 2)
    np.testing.assert_array_equal(joiner.answer()[1].view(np.float32), ones)
    np.testing.assert_array_equal(w, ones)
    assert joiner.answers.empty()
    late_joiner = Client(hub, 1, joined=1)  # of whom nothing had been heard for too long
    assert late_joiner.disconnected.get(timeout=60) and joiner.disconnected.empty()


def test_a_worker_that_is_replaced_leaves_neither_a_thread_nor_a_connection(hub: Hub) -> None:
    def there() -> Tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    Client(hub, 1)
    until(lambda: 1 in hub._couriers, PATIENCE_S)
    before = there()
    for joined in range(1, 30):
        client = Client(hub, 1, joined=joined)
        until(functools.partial(lambda joined: hub._joined[1] == joined, joined), PATIENCE_S)
    until(lambda: there()[0] <= before[0] and there()[1] <= before[1], 60)
    assert client.disconnected.empty()


@pytest.mark.parametrize("secret, challenged", [("another", True), ("of this test", False)])
def test_a_stranger_and_a_recording_are_shown_the_door(hub: Hub, secret: str, challenged: bool) -> None:
    host, _, port = hub.address.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        challenge = connection.recv(courier.CHALLENGE_NBYTES, socket.MSG_WAITALL)
        signed = challenge if challenged else os.urandom(courier.CHALLENGE_NBYTES)
        hello = commands.Signer(0, secret.encode()).sign("courier", {"challenge": signed.hex()})
        connection.sendall(hello.encode().ljust(courier.HELLO_NBYTES))
        assert connection.recv(1) == b""


def test_a_silent_stranger_holds_up_nobody(hub: Hub) -> None:
    host, _, port = hub.address.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S):
        hub.open({KEY: SIZE}, TrafficSettings(codec="float16"))
        assert Client(hub, 0).begin()[-1] == BEGIN


def test_silent_strangers_are_few_at_a_time(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier, "MOST_UNPROVEN", 2)
    monkeypatch.setattr(courier, "UNDISTURBED_S", 0.1)
    host, _, port = hub.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S)) for _ in range(3)]
        for stranger in silent[:2]:
            assert len(stranger.recv(100)) == courier.CHALLENGE_NBYTES
            assert stranger.recv(1) == b""  # it had to go
        Client(hub, 0)
        until(lambda: 0 in hub._couriers, PATIENCE_S)


def test_a_hello_in_pieces_is_understood(hub: Hub) -> None:
    hub.open({KEY: SIZE}, TrafficSettings(codec="float16"))
    host, _, port = hub.address.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge = connection.recv(courier.CHALLENGE_NBYTES, socket.MSG_WAITALL)
        signer = commands.Signer(0, commands.job_key())
        hello = signer.sign("courier", {"challenge": challenge.hex(), "version": VERSION}).encode()
        hello = hello.ljust(courier.HELLO_NBYTES)
        arrived: queue.Queue[List[float]] = queue.Queue()
        for start in range(0, len(hello), 300):
            connection.sendall(hello[start:start + 300])
            with contextlib.suppress(queue.Empty):  # a wait, so that pieces stay pieces
                arrived.get(timeout=0.05)
        own = Courier(connection, lambda key, nbytes, sender_code: np.empty(nbytes, np.uint8),
                      lambda key, header, message: arrived.put(header.tolist()), lambda reason: None)
        own.send(KEY, np.array([0, 0, 0, BEGIN], np.float32), np.ones(SIZE, np.float32).view(np.uint8))
        assert arrived.get(timeout=PATIENCE_S)[-1] == BEGIN


class Died(Exception):
    """What a process says at its end."""


def test_a_server_whose_messages_are_of_another_length_ends_the_worker(
        hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    told: queue.Queue[Tuple[str, threading.Thread]] = queue.Queue()

    def die(message: str, *_: Any, **__: Any) -> None:
        told.put((message, threading.current_thread()))
        raise Died

    monkeypatch.setattr(ending, "die", die)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    hub.open({KEY: SIZE}, TrafficSettings(codec="float16"))
    outbox, message = Outbox([hub.address], 0, PATIENCE_S), Buffer(SIZE, mx.cpu())
    bucket = Bucket(KEY, 0, (Segment(Parameter("w", "w", (SIZE,)), 0, SIZE, 0),))
    outbox.open(bucket, TrafficSettings(codec="float16", codec_weights="float16"), np.zeros(SIZE, np.float32))
    message.there()[-1] = BEGIN  # not before the engine has written its zeros
    outbox.send(bucket, message)
    message.there()[-HEADER:] = [0, 0, 0, 1]
    second = Client(hub, 1)
    second.ask(np.zeros(SIZE, np.float16).view(np.uint8), 0, 0, 0, 2)
    outbox.send(bucket, message)
    second.answer()
    expected = f"a message of {4 * SIZE} bytes has come for bucket {KEY}, expected {2 * SIZE}"
    said, thread = told.get(timeout=PATIENCE_S)
    thread.join(PATIENCE_S)  # while `excepthook` is ours
    assert expected in said
    outbox._asked[KEY][1]()  # else the engine waits for it for ever


def test_a_lost_connection_is_told(hub: Hub) -> None:
    client = Client(hub, 0)
    client.connection.shutdown(socket.SHUT_RDWR)
    assert client.disconnected.get(timeout=PATIENCE_S) == "it closed the connection"


class WithoutDescriptors(Client):
    def _arrived(self, key: int, header: np.ndarray, message: np.ndarray) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_an_error_of_a_processs_own_is_no_lost_connection(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.open({KEY: SIZE}, TrafficSettings(codec="float16"))
    client = WithoutDescriptors(hub, 0)
    monkeypatch.setattr(ending, "die", lambda message, *_: client.disconnected.put(message))
    client.ask(np.zeros(SIZE, np.float32).view(np.uint8), 0, 0, 0, BEGIN)
    assert client.disconnected.get(timeout=PATIENCE_S).startswith("Traceback")


def test_messages_that_cannot_be() -> None:
    bucket = DirectBucket(TrafficSettings(codec="float16"), 2, np.zeros(9, np.float32), np.zeros(9, np.float32))
    with pytest.raises(ProtocolError, match="worker 1 sent 20 bytes for a bucket of 5 floats, expected 10"):
        bucket.room(1, 20)
    assert not bucket.add(0, np.ones(HEADER, np.float32))
    with pytest.raises(ProtocolError, match="worker 0 pushed a bucket twice"):
        bucket.add(0, np.ones(HEADER, np.float32))


def test_what_an_answer_leaves_out_is_in_the_next_one() -> None:
    traffic, w = TrafficSettings(codec_weights="quantize"), np.zeros(3, np.float32)
    server, worker = CodedAnswer(traffic, w), CodedAnswer(traffic, w)
    w, message = np.array([1.0, 0.001, -0.3], np.float32), np.append(w, PUSHED)
    gaps = []
    for _ in range(4):
        worker.room(message)[:] = server.encode(w, PUSHED)
        worker.decode(message, PUSHED)
        gaps.append(np.abs(message[:-HEADER] - w).max())
    assert 1e-4 < gaps[0] < 1 / 254 and gaps[-1] < 1e-7


def test_a_residual_loses_nothing() -> None:
    push = CodedPush(TrafficSettings(codec="2bit", codec_threshold=0.5), 200_001)
    grad, total = np.full(200_001, 0.25, np.float32), np.zeros(200_001, np.float32)
    assert push.residual is not None
    for _ in range(5):
        total += codec("2bit", 0.5).floats(push.encode(grad), np.empty_like(grad))
    assert set(total.tolist()) == {1.0} and set(push.residual.tolist()) == {0.25}


def test_a_joiner_gets_no_sum_that_the_worker_before_it_had_asked_for(hub: Hub) -> None:
    """Though this server's host has not heard yet that the job has lost that one."""
    sent: List[int] = []
    for rank, joined in ((0, 0), (1, 3)):
        told: Any = SimpleNamespace(send=lambda *_, rank=rank: sent.append(rank))
        hub._joined[rank], hub._couriers[rank] = joined, told
        hub._sums.add(rank, 1, np.ones(2, np.float32))
    hub._answer_sums()
    assert sent == [0]
