"""What travels beside the floats of a bucket.

    push    [ payload … | version | lr_hi | lr_lo | rank ]
    answer  [ W …       | version | …                    ]

In a synchronous job a server sees the sum of all workers' pushes, in an asynchronous one each by itself.

`version`  how many updates the weights have seen. A push says which version the worker has; counted modulo a number
           that keeps a sum over workers exact in a float, or, asynchronously, as large as a float can count.
`lr`       the trainer's learning rate, which so takes effect in that very update; in two floats, because Python's has
           53 bits. In a sum only worker 0's counts: the others send 0.
`rank`     the worker's; FETCH from one that sends nothing and only wants the answer.
"""
from typing import NamedTuple, Tuple

import numpy as np

HEADER = 4  # floats behind the payload
SYNC_MODULUS = 4096
ASYNC_MODULUS = 2 ** 24
FETCH = -1


class Header(NamedTuple):
    """What a server reads of a push; in a synchronous job `version` and `worker_rank` are sums."""

    version: int
    lr: float
    worker_rank: int


def split_lr(lr: float) -> Tuple[float, float]:
    """Two single-precision numbers whose sum is `lr`."""
    high = float(np.float32(lr))
    return high, float(np.float32(lr - high))
