"""Asynchronous SGD on a parameter server: ASGD, DC-ASGD-c and -a, n-softsync with staleness-aware learning rates.

ASGD: Dean et al., NIPS 2012. DC-ASGD: Zheng et al., ICML 2017; Eq. 4-6 of Xu et al., "OD-SGD", arXiv:2005.06728.
n-softsync: Zhang, Gupta, Lian, Liu, "Staleness-Aware Async-SGD for Distributed Deep Learning", IJCAI 2016.

A worker pushes its gradient and gets, in one round trip, the weights as they stand right after its own push. Every
gradient says which version of the weights it was taken on, so the server knows its staleness.

    papers        code         meaning
    W             w            global weights of one bucket
    g_l           grad         one worker's gradient, mean over its own mini-batch
    tau_l         tau          staleness: version now - version the gradient was taken on
    bak(m)        backups[m]   what worker m was last sent
    n, lambda, c  n, M, c      splitting parameter, number of workers, gradients per update: c = floor(lambda / n)

Reading: a version counts the updates of one bucket. Buckets are updated independently, as shards are in the papers: the
weights a worker computes on belong, within a bucket, to one version; across buckets they may differ by a few.
Reading: U is the trainer's optimizer, so momentum and weight decay are possible in all of these; the papers have none.
"""
import collections
import math
from dataclasses import dataclass
from typing import Any, Counter, Dict, List, Optional, Tuple, Type

import numpy as np

from kvstore.algorithms.program import Options, Program, Rule, Worker
from kvstore.buckets import Bucket
from kvstore.engine import engine
from kvstore.engine._mxnet import NDArray
from kvstore.engine.updaters import apply_at_once, compensated_a, compensated_c
from kvstore.errors import ConfigError, ProtocolError
from kvstore.wire.interfaces import Pending, Transport
from kvstore.wire.messages import ASYNC_MODULUS, Header


class Asynchronous(Worker):
    """The worker, for one bucket, of all methods in this file."""

    def __init__(self, bucket: Bucket, transport: Transport, arriving: Pending) -> None:
        super().__init__(bucket, transport, arriving)
        self.w_seen = arriving.untaken().copy()  # global weights, for looking at only

    def iterate(self, grad: NDArray) -> NDArray:
        """Push g; go on with the weights as they stand right after it."""
        self.arriving = self.transport.exchange(self.bucket, grad)
        self.t += 1
        return self.arriving.result()

    def global_weights(self) -> NDArray:
        self.transport.fetch(self.bucket, self.w_seen).untaken().copyto(self.w_seen)
        return self.w_seen


class AsyncUpdate(Rule):
    """ASGD's server:  W <- U(W, g)  on each push.

    Invariants
      1. version starts at 0 and grows by exactly 1 per update.
      2. tau >= 0; a gradient from the future is a ProtocolError.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.staleness: Counter[Tuple[int, int]] = collections.Counter()  # (worker rank, tau) -> pushes
        self.lr_sum = 0.0  # of the effective rates of all pushes

    def receive(self, header: Header, payload: NDArray, w: NDArray) -> None:
        tau = (self.version - header.version) % ASYNC_MODULUS
        if tau > ASYNC_MODULUS // 2:
            raise ProtocolError(f"bucket {self.index}: worker {header.worker_rank} pushed a gradient of version "
                                f"{header.version}, the weights are at version {self.version}; it belongs to "
                                "another run")
        self.staleness[header.worker_rank, tau] += 1
        self.optimizer.lr, self.optimizer.rescale_grad = header.lr, 1.0
        self.lr_sum += header.lr * self.push(header.worker_rank, tau, payload, w)

    def push(self, worker_rank: int, tau: int, grad: NDArray, w: NDArray) -> float:
        """Fold one gradient in; returns the factor on its learning rate."""
        self.update(grad, w)
        return 1.0

    def update(self, grad: NDArray, w: NDArray) -> None:
        """W <- U(W, g)."""
        apply_at_once(self.optimizer, self.index, w, grad, self.state, self.shape)
        self.version += 1

    def statistics(self) -> Dict[str, Any]:
        return {"version": self.version, "lr_sum": self.lr_sum,
                "staleness": [[rank, tau, count] for (rank, tau), count in self.staleness.items()]}

    def progress(self) -> Dict[str, Any]:
        return {**super().progress(), **self.statistics()}

    def resume(self, saved: Dict[str, Any]) -> None:
        super().resume(saved)
        self.version, self.lr_sum = saved["version"], saved["lr_sum"]
        self.staleness = collections.Counter({(rank, tau): count for rank, tau, count in saved["staleness"]})


class DelayCompensated(AsyncUpdate):
    """DC-ASGD's server, one backup per worker:

        W <- U(W, g + lambda(·) g⊙g⊙(W - bak_m)),    bak_m <- W
    """

    def __init__(self, *arguments: Any, lamda: float) -> None:
        super().__init__(*arguments)
        self.lamda = lamda
        self.backups: List[np.ndarray] = []

    def start(self, w: NDArray) -> None:
        super().start(w)
        self.backups = [w.asnumpy() for _ in range(self.num_workers)]  # all workers began with W_0

    def push(self, worker_rank: int, tau: int, grad: NDArray, w: NDArray) -> float:
        weights, g, bak = engine.memory(w), engine.memory(grad), self.backups[worker_rank]
        g[:] = self.compensate(g, weights - bak)
        self.update(grad, w)
        w.wait_to_read()
        bak[:] = weights
        return 1.0

    def compensate(self, g: np.ndarray, moved: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def memory(self) -> List[Any]:
        return [*super().memory(), *self.backups]


class DelayCompensatedC(DelayCompensated):
    """Constant lambda, Eq. 4."""

    def compensate(self, g: np.ndarray, moved: np.ndarray) -> np.ndarray:
        return compensated_c(g, moved, self.lamda)


class DelayCompensatedA(DelayCompensated):
    """Adaptive lambda, Eq. 5 and 6; one MeanSquare, of all workers' gradients."""

    def __init__(self, *arguments: Any, lamda: float, m: float, epsilon: float) -> None:
        super().__init__(*arguments, lamda=lamda)
        self.m, self.epsilon = m, epsilon
        self.mean_square = np.zeros(0, np.float32)

    def start(self, w: NDArray) -> None:
        super().start(w)
        self.mean_square = np.zeros(w.size, np.float32)

    def compensate(self, g: np.ndarray, moved: np.ndarray) -> np.ndarray:
        return compensated_a(g, moved, self.mean_square, self.lamda, self.m, self.epsilon, np.sqrt)

    def memory(self) -> List[Any]:
        return [*super().memory(), self.mean_square]


class Softsync(AsyncUpdate):
    """n-softsync's server: one update per c = floor(M / n) gradients of any workers, each damped by its staleness.

        W <- U(W, 1/c sum_l (alpha_l / alpha_0) g_l),    alpha_l = alpha_0 / tau_l  if tau_l > 0,  else alpha_0

    Invariant 3: fewer than c gradients are held between calls, and none is counted twice.
    """

    def __init__(self, *arguments: Any, n: Optional[int], modulate: bool) -> None:
        super().__init__(*arguments)
        self.c, self.modulate = self.num_workers // (n or self.num_workers), modulate
        self.held = 0
        self.sum = np.zeros(0, np.float32)

    def start(self, w: NDArray) -> None:
        super().start(w)
        self.sum = np.zeros(w.size, np.float32)

    def push(self, worker_rank: int, tau: int, grad: NDArray, w: NDArray) -> float:
        factor = 1.0 / max(tau, 1) if self.modulate else 1.0
        g = engine.memory(grad)
        self.sum += np.float32(factor) * g
        self.held += 1
        if self.held == self.c:
            g[:] = self.sum / np.float32(self.c)
            self.update(grad, w)
            self.sum[:], self.held = 0, 0
        return factor

    def memory(self) -> List[Any]:
        return [*super().memory(), self.sum]

    def progress(self) -> Dict[str, Any]:
        return {**super().progress(), "held": self.held}

    def resume(self, saved: Dict[str, Any]) -> None:
        super().resume(saved)
        self.held = saved["held"]


class ASGD(Program):
    """``kvstore.create("asgd")``."""

    rule: Type[Rule] = AsyncUpdate
    synchronous = resumes_from_optimizer = False

    def worker(self, bucket: Bucket, transport: Transport, arriving: Pending) -> Worker:
        return Asynchronous(bucket, transport, arriving)


class DCASGDC(ASGD):
    """``kvstore.create("dcasgd_c")``."""

    rule = DelayCompensatedC

    @dataclass(frozen=True)
    class Options(Options):
        """Options of DC-ASGD-c."""

        lamda: float = 0.04
        """Strength of the compensation."""

    def rule_options(self, num_workers: int) -> Dict[str, Any]:
        return {"lamda": self.options.lamda}


class DCASGDA(ASGD):
    """``kvstore.create("dcasgd_a")``."""

    rule = DelayCompensatedA

    @dataclass(frozen=True)
    class Options(Options):
        """Options of DC-ASGD-a."""

        lamda: float = 2.0
        """Strength of the compensation."""
        m: float = 0.95
        """Decay of MeanSquare."""
        epsilon: float = 1e-7
        """Added to MeanSquare."""

    def rule_options(self, num_workers: int) -> Dict[str, Any]:
        return {"lamda": self.options.lamda, "m": self.options.m, "epsilon": self.options.epsilon}


class SoftsyncProgram(ASGD):
    """``kvstore.create("softsync")``."""

    rule = Softsync

    @dataclass(frozen=True)
    class Options(Options):
        """Options of n-softsync."""

        n: Optional[int] = None
        """Updates while every worker pushes once; None: as many as there are workers, one update per push."""
        modulate: bool = True
        """Divide a gradient's learning rate by its staleness."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.n is not None and not (self.n >= 1 and math.floor(self.n) == self.n):
                raise ConfigError(f"`n` is {self.n}, expected a whole number from 1 to the number of workers")

    def worker(self, bucket: Bucket, transport: Transport, arriving: Pending) -> Worker:
        if self.options.n is not None and self.options.n > transport.num_workers:
            raise ConfigError(f"`n` is {self.options.n}, more than the {transport.num_workers} workers of the job")
        return super().worker(bucket, transport, arriving)

    def rule_options(self, num_workers: int) -> Dict[str, Any]:
        return {"n": self.options.n, "modulate": self.options.modulate}
