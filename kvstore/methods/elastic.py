"""EASGD and EAMSGD, elastic averaging.

Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", NIPS 2015, Algorithms 1 and 2, asynchronous.

Every worker explores with weights of its own, x; an elastic force pulls them and a centre X on the server towards each
other at the start of every Tth local step.

    paper     code    meaning
    x^i       x       one worker's weights
    x~        X       the centre; what is evaluated
    alpha     alpha   strength of the force in one exchange; beta / M
    v, delta  v       momentum of EAMSGD's local steps (Nesterov), and its factor

How the loop is cut. A pass of `iterate` begins where the gradient is there, and holds the first lines of the next pass:

    x <- x^i                                              `ahead`: what was returned last, x + delta v
    if T divides t: x^i <- x^i - alpha (x - X)            `iterate` takes the answer that the pass before asked for
                    X <- X + alpha (x - X)                `exchange`, before the gradient; the server's `step`
    compute g(x + delta v), at x before the move          Gluon; the store gathers it    ── a pass begins
    v <- delta v - eta g                                  `iterate`
    x^i <- x^i + v                                        `iterate`
    t <- t + 1                                            the session counts             ── a pass ends

The gradient does not wait for the exchange, which runs beside it.

One round trip is enough, and the exchange is atomic: the worker sends x, the server answers X' = X + alpha (x - X), and
since x - X' = (1 - alpha)(x - X) the worker finds alpha (x - X) = alpha / (1 - alpha) (x - X').

Reading: at t = 0 all workers are at W_0, and so is X until the first exchange, where the force is 0; that exchange
sends nothing. A worker that begins after others have exchanged is not pulled to X before its own first exchange.
Reading: the trainer's learning rate and weight decay are for the local steps; weight decay belongs to g.
Other workers after a restart (``-n MIN:MAX``): all begin at the centre, without momentum; what a worker had found
since it last pulled the centre is lost. alpha = beta / M follows the number of workers.
"""
import collections
from dataclasses import dataclass
from typing import Any, Deque, Optional, Tuple

import numpy as np

from kvstore.errors import ConfigError
from kvstore.messages.seam import Array, Pending
from kvstore.methods import common
from kvstore.methods.asgd import ASGD, Asynchronous, AsyncRule
from kvstore.methods.contract import Step, Traits
from kvstore.options import integer, option, real

BETA = 0.9  # if neither beta nor alpha is given


def strength(options: Any, num_workers: int) -> float:
    """alpha, the same on the worker and on the server."""
    return float(options.beta / num_workers if options.alpha is None else options.alpha)


class Elastic(Asynchronous):
    """The worker, for one bucket. With delta = 0 this is EASGD."""

    arrays = {"x": "the worker's own weights", "v": "momentum of its steps", "ahead": "x + delta v",
              "centres": "the centre's answer to x, where the force is still to act"}
    returned = "ahead"  # where the next gradient is taken

    def start(self, w: Array) -> None:
        self.x, self.v, self.ahead = w.copy(), w.zeros_like(), w.copy()
        self.centres: Deque[Pending] = collections.deque()  # one, or none

    def iterate(self, grad: Array, step: Step) -> Array:
        """Apply the force that an earlier pass asked for, take one local step; every T steps begin an exchange."""
        delta, alpha = self.options.delta, strength(self.options, self.num_workers)
        eta = step.lr * self.bucket.first.lr_mult
        if self.centres:
            self.x -= alpha / (1 - alpha) * (self.x - self.centres.popleft().result())   # x^i <- x^i - alpha (x - X)
        self.v[:] = delta * self.v - eta * (grad + self.wd * self.ahead)         # v <- delta v - eta g(x + delta v)
        self.x += self.v                                                         # x^i <- x^i + v
        if step.t % self.options.T == 0:                                         # T divides the next pass's t
            self.last_exchange = self.weights_holder.exchange(self.bucket, self.x, step.lr)
            self.centres.append(self.last_exchange)
        self.ahead[:] = self.x + delta * self.v
        return self.ahead


class Centre(AsyncRule):
    """The server: X <- X + alpha (x - X)."""

    def step(self, centre: np.ndarray, x: np.ndarray, lr: float) -> None:
        centre += np.float32(strength(self.options, self.num_workers)) * (x - centre)
        self.version += 1


class EASGD(ASGD):
    name = "easgd"
    worker, rule = Elastic, Centre
    plain_sgd = "store `eamsgd`, option `delta`"

    @dataclass(frozen=True)
    class Options(common.Options):
        T: int = option(4, integer(1), "local steps between exchanges", tunable=True)
        alpha: Optional[float] = option(None, real(at_least=0, below=1), "share of the distance between local and "
                                        "global weights by which one exchange moves each towards the other",
                                        tunable=True, otherwise="beta / number of workers")
        beta: Optional[float] = option(None, real(at_least=0, below=1), "pull of all workers together, alpha times "
                                       "their number", tunable=True, otherwise=f"{BETA}")

        delta = 0.0

        def check(self) -> None:
            if self.on_nan == "skip":
                raise ConfigError("on_nan `skip` has no meaning in elastic averaging, where weights travel and no "
                                  "gradients; take `stop`")
            if self.alpha is not None:
                self.refuse(["beta"], "beside alpha; leave one of them out")
            elif self.beta is None:
                self._set("beta", BETA)

    @classmethod
    def intervals(cls, options: Any) -> Tuple[int, int]:
        return options.T, options.T

    @classmethod
    def traits(cls, options: Any, num_workers: int) -> Traits:
        return Traits(in_flight=1, momentum=("delta", options.delta))  # a worker's own steps


class EAMSGD(EASGD):
    name = "eamsgd"

    @dataclass(frozen=True)
    class Options(EASGD.Options):
        delta: float = option(0.9, real(at_least=0, below=1), "Nesterov's momentum of the local steps", tunable=True)
