"""Which settings are warned about, with which number and remedy."""
from typing import Any, Dict

import pytest

from odsgd.config.train import TrainConfig
from odsgd.training.stability import effective_step, total_momentum, warnings_about


def only_line(workers: int, **options: Any) -> str:
    (line,) = warnings_about(TrainConfig(**options), workers)
    assert "\n" not in line
    return line


def test_the_effective_step_is_lr_times_workers_over_one_minus_momentum() -> None:
    assert only_line(4, kvstore="asgd", lr=0.1, momentum=0.9) == (
        "effective step 4 = lr 0.1 x 4 workers / (1 - momentum 0.9): above 1 asynchronous training is known to diverge."
        " Lower lr to 0.025, or set momentum to 0")


@pytest.mark.parametrize("workers, options, step", [
    (8, dict(kvstore="asgd", lr=0.1), 0.8),
    (8, dict(kvstore="dcasgd_a", lr=0.05, momentum=0.5), 0.8),
    (8, dict(kvstore="softsync", n=2, modulate=False, lr=0.3), 0.6),
    (8, dict(kvstore="softsync", lr=0.3), 0.6),
    (8, dict(kvstore="softsync", n=1, lr=0.3), 0.3),
    (8, dict(kvstore="downpour", T=4, lr=0.1), 0.8),
    (8, dict(kvstore="easgd", lr=0.8), 0.8),
    (8, dict(kvstore="eamsgd", lr=0.08), 0.8),
    (8, dict(kvstore="asgd", lr=0.05, lr_warmup="1epoch", lr_warmup_from=0.1), 0.8),
    (8, dict(kvstore="asgd", lr=0.05, optimizer_params="momentum=0.5"), 0.8),
])
def test_what_is_in_flight_depends_on_the_algorithm(workers: int, options: Dict[str, Any], step: float) -> None:
    config = TrainConfig(**options)
    assert effective_step(config, workers) == pytest.approx(step)
    assert warnings_about(config, workers) == []


def test_each_remedy_named_would_do() -> None:
    assert only_line(8, kvstore="asgd", lr=0.4).endswith(
        "Lower lr to 0.125, or take --kvstore softsync with its modulation")
    assert only_line(2, kvstore="asgd", lr=0.8, momentum=0.5).endswith("Lower lr to 0.25")
    assert only_line(4, kvstore="eamsgd", lr=0.4).endswith("Lower lr to 0.1, or set delta to 0")
    assert warnings_about(TrainConfig(kvstore="asgd", lr=0.125), 8) == []


def test_asynchrony_adds_momentum_to_that_of_the_optimizer() -> None:
    config = TrainConfig(kvstore="asgd", lr=0.001, momentum=0.9)
    assert total_momentum(config, 8) == pytest.approx(0.9875) and warnings_about(config, 8) == []
    assert only_line(16, kvstore="asgd", lr=0.001, momentum=0.9).startswith(
        "total momentum 0.9938: 0.9 of its own, the rest from 16 gradients in flight; above 0.99 asynchronous training")


@pytest.mark.parametrize("workers, options", [
    (1, dict(kvstore="asgd", lr=0.9, momentum=0.9)), (8, dict(kvstore="ssgd", lr=0.9, momentum=0.9)),
    (8, dict(kvstore="asgd", lr=0.9, optimizer="adam"))])
def test_nothing_is_said_of_one_worker_of_synchronous_stores_and_of_optimizers_with_another_scale(
        workers: int, options: Dict[str, Any]) -> None:
    assert warnings_about(TrainConfig(**options), workers) == []
