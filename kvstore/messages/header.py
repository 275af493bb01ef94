"""What travels beside the floats of a bucket.

    push    [ payload … | version | lr_hi | lr_lo | sender_code ]
    answer  [ W …       | version | 0     | 0     | 0           ]

In a synchronous job a server sees the sum of all workers' pushes, in an asynchronous job single pushes. A push has the
worker's rank + 1 as its sender_code. A message that only asks for the answer has FETCH. If it is to end a worker's
round, its lr_hi is that worker's rank + 1; if the worker looks at the weights, -(rank + 1); else 0. On connections of
our own the four floats come first (`FRAME`).
docs/explanation/messages.md says why.
"""
import struct
from typing import NamedTuple, Tuple

import numpy as np

HEADER = 4  # floats behind the payload
SYNC_MODULUS = 4096
ASYNC_MODULUS = 2 ** 24
FETCH = -1
BEGIN = -2  # a sender_code, too: a bucket's first weights, on their way to a hub

COMMAND, SUM = -1, -2
"""In the place of a bucket's number: a signed command and its answer; a part of a sum over the workers, and the sum.
Version and lr_hi are then the number of the command or sum (`numbered`), which the answer has, too."""

FRAME = struct.Struct("<qq4f")
"""In front of each message on a connection of our own: bucket, bytes that follow, and the four floats."""


class Header(NamedTuple):
    """What a server reads of a push. In a synchronous job it is the sum of all workers' headers."""

    version: int
    lr: float
    rank_sum: int

    @property
    def worker_rank(self) -> int:
        """The rank, if this is the push of one worker."""
        return self.rank_sum


def split_lr(lr: float) -> Tuple[float, float]:
    """Two single-precision numbers whose sum is `lr`."""
    high = float(np.float32(lr))
    return high, float(np.float32(lr - high))


def rank_whose_round_ends(header: np.ndarray) -> int:
    """The worker whose round this fetch is to end; -1 in any other message."""
    return int(header[1]) - 1 if header[-1] == FETCH else -1


def is_look(header: np.ndarray) -> bool:
    """Whether a worker looks at the global weights by this fetch."""
    return bool(header[-1] == FETCH and header[1] < 0)


def numbered(number: int) -> np.ndarray:
    """The header of command or sum `number`."""
    return np.array([number % SYNC_MODULUS, number // SYNC_MODULUS, 0, 0], np.float32)


def number_of(header: np.ndarray) -> int:
    """The inverse of `numbered`."""
    return int(header[0]) + SYNC_MODULUS * int(header[1])


# -- beside buckets: sums and answers --------------------------------------------------------------------------------

SUM_SIZES = (1024, 32 * 1024)  # floats of the arrays whose answer is the sum of what was pushed


def sum_message(part: np.ndarray, size: int, number: int, worker_rank: int) -> np.ndarray:
    """A push of at most `size` floats: ``[ part … | number % 4096 | number // 4096 | 0 | rank ]``.

    In a synchronous job the number is the part's length: the answer has the sum of all workers', exact over 4096 of
    them. In an asynchronous one it is the round; the answer is the last sum that is complete, with its own round. There
    FETCH for the rank only asks.
    """
    pushed = np.zeros(size + HEADER, np.float32)
    pushed[:part.size] = part
    pushed[-HEADER:] = numbered(number)
    pushed[-1] = worker_rank
    return pushed


# A server's answer array holds raw bits: the worker that asked, which piece, how long the whole is, and the piece.
ANSWER_FLOATS = 32 * 1024  # the array's length; a longer one lets TCP's windows grow
_ENVELOPE = struct.Struct("<iiq")
_PIECE_NBYTES = 4 * ANSWER_FLOATS - _ENVELOPE.size


def pack_piece(sender: int, chunk: int, data: bytes) -> np.ndarray:
    """What the answer array holds while it carries piece number `chunk` of `data`."""
    piece = data[chunk * _PIECE_NBYTES:(chunk + 1) * _PIECE_NBYTES]
    raw = _ENVELOPE.pack(sender, chunk, len(data)) + piece
    return np.frombuffer(raw.ljust(4 * ANSWER_FLOATS, b"\0"), np.float32)


def pieces(nbytes: int) -> int:
    """How many pieces an answer takes; one at least."""
    return max(1, -(-nbytes // _PIECE_NBYTES))


def read_piece(array: np.ndarray) -> Tuple[int, int, int, bytes]:
    """The worker that asked, which piece, how long the whole is, and the piece (padded)."""
    raw = array.tobytes()
    return (*_ENVELOPE.unpack_from(raw), raw[_ENVELOPE.size:])
