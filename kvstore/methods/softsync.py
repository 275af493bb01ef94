"""n-softsync with staleness-aware learning rates.

Zhang, Gupta, Lian, Liu, "Staleness-Aware Async-SGD for Distributed Deep Learning", IJCAI 2016.

The server collects c = floor(M / n) gradients of any workers for one update, and damps each by its staleness. The
worker is ASGD's.

    W <- U(W, 1/c sum_l (alpha_l / alpha_0) g_l),    alpha_l = alpha_0 / tau_l  if tau_l > 0,  else alpha_0

    paper         code         meaning
    n, lambda, c  n, M, c      splitting parameter, number of workers, gradients per update: c = floor(lambda / n)
    tau_l         tau          staleness: version now - version the gradient was taken on
    sum           sum, held    sum of the gradients since the last update; their number

How the loop is cut: the worker's as in `asgd`. The server's: each gradient is added as it comes (`push`); the c-th
completes the sum, updates at its own rate and counts the version. The others are answered with the weights as they are.
Other workers after a restart (``-n MIN:MAX``): the gradients held for the next update, fewer than c, are lost. n must
not be more than the workers that are left.
"""
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from kvstore.errors import ConfigError
from kvstore.messages.header import Header
from kvstore.methods import common
from kvstore.methods.asgd import ASGD, AsyncRule
from kvstore.methods.contract import Traits
from kvstore.options import FLAG, integer, option


class Softsync(AsyncRule):
    """The server, for one bucket.

    Invariant 3: fewer than c gradients are held between calls, and none is counted twice.
    """

    arrays = {"sum": "gradients that wait for the next update"}
    facts = (*AsyncRule.facts, "held")

    def start(self, w: np.ndarray) -> None:
        self.c = SoftsyncSGD.traits(self.options, self.num_workers).collected
        self.sum, self.held = np.zeros_like(w), 0

    def push(self, header: Header, tau: int, grad: np.ndarray, w: np.ndarray) -> float:
        factor = 1.0 / max(tau, 1) if self.options.modulate else 1.0
        grad *= np.float32(factor)
        self.sum += grad
        self.held += 1
        if self.held == self.c:
            np.divide(self.sum, np.float32(self.c if self.options.reduction == "mean" else 1), out=grad)
            self.step(w, grad, header.lr)
            self.sum[:], self.held = 0, 0
        return factor


class SoftsyncSGD(ASGD):
    name = "softsync"
    rule = Softsync
    reduces = True

    @dataclass(frozen=True)
    class Options(common.CodedOptions):
        n: Optional[int] = option(None, integer(1), "updates per round of pushes (one of each worker): the servers "
                                  "collect workers / n gradients for each update", tunable=True,
                                  otherwise="the number of workers: an update per push")
        modulate: bool = option(True, FLAG, "divide a gradient's learning rate by its staleness", tunable=True)

    def check(self) -> None:
        if self.options.n is not None and self.options.n > self.num_workers:
            raise ConfigError(f"`n` is {self.options.n}, more than the {self.num_workers} workers of the job")

    @classmethod
    def traits(cls, options: Any, num_workers: int) -> Traits:
        n = options.n or num_workers
        return Traits(in_flight=n, collected=num_workers // n, damped=options.modulate)
