"""ACCO: half of the gradients are taken at a guess of the next weights, so that no update is late.

Nabli et al., "ACCO: Accumulate while you Communicate for Communication-Overlapped Sharded LLM Training",
arXiv:2406.02613.

While one gradient travels the next one is computed, as in the delayed update. But one step of the optimizer takes two
gradients: the first to arrive makes a guess of where the step will lead, a trial whose state is put back; both together
make the step. So weights never lack an update; optimizers such as Adam suffer if they do.

    paper          code            meaning
    theta_t        w               the weights, the same on every worker
    theta~_t       guess           where the optimizer will have led, by half of the gradients
    g~_t, g_t      in_flight       sums of the workers' gradients at theta~_t and at theta_t
    Opt            U               the trainer's optimizer

How the two stages are cut. A pass of `iterate` begins where a gradient is there, and sends it:

    g~_0 at theta_0                                                                                ── a pass
    g_t at theta_t         theta~_{t+1} = Opt(theta_t, g~_t), whose state is put back              ── a pass
    g~_{t+1} at theta~     theta_{t+1} = Opt(theta_t, (g_t + g~_t) / (N + N~))                     ── a pass

What a pass takes was sent in the passes before; so each sum has the time of a gradient to arrive in.

Reading: all batches are equally large, N = N~. U takes one step in two passes, at the rate of the pass that takes it.
Reading: the global weights are theta; checkpoints keep the one or two sums that are not applied yet.
Deviation: every worker holds all of theta and of the optimizer's state. The paper shards both (ZeRO): here that is
transport `sharded`, whose owners of parts apply each sum for good, where this needs a trial first.
Other workers after a restart (``-n MIN:MAX``): all have theta; the sums in flight are lost.
"""
import collections
from dataclasses import replace
from typing import Deque

from kvstore.messages.seam import Array, Pending, Replicated, TrafficSettings
from kvstore.methods import common
from kvstore.methods.contract import Method, Step, Update, Worker


class Guessing(Worker):
    weights_holder: Replicated
    update: Update
    arrays = {"guess": "the weights that the next gradient is taken at", "w": "weights, the same on every worker",
              "in_flight": "sums that have not been applied"}
    returned = "guess"

    def start(self, w: Array) -> None:
        self.guess, self.w = w, w.copy()
        self.in_flight: Deque[Pending] = collections.deque()

    def iterate(self, grad: Array, step: Step) -> Array:
        """Send a gradient; then make the guess with the gradient before it, or the step with the two before it."""
        self.last_exchange = self.weights_holder.allreduce(self.bucket, grad, step.lr)
        self.in_flight.append(self.last_exchange)
        weight = self.options.gradient_weight(self.num_workers)
        if len(self.in_flight) == 2:
            return self.update.trial(self.w, self.in_flight[0].result(), step.lr, weight, out=self.guess)
        if len(self.in_flight) == 3:
            both = self.in_flight.popleft().result() + self.in_flight.popleft().result()
            self.update(self.w, both, step.lr, weight / 2)
        self.guess[:] = self.w
        return self.guess

    def global_weights(self, step: Step) -> Array:
        return self.w


class ACCO(Method):
    name = "acco"
    worker = Guessing
    transports = ("ring",)
    Options = common.Options
    resumes_from_optimizer = False

    def traffic(self, whole: bool) -> TrafficSettings:
        return replace(super().traffic(whole), depth=3)
