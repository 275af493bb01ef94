"""Which examples are dealt in an epoch in which the number of workers changes."""
from typing import List

import numpy as np
import pytest

from odsgd.training.data.data import Shards
from odsgd.training.epochs import EpochProgress, EpochShares

EXAMPLES, BATCH = 103, 4


@pytest.mark.parametrize("workers, iterations", [
    ([3, 2], [11, 40]),  # in the second epoch
    ([3, 2], [16, 40]),  # where one ends
    ([2, 3, 1, 4], [5, 3, 7, 40]),  # three times in one epoch
    ([4, 1, 4], [1, 1, 40]),
    ([3, 2], [7, 40]),  # with less than a batch of all left
])
def test_each_example_is_dealt_once_per_epoch_whoever_is_there(workers: List[int], iterations: List[int]) -> None:
    progress, before, iteration = EpochProgress(), EpochShares(0, 0), 0
    epochs: List[List[int]] = [[] for _ in range(3)]
    for num_workers, steps in zip(workers, iterations):
        shards = Shards(EXAMPLES, num_workers, BATCH, seed=1)
        now = EpochShares(shards.batches_per_epoch, num_workers * BATCH)
        if iteration:
            progress = progress.divided_anew(iteration, EXAMPLES, before, now)
        before = now
        for _ in range(steps):
            epoch, position = divmod(iteration + progress.ahead, now.batches_per_epoch)
            if epoch == len(epochs):
                break
            for rank in range(num_workers):
                batch = shards.batch(shards.order(epoch), position, rank, progress.offset(epoch))
                assert len(batch) == BATCH
                epochs[epoch] += batch.tolist()
            iteration += 1
    for epoch, dealt in enumerate(epochs):
        assert len(set(dealt)) == len(dealt), f"epoch {epoch}: some were dealt twice"
        assert EXAMPLES - len(dealt) < BATCH * max(workers), f"epoch {epoch}: {len(dealt)} were dealt"
    first = np.array(epochs[0])
    assert np.array_equal(first, Shards(EXAMPLES, 1, BATCH, seed=1).order(0)[:len(first)])
