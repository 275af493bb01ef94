"""SASGD, SGD with sparse aggregation of gradients.

Cong, Bhardwaj, Feng, "An efficient, distributed stochastic gradient descent algorithm for deep-learning applications",
ICPP 2017: Algorithm 1.

Every worker takes T local steps on a copy of its own and accumulates the gradients; then all workers sum what they have
accumulated, and the copies become one again. There is no server.

    paper      code           meaning
    x          x              this worker's weights
    x'         x_shared       the weights at the start of the interval, the same on every worker
    g          step           its gradient
    g_s        accumulated    sum of its gradients in this interval; summed over the workers where it ends
    p          num_workers    number of workers, M
    gamma      gamma          learning rate of the local steps
    gamma_p    gamma_p        learning rate of the aggregation

gamma_p = gamma / M makes x the mean of the workers' weights: model averaging. (The paper writes 1/p for it in a
sentence, which leaves gamma out.) T = 1 is synchronous SGD.

Reading: weight decay belongs to the gradient, g + wd x, so that model averaging remains what it is.
Reading: rates are those of the iteration, gamma_p that of the one in which the interval ends.
Reading: an interval knows nothing of epochs; one that an epoch or a checkpoint cuts goes on afterwards. The global
weights meanwhile are what the interval would end with: x' - gamma_p allreduce(g_s).
"""
from dataclasses import dataclass
from typing import Any, Dict, List, Optional

from kvstore.algorithms.program import Options, Program, Worker, check_iterations, check_plain_sgd
from kvstore.buckets import Bucket
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import ConfigError
from kvstore.wire.interfaces import Pending, Transport


class SparseAggregation(Worker):
    """The worker, for one bucket."""

    def __init__(self, bucket: Bucket, transport: Transport, arriving: Pending, T: int, rates: "Rates") -> None:
        super().__init__(bucket, transport, arriving)
        self.T, self.rates = T, rates
        self.x = arriving.result().copy()                                       # x <- broadcast(x, p, id)
        self.x_shared = self.x.copy()                                           # x' <- x
        self.accumulated = mx.nd.zeros_like(self.x)                             # g_s <- 0
        self.w_seen = mx.nd.zeros_like(self.x)  # global weights, for looking at only

    def iterate(self, grad: NDArray) -> NDArray:
        """One local step, then, every T of them, the aggregation."""
        decay = self.rates.wd * self.bucket.first.wd_mult
        step = grad + decay * self.x if decay else grad
        self._move(self.x, step, self.rates.gamma)                              # x <- x - gamma g
        self.accumulated += step                                                # g_s <- g_s + g
        self.t += 1                                                             # j <- j + 1
        if self.t % self.T == 0:
            self._aggregate(self.x_shared)                                      # x' - gamma_p allreduce(g_s)
            self.x_shared.copyto(self.x)                                        # x' <- x
            self.accumulated[:] = 0                                             # g_s <- 0
        return self.x

    def _aggregate(self, w: NDArray) -> None:
        """w <- w - gamma_p allreduce(g_s)"""
        self.arriving = self.transport.allreduce(self.bucket, self.accumulated)
        self._move(w, self.arriving.result(), self.rates.gamma_p, self.rates.share)

    def _move(self, w: NDArray, direction: NDArray, rate: float, share: float = 1.0) -> None:
        """w <- w - rate share direction, by the operator of MXNet's SGD and hence in its bits."""
        mx.nd.sgd_update(w, direction, lr=rate * self.bucket.first.lr_mult, rescale_grad=share, wd=0, out=w)

    def global_weights(self) -> NDArray:
        """All workers ask together: it is an aggregation that leaves the interval as it is."""
        self.x_shared.copyto(self.w_seen)
        if self.t % self.T:
            self._aggregate(self.w_seen)
        return self.w_seen

    def memory(self) -> List[NDArray]:
        return [self.x_shared, self.accumulated]

    def resume(self, t: int, w_local: NDArray, memory: List[NDArray]) -> None:
        self.t = t
        for saved, mine in zip([w_local, *memory], [self.x, self.x_shared, self.accumulated]):
            saved.copyto(mine)


class Rates:
    """The rates of all buckets' steps. An aggregation moves by gamma_p = `gamma_p` x `share`.

    Synchronous SGD multiplies a sum by lr / M in just this way; where gamma_p is gamma / M, so does SASGD.
    """

    def __init__(self, wd: float, share: float) -> None:
        self.wd, self.share = wd, share
        self.gamma = self.gamma_p = 0.0


class SASGD(Program):
    """``kvstore.create("sasgd")``."""

    resumes_from_optimizer = False
    waits = True

    @dataclass(frozen=True)
    class Options(Options):
        """Options of SASGD."""

        T: int = 1
        """Local steps between aggregations."""
        lr_local: Optional[float] = None
        """Learning rate of the local steps, gamma; None: the trainer's. `store.lr_local` changes it while training."""
        gamma_p: Optional[float] = None
        """Learning rate of the aggregation; None: gamma / number of workers."""

        def __post_init__(self) -> None:
            super().__post_init__()
            check_iterations(self, 1, "T")
            if self.gamma_p is not None and not self.gamma_p >= 0:
                raise ConfigError(f"`gamma_p` is {self.gamma_p}, expected 0 or more")

    def __init__(self, options: Any, optimizer: mx.optimizer.Optimizer) -> None:
        super().__init__(options, optimizer)
        check_plain_sgd(optimizer, "store `sasgd`")
        self.rates = Rates(optimizer.wd, 1.0)

    @staticmethod
    def on_ring(options: Any) -> bool:
        return True

    def worker(self, bucket: Bucket, transport: Transport, arriving: Pending) -> SparseAggregation:
        self.rates.share = 1.0 / transport.num_workers if self.options.gamma_p is None else 1.0
        return SparseAggregation(bucket, transport, arriving, self.options.T, self.rates)

    def begin_iteration(self, lr: float, lr_local: float) -> None:
        self.rates.gamma, self.rates.gamma_p = lr_local, self.global_rate(lr, lr_local)

    def global_rate(self, lr: float, lr_local: float) -> float:
        return float(lr_local if self.options.gamma_p is None else self.options.gamma_p)

    def progress(self) -> Dict[str, Any]:
        return {"gamma_p": self.rates.gamma_p}

    def resume(self, saved: Dict[str, Any]) -> None:
        self.rates.gamma_p = saved["gamma_p"]
