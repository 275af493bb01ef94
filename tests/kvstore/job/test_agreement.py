"""What a worker that is lost between two sums leaves to those that gather texts."""
import numpy as np
import pytest

from kvstore.job import agreement
from kvstore.transports.sockets import SocketsJoined

PIECE = SocketsJoined.piece_floats

class WithAWorkerThatDies:
    """Worker 0 of two. Worker 1 adds `text` to the sums of a gathering, as far as it gets in the second one."""

    worker_rank, num_workers = 0, 2

    def __init__(self, text: str, gets: int) -> None:
        self._parts = [np.array([0, len(text)]), self._rows(text, gets)]

    def _rows(self, text: str, gets: int) -> np.ndarray:
        rows = np.zeros((2, len(text)))
        rows[1, :gets] = bytearray(text[:gets].encode())
        return rows

    def total(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(array + self._parts.pop(0), np.float32)


@pytest.mark.parametrize("gets, expected", [(0, ""), (PIECE, ""), (PIECE + 9, "x" * (PIECE + 9))])
def test_a_text_that_did_not_come_whole_is_an_empty_one(gets: int, expected: str) -> None:
    others = WithAWorkerThatDies("x" * (PIECE + 9), gets)
    assert agreement.gather_texts(others, "mine") == ["mine", expected]
