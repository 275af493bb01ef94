"""Workers that run ahead: of an exchange that they need not wait for, and with messages in the order of the rule."""
from typing import List

import numpy as np
import pytest

from tests.jobs import run_job


@pytest.mark.parametrize("push_every, fetch_every, expected", [
    (2, 3, [0, 0, 2, 2, 2, 6]),   # the fetch of step 3 contains the push of step 2
    (1, 2, [0, 2, 2, 4, 4, 6]),
])
def test_a_fetch_contains_every_push_the_worker_has_asked_for(push_every: int, fetch_every: int,
                                                              expected: List[int]) -> None:
    result, = run_job("tests.runahead:downpour", 1, 1, push_every, fetch_every, 6)
    np.testing.assert_array_equal(result["seen"], expected)


def test_the_gradient_of_elastic_averaging_does_not_wait_for_the_exchange() -> None:
    # x: 4 - 1 = 3, X = 3 1/2; x: 3 -> 3 1/2, then 2 1/2, X = 3; x: 2 1/2 -> 3, then 2.
    result, = run_job("tests.runahead:elastic", 1, 1)
    np.testing.assert_array_equal(result["seen"], [3.0, 2.5, 2.0])
