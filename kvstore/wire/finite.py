"""Whether gradients are finite. A sum of squares is finite where all numbers are, and takes one pass at the rate of
memory. Only where it is not does anybody look at each number: one may be infinite or none at all, or the squares may be
too large for a float (from 2e19 on).

Workers look at the beginning of each bucket, which takes microseconds and finds most: a loss that is not a number makes
all gradients so. Servers look at what they get, before an update reads it anyway. Where MXNet has added up by then, the
server knows the round and the parameter, and no worker. With on_nan `find`, workers look at everything they send.
"""
import functools
import math
from typing import Callable, Optional, Sequence, Tuple

import numpy as np

from kvstore.buckets import Bucket
from kvstore.errors import DivergedError

Look = Callable[[np.ndarray], None]
"""Raises DivergedError for floats that are not to be sent."""

Names = Sequence[Tuple[str, int]]
"""The parameters of a bucket, and where each ends."""

ON_NAN = ("stop", "find", "continue")
SAMPLE = 1024
"""Floats of a bucket that a worker looks at with `stop`."""

ADVICE = "Lower the learning rate, look at the data, or let on_nan be `continue`"


def names(bucket: Bucket) -> Names:
    """As `wrong` wants them."""
    return [(segment.parameter.name, segment.end) for segment in bucket.segments]


def finite(floats: np.ndarray) -> bool:
    """Whether none is infinite or not a number."""
    return math.isfinite(np.dot(floats, floats)) or bool(np.isfinite(floats).all())


def wrong(floats: np.ndarray, of: Names) -> str:
    """What is wrong with floats that are not finite, in words."""
    places = np.flatnonzero(~np.isfinite(floats))
    name, end = next((name, end) for name, end in of if places[0] < end)
    return (f"{np.count_nonzero(places < end)} elements of the gradient of {name} are infinite or not a number (the "
            f"first: {floats[places[0]]})")


def look(worker_rank: int, iteration: int, bucket: Bucket, sample: Optional[int], floats: np.ndarray) -> None:
    """DivergedError if a bucket's floats, on their way from a worker, are not finite, as far as the `sample` tells."""
    if not finite(floats[:sample]):
        raise DivergedError(f"worker {worker_rank}, iteration {iteration}: {wrong(floats, names(bucket))}, and were "
                            f"not sent. {ADVICE}")


def looking(worker_rank: int, iteration: int, bucket: Bucket, sample: Optional[int]) -> Look:
    """`look`, at what this worker sends of a bucket in this iteration."""
    return functools.partial(look, worker_rank, iteration, bucket, sample)
