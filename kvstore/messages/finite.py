"""Whether gradients are finite. A sum of squares is finite where all numbers are, and takes one pass at the rate of
memory. Only if that sum is not finite are the elements inspected: one may be infinite or NaN, or the squares may merely
have overflowed (from 2e19 on).

Workers check the beginning of each bucket, which takes microseconds and finds most: a loss that is NaN makes gradients
NaN, but for zeros, as in rows of an embedding that the batch lacks. Servers check each push before the update, which
reads it anyway. Where MXNet has added up by then, the server knows the round and the parameter, but not the worker.
With on_nan `find`, and with codecs that hide it from servers, workers check everything they send. With `skip`, servers
leave out gradients that are not finite; workers do so where they take steps themselves.
"""
import itertools
import math
import sys
from typing import Callable, Optional, Sequence, Tuple

import numpy as np

from kvstore.errors import DivergedError
from kvstore.messages.buckets import Bucket

Check = Callable[[np.ndarray], None]
"""Raises DivergedError for floats that are not to be sent."""

Names = Sequence[Tuple[str, int]]
"""The parameters of a bucket, and where each ends."""

ON_NAN = ("stop", "find", "skip", "continue")
SAMPLE = 1024
"""Floats of a bucket that a worker checks with `stop` and `skip`."""

MOST_LINES = 20
"""Lines that a process writes about skipped gradients."""
_lines = itertools.count(1)

ADVICE = "Lower the learning rate, look at the data, or let on_nan be `skip` or `continue`"


def names(bucket: Bucket) -> Names:
    """The parameters of this bucket, for `wrong`."""
    return [(segment.parameter.name, segment.end) for segment in bucket.segments]


def finite(floats: np.ndarray) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):  # NumPy 2 warns of both
        return math.isfinite(np.dot(floats, floats)) or bool(np.isfinite(floats).all())


def wrong(floats: np.ndarray, of: Names) -> str:
    """What is wrong with floats that are not finite, in words."""
    places = np.flatnonzero(~np.isfinite(floats))
    name, end = next((name, end) for name, end in of if places[0] < end)
    return (f"{np.count_nonzero(places < end)} elements of the gradient of {name} are infinite or not a number (the "
            f"first: {floats[places[0]]})")


def check(worker_rank: int, iteration: int, bucket: Bucket, sample: Optional[int], skip: bool, floats: np.ndarray
          ) -> None:
    """DivergedError if the first `sample` floats that a worker sends of a bucket are not finite; a line if `skip`."""
    where = f"worker {worker_rank}, iteration {iteration}"
    if skip:
        skips(where, names(bucket), floats, sample)
    elif not finite(floats[:sample]):
        raise DivergedError(f"{where}: {wrong(floats, names(bucket))}, and were not sent. {ADVICE}")


def skips(where: str, of: Names, floats: np.ndarray, sample: Optional[int] = None) -> bool:
    """Whether the first `sample` floats are not finite; then a line says that all are skipped."""
    if finite(floats[:sample]):
        return False
    line = next(_lines)
    if line <= MOST_LINES:
        more = "; there will be no more lines like this one" if line == MOST_LINES else ""
        sys.stderr.write(f"{where}: {wrong(floats, of)}, and are skipped{more}\n")  # several threads write lines
        sys.stderr.flush()
    return True
