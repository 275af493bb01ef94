"""Messages of a worker that runs ahead keep the order of the rule."""
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
