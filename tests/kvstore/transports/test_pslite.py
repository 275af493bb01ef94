"""How many of a worker's messages are under way to each server, and what it refuses, without a network."""
import collections
import contextlib
import queue
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import numpy as np
import pytest

from kvstore.engine import engine
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import ConfigError
from kvstore.job.deadlines import deadlines
from kvstore.messages.buckets import Keys, Parameter
from kvstore.messages.header import ANSWER_FLOATS, HEADER, pack_piece, pieces, read_piece
from kvstore.messages.seam import Setup, State, TrafficSettings
from kvstore.methods import where
from kvstore.methods.delayed import ODSGD
from kvstore.state.npz import to_bytes
from kvstore.transports import joining, pslite, sizing, sockets
from kvstore.weights.servers.sums import OrderedSums


class Servers:
    """A connection to servers that answer when they are told to."""

    def __init__(self, num_servers: int) -> None:
        self.worker_rank, self.num_workers, self.num_servers = 1, 2, num_servers
        self.keys, self.native = Keys(num_servers), self
        self.arrived: queue.Queue[Tuple[int, engine.Done]] = queue.Queue()

    def init(self, ids: Sequence[int], arrays: Sequence[NDArray]) -> None:
        """These keep no weights."""

    def command(self, name: str, payload: Any, timeout_s: float) -> None:
        """Nor anything else."""

    def pushpull(self, key: int, value: NDArray, out: NDArray) -> None:
        engine.push_async(lambda answer: self.arrived.put((key, answer)), [], [out])

    def receive(self, number: int) -> List[Tuple[int, engine.Done]]:
        """So many messages, and no more for now: keys and what answers them."""
        found = [self.arrived.get(timeout=300) for _ in range(number)]
        with pytest.raises(queue.Empty):
            self.arrived.get(timeout=0.3)
        return found


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("waits, under_way", [(False, 3), (True, 2)])
def test_a_worker_sends_each_server_as_much_as_its_window_holds(monkeypatch: pytest.MonkeyPatch, servers: int,
                                                                    waits: bool, under_way: int) -> None:
    monkeypatch.setattr(sizing, "WINDOW_NBYTES", 3 * 400)
    there = Servers(servers)
    monkeypatch.setattr(joining, "shared", lambda kind, timeout_s, synchronous: there)
    worker = pslite.ParameterServer()
    traffic = TrafficSettings(waits=waits, bucket_nbytes=400)
    buckets = worker.plan([Parameter(0, "w", (600,))], traffic)
    setup = Setup(where(ODSGD), {}, {}, buckets, traffic)
    worker.set_up(setup, lambda bucket: mx.nd.zeros(bucket.size))
    order = {bucket.id: place for place, bucket in enumerate(buckets)}
    waiting: Dict[int, Dict[int, Callable[[], None]]] = {rank: {} for rank in range(servers)}

    def messages_come(number: int) -> None:
        for key, answer in there.receive(number):
            waiting[buckets[order[key]].server_rank][order[key]] = answer

    pending = [worker.exchange(bucket, mx.nd.ones(bucket.size), 0.1) for bucket in buckets]
    messages_come(servers * under_way)
    for _ in range(len(buckets) // servers - under_way):
        for messages in waiting.values():
            messages.pop(min(messages))()  # which makes room for one more
        messages_come(servers)
    for messages in waiting.values():
        for answer in messages.values():
            answer()
    for one in pending:
        one.wait()
    worker.close()


class Alone:
    """MXNet's connection of the only worker, whose sums are what it pushes. `between` happens after each push."""

    def __init__(self) -> None:
        self.between: Callable[[], object] = lambda: None

    def pushpull(self, key: int, value: NDArray, out: NDArray) -> None:
        self.between()


def test_a_store_waits_as_long_as_it_says_itself_whatever_another_does_meanwhile(monkeypatch: pytest.MonkeyPatch
                                                                                ) -> None:
    job = object.__new__(pslite.Connection)
    job.worker_rank, job.num_workers, job.num_servers, job.synchronous = 0, 1, 1, True
    job.timeout_s, job.native = 1000.0, Alone()
    job._sums, job._rounds = {8: collections.deque([0, 2])}, collections.defaultdict(int)
    job.piece_floats, job.pieces_at_once = 8, 2
    waits: List[float] = []

    @contextlib.contextmanager
    def within(timeout_s: float, message: str) -> Iterator[None]:
        waits.append(timeout_s)
        yield

    monkeypatch.setattr(deadlines, "within", within)
    monkeypatch.setattr(joining, "shared", lambda kind, timeout_s, synchronous: job)
    patient, hasty = pslite.ParameterServer(600), pslite.ParameterServer(30)

    def other() -> None:
        job.native.between = lambda: None
        hasty.total(np.ones(8))

    job.native.between = other
    np.testing.assert_array_equal(patient.total(np.arange(40)), np.arange(40))
    assert waits == [30, *[600] * 5]


class AsynchronousServer:
    """MXNet's connection of the only worker to a server that has one key of sums, and has answered so many."""

    def __init__(self, rounds: int) -> None:
        self.sum, self.stored, self.asked = OrderedSums(1), mx.nd.zeros(8 + HEADER), 0
        self.sum._next += rounds

    def pushpull(self, key: int, value: NDArray, out: NDArray) -> None:
        self.asked += 1
        assert self.asked <= 9, "the worker asks for ever"
        self.sum.receive(value, self.stored)
        self.stored.copyto(out)


@pytest.mark.parametrize("rounds", [4094, 2 ** 24 - 3])
def test_sums_of_an_asynchronous_job_are_told_apart_however_many_there_were(rounds: int) -> None:
    job = object.__new__(pslite.Connection)
    job.worker_rank, job.num_workers, job.synchronous, job.native = 0, 1, False, AsynchronousServer(rounds)
    job._sums, job._rounds = {8: collections.deque([0])}, collections.defaultdict(int, {0: rounds})
    for part in np.arange(9, dtype=np.float32):
        assert job._ask_sum(part.reshape(1))()[0] == part


def test_what_servers_would_refuse_is_refused_by_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ODSGD_SECRET", raising=False)
    monkeypatch.setattr(joining, "shared", lambda kind, timeout_s, synchronous: Servers(1))
    for method, said in (("__main__:Mine", "method Mine is defined in the script itself, which servers cannot import"),
                         ("/tmp/mine.py:Mine", "is not this package's, and this job has no secret")):
        with pytest.raises(ConfigError, match=said):
            pslite.ParameterServer().set_up(Setup(method, {}, {}, [], TrafficSettings()), lambda bucket: None)


class Interrupted:
    """Gives what it has, but for the call that Ctrl-C interrupts."""

    def __init__(self, found: Sequence[Any], after: int) -> None:
        self.found, self.left = iter(found), after

    def __call__(self, *asked: Any) -> Any:
        self.left -= 1
        if self.left == -1:
            raise KeyboardInterrupt
        return next(self.found)


@pytest.mark.parametrize("kind", ["ps-lite", "sockets"])
def test_an_export_that_was_interrupted_can_be_read_again(kind: str) -> None:
    saved: State = {7: ({"optimizer/state": np.arange(3 * ANSWER_FLOATS, dtype=np.float32)}, {"rule": {}})}
    whole = to_bytes(saved)
    there: Any
    if kind == "sockets":
        there = object.__new__(sockets.SocketsJoined)
        wait = Interrupted([np.frombuffer(to_bytes({}), np.uint8), np.frombuffer(whole, np.uint8)], 1)
        there._ask = lambda name, payload: [wait, wait]
    else:
        there = object.__new__(pslite.Connection)
        there.command = lambda *command: None
        answers = [[read_piece(pack_piece(0, chunk, whole))] for chunk in range(pieces(len(whole)))]
        there.ask_piece = Interrupted(answers, 2)
    export = there.answers("export", 5.0)
    with pytest.raises(KeyboardInterrupt):
        export.read()
    (read, rules), = export.read().values()
    np.testing.assert_array_equal(read["optimizer/state"], saved[7][0]["optimizer/state"])
    assert rules == {"rule": {}}
