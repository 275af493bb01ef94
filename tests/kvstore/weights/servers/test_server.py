"""A server's commands, in the place of MXNet's loop: what it keeps and for how long, and who waits for whom."""
import dataclasses
import math
import os
import threading
from pathlib import Path
from typing import Any, Callable, List

import numpy as np
import pytest

from kvstore import methods
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import ProtocolError
from kvstore.job import commands
from kvstore.job.deadlines import Deadlines
from kvstore.job.pulse import pulse
from kvstore.messages.header import ANSWER_FLOATS, HEADER, Header
from kvstore.messages.seam import TrafficSettings
from kvstore.methods.sync import SyncRule
from kvstore.optimizers.described import describe
from kvstore.transports.pslite import Connection
from kvstore.weights.servers import server
from kvstore.weights.servers.server import Server
from tests.kvstore.weights.servers.test_hub import KEY as BUCKET
from tests.kvstore.weights.servers.test_hub import PATIENCE_S, Client

SIZE, ANSWERS, SUM = 100_000, 1, 2


class Loop:
    """MXNet's: the server's rank, and whom it tells of pushes."""

    rank = 0
    push: Callable[[int, NDArray, NDArray], None]

    def _set_updater(self, updater: Callable[[int, NDArray, NDArray], None]) -> None:
        self.push = updater


class Job:
    """A server that has been greeted, and its worker 0."""

    def __init__(self, timeout_s: float = 600.0, num_workers: int = 1) -> None:
        self.loop = Loop()
        self.server = Server(self.loop)
        self.signers = [commands.Signer(rank, commands.job_key()) for rank in range(num_workers)]
        self.command("hello", num_workers=num_workers, synchronous=True, timeout_s=timeout_s, sums=[SUM],
                     answer_keys=[ANSWERS], trace_folder=None)

    def command(self, name: str, worker_rank: int = 0, **payload: Any) -> None:
        self.server._command(self.signers[worker_rank].sign(name, payload).encode())

    def push(self, key: int = BUCKET, marks: int = 1, versions: int = 0) -> None:
        """What all workers' pushes come to, as MXNet's loop has it."""
        pushed = mx.nd.zeros(SIZE + HEADER)
        pushed[-1], pushed[-HEADER] = marks, versions
        self.loop.push(key, pushed, mx.nd.zeros(SIZE + HEADER))

    def open(self, key: int = BUCKET, **options: Any) -> None:
        method = methods.find("ssgd")
        bucket = {"server_rank": 0, "size": SIZE, "shape": None, "names": [("w", SIZE)]}
        self.command("open", method=methods.where(method), options=method.Options(**options).plain(),
                     optimizer=describe(mx.optimizer.Adam()), local_step={}, buckets={str(key): bucket})

    def patience_s(self) -> float:
        """For how long it lets workers be silent."""
        began, due, _ = vars(server)["deadlines"]._due["silence"]
        return due - began


@pytest.fixture(autouse=True)
def own_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "deadlines", Deadlines())
    monkeypatch.setenv("DMLC_NODE_HOST", "127.0.0.1")
    monkeypatch.setenv("ODSGD_SECRET", "of this test")


@pytest.mark.parametrize("first_s, second_s, longest_s", [(10.0, 600.0, 905.0), (600.0, 10.0, 905.0)])
def test_a_server_waits_as_long_as_the_most_patient_store(first_s: float, second_s: float, longest_s: float) -> None:
    job = Job(first_s)
    job.open(BUCKET, timeout_s=first_s)
    job.open(8, timeout_s=second_s)
    assert job.patience_s() == pytest.approx(longest_s)


def test_under_our_launcher_workers_may_compute_for_as_long_as_they_like(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull, "w") as told:
        monkeypatch.setenv("ODSGD_REPORT_FD", str(told.fileno()))
        assert Job(10.0).patience_s() == math.inf


class Place(Connection):
    """A worker's place in that job, by calls."""

    def __init__(self, job: Job) -> None:
        self.job, self.num_servers, self.worker_rank, self.timeout_s, self._answer_keys = job, 1, 0, 600.0, [ANSWERS]
        self.array = mx.nd.zeros(ANSWER_FLOATS)
        job.loop.push(ANSWERS, mx.nd.zeros(ANSWER_FLOATS), self.array)

    def command(self, name: str, payload: Any, timeout_s: float) -> None:
        self.job.command(name, **payload)

    def _pull_answers(self) -> List[np.ndarray]:
        return [self.array.asnumpy()]


def test_a_server_keeps_no_state_that_a_worker_has_taken() -> None:
    job = Job()
    job.open()
    job.push()
    export = Place(job).answers("export", 600.0)
    assert sum(map(len, job.server._outgoing.values())) > 2 * 4 * SIZE
    export.read()
    assert not job.server._outgoing
    assert sum(array.nbytes for array in export.state()[BUCKET][0].values()) >= 2 * 4 * SIZE


def test_a_worker_may_ask_for_a_state_while_an_earlier_one_is_still_on_its_way() -> None:
    job = Job()
    job.open()
    job.push()
    place = Place(job)
    early = place.answers("export", 600.0)
    job.push(versions=1)
    late = place.answers("export", 600.0).read()
    assert [state[BUCKET][1]["optimizer"]["count"] for state in (early.read(), late)] == [1, 2]
    assert not job.server._outgoing


def test_what_a_worker_has_closed_is_open_again_for_who_joins_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(num_workers=2)
    monkeypatch.setattr(job.server, "_answer", lambda *_, **__: b"")
    job.open()
    job.command("close", worker_rank=1, buckets=[BUCKET])
    job.command("opened", worker_rank=1, chunk=0)
    shard = job.server._shard
    assert shard is not None
    for worker_rank in (0, 1):
        assert shard._entries
        job.command("close", worker_rank=worker_rank, buckets=[BUCKET])
    assert not shard._entries


def test_what_a_closed_store_had_goes_with_the_last_worker_that_closes_it() -> None:
    job = Job(num_workers=2)
    job.open()
    job.push(marks=1 + 2)
    job.command("close", worker_rank=1, buckets=[BUCKET])
    job.push(marks=1 + 2, versions=1 + 1)
    with pytest.raises(ProtocolError, match="which another store has"):
        job.open()
    job.command("close", buckets=[BUCKET])
    job.open()


def test_a_server_that_is_done_says_so_and_stays_until_the_launcher_ends_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "told"
    descriptor = os.open(told, os.O_WRONLY | os.O_CREAT)
    monkeypatch.setenv("ODSGD_REPORT_FD", str(descriptor))
    job = Job(num_workers=2)
    job.command("leave", worker_rank=1)
    assert "done" not in told.read_text()
    job.command("leave")
    os.close(descriptor)
    assert told.read_text().endswith('{"event": "done"}\n')
    assert not vars(server)["deadlines"]._due, "it would end as one that nobody talks to"
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())


class Slow(SyncRule):
    """Takes its time over an update."""

    begun, go_on = threading.Event(), threading.Event()

    def receive(self, header: Header, total: np.ndarray, w: np.ndarray) -> None:
        self.begun.set()
        assert self.go_on.wait(PATIENCE_S)
        super().receive(header, total, w)


def test_the_loop_waits_for_an_update_of_a_message_with_a_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods.find("ssgd"), "rule", Slow)
    monkeypatch.setattr(pulse, "activity", "")  # another test of this process may have left one
    job, settings = Job(), dataclasses.asdict(TrafficSettings(codec="float16"))
    job.open(codec="float16")
    job.command("open_direct", traffic=settings, buckets={str(BUCKET): [0, SIZE]})
    assert job.server._hub is not None
    client = Client(job.server._hub, 0)
    client.begin(np.zeros(SIZE, np.float32))
    client.ask(np.zeros(SIZE, np.float16).view(np.uint8), 0, 0, 0, 1)
    assert Slow.begun.wait(PATIENCE_S)
    loop = threading.Thread(target=job.push, args=(SUM,))
    loop.start()
    loop.join(0.5)
    assert loop.is_alive() and pulse.activity == "serving"
    Slow.go_on.set()
    loop.join(PATIENCE_S)
    client.answer()
    assert not loop.is_alive() and pulse.activity == ""
