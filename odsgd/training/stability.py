"""Asynchronous settings known to diverge, said before the time is spent.

With F gradients in flight, each taken on weights that F - 1 others have moved on since, training behaves as if it had
momentum even without any (Mitliagkas, Zhang, Hadjis, Ré, "Asynchrony begets Momentum", 2016):

    total momentum     1 - (1 - momentum) / F        implicit 1 - 1/F and the optimizer's own, together
    effective step     lr F / (1 - momentum)         lr times all momentum that adds up

The method knows F. Where it divides lr by the staleness, F counts at most 2 in the effective step. The reasons, and how
the bounds were measured: docs/explanation/staleness.md.
"""
from __future__ import annotations

from typing import List, Tuple

from kvstore.methods.local_optimizers import PLAIN
from odsgd.config.train import TrainConfig

MOST_STEP = 1.0
MOST_MOMENTUM = 0.99


def warnings_about(config: TrainConfig, num_workers: int) -> List[str]:
    """One line for every bound that `config` is beyond, with the number and what to do."""
    if not config.asynchronous or num_workers == 1 or config.optimizer not in PLAIN:
        return []
    step, momentum = effective_step(config, num_workers), total_momentum(config, num_workers)
    lines = []
    if step > MOST_STEP:
        lines.append(f"effective step {step:.4g} = {_step_words(config, num_workers)}: above {MOST_STEP:g} "
                     f"asynchronous training is known to diverge. {_remedies(config, step)}")
    if momentum > MOST_MOMENTUM:
        lines.append(f"total momentum {momentum:.4g}: {_momentum(config)[1]:g} of its own, the rest from "
                     f"{config.method.traits(config.options, num_workers).in_flight} gradients in flight; above "
                     f"{MOST_MOMENTUM} asynchronous training is known to swing or diverge. Set momentum to 0, or take "
                     "fewer workers (softsync: a smaller n)")
    return lines


def effective_step(config: TrainConfig, num_workers: int) -> float:
    """Of the largest learning rate of the schedule."""
    return _lr(config) * _factor(config, num_workers) / max(1 - _momentum(config)[1], 1e-9)


def total_momentum(config: TrainConfig, num_workers: int) -> float:
    """The momentum of the optimizer and of asynchrony together."""
    return 1 - (1 - _momentum(config)[1]) / config.method.traits(config.options, num_workers).in_flight


def _factor(config: TrainConfig, num_workers: int) -> int:
    """What multiplies lr."""
    traits = config.method.traits(config.options, num_workers)
    return min(traits.in_flight, 2) if traits.damped else traits.in_flight


def _lr(config: TrainConfig) -> float:
    return max(config.lr, config.lr_warmup_from)


def _step_words(config: TrainConfig, num_workers: int) -> str:
    factor, (name, momentum) = _factor(config, num_workers), _momentum(config)
    traits = config.method.traits(config.options, num_workers)
    few = traits.in_flight < num_workers
    what = "fresh gradients" if traits.damped else "updates in flight (n)" if few else "workers"
    times = f" x {factor} {what}" if factor > 1 else ""
    return f"lr {_lr(config):g}{times}" + (f" / (1 - {name} {momentum:g})" if momentum else "")


def _remedies(config: TrainConfig, step: float) -> str:
    """What would do, each by itself."""
    (name, momentum), traits = _momentum(config), config.method.traits(config.options, 1)
    remedies = [f"lower lr to {_lr(config) * MOST_STEP / step:.3g}"]
    if momentum and step * (1 - momentum) <= MOST_STEP:
        remedies.append(f"set {name} to 0")
    if traits.momentum is None and not traits.damped and 2 * _lr(config) / max(1 - momentum, 1e-9) <= MOST_STEP:
        remedies.append("take --kvstore softsync with its modulation")
    sentence = ", or ".join(remedies)
    return sentence[0].upper() + sentence[1:]


def _momentum(config: TrainConfig) -> Tuple[str, float]:
    """The momentum of its steps: the name of its option, and the value."""
    trainers = "momentum", float(config.optimizer_arguments().get("momentum", 0.0))
    return config.method.traits(config.options, 1).momentum or trainers
