"""What travels beside the floats of a bucket.

    push    [ grad … | version | lr_hi | lr_lo ]        from every worker, summed by the server
    answer  [ W …    | version | 0     | 0     ]        to every worker

`version` counts the updates of this bucket, modulo VERSION_MODULUS so that a sum over workers stays exact in a float.
Every worker sends the version it has; a sum that is not M times the server's own means that some worker's
push was counted into a round it does not belong to.

`lr` is sent by worker 0 alone, the others send 0, so that the sum is exact; it is split in two floats because Python's
has 53 bits. This is how the trainer's learning rate takes effect on the servers in that very update.
"""
from typing import Tuple

import numpy as np

HEADER = 3  # floats behind the payload
VERSION_MODULUS = 4096


def split_lr(lr: float) -> Tuple[float, float]:
    """Two single-precision numbers whose sum is `lr`."""
    high = float(np.float32(lr))
    return high, float(np.float32(lr - high))
