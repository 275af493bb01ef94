"""Asynchronous settings known to diverge, said before the time is spent.

With F gradients in flight, each taken on weights that F - 1 others have moved on since, training behaves as if it had
momentum even without any (Mitliagkas, Zhang, Hadjis, Ré, "Asynchrony begets Momentum", 2016):

    total momentum     1 - (1 - momentum) / F        implicit 1 - 1/F and the optimizer's own, together
    effective step     lr F / (1 - momentum)         lr times all momentum that adds up

The method knows F. Where it divides lr by the staleness, F counts at most 2 in the effective step. The reasons, and how
the bounds were measured: docs/explanation/staleness.md.
"""
from typing import List

from kvstore.methods.local_optimizers import PLAIN
from odsgd.config.train import TrainConfig

MOST_STEP = 1.0
MOST_MOMENTUM = 0.99


def warnings_about(config: TrainConfig, num_workers: int) -> List[str]:
    """One line for every bound that `config` is beyond, with the number and what to do."""
    if not config.asynchronous or num_workers == 1 or config.optimizer not in PLAIN:
        return []
    steps = Steps(config, num_workers)
    lines = []
    if steps.effective > MOST_STEP:
        lines.append(f"effective step {steps.effective:.4g} = {steps}: above {MOST_STEP:g} asynchronous training is "
                     f"known to diverge. {steps.remedies()}")
    if steps.total_momentum > MOST_MOMENTUM:
        lines.append(f"total momentum {steps.total_momentum:.4g}: {steps.momentum:g} of its own, the rest from "
                     f"{steps.in_flight} gradients in flight; above {MOST_MOMENTUM} asynchronous training is known to "
                     "swing or diverge. Set momentum to 0, or take fewer workers (softsync: a smaller n)")
    return lines


class Steps:
    """How large the steps of an asynchronous job are at the largest learning rate of its schedule."""

    def __init__(self, config: TrainConfig, num_workers: int) -> None:
        traits = config.method.traits(config.options, num_workers)
        trainers = "momentum", float(config.optimizer_arguments().get("momentum", 0.0))
        self.momentum_option, self.momentum = traits.momentum or trainers
        self.lr, self.in_flight = max(config.lr, config.lr_warmup_from), traits.in_flight
        self._factor = min(self.in_flight, 2) if traits.damped else self.in_flight  # of lr
        self._counted = ("fresh gradients" if traits.damped else
                         "updates in flight (n)" if self.in_flight < num_workers else "workers")
        self._may_be_damped = traits.momentum is None and not traits.damped
        self.effective = self.lr * self._factor / max(1 - self.momentum, 1e-9)
        self.total_momentum = 1 - (1 - self.momentum) / self.in_flight

    def __str__(self) -> str:
        times = f" x {self._factor} {self._counted}" if self._factor > 1 else ""
        share = f" / (1 - {self.momentum_option} {self.momentum:g})" if self.momentum else ""
        return f"lr {self.lr:g}{times}{share}"

    def remedies(self) -> str:
        """The changes that would do, each by itself."""
        remedies = [f"Lower lr to {self.lr * MOST_STEP / self.effective:.3g}"]
        if self.momentum and self.effective * (1 - self.momentum) <= MOST_STEP:
            remedies.append(f"set {self.momentum_option} to 0")
        if self._may_be_damped and 2 * self.lr / max(1 - self.momentum, 1e-9) <= MOST_STEP:
            remedies.append("take --kvstore softsync with its modulation")
        return ", or ".join(remedies)
