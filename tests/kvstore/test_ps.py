"""How a job's buckets are cut for its servers, decided without a network."""
import collections

import pytest

from kvstore.buckets import DEFAULT_NBYTES, Keys, Parameter, plan
from kvstore.ps import FEW_NBYTES, even_nbytes, window

SIZES = [1, 7, 1000, 33_000, 270_000, 512_000, 4_208_650, 25_600_000]


@pytest.mark.parametrize("floats", SIZES)
@pytest.mark.parametrize("workers, servers", [(1, 1), (2, 1), (4, 1), (4, 2), (2, 2), (4, 4), (3, 5)])
def test_every_server_has_as_many_buckets_of_about_the_size_that_suits(floats, workers, servers):
    buckets = plan([Parameter(0, "w", (floats,))], Keys(servers), even_nbytes(floats, workers, servers))
    number = collections.Counter(bucket.server_rank for bucket in buckets)
    near = (FEW_NBYTES if servers < workers else DEFAULT_NBYTES) // 4
    largest = max(bucket.size for bucket in buckets)
    if floats >= near * servers:
        assert len(set(number.values())) == 1 and len(number) == servers
        assert 0.66 * near <= largest <= 1.5 * near
    if floats >= 16 * near * servers:
        assert window(4 * largest) == (4 if servers < workers else 2)
    assert largest <= 1.5 * near


def test_at_least_two_messages_are_under_way_however_large():
    assert [window(nbytes) for nbytes in (1 << 30, 256 * 1024, 128 * 1024, 131_520)] == [2, 2, 4, 4]


def test_a_model_without_numbers_has_no_buckets():
    assert plan([], Keys(2), even_nbytes(0, 2, 2)) == []
