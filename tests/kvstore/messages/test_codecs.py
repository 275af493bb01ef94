"""Codecs beside NumPy, their stated errors, and the bits of a ring of any size: its messages passed on by hand."""
import itertools
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
import pytest

from kvstore.errors import DivergedError, KVStoreError
from kvstore.messages.buckets import Bucket, Parameter, Segment
from kvstore.messages.codecs import CODECS, WITHOUT_RESIDUAL, NotFiniteError, codec
from kvstore.messages.finite import check, finite
from kvstore.transports.rounds import Messages, Round, blocks

SIZES = [0, 1, 7, 1000]
# Error of one encoding of a block, by value; what the classes' docstrings say.
ERROR: Dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda x: 0 * x,
    "truncate": lambda x: np.maximum(np.abs(x) / 128, 2.0 ** -133),
    "bfloat16": lambda x: np.maximum(np.abs(x) / 256, 2.0 ** -134),
    "e3m0": lambda x: np.maximum(np.abs(x) / 3, np.maximum(blockwise(x) / 128, 2.0 ** -119)) * 1.0001,
    "quantize": lambda x: np.full(x.shape, max(np.abs(x).max(initial=0) / 254 * 1.0001, 2.0 ** -119)),
    "float16": lambda x: np.where(np.abs(x) > 65504, np.inf, np.maximum(np.abs(x) / 2048, 2.0 ** -25))}


def blockwise(x: np.ndarray) -> np.ndarray:
    """Of each value the largest magnitude of its block of 256."""
    return np.concatenate([np.full(part.size, np.abs(part).max()) for part in np.split(x, range(256, x.size, 256))
                           if part.size] or [x])


def floats(size: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    random = np.random.RandomState(seed)
    return (random.standard_normal(size) * scale).astype(np.float32)


def through(name: str, values: np.ndarray) -> np.ndarray:
    """What is left of `values` after one hop."""
    one = codec(name)
    message = one.room(values, np.empty(one.nbytes(values.size), np.uint8))
    assert message.size == one.nbytes(values.size)
    one.encode(values, message)
    decoded = np.empty_like(values)
    arrived = one.room(decoded, message.copy())
    arrived[:] = message
    one.decode(arrived, decoded)
    return decoded


def ring(name: str, own: Sequence[np.ndarray]) -> Tuple[List[np.ndarray], int]:
    """Every worker's result of an allreduce of `own`, one array per worker, and how many bytes each sent."""
    p = len(own)
    room = codec(name).nbytes(own[0].size)
    totals = [np.full_like(values, np.nan) for values in own]

    def messages(m: int) -> Messages:
        round_ = Round("a test", codec(name))
        round_.own, round_.total = own[m], totals[m]
        return round_.messages(m, p, (np.empty(room, np.uint8), np.empty(room, np.uint8)))

    rounds = [messages(m) for m in range(p)]
    sent = 0
    while True:
        pairs = [pair for pair in [next(one, None) for one in rounds] if pair is not None]
        if not pairs:
            return totals, sent
        assert len(pairs) == p
        assert not any(np.shares_memory(outgoing, incoming) for outgoing, incoming in pairs)  # both are under way
        on_the_wire = [outgoing.copy() for outgoing, _ in pairs]
        sent += on_the_wire[0].size
        for m, (_, incoming) in enumerate(pairs):
            incoming[:] = on_the_wire[m - 1]


def test_the_lengths_of_messages() -> None:
    assert {name: codec(name).nbytes(100) for name in CODECS} == {
        "none": 400, "float16": 200, "bfloat16": 200, "truncate": 200, "quantize": 104, "e3m0": 54, "2bit": 25,
        "1bit": 13}
    assert codec("e3m0").nbytes(2 ** 20) == 2 ** 20 * 4.125 / 8
    assert codec("largest:64").nbytes(8192) == 2 * (96 + 256) and codec("largest_2bit:64").nbytes(4097) == 2 * (
        96 + 8 + 16)


@pytest.mark.parametrize("name", ERROR)
@pytest.mark.parametrize("scale", [1e-44, 1e-39, 1e-36, 1e-3, 1.0, 1e37])
@pytest.mark.parametrize("size", SIZES)
def test_one_hop_errs_no_more_than_stated(name: str, size: int, scale: float) -> None:
    values = floats(size, size, scale)
    with np.errstate(over="ignore"):
        decoded = through(name, values)
    error = np.abs(decoded.astype(float) - values)
    assert np.all(error <= ERROR[name](values.astype(float)))


def test_truncate_keeps_the_upper_bits() -> None:
    values = np.array([1.0, -1.0078124, 3.1415926, -0.0], np.float32)
    np.testing.assert_array_equal(through("truncate", values), np.array([1, -1, 3.140625, -0.0], np.float32))
    random = floats(1000)
    assert np.all(np.abs(through("truncate", random)) <= np.abs(random))  # toward zero
    np.testing.assert_array_equal(through("truncate", random).view(np.uint32), random.view(np.uint32) & 0xffff0000)


def test_bfloat16_rounds_to_the_nearest_and_to_even_in_the_middle() -> None:
    values = np.array([1.00390625, 1.01171875, -1.004, 3.4028235e38, -0.0, np.inf], np.float32)
    np.testing.assert_array_equal(through("bfloat16", values),
                                  np.array([1, 1.015625, -1.0078125, np.inf, -0.0, np.inf], np.float32))
    assert np.isnan(through("bfloat16", np.array([0x7f800001, 0xffffffff], np.uint32).view(np.float32))).all()


def test_e3m0_takes_the_nearest_of_a_few_powers_of_two() -> None:
    values = np.array([-8, 6, 5.9, 3, -2.9, 0.1, 0.0625, 0.0624, 0], np.float32)
    np.testing.assert_array_equal(through("e3m0", values), [-8, 8, 4, 4, -2, 0.125, 0.125, 0, 0])
    apart = np.concatenate([np.full(256, 3, np.float32), np.full(3, 1e-3, np.float32)])  # another scale for each block
    np.testing.assert_array_equal(through("e3m0", apart), apart)
    with pytest.raises(NotFiniteError, match="e3m0 cannot send NaN"):
        through("e3m0", np.array([1, np.nan], np.float32))


def test_the_largest_of_each_chunk_keep_their_places() -> None:
    values = floats(10_000, 3)
    sent, few = through("largest:64", values), through("largest_2bit:64", values)
    for start in range(0, 10_000, 4096):
        chunk, kept, coded = (one[start:start + 4096] for one in (values, sent, few))
        largest = np.argsort(-np.abs(chunk))[:64]
        assert set(np.flatnonzero(kept)) == set(largest) == set(np.flatnonzero(coded))
        np.testing.assert_array_equal(kept[largest], chunk[largest])
        size = np.abs(chunk[largest])
        above = size > size.mean()
        expected = np.sign(chunk[largest]) * np.where(above, size[above].mean(), size[~above].mean())
        np.testing.assert_allclose(coded[largest], expected, rtol=1e-6)
    np.testing.assert_array_equal(through("largest:4096", values), values)
    with pytest.raises(NotFiniteError, match="the 3 largest"):
        through("largest:3", np.array([np.inf], np.float32))


def test_what_has_not_moved_is_not_sent_among_the_largest() -> None:
    values = np.zeros(4096 + 40, np.float32)
    values[[7, 9, 11, 4100, 4101]] = 1, -3, 1, 1, 3
    for name in ("largest:64", "largest_2bit:64"):
        np.testing.assert_array_equal(through(name, values), values)
        np.testing.assert_array_equal(through(name, 0 * values), 0 * values)


def test_nan_and_infinity_survive_truncate() -> None:
    bits = np.array([0x7f800000, 0xff800000, 0x7f800001, 0xff800001, 0x7fc00000, 0x3f800000], np.uint32)
    decoded = through("truncate", bits.view(np.float32))
    assert decoded[0] == np.inf and decoded[1] == -np.inf and decoded[5] == 1
    assert np.isnan(decoded[2:5]).all()


def test_quantize_beside_numpy() -> None:
    values = np.array([-2.54, 0.0, 0.011, 1.27, 2.54], np.float32)
    np.testing.assert_allclose(through("quantize", values), [-2.54, 0, 0.02, 1.28, 2.54], rtol=1e-6)
    np.testing.assert_array_equal(through("quantize", np.zeros(3, np.float32)), np.zeros(3))


def test_float16_is_numpys() -> None:
    values = np.array([1.0, -1.0004, 65504, 65520, -1e9, 2.0 ** -24, 2.0 ** -25, np.inf, -0.0], np.float32)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(through("float16", values), values.astype(np.float16).astype(np.float32))
        assert np.isnan(through("float16", np.array([np.nan], np.float32)))[0]


@pytest.mark.parametrize("name, threshold, expected", [
    ("2bit", 0.5, [0xe0 | 0x03, 0x80]),  # 11 10 00 11, then 10 and nothing
    ("1bit", 0.25, [0b10010000])])
def test_codes_of_a_few_bits_are_mxnets(name: str, threshold: float, expected: List[int]) -> None:
    """Its kernels: 11 for at least the threshold, 10 for at most minus it; 1 for above it. The first value highest."""
    values = np.array([0.5, -0.5, 0.25, 7.0, -0.75], np.float32)
    one = codec(name, threshold)
    message = np.empty(one.nbytes(5), np.uint8)
    one.encode(values, message)
    assert message.tolist() == expected
    decoded = one.floats(message, np.empty(5, np.float32))
    assert decoded.tolist() == ([0.5, -0.5, 0, 0.5, -0.5] if name == "2bit" else [1, -1, -1, 1, -1])


@pytest.mark.parametrize("name", ["2bit", "1bit"])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 1001])
def test_codes_of_a_few_bits_one_value_at_a_time(name: str, size: int) -> None:
    values = floats(size, size)
    wanted = ([0.5 if x >= 0.5 else -0.5 if x <= -0.5 else 0 for x in values] if name == "2bit" else
              [1 if x > 0.5 else -1 for x in values])
    assert through(name, values).tolist() == wanted


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_quantize_reports_what_it_cannot_send(bad: float) -> None:
    values = floats(10)
    values[3] = bad
    with pytest.raises(NotFiniteError, match=r"quantize cannot send (nan|inf)"):
        through("quantize", values)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", WITHOUT_RESIDUAL)
@pytest.mark.parametrize("size", [1, 3, 8, 1001])
def test_a_ring_gives_all_the_same_bits_within_the_stated_error(name: str, p: int, size: int) -> None:
    own = [floats(size, m) for m in range(p)]
    totals, sent = ring(name, own)
    assert all(total.tobytes() == totals[0].tobytes() for total in totals)
    exact = np.sum(own, axis=0, dtype=float)
    magnitude = np.sum(np.abs(own), axis=0, dtype=float)
    largest = max(np.abs(values).max() for values in own)
    stated = {"none": 0 * magnitude, "truncate": p / 128 * magnitude,
              "bfloat16": p / 256 * magnitude * (1 + p / 256),
              "float16": p / 2048 * magnitude * (1 + p / 2048) + p * 2.0 ** -25,
              "quantize": np.full(size, p * (p + 1) / 2 * largest / 254 * (1 + p / 254) * 1.0001)}
    assert np.all(np.abs(totals[0] - exact) <= (stated[name] if p > 1 else 0) + p * 2.0 ** -23 * magnitude)
    assert sent <= 2 * (p - 1) * codec(name).nbytes(-(-size // p))


def test_two_workers_get_the_bits_of_a_plain_sum() -> None:
    own = [floats(101, m) for m in range(2)]
    assert ring("none", own)[0][0].tobytes() == (own[0] + own[1]).tobytes()


def test_each_block_is_summed_in_the_order_of_the_ring() -> None:
    own = [floats(12, m, 1e3) for m in range(3)]
    total = ring("none", own)[0][0]
    for block, part in enumerate(blocks(total, 3)):
        order = [blocks(own[(block + hop) % 3], 3)[block] for hop in range(3)]
        assert part.tobytes() == (order[0] + order[1] + order[2]).tobytes()


def test_what_is_not_finite_in_a_ring() -> None:
    own = [np.array([np.nan, np.inf, 1, -np.inf], np.float32), np.array([1, 1, 1, 1], np.float32)]
    total = ring("truncate", own)[0][1]
    assert np.isnan(total[0]) and total[1:].tolist() == [np.inf, 2, -np.inf]
    with pytest.raises(KVStoreError, match="block 0 of 2: the codec quantize cannot send nan"):
        ring("quantize", own)


def test_blocks_cover_the_array() -> None:
    for size, p in itertools.product(SIZES, range(1, 9)):
        parts = blocks(np.arange(size), p)
        assert len(parts) == p and np.concatenate(parts).tolist() == list(range(size))
        assert max(map(len, parts)) <= -(-size // p)


FIRST, SECOND = Parameter(0, "first", (2, 3)), Parameter(1, "second", (1000, 4))
BUCKET = Bucket(7, 0, (Segment(FIRST, 0, 6, 0), Segment(SECOND, 0, 4000, 6)))


@pytest.mark.parametrize("largest", [0.0, 1.0, 1e-45, 1e30, 3.4e38])
def test_numbers_whose_squares_are_too_large_are_finite(largest: float) -> None:
    assert finite(np.full(5000, largest, np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 17, 4999])
def test_one_number_that_is_not_is_found(bad: float, place: int) -> None:
    floats = np.ones(5000, np.float32)
    floats[place] = bad
    assert not finite(floats)


@pytest.mark.parametrize("places, said", [
    ([5], "1 elements of the gradient of first are infinite or not a number (the first: nan)"),
    ([4, 5, 6, 7], "2 elements of the gradient of first "),
    ([6, 4005], "2 elements of the gradient of second "),
])
def test_what_is_said_names_the_first_parameter(places: "list[int]", said: str) -> None:
    floats = np.zeros(4006, np.float32)
    floats[places] = np.nan
    with pytest.raises(DivergedError) as caught:
        check(3, 12, BUCKET, None, False, floats)
    assert str(caught.value).startswith(f"worker 3, iteration 12: {said}")


@pytest.mark.parametrize("sample, seen", [(1024, False), (None, True)])
def test_a_sample_is_the_beginning(sample: Optional[int], seen: bool) -> None:
    floats = np.zeros(4006, np.float32)
    floats[2000] = np.inf
    if not seen:
        check(0, 1, BUCKET, sample, False, floats)
        return
    with pytest.raises(DivergedError):
        check(0, 1, BUCKET, sample, False, floats)
