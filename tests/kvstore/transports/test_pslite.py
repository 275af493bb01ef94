"""How a job's buckets are cut for its servers, and how many are under way to each, without a network."""
import collections
import contextlib
import queue
from typing import Any, Callable, Dict, List, Sequence, Tuple

import pytest

from kvstore.engine import engine
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import ConfigError
from kvstore.messages.buckets import DEFAULT_NBYTES, Keys, Parameter, plan
from kvstore.messages.seam import Setup, Traffic
from kvstore.methods import where
from kvstore.methods.delayed import ODSGD
from kvstore.transports import pslite
from kvstore.transports.pslite import LEAST_NBYTES, SMALL_NBYTES, even_nbytes, window_nbytes

KIB, MIB = 1024, 1024 * 1024
SLOW, FAST = 6e-8, 1e-9
"""Seconds per byte of a round: four workers and one server at 1 Gbit/s; two workers at 10."""


def sizes(floats: int, servers: int, workers: int, waits: bool, pace: float = SLOW) -> Dict[int, List[int]]:
    """Bytes of every bucket, by server."""
    found: Dict[int, List[int]] = collections.defaultdict(list)
    nbytes = even_nbytes(floats, servers, workers, waits, pace)
    for bucket in plan([Parameter(0, "w", (floats,))], Keys(servers), nbytes):
        found[bucket.server_rank].append(4 * bucket.size)
    return found


@pytest.mark.parametrize("floats", [1, 7, 1000, 33_000, 270_000, 512_000, 4_208_650, 25_600_000])
@pytest.mark.parametrize("servers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("workers", [1, 4, 16])
@pytest.mark.parametrize("waits", [True, False])
def test_every_server_has_as_many_buckets_of_a_size_that_suits(floats: int, servers: int, workers: int,
                                                                         waits: bool) -> None:
    found = sizes(floats, servers, workers, waits)
    numbers, largest = [len(buckets) for buckets in found.values()], max(max(buckets) for buckets in found.values())
    nbytes = 4 * floats
    assert largest <= 1.5 * min(max(DEFAULT_NBYTES, nbytes / 64), MIB)
    if floats >= 1000:
        assert len(set(numbers)) == 1 and len(found) == servers
        assert numbers[0] <= 2 or largest >= 0.66 * DEFAULT_NBYTES or waits or servers < workers
        assert numbers[0] >= (2 if waits or nbytes >= 2 * LEAST_NBYTES * servers else 1)
    if nbytes >= 16 * SMALL_NBYTES * servers and servers < workers:
        assert numbers[0] >= 16 and largest >= SMALL_NBYTES


@pytest.mark.parametrize("floats, servers, waits, nbytes, under_way", [
    (4_208_650, 1, True, 257, 1024), (505_058, 1, True, 132, 247), (271_098, 1, True, 132, 132),
    (271_098, 4, True, 132, 132), (23_520_970, 1, True, 1021, 1024), (23_520_970, 4, True, 1044, 1024),
    (271_098, 1, False, 132, 1024)])
def test_the_sizes_that_benchmarks_md_speaks_of(floats: int, servers: int, waits: bool, nbytes: int,
                                                       under_way: int) -> None:
    found = [size for buckets in sizes(floats, servers, 4, waits).values() for size in buckets]
    assert max(found) / KIB == pytest.approx(nbytes, rel=0.01)
    assert window_nbytes(floats, waits) / KIB == pytest.approx(under_way, rel=0.01)


@pytest.mark.parametrize("floats, pace, kib", [
    (4_208_650, FAST, 2055), (505_058, FAST, 493), (271_098, FAST, 265), (25_600_000, 0.0, 2083),
    (4_208_650, 3e-9, 1028), (4_208_650, SLOW, 257), (25_600_000, SLOW, 1020)])
def test_buckets_grow_with_the_rate_of_the_links(floats: int, pace: float, kib: float) -> None:
    found = [size for buckets in sizes(floats, 2, 2, True, pace).values() for size in buckets]
    assert max(found) / KIB == pytest.approx(kib, rel=0.01)


def test_a_model_without_numbers_has_no_buckets() -> None:
    assert plan([], Keys(2), even_nbytes(0, 2, 1, True, SLOW)) == []


class Servers:
    """A connection to servers that answer when they are told to."""

    def __init__(self, num_servers: int) -> None:
        self.worker_rank, self.num_workers, self.num_servers = 1, 2, num_servers
        self.keys, self.native, self._waiting = Keys(num_servers), self, contextlib.nullcontext
        self.arrived: queue.Queue[Tuple[int, engine.Done]] = queue.Queue()

    def init(self, ids: Sequence[int], arrays: Sequence[NDArray]) -> None:
        """These keep no weights."""

    def command(self, name: str, payload: Any) -> None:
        """Nor anything else."""

    def pushpull(self, key: int, value: NDArray, out: NDArray) -> None:
        engine.push_async(lambda answer: self.arrived.put((key, answer)), [], [out])

    def receive(self, number: int) -> List[Tuple[int, engine.Done]]:
        """So many messages, and no more for now: keys and what answers them."""
        found = [self.arrived.get(timeout=20) for _ in range(number)]
        with pytest.raises(queue.Empty):
            self.arrived.get(timeout=0.3)
        return found


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("waits, under_way", [(False, 3), (True, 2)])
def test_a_worker_sends_each_server_as_much_as_its_window_holds(monkeypatch: pytest.MonkeyPatch, servers: int,
                                                                    waits: bool, under_way: int) -> None:
    monkeypatch.setattr(pslite, "WINDOW_NBYTES", 3 * 400)
    there = Servers(servers)
    monkeypatch.setattr(pslite, "connection", lambda timeout_s, synchronous: there)
    worker = pslite.ParameterServer()
    traffic = Traffic(waits=waits, bucket_nbytes=400)
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


def test_what_servers_would_refuse_is_refused_by_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ODSGD_SECRET", raising=False)
    monkeypatch.setattr(pslite, "connection", lambda timeout_s, synchronous: Servers(1))
    for method, said in (("__main__:Mine", "method Mine is defined in the script itself, which servers cannot import"),
                         ("/tmp/mine.py:Mine", "is not this package's, and this job has no secret")):
        with pytest.raises(ConfigError, match=said):
            pslite.ParameterServer().set_up(Setup(method, {}, {}, [], Traffic()), lambda bucket: None)
