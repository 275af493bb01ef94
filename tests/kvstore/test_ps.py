"""How a job's buckets are cut for its servers, decided without a network."""
import collections

import pytest

from kvstore.buckets import DEFAULT_NBYTES, Keys, Parameter, plan
from kvstore.ps import SMALL_NBYTES, even_nbytes, window

SIZES = [1, 7, 1000, 33_000, 270_000, 512_000, 4_208_650, 25_600_000]


@pytest.mark.parametrize("floats", SIZES)
@pytest.mark.parametrize("servers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("near, under_way", [(SMALL_NBYTES, 4), (DEFAULT_NBYTES, 2)])
@pytest.mark.parametrize("at_least", [1, 2])
def test_every_server_has_as_many_buckets_of_about_the_size_that_suits(floats, servers, near, under_way, at_least):
    buckets = plan([Parameter(0, "w", (floats,))], Keys(servers), even_nbytes(floats, servers, near, at_least))
    number = collections.Counter(bucket.server_rank for bucket in buckets)
    largest = 4 * max(bucket.size for bucket in buckets)
    assert largest <= 1.5 * near
    if floats >= 1000:
        assert min(number.values()) >= at_least
    if 4 * floats >= 2 * near * servers:
        assert len(set(number.values())) == 1 and len(number) == servers
        assert largest >= 0.66 * near
    if 4 * floats >= 16 * near * servers:
        assert window(largest) == under_way


def test_at_least_two_messages_are_under_way_however_large():
    assert [window(nbytes) for nbytes in (1 << 30, 256 * 1024, 128 * 1024, 131_520)] == [2, 2, 4, 4]


def test_a_model_without_numbers_has_no_buckets():
    assert plan([], Keys(2), even_nbytes(0, 2, SMALL_NBYTES, 1)) == []
