"""Downpour SGD.

Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, Algorithm 7.1.

A worker takes local steps on a copy of its own and accrues the gradients. Every n_push iterations it pushes their sum,
every n_fetch iterations it goes on from the global weights. With both 1 this is ASGD.

    paper               code      meaning
    parameters          w         the worker's own copy
    accruedgradients    accrued   sum of its gradients since the last push
    n_push, n_fetch     push_every, fetch_every
    alpha               lr_local  learning rate of the local steps

How the loop is cut. The paper's loop begins with the fetch, and a pass of `iterate` begins where the gradient is there:

    if step mod n_fetch == 0: fetch parameters            at the end of the pass before
    get data, compute gradient                            Gluon; the store gathers it    ── a pass begins
    accruedgradients += gradient                          `iterate`; weight decay is part of the gradient
    parameters -= alpha gradient                          `iterate`: a step of plain SGD
    if step mod n_push == 0: push accruedgradients        `iterate`: exchange            ── a pass ends

The server: W <- U(W, sum g) on each push, ASGD's (`asgd.AsyncRule`).
Reading: weight decay belongs to the gradient, g + wd w, and U adds none: so a push carries the decay of every step that
it sums, and one worker is plain SGD with any interval.
Reading: where push and fetch fall together, they are one round trip, and the fetched weights contain the push.
Other workers after a restart (``-n MIN:MAX``): all begin at W; what each had accrued since its last push is lost.
"""
from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

from kvstore.messages.seam import Array
from kvstore.methods import common
from kvstore.methods.asgd import ASGD, Asynchronous
from kvstore.methods.contract import Step, Update
from kvstore.options import integer, option

INTERVAL = 1  # if no interval is given


class Accruing(Asynchronous):
    local_optimizer: Update
    arrays = {"w": "the worker's own weights", "accrued": "gradients since the last push"}
    returned = "w"

    def start(self, w: Array) -> None:
        self.w = w.copy()
        self.accrued = self.w.zeros_like()

    def iterate(self, grad: Array, step: Step) -> Array:
        """Accrue, and take a local step; push and fetch when they are due."""
        pushes, fetches = (step.t % every == 0 for every in Downpour.intervals(self.options))
        g = grad + self.wd * self.w if self.wd else grad
        self.local_optimizer.accrue(self.accrued, g)
        self.local_optimizer(self.w, g, step.lr_local)
        if pushes:
            self.last_exchange = self.weights_holder.exchange(self.bucket, self.accrued, step.lr)
            self.accrued[:] = 0
        if fetches:
            fetched = self.last_exchange if pushes else self.weights_holder.fetch(self.bucket, self.w)
            fetched.result().copyto(self.w)
        return self.w


class Downpour(ASGD):
    name = "downpour"
    worker = Accruing
    update_decays = False

    @dataclass(frozen=True)
    class Options(common.CodedOptions):
        T: Optional[int] = option(None, integer(1), "iterations between exchanges", tunable=True,
                                  otherwise=f"{INTERVAL}")
        push_every: Optional[int] = option(None, integer(1), "iterations between pushes", otherwise="T")
        fetch_every: Optional[int] = option(None, integer(1), "iterations between fetches", otherwise="T")
        lr_local: Optional[float] = common.lr_local()

        def check(self) -> None:
            super().check()
            if self.push_every is not None and self.fetch_every is not None:
                self.refuse(["T"], "beside push_every and fetch_every; leave one of them out")
            elif self.T is None:
                self._set("T", INTERVAL)

    @classmethod
    def intervals(cls, options: Any) -> Tuple[int, int]:
        return options.push_every or options.T, options.fetch_every or options.T

    @classmethod
    def local_optimizer(cls, options: Any) -> Optional[Tuple[str, Dict[str, Any]]]:
        return "sgd", {"wd": 0.0}
