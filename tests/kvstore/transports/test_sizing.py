"""How a job's buckets are cut for its servers, without a network."""
import collections
from typing import Dict, List, Optional

import numpy as np
import pytest

from kvstore.messages.buckets import DEFAULT_NBYTES, Keys, Parameter, plan
from kvstore.transports.joining import Joined
from kvstore.transports.sizing import LEAST_NBYTES, SMALL_NBYTES, even_nbytes, window_nbytes

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


class NotesItsWaits(Joined):
    """A connection to servers that are not there; it notes how long each sum may take."""

    def __init__(self) -> None:
        self.timeout_s, self.num_workers, self._pace = 600.0, 2, None
        self.waits_s: List[Optional[float]] = []

    def total(self, array: np.ndarray, timeout_s: Optional[float] = None) -> np.ndarray:
        self.waits_s.append(timeout_s)
        return np.asarray(array)


def test_the_pace_is_measured_once_within_the_time_of_the_store_that_asks() -> None:
    connection = NotesItsWaits()
    assert connection.pace(5.0) == connection.pace(600.0)
    assert set(connection.waits_s) == {5.0}
