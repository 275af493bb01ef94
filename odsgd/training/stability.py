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
    traits = config.method.traits(config.options, num_workers)
    rate = "lr_warmup_from" if config.lr_warmup_from > config.lr else "lr"
    lr, in_flight = float(getattr(config, rate)), traits.in_flight  # the largest rate of the schedule
    option, momentum = traits.momentum or ("momentum", float(config.optimizer_arguments().get("momentum", 0.0)))
    factor = min(in_flight, 2) if traits.damped else in_flight
    step, total = lr * factor / max(1 - momentum, 1e-9), 1 - (1 - momentum) / in_flight
    lines = []
    if step > MOST_STEP:
        counted = ("fresh gradients" if traits.damped else
                   "updates in flight (n)" if in_flight < num_workers else "workers")
        times = f" x {factor} {counted}" if factor > 1 else ""
        share = f" / (1 - {option} {momentum:g})" if momentum else ""
        remedies = [f"Lower {rate} to {lr * MOST_STEP / step:.3g}"]  # each would do by itself
        if momentum and step * (1 - momentum) <= MOST_STEP:
            remedies.append(f"set {option} to 0")
        if traits.momentum is None and not traits.damped and 2 * lr / max(1 - momentum, 1e-9) <= MOST_STEP:
            remedies.append("take --kvstore softsync with its modulation")
        lines.append(f"effective step {step:.4g} = {rate} {lr:g}{times}{share}: above {MOST_STEP:g} asynchronous "
                     f"training is known to diverge. {', or '.join(remedies)}")
    if total > MOST_MOMENTUM:
        rest = f", the rest from {in_flight} gradients in flight" if in_flight > 1 else ""
        none, fewer = f"set {option} to 0", "take fewer workers (softsync: a smaller n)"
        enough = [none] * (1 - 1 / in_flight <= MOST_MOMENTUM) + [fewer] * (momentum <= MOST_MOMENTUM)
        remedy = ", or ".join(enough) or f"{none}, and {fewer}"
        lines.append(f"total momentum {total:.4g}: {momentum:g} of its own{rest}; above {MOST_MOMENTUM} asynchronous "
                     f"training is known to swing or diverge. {remedy[0].upper()}{remedy[1:]}")
    return lines
