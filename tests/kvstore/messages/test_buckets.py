"""The plan of buckets, decided without a network."""
import random
from typing import Dict, Sequence

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.messages.buckets import Bucket, Keys, Parameter, by_layer, join, plan, split

ODD = [Parameter(i, f"p{i}", shape) for i, shape in enumerate([(30, 3), (5,), (100, 2), (7,), (1,), (64,)])]


def covered(buckets: Sequence[Bucket]) -> Dict[str, np.ndarray]:
    """How often each element of each parameter is in a bucket."""
    count = {parameter.name: np.zeros(parameter.size, int) for parameter in ODD}
    for bucket in buckets:
        for segment in bucket.segments:
            count[segment.parameter.name][segment.start:segment.stop] += 1
    return count


@pytest.mark.parametrize("nbytes", [4, 16, 20, 256, 1 << 20])
@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_every_element_travels_exactly_once_in_buckets_of_limited_size(nbytes: int, servers: int) -> None:
    buckets = plan(ODD, Keys(servers), nbytes)
    assert all(np.all(count == 1) for count in covered(buckets).values())
    assert max(bucket.size for bucket in buckets) * 4 <= nbytes
    for bucket in buckets:
        ends = [0] + [segment.end for segment in bucket.segments]
        assert [segment.offset for segment in bucket.segments] == ends[:-1]


def test_the_last_layer_is_packed_first() -> None:
    assert [s.parameter.name for s in plan(ODD, Keys(1), 1 << 20)[0].segments] == ["p5", "p4", "p3", "p2", "p1", "p0"]


@pytest.mark.parametrize("servers", [1, 2, 3, 4, 5])
def test_mxnet_sends_every_bucket_to_the_server_it_is_planned_for(servers: int) -> None:
    for bucket in plan(ODD, Keys(servers), 64):
        assert bucket.id * 9973 % servers == bucket.server_rank
        assert bucket.id * 9973 < 2 ** 31


def test_servers_get_equal_shares_of_bytes() -> None:
    parameters = [Parameter(i, f"p{i}", (size,)) for i, size in enumerate([1000, 10] * 20)]  # weights, biases in turn
    load = [0, 0]
    for bucket in plan(parameters, Keys(2), 1000):
        load[bucket.server_rank] += bucket.size
    assert abs(load[0] - load[1]) <= 250


def test_two_stores_never_share_a_number() -> None:
    keys = Keys(2)
    first, second = plan(ODD, keys, 64), plan(ODD, keys, 64)
    assert not {bucket.id for bucket in first} & {bucket.id for bucket in second}


def test_only_ps_lite_runs_out_of_numbers_and_says_what_has_taken_them() -> None:
    keys, any_number = Keys(2, Keys.LIMIT), Keys(2)
    keys._next = any_number._next = [Keys.LIMIT - 1, Keys.LIMIT - 2]
    assert keys.take(0) == Keys.LIMIT - 1
    with pytest.raises(ConfigError, match="closed ones too, have used up the 215329 numbers"):
        keys.take(0)
    assert any_number.take(0) == Keys.LIMIT + 1


def test_parameters_with_other_multipliers_or_types_do_not_share_a_bucket() -> None:
    mixed = [Parameter(i, f"p{i}", (4,), dtype, lr, wd) for i, (dtype, lr, wd) in enumerate(
        [("float32", 1, 1), ("float32", 1, 0), ("float32", 2, 1), ("float16", 1, 1), ("float32", 1, 1)])]
    groups = sorted(sorted(s.parameter.key for s in bucket.segments) for bucket in plan(mixed, Keys(1), 1 << 20))
    assert groups == [[0, 4], [1], [2], [3]]


def test_whole_means_one_bucket_per_parameter_in_its_own_shape() -> None:
    buckets = plan(ODD, Keys(2), 16, whole=True)
    assert sorted(bucket.shape or () for bucket in buckets) == sorted(parameter.shape for parameter in ODD)


def test_a_part_of_a_parameter_has_no_shape() -> None:
    assert {bucket.shape for bucket in plan([Parameter(0, "p", (4, 4))], Keys(1), 32)} == {None}


def test_a_parameter_that_cannot_be_trained_is_named() -> None:
    with pytest.raises(ConfigError, match="parameter p is int32; only float32 and float16"):
        plan([Parameter(0, "p", (3,), "int32")], Keys(1))


def test_split_and_join_are_inverse() -> None:
    buckets = plan(ODD, Keys(3), 100)
    flats = {bucket.id: np.random.RandomState(bucket.id).rand(bucket.size) for bucket in buckets}
    arrays: Dict[str, np.ndarray] = {}
    for bucket in buckets:
        split(bucket, flats[bucket.id], arrays, "x/")
    for bucket in plan(ODD, Keys(2), 1 << 20):  # another plan reads the same arrays
        assert join(bucket, arrays, "x/").size == bucket.size
    for bucket in buckets:
        np.testing.assert_array_equal(join(bucket, arrays, "x/"), flats[bucket.id])


def test_join_names_what_is_missing_or_misshapen() -> None:
    bucket = plan([Parameter(0, "p", (2, 3))], Keys(1))[0]
    with pytest.raises(ConfigError, match="no array `w/p`"):
        join(bucket, {}, "w/")
    with pytest.raises(ConfigError, match=r"`w/p` has shape \(3,\) .* expects \(2, 3\)"):
        join(bucket, {"w/p": np.zeros(3)}, "w/")


def test_layers_are_ordered_by_number_and_not_by_digit() -> None:
    names = ["conv1_weight", "conv2_bias", "conv2_weight", "conv10_weight"]
    shuffled = random.Random(3).sample(names, len(names))
    assert [p.name for p in by_layer(Parameter(n, n, (1,)) for n in shuffled)] == names


def test_a_bucket_is_printed_by_what_it_holds() -> None:
    assert str(plan(ODD, Keys(1), 1 << 20)[0]) == "bucket 0 (p5 … p0)"
    assert isinstance(plan(ODD, Keys(1))[0], Bucket)
