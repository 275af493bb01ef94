"""SSGD, synchronous SGD on a parameter server (hardsync, PS-Sync).

Xu et al., "OD-SGD", arXiv:2005.06728, Algorithm 1 and Fig. 7; the baseline of every paper here.

Each iteration, every worker pushes its gradient and waits for the weights that all gradients together have updated.

    paper      code       meaning
    w_t        w          global weights after t updates, W_t
    g_m        grad       worker m's gradient, mean over its own mini-batch
    gradient   total      sum over the M workers

How the loop is cut. A pass of the worker begins where its gradient is there:

    worker   push g_t, pull W_{t+1}                iterate; the transport sends, and brings the answer
             w_{t+1} = W_{t+1}                     iterate returns it; its readers wait in the engine
    server   l.3   receive g_m                     MXNet's server loop
             l.4   gradient += g_m, count += 1     MXNet's server loop
             l.5   if count == M                   MXNet's server loop, which then calls receive
             l.6   W_{t+1} = U(W_t, G_t)           receive
             l.7-8 t <- t + 1, count <- 0          receive counts the version; MXNet's server loop
             l.9-10 pull request: send W_{t+1}     the transport: one round trip for push and pull

Reading: G_t is the mean, unless `reduction` says `sum`, which is what MXNet's servers make of the gradients.
Deviation: Algorithm 1 counts pushes; the version in each message is compared as well, so that a push counted into a
round it does not belong to is an error and not a silent mix of two iterations.
Other workers after a restart (``-n MIN:MAX``): nothing of a worker's own is lost; G_t is the mean over those there are.
"""
from typing import ClassVar, Tuple

import numpy as np

from kvstore.errors import ProtocolError
from kvstore.messages.header import SYNC_MODULUS, Header
from kvstore.messages.seam import Array
from kvstore.methods import common
from kvstore.methods.contract import Method, Rule, Step, Worker


class Synchronous(Worker):
    """The worker, for one bucket. Every weight it computes on is W_t."""

    sends_gradient_in_place = True

    def iterate(self, grad: Array, step: Step) -> Array:
        """Push g_t; the weights of the next iteration are W_{t+1}."""
        self.last_exchange = self.weights_holder.exchange(self.bucket, grad, step.lr)
        return self.last_exchange.result()


class SyncRule(Rule):
    """The server, for one bucket: Algorithm 1, l.3-8. MXNet adds up the pushes and calls when count == M (l.5).

        W_{t+1} = U(W_t, G_t),    G_t = 1/M sum_m g_t^m

    Invariants
      1. version starts at 0 and grows by exactly 1 per update.
      2. the M gradients of a round come from M different workers, all at the server's own version. The check compares
         the sums of ranks and of versions, so it misses mistakes that cancel.
    """

    by_element = True

    def receive(self, header: Header, total: np.ndarray, w: np.ndarray) -> None:
        self._check(header)
        self.update(w, total, header.lr, gradient_weight=self.options.gradient_weight(self.num_workers))     # l.6
        self.version += 1                                                                # l.7

    def skip(self, header: Header, w: np.ndarray) -> None:
        """The round counts, without an update."""
        self._check(header)
        self.version += 1

    def _check(self, header: Header) -> None:
        expected_sums = self.num_workers * (self.num_workers - 1) // 2, self.num_workers * (self.version % SYNC_MODULUS)
        if (header.rank_sum, header.version) != expected_sums:
            raise ProtocolError(
                f"bucket {self.index}: in this round the ranks add up to {header.rank_sum} and the versions to "
                f"{header.version}, expected {expected_sums[0]} and {expected_sums[1]} ({self.num_workers} workers at "
                f"version {self.version}); a worker pushed twice, or left and came back")


class SSGD(Method):
    name = "ssgd"
    Options = common.CodedOptions
    worker, rule = Synchronous, SyncRule
    transports: ClassVar[Tuple[str, ...]] = ("server", "sharded")
    waits = True


class Local(SSGD):
    """``kvstore.create("local")``: SSGD of one worker, in this process alone."""

    name = "local"
    transports = ("process",)
