"""Gradients that are not finite: found, and said where."""
from typing import Optional

import numpy as np
import pytest

from kvstore.errors import DivergedError
from kvstore.messages.buckets import Bucket, Parameter, Segment
from kvstore.messages.finite import check, finite

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
