"""Asynchronous DiLoCo: every worker sends when it has taken H steps, and servers apply each outer gradient as it comes.

Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv:2401.09135: Algorithm 3 (delayed Nesterov).

A worker trains by itself for H steps, sends how far it has come, and goes on from the global weights right after that;
nobody waits for anybody. With plain Nesterov's momentum late outer gradients, which resemble each other, add up to
steps that are far too long. So the servers apply each of them at once, and their momentum moves by the mean of every N.

    paper      code            meaning
    theta      w               the global weights
    g          g               an outer gradient: where the worker began this round, minus where its H steps have led
    t          pushes          outer gradients so far
    N          N               outer gradients from one change of the momentum to the next; M unless given
    Delta      delta           their sum
    m, beta    m               the momentum and its factor, momentum_outer
    epsilon    header.lr       lr_outer
    c          c               the share of the momentum's step that is taken with each outer gradient; 0 to 1 / N
    v_w        dylu            how fast worker w is, in any unit
    H_w        of_worker       its steps between two outer gradients: floor(H v_w / max v), 1 at least

How the loop is cut. The worker's as in `diloco`. The server's, for one bucket:

    receive g                                                          MXNet's server loop calls `receive`
    Delta <- Delta + g                                                 `step`
    if (t + 1) mod N = 0:  m <- beta m + Delta / N,  Delta <- 0        `step`
                           theta <- theta - epsilon ((1 - cN + c) beta m + g / N)
    else:                  theta <- theta - epsilon (c beta m + g / N)
    send theta                                                         the transport

N = 1 and c = 0 are Nesterov's momentum with each outer gradient.

Reading: U is plain SGD, and takes a step along what stands in the brackets; so a version is one outer gradient.
Reading: the paper measures v (dynamic local updates, DyLU). Then a clock would decide when a worker has its turn, and
decide anew in a resumed run. So here v is given, by rank; without it all take H steps.
Readings of `diloco` on BatchNorm and momentum hold here. ``on_nan="skip"`` leaves a worker's round out: it goes on from
the global weights.
Other workers after a restart (``-n MIN:MAX``): all begin at the global weights, the momentum at 0; what a worker had
found since it sent last is lost. N = M follows the number of workers, and `dylu` is by the ranks there are then.
"""
from dataclasses import dataclass, replace
from typing import Any, Optional, Tuple

import numpy as np

from kvstore.errors import ConfigError
from kvstore.messages.seam import Array
from kvstore.methods.asgd import Asynchronous, AsyncRule
from kvstore.methods.contract import Step
from kvstore.methods.diloco import DiLoCo, OuterOptions
from kvstore.options import integer, option, real, several


class AsyncReplica(Asynchronous):
    arrays = {"anchor": "where this worker's round began"}

    def start(self, w: Array) -> None:
        self.anchor = w.copy()

    def iterate(self, x: Array, step: Step) -> Array:
        """The end of a round: `x` are the weights after its inner steps; returns those that the next one begins at."""
        self.last_exchange = self.weights_holder.exchange(self.bucket, self.anchor - x, self.options.lr_outer)
        self.anchor[:] = self.last_exchange.result()
        return self.anchor


class DelayedNesterov(AsyncRule):
    """The server, for one bucket.

    Invariant 3: delta is the sum of fewer than N outer gradients between calls.
    """

    arrays = {"delta": "outer gradients that are not in the momentum yet", "m": "momentum of the outer gradients"}
    facts = (*AsyncRule.facts, "pushes")

    def start(self, w: np.ndarray) -> None:
        self.delta, self.m, self.pushes = np.zeros_like(w), np.zeros_like(w), 0

    def step(self, w: np.ndarray, g: np.ndarray, lr: float) -> None:
        N, c, beta = self.options.N or self.num_workers, self.options.c, self.options.momentum
        share = c
        self.delta += g
        if (self.pushes + 1) % N == 0:
            self.m[:] = np.float32(beta) * self.m + self.delta / np.float32(N)
            self.delta[:] = 0
            share = 1 - c * N + c
        self.update(w, np.float32(share * beta) * self.m + g / np.float32(N), lr)
        self.pushes += 1
        self.version += 1


class AsyncDiLoCo(DiLoCo):
    name = "async_diloco"
    worker, rule = AsyncReplica, DelayedNesterov
    asynchronous = True
    waits = False
    reduces = False

    @dataclass(frozen=True)
    class Options(OuterOptions):
        N: Optional[int] = option(None, integer(1), "outer gradients between two updates of the momentum",
                                  tunable=True, otherwise="the number of workers")
        c: float = option(0.0, real(at_least=0, at_most=1), "share of the momentum that is applied with each outer "
                          "gradient; at most 1 / N", tunable=True)
        dylu: Optional[Tuple[float, ...]] = option(None, several(real(above=0)), "speed of each worker, by rank, in "
                                                   "any unit; the fastest takes H steps, others fewer, so that all "
                                                   "send equally often", otherwise="all take H steps")

    def check(self) -> None:
        N = self.options.N or self.num_workers
        if self.options.c > 1 / N:
            raise ConfigError(f"c is {self.options.c:g}, expected at most 1 / N, and N is {N}")
        speeds = self.options.dylu
        if speeds and len(speeds) < self.num_workers:
            raise ConfigError(f"dylu has {len(speeds)} speeds, and the job has {self.num_workers} workers")

    @classmethod
    def admits(cls, options: Any) -> bool:
        return bool(options.codec_weights == "none")

    @classmethod
    def of_worker(cls, options: Any, worker_rank: int) -> Any:
        v = options.dylu
        if not v:
            return options
        steps = round(options.H * v[worker_rank] / max(v), 6)  # 24 x 0.7 / 0.7 is 23.999... in floats
        return replace(options, H=max(1, int(steps)))

    @classmethod
    def outer_sgd(cls, options: Any) -> Optional[Tuple[float, float]]:
        return options.lr_outer, 0.0  # the momentum is the rule's
