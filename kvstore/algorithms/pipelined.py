"""Pipe-SGD, and D-Sync, which is its K = 1.

Li et al., "Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net Training", NeurIPS 2018:
Algorithm 1, section 3.1 (pipeline), 3.2 (codecs), 4 (warm-up).

Every worker holds the weights and updates them by the sum of all gradients of K iterations ago. With K = 2 that sum is
made while the next gradient is computed; K = 1 waits for it, which is D-Sync, decentralized synchronous SGD. There is
no server. For the first `warmup` iterations K is 1.

    paper          code        meaning
    w[t]           w           weights, the same on every worker
    g_local[t]     grad        this worker's gradient, taken at w[t]
    g_sum[t]       in_flight   sums of all workers' gradients, under way or waiting: the oldest first
    K              K           iteration dependency
    gamma          lr          learning rate

The communication thread of the paper is the transport; its codec compresses each hop.

Reading: U is the trainer's optimizer, applied to the mean, where the paper has w[t-1] - gamma g_sum[t-K].
Reading: sums that do not exist (l.1 of the communication thread: zero, ready) change nothing at all, neither momentum
nor, by weight decay, weights. So it is when the warm-up ends: all sums up to then have been applied.
Reading: U takes a gradient's learning rate from the iteration that the gradient was taken in.
Reading: the global weights are w; the K - 1 sums that have not been applied yet are no part of them, not at the end
either. Checkpoints keep these sums.
"""
import collections
from dataclasses import dataclass
from typing import Any, Deque, Dict, List, Tuple

from kvstore.algorithms.program import Options, Program, Worker, check_iterations
from kvstore.buckets import Bucket
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import ConfigError
from kvstore.wire.codecs import codec as make_codec
from kvstore.wire.interfaces import Pending, Transport


class Pipelined(Worker):
    """The worker, for one bucket."""

    def __init__(self, bucket: Bucket, transport: Transport, arriving: Pending, K: int, warmup: int,
                 rates: "Rates") -> None:
        super().__init__(bucket, transport, arriving)
        self.K, self.warmup, self.rates = K, warmup, rates
        self.w = arriving.result()                                                  # l.1
        self.update = transport.replica(bucket)
        self.in_flight: Deque[Tuple[Pending, float]] = collections.deque()

    def iterate(self, grad: NDArray) -> NDArray:
        """One pass of Algorithm 1 from l.8 to the next l.5; returns the weights of the next iteration."""
        self.arriving = self.transport.allreduce(self.bucket, grad)                 # l.9-10, communication l.3-5
        self.in_flight.append((self.arriving, self.rates.lr))
        self.t += 1
        if len(self.in_flight) > (self.K - 1 if self.t > self.warmup else 0):
            g_sum, lr = self.in_flight.popleft()                                    # l.3
            self.update(self.w, g_sum.result(), lr, out=self.w)                     # l.4-5
        return self.w

    def global_weights(self) -> NDArray:
        return self.w

    def memory(self) -> List[NDArray]:
        return [g_sum.result() for g_sum, _ in self.in_flight]

    def resume(self, t: int, w_local: NDArray, memory: List[NDArray]) -> None:
        super().resume(t, w_local, memory)
        if len(memory) >= self.K:
            raise ConfigError(f"the saved state has {len(memory)} sums in flight, which `K` = {self.K} has no place "
                              f"for; go on with K = {len(memory) + 1}")
        w_local.copyto(self.w)
        self.in_flight.extend(zip(map(Pending, memory), self.rates.latest(len(memory))))


class Rates:
    """Learning rates of the last K iterations; all buckets have the same."""

    def __init__(self, K: int) -> None:
        self.of_iterations: Deque[float] = collections.deque(maxlen=K)

    @property
    def lr(self) -> float:
        return self.of_iterations[-1]

    def latest(self, number: int) -> List[float]:
        """Those of the last iterations, the oldest first."""
        rates = list(self.of_iterations)
        return rates[len(rates) - number:]


class PipeSGD(Program):
    """``kvstore.create("pipesgd")``."""

    resumes_from_optimizer = False

    @dataclass(frozen=True)
    class Options(Options):
        """Options of Pipe-SGD."""

        K: int = 2
        """Iterations between a gradient and its update: K - 1 sums are under way while a gradient is computed."""
        codec: str = "none"
        """What travels: `none` (floats), `truncate` (their upper 16 bits) or `quantize` (8 bits, a scale per block)."""
        warmup: int = 0
        """Iterations of D-Sync before the pipeline is switched on."""

        def __post_init__(self) -> None:
            super().__post_init__()
            check_iterations(self, 1, "K")
            check_iterations(self, 0, "warmup")
            make_codec(self.codec)

    def __init__(self, options: Any, optimizer: mx.optimizer.Optimizer) -> None:
        super().__init__(options, optimizer)
        self.rates = Rates(options.K)

    @staticmethod
    def on_ring(options: Any) -> bool:
        return True

    @property
    def depth(self) -> int:
        return max(2, self.options.K)

    def worker(self, bucket: Bucket, transport: Transport, arriving: Pending) -> Pipelined:
        return Pipelined(bucket, transport, arriving, self.options.K, self.options.warmup, self.rates)

    def begin_iteration(self, lr: float, lr_local: float) -> None:
        self.rates.of_iterations.append(lr)

    def progress(self) -> Dict[str, Any]:
        return {"lr": list(self.rates.of_iterations)}

    def resume(self, saved: Dict[str, Any]) -> None:
        self.rates.of_iterations.extend(saved["lr"])


class DSync(PipeSGD):
    """``kvstore.create("dsync")``: K = 1."""

    resumes_from_optimizer = waits = True

    @dataclass(frozen=True)
    class Options(Options):
        """Options of D-Sync: none of its own."""

        K = 1
        codec = "none"
        warmup = 0
