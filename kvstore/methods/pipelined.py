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
    gamma          lr, rates   learning rate; the rates of the sums in flight

How the two threads are cut. A pass of `iterate` begins where the gradient is there, and holds l.3-5 of the next pass:

    computation     l.2     for t = 1 ... T                          the trainer's loop
                    l.3     wait until g_sum[t - K] is ready         `iterate` takes it; what reads it waits
                    l.4     decompress g_sum[t - K]                  the transport
                    l.5     w[t] <- w[t-1] - gamma g_sum[t - K]      `iterate`: U                   ── a pass ends
                    l.6-8   load a batch, forward, backward          Gluon; the store gathers it    ── a pass begins
                    l.9     compress g_local[t]                      the transport
                    l.10    g_local[t] is there                      `iterate`: allreduce
    communication   l.1     g_sum[1 - K ... 0] <- 0, ready           none is in flight
                    l.3     wait until g_local[t] is ready           the transport
                    l.4     g_sum[t] <- allreduce g_local[t]         the transport: the codec compresses each hop
                    l.5     g_sum[t] is there                        the transport

Reading: U is the trainer's optimizer, applied to the mean, where the paper has w[t-1] - gamma g_sum[t-K].
Reading: sums that do not exist (l.1 of the communication thread: zero, ready) change nothing at all, neither momentum
nor, by weight decay, weights. The same holds when the warm-up ends: all sums up to then have been applied.
Reading: U applies a gradient at the learning rate of the iteration that it was taken in. If U is replaced, the new one
applies all sums that are left, at its own rate.
Reading: the global weights are w; the K - 1 sums that have not been applied yet are no part of them, not at the end
either. Checkpoints keep these sums.
Other workers after a restart (``-n MIN:MAX``): all have w; the K - 1 sums in flight are lost.
"""
import collections
import dataclasses
from dataclasses import dataclass
from typing import Any, Deque, List

from kvstore.errors import ConfigError
from kvstore.messages.seam import Array, Pending, Replicated, TrafficSettings
from kvstore.methods import common
from kvstore.methods.contract import Method, Step, Update, Worker
from kvstore.options import TrainingLength, integer, option


class Pipelined(Worker):
    weights_holder: Replicated
    update: Update
    sends_gradient_in_place = True
    arrays = {"w": "weights, the same on every worker", "in_flight": "sums that have not been applied"}
    facts = ("rates",)
    returned = "w"

    def start(self, w: Array) -> None:
        self.w = w                                                           # l.1
        self.in_flight: Deque[Pending] = collections.deque()
        self.rates: List[float] = []  # of the sums in flight

    def iterate(self, grad: Array, step: Step) -> Array:
        """One pass of Algorithm 1 from l.8 to the next l.5; returns the weights of the next iteration."""
        self.last_exchange = self.weights_holder.allreduce(self.bucket, grad, step.lr)   # l.9-10, communication l.3-5
        self.in_flight.append(self.last_exchange)
        self.rates.append(step.lr)
        K = self.options.K if step.t > self.options.warmup.iterations() else 1
        if len(self.in_flight) >= K:
            g_sum, lr = self.in_flight.popleft(), self.rates.pop(0)                      # l.3
            weight = self.options.gradient_weight(self.num_workers)
            self.update(self.w, g_sum.result(), lr, weight)                              # l.4-5
        return self.w

    def global_weights(self, step: Step) -> Array:
        return self.w

    def replaced(self, lr: float) -> None:
        self.rates = [lr] * len(self.rates)

    def resumed(self) -> None:
        if len(self.in_flight) >= self.options.K:
            raise ConfigError(f"the saved state has {len(self.in_flight)} sums in flight, which `K` = {self.options.K} "
                              f"has no place for; go on with K = {len(self.in_flight) + 1}")


def codec() -> Any:
    return option("none", common.CODEC, "how gradients are sent: none (as they are), float16, bfloat16, truncate (the "
                  "upper 16 bits of each float), quantize (8 bits each and a scale per block)", tunable=True)


class PipeSGD(Method):
    name = "pipesgd"
    worker = Pipelined
    transports = ("ring",)
    resumes_from_optimizer = False

    @dataclass(frozen=True)
    class Options(common.Options):
        K: int = option(2, integer(1), "iterations from a gradient to its update; 1: each waits for its own",
                        tunable=True)
        codec: str = codec()
        warmup: TrainingLength = common.warmup(0)

    def traffic(self, whole: bool) -> TrafficSettings:
        return dataclasses.replace(super().traffic(whole), depth=self.options.K, codec=self.options.codec)


class DSync(PipeSGD):
    """``kvstore.create("dsync")``: K = 1."""

    name = "dsync"
    resumes_from_optimizer = waits = True

    @dataclass(frozen=True)
    class Options(common.Options):
        codec: str = codec()

        K = 1
        warmup = TrainingLength(0)
