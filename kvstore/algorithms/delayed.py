"""OD-SGD, one-step-delay SGD, and the delayed weight update it grew from.

Xu et al., "OD-SGD: One-step Delay Stochastic Gradient Descent for Distributed Training", arXiv:2005.06728: Algorithm 2
(worker), Eq. 4-6, Fig. 5 and 8. The server is that of SSGD, unchanged (Algorithm 1). On a ring (`transport`) an
allreduce takes its place, and every worker applies the global optimizer to a copy of W of its own.

A worker does not wait for the exchange it has just started: it takes a local step from the global weights it
already has and begins the next batch, so exchange t runs beside computation t + 1. For the first `warmup` iterations it
does wait, as in SSGD. Without a local step (`optimizer_local` none) this is the delayed weight update.

    paper        code            meaning
    w_t          w_global        global weights after t updates, W_t; they arrive in comm_buf_
    w_bak        (returned)      the weights this worker computes on next, w_{t+1}^m; comm_bak_
    g_m          grad            its gradient, taken at w_t^m, mean over its own mini-batch
    wp           warmup          iterations of SSGD before the delay is switched on

Invariant: past the warm-up, the weights a worker computes on lack exactly one global update; its own local step stands
in for it.
Reading: the warm-up loop of the paper runs wp + 1 times (l.3), but its last pass already steps locally (l.8-9); so
exactly `warmup` = wp iterations wait.
Reading: the index of w_bak in l.22 is t where l.18 broadcasts t - 1; Fig. 5 and 8 settle it: what is updated with g_t
is W_t, which the pull of the previous iteration brought.
"""
from dataclasses import dataclass
from typing import Any, Dict, List, Optional

from kvstore.algorithms.program import Options, Program, Worker, check_iterations
from kvstore.algorithms.sync import SyncUpdate
from kvstore.buckets import Bucket
from kvstore.engine._mxnet import NDArray, mx
from kvstore.engine.updaters import LocalUpdate, create_local, progress, set_progress
from kvstore.errors import unknown
from kvstore.wire.interfaces import Pending, Transport

TRANSPORTS = ("server", "ring")


class OneStepDelay(Worker):
    """The worker, for one bucket."""

    def __init__(self, bucket: Bucket, transport: Transport, arriving: Pending, warmup: int,
                 local_update: Optional[LocalUpdate]) -> None:
        super().__init__(bucket, transport, arriving)
        self.warmup, self.local_update = warmup, local_update

    def iterate(self, grad: NDArray) -> NDArray:
        """One pass of Algorithm 2 after the gradient is there; returns the weights of the next iteration."""
        arrived = self.arriving                                         # l.24  asked for one iteration ago
        self.arriving = self.transport.exchange(self.bucket, grad)      # l.20  push g_t, bring W_{t+1}; returns at once
        self.t += 1                                                     # l.23
        if self.t <= self.warmup:
            return self.arriving.result()                               # l.4   w_{t+1} = W_{t+1}
        w_global = arrived.result()
        if self.local_update is None:
            return w_global                                             #       w_{t+1} = W_t
        return self.local_update(w_global, grad)                        # l.22  w_{t+1} = L(W_t, g_t; w_t), Eq. 4-6

    def memory(self) -> List[NDArray]:
        return self.local_update.memory() if self.local_update else []

    def resume(self, t: int, w_local: NDArray, memory: List[NDArray]) -> None:
        super().resume(t, w_local, memory)
        if self.local_update and t > self.warmup:
            self.local_update.resume(self.arriving.result(), memory)


class Delayed(Program):
    """``kvstore.create("delayed")``: L = W_t."""

    rule = SyncUpdate

    @dataclass(frozen=True)
    class Options(Options):
        """Options of the delayed weight update."""

        warmup: int = 0
        """Iterations of SSGD before the delay is switched on."""
        transport: str = "server"
        """Who sums and updates: `server`, the parameter servers, or `ring`, the workers among themselves."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.transport not in TRANSPORTS:
                raise unknown("transport", self.transport, TRANSPORTS)
            check_iterations(self, 0, "warmup")

    @staticmethod
    def on_ring(options: Any) -> bool:
        return bool(options.transport == "ring")

    def worker(self, bucket: Bucket, transport: Transport, arriving: Pending) -> OneStepDelay:
        return OneStepDelay(bucket, transport, arriving, self.options.warmup, None)


class ODSGD(Delayed):
    """``kvstore.create("odsgd")``."""

    @dataclass(frozen=True)
    class Options(Delayed.Options):
        """Options of OD-SGD. What is None is the trainer's, or the optimizer's own default."""

        warmup: int = 200
        """Iterations of SSGD before the delay is switched on (wp)."""
        optimizer_local: str = "sgd"
        """The local update: none, sgd, dcasgd_c, dcasgd_a, or any MXNet optimizer by name."""
        lr_local: Optional[float] = None
        """Learning rate of the local update; None: follow the trainer's. `store.lr_local` changes it while training."""
        momentum_local: float = 0.0
        """Momentum of the local update."""
        wd_local: Optional[float] = None
        """Weight decay of the local update; None: the trainer's."""
        lamda: Optional[float] = None
        """dcasgd_c, dcasgd_a: strength of the compensation; None: 0.04 and 2."""
        m: Optional[float] = None
        """dcasgd_a: decay of MeanSquare; None: 0.95."""
        epsilon: Optional[float] = None
        """dcasgd_a: added to MeanSquare; None: 1e-7."""

    def __init__(self, options: Any, optimizer: mx.optimizer.Optimizer) -> None:
        super().__init__(options, optimizer)
        self.local = create_local(options.optimizer_local, {
            "momentum": options.momentum_local, "lamda": options.lamda, "m": options.m,
            "epsilon": options.epsilon, "wd": optimizer.wd if options.wd_local is None else options.wd_local})
        self._buckets: List[Bucket] = []

    @property
    def optimizers(self) -> List[mx.optimizer.Optimizer]:
        return [self.optimizer] if self.local is None else [self.optimizer, self.local]

    def worker(self, bucket: Bucket, transport: Transport, arriving: Pending) -> OneStepDelay:
        if self.local is None:
            return super().worker(bucket, transport, arriving)
        self._buckets.append(bucket)
        self.local.lr_mult[bucket.id], self.local.wd_mult[bucket.id] = bucket.first.lr_mult, bucket.first.wd_mult
        return OneStepDelay(bucket, transport, arriving, self.options.warmup, LocalUpdate(bucket, self.local))

    def begin_iteration(self, lr: float, lr_local: float) -> None:
        if self.local is not None:
            self.local.lr = lr_local

    def progress(self) -> Dict[str, Any]:
        return {} if self.local is None else progress(self.local, self._buckets[0].id)

    def resume(self, saved: Dict[str, Any]) -> None:
        if self.local is not None:
            for bucket in self._buckets:
                set_progress(self.local, bucket.id, saved)
