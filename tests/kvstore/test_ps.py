"""How a job's buckets are cut for its servers, decided without a network."""
import collections

import pytest

from kvstore.buckets import Keys, Parameter, plan
from kvstore.ps import DEFAULT_NBYTES, LARGEST_NBYTES, SMALL_NBYTES, even_nbytes, window_nbytes

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
    numbers, largest = [len(buckets) for buckets in found.values()], max(max(buckets) for buckets in found.values())
    nbytes = 4 * floats
    assert largest <= 1.5 * min(max(DEFAULT_NBYTES, nbytes / 64), LARGEST_NBYTES)
    if floats >= 1000:
        assert len(set(numbers)) == 1 and len(found) == servers
        assert numbers[0] == 1 or largest >= 0.66 * DEFAULT_NBYTES or waits or servers < workers
        assert numbers[0] >= (2 if waits else 1)
    if nbytes >= 16 * SMALL_NBYTES * servers and servers < workers:
        assert numbers[0] >= 16 and largest >= SMALL_NBYTES


@pytest.mark.parametrize("floats, servers, waits, nbytes, under_way", [
    (4_208_650, 1, True, 257, 1024), (505_058, 1, True, 132, 247), (271_098, 1, True, 132, 132),
    (271_098, 4, True, 132, 132), (23_520_970, 1, True, 1021, 1024), (23_520_970, 4, True, 1044, 1024),
    (271_098, 1, False, 132, 1024)])
def test_the_sizes_that_benchmarks_md_speaks_of(floats, servers, waits, nbytes, under_way):
    found = [size for buckets in sizes(floats, servers, 4, waits).values() for size in buckets]
    assert max(found) / KIB == pytest.approx(nbytes, rel=0.01)
    assert window_nbytes(floats, waits) / KIB == pytest.approx(under_way, rel=0.01)


def test_a_model_without_numbers_has_no_buckets():
    assert plan([], Keys(2), even_nbytes(0, 2, 1, True)) == []
