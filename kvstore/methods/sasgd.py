"""SASGD, SGD with sparse aggregation of gradients.

Cong, Bhardwaj, Feng, "An efficient, distributed stochastic gradient descent algorithm for deep-learning applications",
ICPP 2017: Algorithm 1.

Every worker takes T local steps on a copy of its own and accumulates the gradients; then all workers sum what they have
accumulated, and the copies become equal again. There is no server.

    paper      code           meaning
    x          x              this worker's weights
    x'         x_shared       the weights at the start of the interval, the same on every worker
    g          g              its gradient
    g_s        accumulated    sum of its gradients in this interval; summed over the workers where it ends
    p          num_workers    number of workers, M
    gamma      lr_local       learning rate of the local steps
    gamma_p    gamma_p        learning rate of the aggregation

How the loop is cut. Both loops of the paper are one here, j counts on; a pass begins where the gradient is there:

    x <- broadcast(x, p, id), x' <- x, g_s <- 0      the store's broadcast; `start`
    while j < T: compute gradient g                  Gluon; the store gathers it     ── a pass begins
        x <- x - gamma g, g_s <- g_s + g             `iterate`
        j <- j + 1                                   the session counts
    g_s <- allreduce(g_s, p, id)                     `aggregate`, every T passes
    x <- x' - gamma_p g_s                            `aggregate`
    x' <- x, g_s <- 0                                `iterate`                       ── a pass ends

gamma_p = gamma / M makes x the mean of the workers' weights: model averaging. (The paper writes 1/p for it in a
sentence, which leaves gamma out.) T = 1 is synchronous SGD.

Reading: weight decay belongs to the gradient, g + wd x, so that gamma / M still averages the models.
Reading: rates belong to the iteration, gamma_p to the iteration in which the interval ends. A given gamma_p moves the
global weights, so it follows the trainer's schedule, by the same factors; a gamma of its own may follow another.
Reading: intervals do not depend on epochs; one that an epoch or a checkpoint cuts goes on afterwards. The global
weights meanwhile are what the interval would end with at its newest rates: x' - gamma_p allreduce(g_s).
Other workers after a restart (``-n MIN:MAX``): all begin at the global weights, with an interval cut short: no step is
lost. gamma_p = gamma / M follows the number of workers; a given gamma_p stays, times lr_scaling.
"""
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, List, Optional, Tuple

from kvstore.errors import ConfigError
from kvstore.messages.seam import Array, Replicated
from kvstore.methods import common
from kvstore.methods.contract import Method, Step, Update, Worker
from kvstore.options import integer, option, real


class SparseAggregation(Worker):
    weights_holder: Replicated
    local_optimizer: Update
    arrays = {"x": "this worker's weights", "x_shared": "weights at the start of the interval",
              "accumulated": "gradients of this interval"}
    facts = ("lr_given", "rates")
    returned = "x"
    rates: List[float]  # of the newest iteration: lr, and lr_local; parameter groups have their own

    def start(self, w: Array) -> None:
        self.x, self.x_shared = w.copy(), w.copy()                                  # x' <- x
        self.accumulated = w.zeros_like()                                           # g_s <- 0
        self.rates = [0.0, 0.0]

    def iterate(self, grad: Array, step: Step) -> Array:
        """One local step, then, every T of them, the aggregation."""
        self.rates = [step.lr, step.lr_local]
        g = grad + self.wd * self.x if self.wd else grad
        self.local_optimizer(self.x, g, step.lr_local)                              # x <- x - gamma g
        self.local_optimizer.accrue(self.accumulated, g)                            # g_s <- g_s + g
        if step.t % self.options.T == 0:
            self.aggregate(step, self.local_optimizer, self.x_shared)               # x' - gamma_p allreduce(g_s)
            self.x_shared.copyto(self.x)                                            # x <- x'
            self.accumulated[:] = 0                                                 # g_s <- 0
        return self.x

    def aggregate(self, step: Step, move: Callable[..., Array], out: Array) -> Array:
        """out <- x' - gamma_p allreduce(g_s). gamma / M is multiplied as in synchronous SGD, for the same bits."""
        if self.options.gamma_p is None:
            gamma_p, gradient_weight = step.lr_local, self.options.gradient_weight(self.num_workers)
        else:
            gamma_p, gradient_weight = self.options.gamma_p * self.scheduled(step), 1.0
        self.last_exchange = self.weights_holder.allreduce(self.bucket, self.accumulated, gamma_p)
        return move(self.x_shared, self.last_exchange.result(), gamma_p, gradient_weight, out)

    def scheduled(self, step: Step) -> float:
        """The factor by which the trainer's schedule has changed its rate so far."""
        if not self.lr_given:
            raise ConfigError("gamma_p of sasgd follows the learning rate's schedule by a factor, and that rate was 0 "
                              "when the optimizer was made; make it with the rate that the schedule leads to")
        return step.lr / self.lr_given

    def global_weights(self, step: Step) -> Array:
        """Aggregate without ending the interval. All workers ask together."""
        if step.t % self.options.T == 0:
            return self.x_shared
        lr, lr_local = self.rates
        return self.aggregate(replace(step, lr=lr, lr_local=lr_local), self.local_optimizer.trial, self.x.zeros_like())


class SASGD(Method):
    name = "sasgd"
    worker = SparseAggregation
    transports = ("ring",)
    plain_sgd = "SASGD has none"
    resumes_from_optimizer = False
    waits = True

    @dataclass(frozen=True)
    class Options(common.Options):
        T: int = option(1, integer(1), "local steps between aggregations", tunable=True)
        lr_local: Optional[float] = common.lr_local()
        gamma_p: Optional[float] = option(None, real(at_least=0), "learning rate of the aggregation, for the sum of "
                                          "all workers' gradients; it follows the schedule of lr", tunable=True,
                                          otherwise="lr_local / number of workers: model averaging")

        def check(self) -> None:
            self.refuse(["uneven"], "in store sasgd, which aggregates intervals and not gradients; leave it out")

    @classmethod
    def intervals(cls, options: Any) -> Tuple[int, int]:
        return options.T, options.T

    @classmethod
    def local_optimizer(cls, options: Any) -> Optional[Tuple[str, Dict[str, Any]]]:
        return "sgd", {"wd": 0.0}
