"""How a job's buckets are cut for its servers, decided without a network."""
import collections

import pytest

from kvstore.buckets import Keys, Parameter, plan
from kvstore.ps import LARGEST_NBYTES, LEAST_NBYTES, even_nbytes, window

KIB = 1024


def sizes(floats, servers, workers, waits):
    """Bytes of every bucket, by server."""
    found = collections.defaultdict(list)
    for bucket in plan([Parameter(0, "w", (floats,))], Keys(servers), even_nbytes(floats, servers, workers, waits)):
        found[bucket.server_rank].append(4 * bucket.size)
    return found


@pytest.mark.parametrize("floats", [1, 7, 1000, 33_000, 270_000, 512_000, 4_208_650, 25_600_000])
@pytest.mark.parametrize("servers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("workers", [1, 4, 16])
@pytest.mark.parametrize("waits", [True, False])
def test_every_server_has_as_many_buckets_of_a_size_that_suits(floats, servers, workers, waits):
    found = sizes(floats, servers, workers, waits)
    numbers, largest = {len(buckets) for buckets in found.values()}, max(max(buckets) for buckets in found.values())
    assert largest <= 1.5 * LARGEST_NBYTES
    if 4 * floats >= 2 * LEAST_NBYTES * servers:
        assert len(numbers) == 1 and len(found) == servers
        assert largest >= 0.99 * LEAST_NBYTES
        assert min(numbers) >= (2 if waits or servers < workers else 1)
    if 4 * floats >= 16 * LEAST_NBYTES * servers and servers < workers:
        assert min(numbers) >= 16


@pytest.mark.parametrize("floats, servers, waits, nbytes, under_way", [
    (4_208_650, 1, True, 257, 4), (4_208_650, 4, False, 257, 4), (505_058, 1, True, 132, 2),
    (505_058, 1, False, 132, 8), (271_098, 1, True, 132, 2), (271_098, 4, True, 132, 2),
    (25_600_000, 1, True, 1020, 2)])
def test_what_was_measured_to_be_fast_with_four_workers(floats, servers, waits, nbytes, under_way):
    found = [size for buckets in sizes(floats, servers, 4, waits).values() for size in buckets]
    assert max(found) / KIB == pytest.approx(nbytes, rel=0.01)
    assert window(found, waits) == under_way


def test_at_least_two_messages_are_under_way_however_large():
    assert [window([size, 100 * size], False) for size in (KIB, 10 * KIB, 1000 * KIB)] == [10, 2, 2]


def test_a_model_without_numbers_has_no_buckets():
    assert plan([], Keys(2), even_nbytes(0, 2, 1, True)) == []
