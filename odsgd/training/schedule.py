"""Learning rates as functions of the iteration alone, so that a resumed run continues its schedule exactly.

    lr        step:  lr * lr_factor ** (how many of lr_step_epochs have passed)
              poly:  lr * (1 - (t - s) / (T - s)) ** 2 from iteration s, where lr_warmup ends, to T, the last of all
                     epochs, as MXNet's PolyScheduler has it
              and during lr_warmup, on the line from lr_warmup_from to what the above gives at its end
    lr_local  the same decay of lr_local, at lr_step_epochs_local, without the warm-up; None follows lr
    gamma_p   SASGD's, where it is given: the store moves it by the factors of lr

>>> from odsgd.config.train import TrainConfig
>>> config = TrainConfig(lr=0.8, lr_warmup="2epochs", lr_step_epochs="4,6", epochs=8)
>>> [round(lr_at(config, t, batches_per_epoch=10), 4) for t in (0, 10, 20, 39, 40, 60)]
[0.0, 0.4, 0.8, 0.8, 0.08, 0.008]
"""
from __future__ import annotations

from typing import Optional, Sequence

from odsgd.config.train import TrainConfig


def lr_at(config: TrainConfig, iteration: int, batches_per_epoch: int) -> float:
    """Learning rate of the global optimizer in iteration `iteration`, 0-based."""
    span = config.lr_warmup.iterations(batches_per_epoch)
    if iteration >= span:
        return config.lr * _decay(config, config.lr_step_epochs, iteration, batches_per_epoch)
    reached = config.lr * _decay(config, config.lr_step_epochs, span, batches_per_epoch)
    return config.lr_warmup_from + (reached - config.lr_warmup_from) * iteration / span


def lr_local_at(config: TrainConfig, iteration: int, batches_per_epoch: int) -> Optional[float]:
    """Learning rate of the local optimizer in iteration `iteration`; None: that of the global one."""
    if config.lr_local is None:
        return None
    own = config.lr_step_epochs_local
    steps = config.lr_step_epochs if own is None else own
    return config.lr_local * _decay(config, steps, iteration, batches_per_epoch)


def _decay(config: TrainConfig, step_epochs: Sequence[int], iteration: int, batches_per_epoch: int) -> float:
    if config.lr_decay == "poly":
        start, end = config.lr_warmup.iterations(batches_per_epoch), config.epochs * batches_per_epoch
        return 1.0 if iteration <= start else max(0.0, (end - iteration) / max(1, end - start)) ** 2
    return config.lr_factor ** sum(iteration >= epoch * batches_per_epoch for epoch in step_epochs)
