"""Decoupled DiLoCo: servers close the round of a fragment when enough workers have sent theirs; no worker waits.

Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training", arXiv:2604.21428.

As streaming DiLoCo (`diloco`), but a round does not need all workers: one that is slow, or dies, holds up nobody. The
servers take what at least K workers have sent of a fragment, and what comes within a grace window. A worker that has
seen more data, and faster, counts more. What comes later is part of the next round.

    paper          code          meaning
    Theta_p, v_p   w, U          a fragment's global weights, and the state of SGD with Nesterov's momentum
    Theta_p (m)    anchor        the global weights as worker m got them last
    Delta_m,p      pushes        how far worker m has come since: anchor - x
    c_tok, c_step  steps         examples (steps * step.samples) and steps of worker m since it sent this fragment last
    w_m            counts        c_tok (c_tok / c_step), what its outer gradient counts
    K, xi_grace    quorum, grace  workers that a round has at least; how long it stays open for more, here in steps of
                                 the worker that waits for it
    tau, alpha     delay, mix    steps from sending to applying; the share of a worker's own weights there

How the loop is cut. A pass of the worker begins at three steps of each fragment's turn:

    t           send Delta_m,p and w_m, with the version of Theta_p (m)     `exchange`, whose answer is empty
    t + grace   ask for what came of it                                     `fetch`: from here on the round may close
    t + delay   theta_m,p <- alpha theta_m,p + (1 - alpha) Theta_p          waits only if that is not there yet

The server's, for one bucket (`quorum` says when a round is over):

    Delta <- merge         `close`: the mean length in the mean direction, per tensor (rda), which does not shrink where
                           directions differ; or the plain mean
    Theta_p <- Nesterov    `close`
    send Theta_p           the transport, to each worker that asks; the newest there is

Reading: the paper's grace is what tau leaves after the quorum and the way back, in measured seconds. Here it ends when
the first of the round asks for the answer, which needs no clock; delay - grace steps are left for the way back.
Reading: an evaluation ends a round that has its quorum, as a worker's fetch would; it gets nothing of a round that
stays open. The rate that travels with a push is w_m. RDA is for all tensors (each a bucket of its own); the paper takes
the mean for embeddings.
Replay: with a file of `store.rounds()` each round closes and answers as there, however fast workers are: the same bits.
Readings of `diloco` on BatchNorm, momentum and fragments hold here. A worker that is lost costs its own last H steps,
and a worker that joins begins at the newest global weights.
Other workers after a restart (``-n MIN:MAX``): all begin at the global weights, which open rounds are not in.
"""
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Collection, Deque, Optional, Sequence

import numpy as np

from kvstore.errors import ConfigError
from kvstore.messages.seam import Array, Pending, TrafficSettings
from kvstore.methods.asgd import Asynchronous
from kvstore.methods.contract import Step
from kvstore.methods.diloco import DiLoCo
from kvstore.methods.quorum import QuorumRule, check_logs
from kvstore.options import PATH, integer, option
from kvstore.options import name as one_of

LONG_GRACE = 5
"""A grace of so many steps with which jobs with a small quorum have learned."""
FRAGMENTS = 24


class Learner(Asynchronous):
    arrays = {"anchor": "the global weights as this worker got them last", "asked": "those that it has asked for"}
    facts = ("sent",)

    def start(self, w: Array) -> None:
        self.anchor, self.sent = w.copy(), self.begun
        self.asked: Deque[Pending] = deque()

    def iterate(self, x: Array, step: Step) -> Array:
        """One of the three steps of a turn: `x` are the weights that the inner steps have come to."""
        options, bucket = self.options, self.bucket
        since = options.since(step.t, bucket.first.fragment)
        if since == 0:
            steps, self.sent = step.t - self.sent, step.t
            counts = (steps * step.samples) ** 2 / steps
            self.last_exchange = self.weights_holder.exchange(bucket, self.anchor - x, counts)
        if since == options.grace:
            self.asked.append(self.weights_holder.fetch(bucket, self.last_exchange.untaken(), end_round=True))
        if since != options.delay or not self.asked:
            return x
        self.anchor[:] = self.asked.popleft().result()
        return options.mix * x + (1 - options.mix) * self.anchor if options.mix else self.anchor

    def global_weights(self, step: Step) -> Array:
        self._copy_asked()
        return self.weights_holder.fetch(self.bucket, self.last_exchange.untaken(), looks=True).untaken()

    def wait(self) -> None:
        super().wait()
        self._copy_asked()
        for copy in self.asked:
            copy.wait()

    def _copy_asked(self) -> None:
        """An evaluation fetches into the array that holds what this worker has asked for."""
        self.asked = deque(Pending(one.result().copy()) for one in self.asked)


def mean(shares: Sequence[Any], deltas: Sequence[np.ndarray]) -> np.ndarray:
    """The weighted mean; `shares` add up to 1."""
    return np.asarray(sum(share * delta for share, delta in zip(shares, deltas)))


def rda(shares: Sequence[Any], deltas: Sequence[np.ndarray]) -> np.ndarray:
    """Radial-directional averaging: the mean length in the mean direction."""
    lengths = [np.linalg.norm(delta) for delta in deltas]
    direction = mean(shares, [delta / (length or 1) for delta, length in zip(deltas, lengths)])
    length = sum(share * one for share, one in zip(shares, lengths))
    return np.asarray(direction * np.float32(length / (np.linalg.norm(direction) or 1)))


class Syncer(QuorumRule):
    def close(self, w: np.ndarray, rates: np.ndarray, pushes: Sequence[np.ndarray]) -> None:
        if not rates.any():  # all were skipped
            self.version += 1
            return
        merge = {"rda": rda, "mean": mean}[self.options.merge]
        self.step(w, merge((rates / rates.sum()).astype(np.float32), pushes), self.options.lr_outer)


class Decoupled(DiLoCo):
    name = "decoupled"
    worker, rule = Learner, Syncer
    asynchronous = True
    waits = False

    @dataclass(frozen=True)
    class Options(DiLoCo.Options):
        H: int = option(24, integer(1), "steps of a worker between two pushes of a fragment", tunable=True,
                        method_specific=True)
        fragments: int = option(None, integer(1), "groups of whole parameters that are sent at different steps",
                                tunable=True, method_specific=True,
                                otherwise=f"{FRAGMENTS}, or the number of parameters")
        delay: int = option(None, integer(0), "steps from a push to the use of its result; less than H", tunable=True,
                            method_specific=True, otherwise="2, or H - 1 if that is less")
        quorum: int = option(1, integer(1), "least number of workers in a round; if it is all, they wait for each "
                             "other", tunable=True)
        grace: int = option(None, integer(0), "steps for which a round stays open for more workers; at most delay",
                            tunable=True, otherwise="delay - 1")
        merge: str = option("rda", one_of("merge", ("rda", "mean")), "how the outer gradients of a round are combined: "
                            "rda (mean length in the mean direction) or mean", tunable=True)
        replay: Optional[str] = option(None, PATH, "rounds.json of an earlier run, whose rounds this run repeats",
                                       group="Run", otherwise="rounds close as workers come")

        def check(self) -> None:
            self._set("delay", min(2, self.H - 1) if self.delay is None else self.delay)
            self._set("grace", max(self.delay - 1, 0) if self.grace is None else self.grace)
            super().check()
            self.refuse(["reduction"], "in store decoupled, where `merge` says what a round comes to; leave it out")
            if self.grace > self.delay:
                raise ConfigError(f"grace is {self.grace}, expected at most delay, which is {self.delay}")

    def check(self) -> None:
        if self.options.quorum > self.num_workers:
            raise ConfigError(f"quorum is {self.options.quorum}, and the job has {self.num_workers} workers")

    def advice(self) -> Optional[str]:
        quorum, grace = self.options.quorum, self.options.grace
        if self.num_workers <= 2 or 2 * quorum >= self.num_workers or grace >= LONG_GRACE:
            return super().advice()
        what = "a grace" if self.options.delay >= LONG_GRACE else "a delay and a grace"  # which the delay bounds
        return (f"`decoupled` with a quorum of {quorum} and a grace of {grace} step{'s' * (grace != 1)} may "
                f"diverge with {self.num_workers} workers: a push may be a round of its own, so that the weights move "
                f"by lr_outer for each worker; give a quorum of half of the workers, or {what} of {LONG_GRACE} "
                "(docs/results/weights.md)")

    def check_buckets(self, buckets: Collection[int]) -> None:
        if self.options.replay:
            check_logs(self.options.replay, buckets, self.num_workers)

    @classmethod
    def admits(cls, options: Any) -> bool:
        return options.codec_weights == "none" and options.replay is None  # else all that was answered must be known

    @classmethod
    def fitted(cls, options: Any, parameters: int) -> Any:
        return options if options.fragments else replace(options, fragments=min(FRAGMENTS, parameters))

    @classmethod
    def due(cls, options: Any, t: int, fragment: int) -> bool:
        return options.since(t, fragment) in (0, options.grace, options.delay)

    def traffic(self, whole: bool) -> TrafficSettings:
        return replace(super().traffic(whole or self.options.merge == "rda"), quorum=self.options.quorum)
