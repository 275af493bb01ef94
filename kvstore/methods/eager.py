"""DiLoCo with eager updates: an exchange has a whole round of H steps to arrive in.

Kale, Douillard, Donchev, "Eager Updates For Overlapped Communication and Computation in DiLoCo", arXiv:2502.12996.

As DiLoCo (`diloco`), but a worker does not wait for the exchange that it has just started. It goes on from the mean of
the outer gradients of the round before, in which its own is replaced by the one that it has just found.

    paper               code           meaning
    theta_m             anchor         where worker m began this round, and begins the next
    Delta_m(t)          delta          its outer gradient of round t: anchor - x
    Delta~_m(t)                        1/M (Delta_m(t) + the others' Delta of round t - 1), what it applies
    OuterOpt            U              SGD with Nesterov's momentum: rate eta, momentum mu

In the paper every worker has an outer optimizer of its own, which is given Delta~_m. Its state and its weights are the
worker's, so there are no global weights, nothing that a checkpoint, an evaluation or other workers could begin with.
Here the holder of the weights applies U to the plain means, and a worker adds a part of its own. The rule is the same:

    OuterOpt on d(0), d(1), ... :    v(t) = mu v(t-1) + d(t),    theta(t) = theta(t-1) - eta (d(t) + mu v(t))

is linear in the d's: what it does to a sum is the sum of what it does to the parts, each with a v of its own. With
Delta(t) for the mean of all Delta_m(t), and Delta(-1) = Delta_m(-1) = 0,

    Delta~_m(t) = Delta(t-1) + 1/M Delta_m(t) - 1/M Delta_m(t-1)

has three parts. The first moves the weights to Theta(t-1), U of all means up to round t - 1: the same on all workers,
the answer to the exchange of round t - 1. The second and the third are one sequence, with opposite signs, the third a
round later. They cancel but for the last move along the second:

    theta_m(t) = Theta(t-1) - eta/M u_m(t),     u = Delta_m(t) + mu b_m(t) = (1 + mu) Delta_m(t) + mu^2 b_m(t-1),
                                                b_m(t) = mu b_m(t-1) + Delta_m(t)

b_m is v of the outer gradients of worker m alone. `local_scale` stands in place of 1/M: 0 is the naive delay, where a
worker's own Delta is as late as the others'.

What follows for OD-SGD. With H = 1, mu = 0 and an inner SGD step of rate 1, Delta_m is the gradient, and the rule is
theta_m(t) = Theta(t-1) - eta/M g_m(t): OD-SGD with lr_local = lr/M, a worker's share of the mean. OD-SGD's other rates
are other values of `local_scale`: lr_local = lr is local_scale 1.

How the loop is cut. A pass of `iterate` begins every H iterations, where the inner steps have been taken; see `diloco`.

Reading: the first round has no Delta of a round before it, and Theta(-1) = W_0.
Reading: the global weights contain all outer gradients that were sent, the last ones included.
Readings of `diloco` on BatchNorm, momentum and ``uneven`` hold here.
Other workers after a restart (``-n MIN:MAX``): all begin at the global weights, b at 0; what a worker had found since
the last exchange, and the state of its inner optimizer, are lost. `local_scale` = 1/M follows the number of workers.
"""
from dataclasses import dataclass
from typing import Optional

from kvstore.errors import ConfigError
from kvstore.messages.seam import Array
from kvstore.methods.contract import Step
from kvstore.methods.diloco import DiLoCo, OuterOptions, Replica
from kvstore.options import option, real


class EagerReplica(Replica):
    arrays = {"anchor": "where this worker's round began", "b": "momentum of its own outer gradients"}

    def start(self, w: Array) -> None:
        self.anchor = w.copy()
        self.b = w.zeros_like() if self.options.momentum else None

    def iterate(self, x: Array, step: Step) -> Array:
        """The end of round t: `x` are the weights after its inner steps; returns those that the next one begins at."""
        eta, mu = self.options.lr_outer, self.options.momentum
        theta, own = self.last_exchange.result(), self.anchor - x              # Theta(t-1), Delta_m(t)
        delta = step.counts * own
        self.last_exchange = self.weights_holder.exchange(self.bucket, delta, eta)
        u = own = delta if self.options.local_scale is None else own  # 1/M of it: a share among those that have data
        if self.b is not None:
            self.b[:] = mu * self.b + own                                      # b_m(t)
            u = own + mu * self.b
        self.anchor[:] = theta - self.scale * eta * u                          # theta_m(t)
        return self.anchor

    @property
    def scale(self) -> float:
        """What the worker's own outer gradient counts: 1/M, as in the mean; 1 where `reduction` is sum."""
        share = self.options.gradient_weight(self.num_workers)
        return float(share if self.options.local_scale is None else self.options.local_scale)


class Eager(DiLoCo):
    name = "eager"
    worker = EagerReplica
    waits = False

    @dataclass(frozen=True)
    class Options(OuterOptions):
        local_scale: Optional[float] = option(None, real(at_least=0, at_most=1), "share of a worker's own outer "
                                              "gradient that it applies before the others' arrive", tunable=True,
                                              otherwise="1 / number of workers")

        def check(self) -> None:
            super().check()
            if self.on_nan == "skip":
                raise ConfigError("on_nan `skip` leaves a round out for all, and by then a worker's own weights "
                                  "contain its part of it; take `stop`")
