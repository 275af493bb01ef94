"""Epochs and learning rates as functions of the iteration alone, so that a resumed run continues its schedule exactly.

    lr        step:  lr * lr_factor ** (how many of lr_step_epochs have passed)
              poly:  lr * (1 - (t - s) / (T - s)) ** 2 from iteration s, where lr_warmup ends, to T, the last of all
                     epochs, as MXNet's PolyScheduler has it
              and during lr_warmup, on the line from lr_warmup_from to what the above gives at its end
    lr_local  the same decay of lr_local, at lr_step_epochs_local, without the warm-up; None follows lr
    gamma_p   SASGD's, where it is given: the store moves it by the factors of lr

>>> from odsgd.config.train import TrainConfig
>>> config = TrainConfig(lr=0.8, lr_warmup="2epochs", lr_step_epochs="4,6", epochs=8)
>>> schedule = Schedule(config, batches_per_epoch=10, num_workers=1)
>>> [round(schedule.rates(t)[0], 4) for t in (0, 10, 20, 39, 40, 60)]
[0.0, 0.4, 0.8, 0.8, 0.08, 0.008]

A run may go on with another number of workers:

>>> before, now = EpochShares(4, 30), EpochShares(6, 20)
>>> progress = EpochProgress().divided_anew(iteration=5, examples=120, before=before, now=now)
>>> divmod(5 + progress.ahead, 6), progress.offset(1)  # of epoch 1 the first 1.5 of 6 batches have been dealt
((1, 2), -10)
"""
import math
import sys
from typing import List, NamedTuple, Optional, Sequence, Tuple

from kvstore.job import environment
from kvstore.options import TrainingLength
from odsgd.config.train import TrainConfig


class Schedule:
    """The epoch and the learning rates of each iteration, and what is due after it. Iterations count from 0.

    `progress` : how an earlier number of workers has divided the epochs
    `scaling` : the factor of lr while there are fewer workers than `most_workers`
    """

    def __init__(self, config: TrainConfig, batches_per_epoch: int, num_workers: int) -> None:
        self._config, self.batches_per_epoch, self.progress = config, batches_per_epoch, EpochProgress()
        self.most_workers = environment.most_workers() or num_workers
        self._part = num_workers / self.most_workers
        self.scaling = {"none": 1.0, "linear": self._part, "sqrt": math.sqrt(self._part)}[config.lr_scaling]

    @property
    def total(self) -> int:
        """Iterations of the whole run."""
        return min(self._config.epochs * self.batches_per_epoch - self.progress.ahead,
                   self._config.iterations or sys.maxsize)

    def place(self, iteration: int) -> Tuple[int, int]:
        """Epoch, and batch in it."""
        return divmod(iteration + self.progress.ahead, self.batches_per_epoch)

    def rates(self, iteration: int) -> Tuple[float, Optional[float]]:
        """lr and lr_local; lr_local None: it follows lr."""
        t, config = iteration + self.progress.ahead, self._config
        span, steps = config.lr_warmup.iterations(self.batches_per_epoch), config.lr_step_epochs
        begin = self._begin(config.lr_warmup)
        lr = config.lr * self._decay(steps, max(t, begin + span))
        if t < begin + span:
            lr = config.lr_warmup_from + (lr - config.lr_warmup_from) * (t - begin) / span
        if config.lr_local is None:
            return lr * self.scaling, None
        own = config.lr_step_epochs_local
        return lr * self.scaling, config.lr_local * self._decay(steps if own is None else own, t)

    def _begin(self, span: TrainingLength) -> int:
        """Where a span from the first iteration, or the first epoch, on begins in the `t` of `rates`."""
        return self.progress.ahead if span.unit == "iterations" else 0

    def _decay(self, step_epochs: Sequence[int], t: int) -> float:
        config = self._config
        if config.lr_decay == "poly":
            start, end = config.lr_warmup.iterations(self.batches_per_epoch), config.epochs * self.batches_per_epoch
            # where the warm-up has ended: with the workers of now, or before, when there were most_workers
            start = int(min(start + max(0, self._begin(config.lr_warmup)), start / self._part))
            return 1.0 if t <= start else max(0.0, (end - t) / max(1, end - start)) ** 2
        return config.lr_factor ** sum(t >= epoch * self.batches_per_epoch for epoch in step_epochs)

    def settings(self, iteration: int) -> str:
        """The options, with their values, that mend a run that diverges."""
        lr, lr_local = self.rates(iteration)
        settings = {"lr": lr, "lr_local": lr_local, **self._config.tuned_with()}
        return ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)

    def evaluation_due(self, epoch: int, done: int) -> bool:
        """Whether the weights are evaluated at the end of this epoch, after `done` iterations."""
        every = self._config.eval_every
        return bool(every) and ((epoch + 1) % every == 0 or done == self.total)

    def checkpoint_due(self, done: int) -> bool:
        """Whether a checkpoint follows after `done` iterations."""
        span = self._config.checkpoint_every
        every = span.iterations(self.batches_per_epoch)
        counted = done + self.progress.ahead - self._begin(span)
        return done == self.total or bool(every and counted % every == 0)

    def warnings(self) -> List[str]:
        """A line where the method's `warmup` takes at least half of the run."""
        warmup = getattr(self._config.options, "warmup", None)
        count = warmup.iterations(self.batches_per_epoch) if warmup else 0
        if 2 * count < self.total or not count:
            return []
        if count >= self.total:
            return [f"the delay never begins: warmup is {count} iterations, and the run has {self.total}. Lower "
                    "warmup, e.g. --warmup 1epoch, or train longer"]
        return [f"the delay begins in iteration {count + 1} of {self.total}, since warmup is {count} iterations"]


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

    def divided_anew(self, iteration: int, examples: int, before: EpochShares, now: EpochShares) -> "EpochProgress":
        """The progress with other workers from `iteration` on, who share what is left of the epoch."""
        epoch, position = divmod(iteration + self.ahead, before.batches_per_epoch)
        dealt = position * before.global_batch + (self.offset(epoch) if position else 0)
        left = min(now.batches_per_epoch, (examples - dealt) // now.global_batch)
        first = now.batches_per_epoch - left
        return EpochProgress(epoch * now.batches_per_epoch + first - iteration, epoch, dealt - first * now.global_batch)
