"""OD-SGD, one-step-delay SGD, and the delayed weight update it grew from.

Xu et al., "OD-SGD: One-step Delay Stochastic Gradient Descent for Distributed Training", arXiv:2005.06728: Algorithm 2
(worker), Eq. 4-6, Fig. 5 and 8. The server is the same as in SSGD (Algorithm 1). On a ring an allreduce replaces it,
and every worker applies the global optimizer to its own copy of W.

A worker does not wait for the exchange it has just started: it takes a local step from the global weights it
already has and begins the next batch, so exchange t runs beside computation t + 1. For the first `warmup` iterations it
does wait, as in SSGD. Without a local step (`optimizer_local` none) this is the delayed weight update.

    paper        code            meaning
    w_t          w_global        global weights after t updates, W_t; they arrive in comm_buf_
    w_bak        w_bak           the weights this worker computes on next, w_{t+1}^m; comm_bak_
    g_m          grad            its gradient, taken at w_t^m, mean over its own mini-batch
    wp           warmup          iterations of SSGD before the delay is switched on

How the loop is cut. A pass of `iterate` begins where the gradient is there, and ends where the next one begins:

    l.17  repeat                                   the trainer's loop
    l.18  broadcast w_bak^{t-1} to the devices     the store scatters what `iterate` returned
    l.19  compute g_m                              Gluon; the store gathers it      ── a pass begins
    l.20  push g_m                                 `exchange`, which returns at once
    l.21  update w_bak^t with g_m                  the local step, from W_t, which the last l.24 asked for
    l.23  t <- t + 1                               the session counts
    l.24  pull w_t                                 the same `exchange`; what reads W_t waits for it
    l.25  until forever                                                             ── a pass ends

We queue the local step (l.21) before the push (l.20). Then the push needs no copy of g_m: its answer may overwrite
g_m, which the local step has read by then. This costs no time, because both wait for W_t.

Invariant: past the warm-up, the weights a worker computes on lack exactly one global update; its own local step stands
in for it.
Reading: the warm-up loop of the paper runs wp + 1 times (l.3), but its last pass already steps locally (l.8-9); so
exactly `warmup` = wp iterations wait.
Reading: the paper's two indices of w_bak differ, t in l.21 and t - 1 in l.18. We follow Fig. 5 and 8: g_t updates W_t,
which the pull of the previous iteration brought.
Other workers after a restart (``-n MIN:MAX``): all begin at W_t, which has every gradient that was sent; the local
optimizer's momentum and its other state begin anew.
"""
from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

from kvstore.messages.seam import Array
from kvstore.methods import common, local_optimizers
from kvstore.methods.contract import Method, Step, Worker
from kvstore.methods.sync import SyncRule
from kvstore.options import TrainingLength, option, real


class DelayedWorker(Worker):
    sends_gradient_in_place = True
    arrays = {"w_bak": "the weights that the next gradient is taken at"}
    returned = "w_bak"

    def start(self, w: Array) -> None:
        self.w_bak = w.copy() if self.local_optimizer else None

    def iterate(self, grad: Array, step: Step) -> Array:
        """One pass of Algorithm 2 after the gradient is there; returns the weights of the next iteration."""
        if step.t <= self.options.warmup.iterations():
            self.last_exchange = self.weights_holder.exchange(self.bucket, grad, step.lr)  # l.7   push g_t, ask W_{t+1}
            return self.last_exchange.result()                                             # l.4   w_{t+1} = W_{t+1}
        w = self._step(self.last_exchange.result(), grad, step)
        self.last_exchange = self.weights_holder.exchange(self.bucket, grad, step.lr)      # l.20  push g_t, ask W_{t+1}
        return w

    def _step(self, w_global: Array, grad: Array, step: Step) -> Array:
        """w_{t+1} from W_t, which the exchange before brings (l.24)."""
        if self.local_optimizer is None:
            return w_global                                                         #       w_{t+1} = W_t
        if step.t == self.options.warmup.iterations() + 1:
            self.local_optimizer.start(w_global)                                    # l.12  w_t is W_t: the warm-up ends
        return self.local_optimizer(w_global, grad, step.lr_local, out=self.w_bak)  # l.21  w_{t+1} = L(W_t, g_t; w_t)


class Delayed(Method):
    """``kvstore.create("delayed")``: no local step, w_{t+1} = W_t."""

    name = "delayed"
    worker, rule = DelayedWorker, SyncRule
    transports = ("server", "ring", "sharded")

    @dataclass(frozen=True)
    class Options(common.CodedOptions):
        warmup: TrainingLength = common.warmup(0)


class ODSGD(Delayed):
    name = "odsgd"

    @dataclass(frozen=True)
    class Options(Delayed.Options):
        warmup: TrainingLength = common.warmup(200)
        optimizer_local: str = option("sgd", local_optimizers.LOCAL, "optimizer of the local steps: none, sgd, "
                                      "dcasgd_c, dcasgd_a, adamw, or another optimizer of the framework", tunable=True)
        lr_local: Optional[float] = common.lr_local()
        momentum_local: float = option(0.0, real(at_least=0, at_most=1), "momentum of the local steps", tunable=True)
        wd_local: Optional[float] = option(None, real(at_least=0), "weight decay of the local steps",
                                           otherwise="the global weight decay")
        lamda: Optional[float] = local_optimizers.compensation_option("lamda")
        m: Optional[float] = local_optimizers.compensation_option("m")
        epsilon: Optional[float] = local_optimizers.compensation_option("epsilon")

        def check(self) -> None:
            super().check()
            if self.optimizer_local == "none":
                self.refuse(("lr_local", "momentum_local", "wd_local", *local_optimizers.COMPENSATION),
                            "with optimizer_local `none`, which takes no local step")
            local_optimizers.fill_in(self, self.optimizer_local)
            local_optimizers.check_momentum("momentum_local", self.momentum_local, self.optimizer_local)

    @classmethod
    def local_optimizer(cls, options: Any) -> Optional[Tuple[str, Dict[str, Any]]]:
        if options.optimizer_local == "none":
            return None
        return options.optimizer_local, {
            "momentum": options.momentum_local, "wd": options.wd_local,
            **{name: getattr(options, name) for name in local_optimizers.COMPENSATION}}
