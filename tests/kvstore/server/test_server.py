"""A server's commands, in the place of MXNet's loop: what it keeps, and how long it waits for workers."""
from typing import Any, Callable

import pytest

from kvstore import algorithms
from kvstore.engine._mxnet import NDArray, mx
from kvstore.engine.optimizers import describe
from kvstore.job import control
from kvstore.server.server import Server

SIZE, MAILBOX = 1000, 1
SUMS = [2, 3]


class Loop:
    """MXNet's: the server's rank, and whom it tells of pushes."""

    rank = 0
    push: Callable[[int, NDArray, NDArray], None]

    def _set_updater(self, updater: Callable[[int, NDArray, NDArray], None]) -> None:
        self.push = updater


class Job:
    """A server that has been greeted, and its worker 0."""

    def __init__(self, timeout_s: float = 600.0, num_workers: int = 1) -> None:
        self.loop = Loop()
        self.server = Server(self.loop)
        self.signer = control.Signer(0, control.job_key())
        self.command("hello", num_workers=num_workers, synchronous=True, timeout_s=timeout_s, sums=SUMS,
                     mailboxes=[MAILBOX], trace_folder=None)

    def command(self, name: str, **payload: Any) -> None:
        self.server._controller(0, self.signer.sign(name, payload).encode(), None)

    def open(self, key: int = 7, **options: Any) -> None:
        method = algorithms.find("ssgd")
        bucket = {"server_rank": 0, "size": SIZE, "shape": None, "names": [("w", SIZE)], "lr_mult": 1.0, "wd_mult": 1.0}
        self.command("open", method=algorithms.where(method), options=method.Options(**options).plain(),
                     optimizer=describe(mx.optimizer.SGD()), buckets={str(key): bucket})

    def patience_s(self) -> float:
        """For how long it lets workers be silent."""
        began, due, _ = control.watch._due["silence"]
        return due - began


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "watch", control.Watch())
    monkeypatch.setenv("ODSGD_SECRET", "of this test")


@pytest.mark.parametrize("first_s, second_s, longest_s", [(10.0, 600.0, 905.0), (600.0, 10.0, 905.0)])
def test_a_server_waits_as_long_as_the_most_patient_store(first_s: float, second_s: float, longest_s: float) -> None:
    job = Job(first_s)
    job.open(7, timeout_s=first_s)
    job.open(8, timeout_s=second_s)
    assert job.patience_s() == pytest.approx(longest_s)
