"""Learning rates, iteration by iteration."""
from typing import Any, List, Optional

import numpy as np
import pytest

from kvstore.engine._mxnet import mx
from odsgd.config.train import TrainConfig
from odsgd.training.data.data import Shards
from odsgd.training.schedule import EpochProgress, EpochShares, Schedule


def config_of(**options: Any) -> TrainConfig:
    return TrainConfig(**options)


def test_steps_come_at_the_first_iteration_after_their_epoch() -> None:
    config = config_of(lr=1.0, lr_step_epochs="2,3", lr_factor=0.5)
    assert [Schedule(config, 10, 1).rates(t)[0] for t in (0, 19, 20, 29, 30, 99)] == [1, 1, 0.5, 0.5, 0.25, 0.25]


def test_warm_up_is_a_line_from_its_start_to_the_full_rate() -> None:
    config = config_of(lr=0.8, lr_warmup="5epochs", lr_warmup_from=0.1)  # as for ImageNet in the paper
    assert [Schedule(config, 2, 1).rates(t)[0] for t in (0, 5, 10, 11)] == pytest.approx([0.1, 0.45, 0.8, 0.8])


def test_poly_falls_with_the_square_to_zero() -> None:
    config = config_of(lr=1.6, lr_decay="poly", epochs=4)
    assert [Schedule(config, 5, 1).rates(t)[0] for t in (0, 10, 20, 21)] == [1.6, 0.4, 0.0, 0.0]


def test_poly_with_a_warm_up_reaches_its_rate_and_is_mxnets() -> None:
    config = config_of(lr=1.6, lr_decay="poly", epochs=90, lr_warmup="5epochs")  # Table 4 of the OD-SGD paper
    mxnets = mx.lr_scheduler.PolyScheduler(90 * 7, base_lr=1.6, pwr=2, final_lr=0, warmup_steps=5 * 7)
    rates = [Schedule(config, 7, 1).rates(t)[0] for t in range(90 * 7 + 1)]
    assert rates == pytest.approx([mxnets(t) for t in range(90 * 7 + 1)]) and max(rates) == rates[35] == 1.6


def test_a_local_rate_with_poly_begins_to_fall_where_the_global_one_does() -> None:
    config = config_of(lr=1.6, lr_local=0.2, lr_decay="poly", epochs=10, lr_warmup=2)
    assert [Schedule(config, 1, 1).rates(t)[1] for t in (0, 1, 2, 6, 10)] == pytest.approx(
        [0.2, 0.2, 0.2, 0.05, 0])


def test_a_warm_up_as_long_as_the_run_ends_at_the_rate() -> None:
    config = config_of(lr=1.0, lr_decay="poly", epochs=4, lr_warmup=4)
    assert [Schedule(config, 1, 1).rates(t)[0] for t in (0, 2, 3)] == [0.0, 0.5, 0.75]


def test_the_local_rate_has_its_own_steps_and_no_warm_up() -> None:
    config = config_of(lr_local=0.5, lr_step_epochs="1", lr_step_epochs_local="2", lr_warmup="1epoch")
    assert [Schedule(config, 10, 1).rates(t)[1] for t in (0, 10, 20)] == pytest.approx([0.5, 0.5, 0.05])


def test_the_local_rate_shares_the_steps_when_it_has_none_of_its_own() -> None:
    config = config_of(lr_local=0.5, lr_step_epochs="1")
    assert Schedule(config, 10, 1).rates(10)[1] == pytest.approx(0.05)


def test_without_a_local_rate_the_global_one_is_followed() -> None:
    assert Schedule(TrainConfig(), 10, 1).rates(0)[1] is None


@pytest.mark.parametrize("before, now, iteration, decay", [
    (8, 4, 150, "step"), (4, 8, 150, "step"), (8, 4, 1200, "step"), (4, 8, 1200, "step"),
    (8, 4, 150, "poly"), (8, 4, 900, "poly"), (8, 4, 1200, "poly"), (8, 4, 4500, "poly")])
def test_a_warm_up_of_iterations_ends_after_as_many_with_another_number_of_workers_too(
        monkeypatch: pytest.MonkeyPatch, before: int, now: int, iteration: int, decay: str) -> None:
    """Steps come later; poly is smooth but for the end of the warm-up, where it begins to fall."""
    monkeypatch.setenv("ODSGD_MOST_WORKERS", "8")
    config, shares = config_of(lr=1.0, lr_warmup=1000, epochs=100, lr_decay=decay), {4: (100, 4), 8: (50, 8)}
    earlier, later = (Schedule(config, shares[workers][0], workers) for workers in (before, now))
    later.progress = EpochProgress().divided_anew(iteration, 400, *(EpochShares(*shares[one]) for one in (before, now)))
    rates = [(earlier if t < iteration else later).rates(t)[0] for t in range(5000)]
    assert np.abs(np.diff(rates)).max() < 0.0011 and max(rates) == rates[1000] == 1
    if decay == "step":
        assert rates == pytest.approx([min(1, t / 1000) for t in range(5000)])


@pytest.mark.parametrize("warmup, line", [
    (100000, "the delay never begins: warmup is 100000 iterations, and the run has 220. Lower warmup, "
     "e.g. --warmup 1epoch, or train longer"),
    ("20epochs", "the delay never begins: warmup is 220 iterations, and the run has 220. Lower warmup, e.g. "
     "--warmup 1epoch, or train longer"),
    (200, "the delay begins in iteration 201 of 220, since warmup is 200 iterations"), (100, None), (0, None)])
def test_a_warmup_that_takes_most_of_a_run_is_told(warmup: Any, line: Optional[str]) -> None:
    config = TrainConfig(kvstore="odsgd", warmup=warmup, epochs=20)
    assert Schedule(config, batches_per_epoch=11, num_workers=2).warnings() == ([line] if line else [])


def test_a_store_without_a_warmup_of_its_own_has_nothing_to_tell() -> None:
    assert Schedule(TrainConfig(kvstore="ssgd"), batches_per_epoch=11, num_workers=2).warnings() == []


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
