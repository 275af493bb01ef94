"""Sums over the workers on a server of ps-lite, in an asynchronous job."""
from pathlib import Path

import numpy as np
import pytest

from kvstore.engine import engine
from kvstore.messages.header import FETCH, HEADER, number_of, sum_message
from kvstore.weights.servers.sums import OrderedSums


def test_a_sum_that_has_been_told_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sums, stored = OrderedSums(2), engine.zeros(1 + HEADER)

    def told(rank: int, *part: float) -> "tuple[float, float]":
        """The first number and the round of what is answered."""
        pushed = sum_message(np.array(part, np.float32), 1, 1, rank)
        sums.receive(engine.array(pushed), stored)
        return float(engine.memory(stored)[0]), float(engine.memory(stored)[-HEADER])

    monkeypatch.setenv("ODSGD_LOST", str(tmp_path / "lost"))
    assert told(0, 5) == (0, 0)
    (tmp_path / "lost").write_text("1\n")
    assert told(FETCH) == (5, 1)
    assert told(1, 7) == (5, 1)  # it was given up and lives


@pytest.mark.parametrize("workers, length", [(2, 1), (600, 28_939), (4096, 32_767)])
def test_the_lengths_of_all_workers_add_up_exactly_in_floats(workers: int, length: int) -> None:
    pushed = sum_message(np.zeros(length, np.float32), length, length, 0)
    total = pushed.copy()
    for _ in range(workers - 1):
        total[-HEADER:] += pushed[-HEADER:]
    assert number_of(total[-HEADER:]) == workers * length
