"""Which epoch and batch an iteration is, also when a run has gone on with another number of workers.

>>> before, now = EpochShares(4, 30), EpochShares(6, 20)
>>> progress = EpochProgress().divided_anew(iteration=5, examples=120, before=before, now=now)
>>> divmod(5 + progress.ahead, 6), progress.offset(1)  # of epoch 1 the first 1.5 of 6 batches have been dealt
((1, 2), -10)
"""
from __future__ import annotations

from typing import NamedTuple


class EpochShares(NamedTuple):
    """How a number of workers divide an epoch."""

    batches_per_epoch: int
    global_batch: int


class EpochProgress(NamedTuple):
    """Iterations are counted as if there had always been as many workers as now.

    Invariant: in no epoch is an example dealt twice.
    """

    ahead: int = 0  # iterations counted beyond those that were done
    epoch: int = -1  # the one that was under way when the number of workers changed; 0 is the first
    moved: int = 0  # examples by which its batches begin later

    def offset(self, epoch: int) -> int:
        """How many examples later the batches of this epoch begin."""
        return self.moved if epoch == self.epoch else 0

    def divided_anew(self, iteration: int, examples: int, before: EpochShares, now: EpochShares) -> EpochProgress:
        """From `iteration` on there are other workers. What is left of the epoch is theirs."""
        epoch, position = divmod(iteration + self.ahead, before.batches_per_epoch)
        dealt = position * before.global_batch + (self.offset(epoch) if position else 0)
        left = min(now.batches_per_epoch, (examples - dealt) // now.global_batch)
        first = now.batches_per_epoch - left
        return EpochProgress(epoch * now.batches_per_epoch + first - iteration, epoch, dealt - first * now.global_batch)
