"""Asynchronous settings known to diverge, said before the time is spent.

With F gradients in flight, each taken on weights that F - 1 others have moved on since, training behaves as if it had
momentum even without any (Mitliagkas, Zhang, Hadjis, Ré, "Asynchrony begets Momentum", 2016):

    total momentum     1 - (1 - momentum) / F        implicit 1 - 1/F and the optimizer's own, together
    effective step     lr F / (1 - momentum)         what lr comes to when all of that has added up

F is the number of workers; of softsync n, since its servers average the rest. In the effective step of modulated
softsync it is at most 2: lr is divided by a staleness of about n again, but not for the fresh ones, and 2 is what was
measured. Elastic averaging has nothing in flight but a worker's own steps: F is 1. Downpour's interval T does not
enter: neither did it in what was measured.

The bounds were measured (docs/explanation/staleness.md). Another network has another scale of lr; hence a warning and
no error.
"""
from __future__ import annotations

from typing import List, Tuple

from kvstore.algorithms.optimizers import PLAIN
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
        lines.append(f"total momentum {momentum:.4g}: {_own_momentum(config):g} of its own, the rest from "
                     f"{_in_flight(config, num_workers)} gradients in flight; above {MOST_MOMENTUM} asynchronous "
                     "training is known to swing or diverge. Set momentum to 0, or take fewer workers (softsync: a "
                     "smaller n)")
    return lines


def effective_step(config: TrainConfig, num_workers: int) -> float:
    """Of the largest learning rate of the schedule."""
    return _lr(config) * _factor(config, num_workers) / max(1 - _own_momentum(config), 1e-9)


def total_momentum(config: TrainConfig, num_workers: int) -> float:
    """The optimizer's own and that of asynchrony."""
    return 1 - (1 - _own_momentum(config)) / _in_flight(config, num_workers)


def _in_flight(config: TrainConfig, num_workers: int) -> int:
    """F."""
    return config.method.in_flight(config.options, num_workers)


def _damped(config: TrainConfig) -> bool:
    return config.method.damped(config.options)


def _factor(config: TrainConfig, num_workers: int) -> int:
    """What multiplies lr."""
    return min(_in_flight(config, num_workers), 2 if _damped(config) else num_workers)


def _lr(config: TrainConfig) -> float:
    return max(config.lr, config.lr_warmup_from)


def _own_momentum(config: TrainConfig) -> float:
    return _named_momentum(config)[1]


def _step_words(config: TrainConfig, num_workers: int) -> str:
    factor, (name, momentum) = _factor(config, num_workers), _named_momentum(config)
    few = _in_flight(config, num_workers) < num_workers
    what = "fresh gradients" if _damped(config) else "updates in flight (n)" if few else "workers"
    times = f" x {factor} {what}" if factor > 1 else ""
    return f"lr {_lr(config):g}{times}" + (f" / (1 - {name} {momentum:g})" if momentum else "")


def _remedies(config: TrainConfig, step: float) -> str:
    """What would do, each by itself."""
    name, momentum = _named_momentum(config)
    remedies = [f"lower lr to {_lr(config) * MOST_STEP / step:.3g}"]
    if momentum and step * (1 - momentum) <= MOST_STEP:
        remedies.append(f"set {name} to 0")
    alone = config.method.own_momentum(config.options) is not None
    if not alone and not _damped(config) and 2 * _lr(config) / max(1 - momentum, 1e-9) <= MOST_STEP:
        remedies.append("take --kvstore softsync with its modulation")
    sentence = ", or ".join(remedies)
    return sentence[0].upper() + sentence[1:]


def _named_momentum(config: TrainConfig) -> Tuple[str, float]:
    """The momentum of its steps, by the name of its option."""
    trainers = "momentum", float(config.optimizer_arguments().get("momentum", 0.0))
    return config.method.own_momentum(config.options) or trainers
