"""Asynchronous SGD on a parameter server.

Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012.

A worker pushes its gradient and gets, in one round trip, the weights as they stand right after its own push. Every
gradient says which version of the weights it was taken on, so the server knows its staleness.

    papers        code         meaning
    W             w            global weights of one bucket
    g_l           grad         one worker's gradient, mean over its own mini-batch
    tau_l         tau          staleness: version now - version the gradient was taken on

How the loop is cut:

    worker   fetch W                    the answer of the last pass, which the store scatters
             compute g                  Gluon; the store gathers it                  ── a pass begins
             push g                     `exchange`; its answer is the next fetch     ── a pass ends
    server   receive g                  MXNet's server loop calls `receive`
             W <- U(W, g)               `receive` → `push`
             send W                     the transport, with the version

Other asynchronous methods change `push` (`dcasgd`, `softsync`, `quorum`), `step` (`elastic`, `async_diloco`) or the
worker (`downpour`, `elastic`, `async_diloco`, `decoupled`).
Reading: a version counts the updates of one bucket. Buckets are updated independently, as shards are in the papers: the
weights a worker computes on belong, within a bucket, to one version; across buckets they may differ by a few.
Reading: U is the trainer's optimizer, so momentum is possible in all that take gradients but elastic averaging, and
weight decay in all. The softsync paper trains with momentum.
Other workers after a restart (``-n MIN:MAX``): nothing of a worker's own is lost; versions and counts begin at 0.
"""
from typing import Any, ClassVar, Dict, Sequence

import numpy as np

from kvstore.errors import ProtocolError
from kvstore.messages.header import ASYNC_MODULUS, Header
from kvstore.messages.seam import Array, Servers
from kvstore.methods import common
from kvstore.methods.contract import Method, Rule, Step, Worker


class Asynchronous(Worker):
    weights_holder: Servers

    sends_gradient_in_place = True

    def iterate(self, grad: Array, step: Step) -> Array:
        """Push g; go on with the weights as they stand right after it."""
        self.last_exchange = self.weights_holder.exchange(self.bucket, grad, step.lr)
        return self.last_exchange.result()

    def global_weights(self, step: Step) -> Array:
        return self.weights_holder.fetch(self.bucket, self.last_exchange.untaken()).untaken()


class AsyncRule(Rule):
    """The server, for one bucket:  W <- U(W, g)  on each push.

    Invariants
      1. version starts at 0 and grows by exactly 1 per update.
      2. tau >= 0; a gradient from the future is a ProtocolError.
    """

    facts: ClassVar[Sequence[str]] = ("version", "lr_sum", "staleness")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.staleness: Dict[str, int] = {}  # "WORKER_RANK TAU" -> pushes
        self.lr_sum = 0.0  # of the effective rates of all pushes

    def receive(self, header: Header, grad: np.ndarray, w: np.ndarray) -> None:
        tau = (self.version - header.version) % ASYNC_MODULUS
        if tau > ASYNC_MODULUS // 2:
            raise ProtocolError(f"bucket {self.index}: worker {header.worker_rank} pushed a gradient of version "
                                f"{header.version}, the weights are at version {self.version}; it belongs to "
                                "another run")
        key = f"{header.worker_rank} {tau}"
        self.staleness[key] = self.staleness.get(key, 0) + 1
        self.lr_sum += header.lr * self.push(header, tau, grad, w)

    def push(self, header: Header, tau: int, grad: np.ndarray, w: np.ndarray) -> float:
        """Fold one gradient in; returns the factor on its learning rate."""
        self.step(w, grad, header.lr)
        return 1.0

    def step(self, w: np.ndarray, grad: np.ndarray, lr: float) -> None:
        """W <- U(W, g)."""
        self.update(w, grad, lr)
        self.version += 1

    def skip(self, header: Header, w: np.ndarray) -> None:
        """Nothing: as if it had not been pushed."""

    def statistics(self) -> Dict[str, Any]:
        return {"version": self.version, "lr_sum": self.lr_sum,
                "staleness": [[*map(int, key.split()), count] for key, count in self.staleness.items()]}


class ASGD(Method):
    name = "asgd"
    Options = common.CodedOptions
    worker, rule = Asynchronous, AsyncRule
    asynchronous = True
    reduces = False
    resumes_from_optimizer = False
