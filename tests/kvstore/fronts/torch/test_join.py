"""Uneven data through PyTorch: the scenarios of Gluon's, and what a script does in the middle of an iteration."""
import atexit
from typing import Any, List, Optional

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from kvstore.errors import ProtocolError
from kvstore.fronts.torch.optimizer import GradScaler, Optimizer
from kvstore.fronts.torch.store import create
from kvstore.transports.in_process import Stage
from tests.kvstore.fronts.uneven import LENGTHS, LR_LOCAL, TARGETS, W_0, by_numpy, lr


class Descent(torch.nn.Module):
    """(w - target)^2 / 2"""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([W_0]))

    def forward(self, target: float) -> Any:
        return ((self.w - target) ** 2).sum() / 2


def descend(rank: int, store: Any, way: str) -> List[float]:
    """`way`: the gradients leave in the backward pass, after a mean of their own, or unscaled."""
    model = Descent()
    optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr(0)), model, store)
    scaler = GradScaler("cpu", init_scale=8.0, enabled=way == "scaler")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: lr(t) / lr(0))
    seen = []
    for _ in range(LENGTHS[rank]):
        optimizer.zero_grad()
        if way == "overlap":
            model(TARGETS[rank]).backward()
        else:
            with optimizer.no_sync():
                scaler.scale(model(TARGETS[rank])).backward()
        seen.append(float(model.w.detach()))
        if way == "mean":
            optimizer.synchronize_grads()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    if way != "mean":  # else what comes next joins by itself
        store.join()
        assert store.iteration == max(LENGTHS)
    with store.global_weights():
        seen.append(float(model.w.detach()))
    store.close()
    return seen


def test_a_store_that_an_error_keeps_open_goes_on_with_its_model() -> None:
    def train(transport: Any) -> List[float]:
        model = Descent()
        optimizer = Optimizer(torch.optim.SGD(model.parameters(), 0.5), model,
                              create("ssgd", transport, uneven="join"))
        seen = []
        for _ in range(3):
            model(0.0).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(float(model(0.0).detach()))
            try:
                raise ValueError("the script handles it")
            except ValueError:
                optimizer.store.close()
        return seen

    assert Stage(1).run(train) == [[(W_0 / 2 ** t) ** 2 / 2 for t in (1, 2, 3)]]


@pytest.mark.parametrize("name, kind, way, expected", [
    ("ssgd", None, "overlap", {}), ("ssgd", None, "mean", {}), ("dsync", "ring", "scaler", {}),
    ("odsgd", None, "overlap", {"delay": True}), ("ssgd", "sharded", "mean", {})])
def test_a_mean_is_that_of_the_workers_that_have_a_gradient(name: str, kind: Optional[str], way: str,
                                                            expected: Any) -> None:
    stage = Stage(len(TARGETS))
    make = {"ring": stage.ring_worker, "sharded": stage.sharded_worker}.get(kind or "", stage.worker)
    options = {"warmup": 0, "lr_local": LR_LOCAL} if expected else {}

    def work(transport: Any) -> List[float]:
        return descend(transport.worker_rank, create(name, transport, uneven="join", **options), way)

    for mine, path in zip(stage.run(work, make), by_numpy(**expected)):
        np.testing.assert_allclose(mine, path, rtol=1e-6)


def test_a_worker_joins_while_its_model_holds_the_global_weights() -> None:
    """As at the end of a trainer's epoch."""
    def work(transport: Any) -> int:
        model, store = Descent(), create("ssgd", transport, uneven="join")
        optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr(0)), model, store)
        for t in range(1 + 2 * transport.worker_rank):
            store.show_own()
            optimizer.zero_grad()
            model(1.0).backward()
            optimizer.step()
            if t == 0:
                store.show_global()
        store.join()
        store.show_own()
        store.close()
        return int(store.iteration)

    assert Stage(2).run(work) == [3, 3]


def test_a_worker_without_a_batch_joins_and_takes_part_in_the_next_epoch() -> None:
    def work(transport: Any) -> List[float]:
        model, rank = Descent(), transport.worker_rank
        store = create("ssgd", transport, uneven="join")
        optimizer = Optimizer(torch.optim.SGD(model.parameters(), 0.5), model, store)
        for batches in ([0, 2][rank], 1):
            for _ in range(batches):
                optimizer.zero_grad()
                model(0.0).backward()
                optimizer.step()
            store.join()
        store.close()
        return [float(model.w.detach()), store.iteration]

    assert Stage(2).run(work) == [[W_0 / 8, 3]] * 2


def test_workers_whose_schedules_have_parted_are_told() -> None:
    def work(transport: Any) -> None:
        model = Descent()
        store = create("ssgd", transport, uneven="join")
        optimizer = Optimizer(torch.optim.SGD(model.parameters(), 0.5), model, store)
        model(0.0).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] -= 0.125 * transport.worker_rank
        with pytest.raises(ProtocolError, match="iteration 2: the workers differ in their learning rates"):
            model(0.0).backward()
        atexit.unregister(store._join_at_exit)

    Stage(2).run(work)
