"""How a job's buckets are cut for its servers, by how long a round takes, and how much of them is in flight."""
import math
import time
from typing import Callable, Dict, List, Sequence

import numpy as np

from kvstore.messages.buckets import DEFAULT_NBYTES, WIRE_DTYPE, Bucket, Keys, Parameter, plan
from kvstore.messages.header import SUM_SIZES
from kvstore.messages.seam import TrafficSettings

WINDOW_NBYTES = 1024 * 1024
"""How much a worker has in flight to one server; an eighth of a small model where it waits for the answers. Less does
not fill the link; with much more the workers' streams drift apart, and the way back stands idle. The bound is safe only
because the store lets all workers send their buckets in one order."""
BUCKET_S = 3e-3
"""A round of a bucket takes about so long, within these bounds: a message costs processor time, whatever its size."""
OF_A_MODEL, LARGEST_NBYTES = (1 / 64, 1 / 4), (1024 * 1024, 2 * 1024 * 1024)
"""A bucket's share of the model, and its largest size: on slow links, on fast ones. DEFAULT_NBYTES is the least."""
MANY, SMALL_NBYTES = 16, 128 * 1024
"""If servers are fewer than workers, each gets about `MANY` buckets or more on slow links, if that leaves them
SMALL_NBYTES: some travel while others are updated."""
LEAST_NBYTES = 64 * 1024
"""If no worker waits for the answers, a server gets two buckets only if both have this many bytes."""
PROBES, PROBING_S = 5, 0.1  # sums of each length; how long a worker goes on with them


def measured_pace(total: Callable[[np.ndarray], np.ndarray], num_workers: int) -> float:
    """Seconds that a round takes for each byte of a worker's message, measured by sums over the workers (`total`). The
    same on all workers; collective, waits.

    The fastest rounds count: a round that a busy machine holds up says nothing about links and servers.
    """
    times: Dict[int, List[float]] = {size: [] for size in SUM_SIZES}
    spent = 0.0
    total(np.zeros(1))  # all are here, and begin together
    for probe in range(PROBES):
        for size, took in times.items():
            begin = time.perf_counter()
            total(np.zeros(size))
            took.append(time.perf_counter() - begin)
            spent += took[-1]
        if total(np.array([spent]))[0] > num_workers * PROBING_S and probe:
            break
    (small, fast), (large, slow) = ((size, min(took)) for size, took in sorted(times.items()))
    mine = max(slow - fast, 0.0) / (WIRE_DTYPE.itemsize * (large - small))
    return float(total(np.array([mine]))[0]) / num_workers


def even_nbytes(floats: int, num_servers: int, num_workers: int, waits: bool, pace: float) -> int:
    """A size of buckets that gives every server the same number, where a round takes `pace` seconds per byte.

    Two at least: one is pushed while the other is answered (SSGD, 4 workers with a server beside each, 1 Gbit/s, 0.27 M
    parameters: 33 ms per iteration in place of 41). Where no worker waits for the answers that pays only if both have
    LEAST_NBYTES: with less the messages cost more than they hide.
    """
    nbytes = WIRE_DTYPE.itemsize * floats
    slow, fast = (min(max(DEFAULT_NBYTES, part * nbytes), largest) for part, largest in zip(OF_A_MODEL, LARGEST_NBYTES))
    if num_servers < num_workers:
        slow = min(slow, max(nbytes / (MANY * num_servers), SMALL_NBYTES))
    near = min(max(slow, BUCKET_S / pace if pace else fast), fast)
    two = waits or nbytes >= 2 * LEAST_NBYTES * num_servers
    each = max(round(nbytes / (near * num_servers)), 2 if two else 1)
    return WIRE_DTYPE.itemsize * max(1, -(-floats // (each * num_servers)))


def on_servers(parameters: Sequence[Parameter], traffic: TrafficSettings, keys: Keys, num_workers: int,
               pace: Callable[[], float]) -> List[Bucket]:
    """The buckets of a job. Their sizes depend on the measured `pace` only where the bits do not depend on the sizes: a
    rule may look at a whole bucket, and a codec may have a scale per bucket. In an asynchronous job a saved version
    belongs to a bucket.
    """
    nbytes = traffic.bucket_nbytes
    if nbytes is None and not traffic.asynchronous:
        floats = sum(parameter.size for parameter in parameters)
        nbytes = even_nbytes(floats, keys.num_servers, num_workers, traffic.waits,
                             pace() if traffic.any_cut and not traffic.has_codec else math.inf)
    return plan(parameters, keys, nbytes, traffic.whole)


def window_nbytes(floats: int, waits: bool) -> float:
    """Bytes of a model of `floats` that may be in flight to one server."""
    return min(WINDOW_NBYTES, WIRE_DTYPE.itemsize * floats / 8) if waits else WINDOW_NBYTES
