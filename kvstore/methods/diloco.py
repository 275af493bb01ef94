"""DiLoCo, distributed low-communication training, and its streaming form.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv:2311.08105, Algorithm 1.
Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv:2501.18512: fragments, overlap.

Every worker trains by itself for H steps, by the script's own optimizer. Then all send how far they have come since the
last exchange, the outer gradient; whoever holds the global weights applies the mean by SGD with Nesterov's momentum,
and all go on from the result.

    paper             code            meaning
    theta^(t)         theta           the global weights, W; what the last exchange brought
    theta_i^(t)       x               worker i's weights after its inner steps
    InnerOpt                          the script's optimizer, in every iteration; its state stays on the worker
    Delta_i           theta - x       worker i's outer gradient
    OuterOpt          U               Nesterov: v <- mu v + Delta,  theta <- theta - eta (Delta + mu v)
    eta, mu           lr_outer, momentum_outer
    H                 H               inner steps between two exchanges
    k, T              num_workers     workers; t counts exchanges in the paper, and inner steps here
    p, P              fragments       groups of whole tensors, dealt by size; their turns are H / P steps apart
    tau               delay           inner steps between sending a fragment and applying what came back
    alpha             mix             what a worker's own weights count where the answer is applied

How the loop is cut. A pass of `iterate` begins every H iterations, where the inner steps have been taken:

    l.1   for t = 1 ... T                                   the trainer's loop
    l.2-3   for worker i: theta_i <- theta^(t-1)            the last pass returned it
    l.4-8     H times: theta_i <- InnerOpt(theta_i, grad)   the front end, by the script's optimizer  ── a pass begins
    l.10    Delta <- 1/k sum_i (theta^(t-1) - theta_i)      `exchange` sends this worker's; servers or a ring add
    l.12    theta^(t) <- OuterOpt(theta^(t-1), Delta)       `SyncRule.receive`; without servers U of every worker
                                                            ── a pass ends with theta^(t)

With a delay two passes do this, tau steps apart; the inner steps between them go on from what was sent:

    t          l.10  exchange                                                              ── a pass begins and ends
    t + tau    theta_i <- alpha theta_i + (1 - alpha) theta^(t)                            ── a pass begins and ends

What came back is applied at t + tau exactly, however early it came; so no bit depends on the network.

Reading: what is not trained (the statistics of BatchNorm) stays each worker's own, and an evaluation uses the mean.
Reading: between two exchanges the global weights are those of the last one, without the steps of workers since.
Reading: below H = 100 momentum_outer is 0 unless given. There successive outer gradients point the same way, and a
momentum of 0.9 acts as a rate that is up to ten times larger.
Reading: fragment p is sent where (t + floor(p H / P)) mod H = 0. Streaming DiLoCo takes whole layers, here it is whole
parameters, the largest first, each to the fragment that is smallest so far.
A worker whose data have ended (``uneven="join"``) takes no more steps: it goes on from theta alone, so that after the
next exchange its outer gradient is 0. The mean is over the workers that have taken a step since the last exchange. With
a delay the steps between its last exchange and the answer are lost.
Other workers after a restart (``-n MIN:MAX``): all begin at theta; a worker's steps since the last exchange, and the
state of its inner optimizer, are lost. The outer momentum stays.
"""
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Optional, Tuple, Type

from kvstore.errors import ConfigError
from kvstore.messages.seam import Array, TrafficSettings
from kvstore.methods import common
from kvstore.methods.contract import Method, Rule, Step, Worker
from kvstore.methods.sync import SyncRule
from kvstore.options import integer, option, real

LONG = 100  # H from which on the paper's momentum is the default
MOMENTUM, MIX = 0.9, 0.5  # the mix with a delay


class Replica(Worker):
    def iterate(self, x: Array, step: Step) -> Array:
        """Send an outer gradient, or apply the answer, or both: `x` are the weights after the inner steps."""
        options, theta = self.options, self.last_exchange.result()
        since = options.since(step.t, self.bucket.first.fragment)
        if since == 0:
            delta = step.counts * (theta - x)
            self.last_exchange = self.weights_holder.exchange(self.bucket, delta, options.lr_outer)       # l.10, 12
        if since != options.delay:
            return x
        theta = self.last_exchange.result()                                                             # l.3
        mix = 0.0 if step.joined else options.mix
        return mix * x + (1 - mix) * theta if mix else theta


@dataclass(frozen=True)
class OuterOptions(common.CodedOptions):
    """Options of methods whose workers send how far they have come."""

    H: int = option(LONG, integer(1), "steps of a worker between two exchanges", tunable=True)
    fragments: int = option(1, integer(1), "groups of whole parameters that are sent at different steps", tunable=True)
    lr_outer: float = option(0.7, real(at_least=0), "learning rate of the outer step, which applies the mean of "
                             "the workers' outer gradients", tunable=True)
    momentum_outer: Optional[float] = option(None, real(at_least=0, below=1), "Nesterov's momentum of the outer step",
                                             tunable=True, otherwise=f"{MOMENTUM}, and 0 below H = {LONG}")

    delay = 0

    @property
    def momentum(self) -> float:
        """Momentum of the outer optimizer."""
        short = MOMENTUM if self.H >= LONG else 0.0
        return short if self.momentum_outer is None else self.momentum_outer

    def since(self, t: int, fragment: int) -> int:
        """Iterations since a fragment was sent last; negative before the first time."""
        first = self.H - fragment * self.H // self.fragments
        return (t - first) % self.H if t >= first else -1


class DiLoCo(Method):
    name = "diloco"
    worker: ClassVar[Type[Worker]] = Replica
    rule: ClassVar[Type[Rule]] = SyncRule
    transports: ClassVar[Tuple[str, ...]] = ("server", "ring", "sharded")
    takes = "weights"
    waits = True
    resumes_from_optimizer = False

    @dataclass(frozen=True)
    class Options(OuterOptions):
        delay: int = option(0, integer(0), "steps from sending an outer gradient to using its result; less than H",
                            tunable=True)
        mix: Optional[float] = option(None, real(at_least=0, at_most=1), "share of its own weights that a worker keeps "
                                      "when it takes over the global ones", tunable=True, method_specific=True,
                                      otherwise=f"{MIX} with a delay, else 0")

        def check(self) -> None:
            super().check()
            self._set("mix", (MIX if self.delay else 0.0) if self.mix is None else self.mix)
            if self.on_nan == "skip" and self.mix:
                raise ConfigError(f"on_nan `skip` leaves a round out, and mix {self.mix:g} would keep the weights of a "
                                  "worker that are not finite; take mix 0, or `stop`")
            if self.delay >= self.H:
                raise ConfigError(f"delay is {self.delay}, expected less than H, which is {self.H}: what comes of an "
                                  "exchange is applied before the next one")

    @classmethod
    def intervals(cls, options: Any) -> Tuple[int, int]:
        return options.H, options.H

    @classmethod
    def fragments(cls, options: Any) -> int:
        return int(options.fragments)

    @classmethod
    def due(cls, options: Any, t: int, fragment: int) -> bool:
        return options.since(t, fragment) in (0, options.delay)

    @classmethod
    def outer_sgd(cls, options: Any) -> Optional[Tuple[float, float]]:
        return options.lr_outer, options.momentum

    def traffic(self, whole: bool) -> TrafficSettings:
        return replace(super().traffic(whole), waits=self.waits and not self.options.delay)

    def advice(self) -> Optional[str]:
        if self.options.momentum_outer is not None or self.options.H >= LONG:
            return None
        return (f"`{self.name}` with H = {self.options.H} has momentum_outer 0: below H = {LONG} successive outer "
                f"gradients point the same way, and {MOMENTUM} would act as a rate up to ten times larger; give "
                "momentum_outer if you want it")
