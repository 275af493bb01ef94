"""Downpour SGD.

Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, Algorithm 7.1.

A worker takes local steps on a copy of its own and accrues the gradients. Every n_push iterations it pushes their sum,
every n_fetch iterations it goes on from the global weights. With both 1 this is ASGD.

    paper               code      meaning
    parameters          w         the worker's own copy
    accruedgradients    accrued   sum of its gradients since the last push
    n_push, n_fetch     push_every, fetch_every

The server: W <- U(W, sum g) on each push, ASGD's (`asynchronous.AsyncUpdate`).
Reading: where push and fetch fall together, they are one round trip, and the fetched weights contain the push.
"""
from dataclasses import dataclass
from typing import Any, List, Optional

from kvstore.algorithms.asynchronous import ASGD, Asynchronous
from kvstore.algorithms.program import Options, check_iterations
from kvstore.buckets import Bucket
from kvstore.engine._mxnet import NDArray, mx
from kvstore.wire.interfaces import Pending, Transport


class Accruing(Asynchronous):
    """The worker, for one bucket."""

    def __init__(self, bucket: Bucket, transport: Transport, arriving: Pending, push_every: int, fetch_every: int,
                 step: mx.optimizer.Optimizer) -> None:
        super().__init__(bucket, transport, arriving)
        self.push_every, self.fetch_every, self.step = push_every, fetch_every, step
        self.w = arriving.result().copy()
        self.accrued = mx.nd.zeros_like(self.w)

    def iterate(self, grad: NDArray) -> NDArray:
        """Accrue, take a local step; push and fetch where it is time."""
        self.t += 1
        self.accrued += grad
        self.step.update_multi_precision(self.bucket.id, self.w, grad, None)
        if self.t % self.push_every == 0:
            self.arriving = self.transport.exchange(self.bucket, self.accrued)
            self.accrued[:] = 0
        if self.t % self.fetch_every == 0:
            fetched = self.arriving if self.t % self.push_every == 0 else self.transport.fetch(self.bucket, self.w)
            fetched.result().copyto(self.w)
        return self.w

    def memory(self) -> List[NDArray]:
        return [self.accrued]

    def resume(self, t: int, w_local: NDArray, memory: List[NDArray]) -> None:
        self.t = t
        w_local.copyto(self.w)
        memory[0].copyto(self.accrued)


class Downpour(ASGD):
    """``kvstore.create("downpour")``."""

    @dataclass(frozen=True)
    class Options(Options):
        """Options of Downpour SGD."""

        T: int = 1
        """Iterations between exchanges."""
        push_every: Optional[int] = None
        """Iterations between pushes (n_push); None: T."""
        fetch_every: Optional[int] = None
        """Iterations between fetches (n_fetch); None: T."""
        lr_local: Optional[float] = None
        """Learning rate of the local steps; None: the trainer's."""

        def __post_init__(self) -> None:
            super().__post_init__()
            check_iterations(self, 1, "T", "push_every", "fetch_every")

    def __init__(self, options: Any, optimizer: mx.optimizer.Optimizer) -> None:
        super().__init__(options, optimizer)
        self.step = mx.optimizer.SGD(wd=optimizer.wd)

    @property
    def optimizers(self) -> List[mx.optimizer.Optimizer]:
        return [self.optimizer, self.step]

    def worker(self, bucket: Bucket, transport: Transport, arriving: Pending) -> Accruing:
        self.step.lr_mult[bucket.id], self.step.wd_mult[bucket.id] = bucket.first.lr_mult, bucket.first.wd_mult
        return Accruing(bucket, transport, arriving, self.options.push_every or self.options.T,
                        self.options.fetch_every or self.options.T, self.step)

    def begin_iteration(self, lr: float, lr_local: float) -> None:
        self.step.lr = lr_local
