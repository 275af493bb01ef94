"""SSGD, synchronous SGD on a parameter server (hardsync, PS-Sync).

Xu et al., "OD-SGD", arXiv:2005.06728, Algorithm 1 and Fig. 7; the baseline of every paper here.

Each iteration, every worker pushes its gradient and waits for the weights that all gradients together have updated.

    paper      code       meaning
    w_t        w          global weights after t updates, W_t
    g_m        grad       worker m's gradient, mean over its own mini-batch
    gradient   payload    sum over the M workers

Deviation: Algorithm 1 counts pushes; the version in each message is compared as well, so that a push counted into a
round it does not belong to is an error and not a silent mix of two iterations.
"""
from kvstore.algorithms.program import Program, Rule, Worker
from kvstore.buckets import Bucket
from kvstore.engine._mxnet import NDArray
from kvstore.engine.updaters import apply_at_once
from kvstore.errors import ProtocolError
from kvstore.wire.interfaces import Pending, Transport
from kvstore.wire.messages import SYNC_MODULUS, Header


class Synchronous(Worker):
    """The worker, for one bucket. Every weight it computes on is W_t."""

    def iterate(self, grad: NDArray) -> NDArray:
        """Push g_t; the weights of the next iteration are W_{t+1}."""
        self.arriving = self.transport.exchange(self.bucket, grad)
        self.t += 1
        return self.arriving.result()


class SyncUpdate(Rule):
    """The server, for one bucket: Algorithm 1, l.3-8. MXNet adds up the pushes and calls when count == M (l.5).

        W_{t+1} = U(W_t, G_t),    G_t = 1/M sum_m g_t^m

    Invariants
      1. version starts at 0 and grows by exactly 1 per update.
      2. the M gradients of a round are of M different workers, all at the server's own version.
    """

    def receive(self, header: Header, payload: NDArray, w: NDArray) -> None:
        self._check(header)
        self.optimizer.lr, self.optimizer.rescale_grad = header.lr, 1.0 / self.num_workers
        apply_at_once(self.optimizer, self.index, w, payload, self.state, self.shape)    # l.6
        self.version += 1                                                                # l.7

    def _check(self, header: Header) -> None:
        everyone = self.num_workers * (self.num_workers - 1) // 2, self.num_workers * (self.version % SYNC_MODULUS)
        if (header.worker_rank, header.version) != everyone:
            raise ProtocolError(
                f"bucket {self.index}: in this round the ranks add up to {header.worker_rank} and the versions to "
                f"{header.version}, expected {everyone[0]} and {everyone[1]} ({self.num_workers} workers at version "
                f"{self.version}); a worker pushed twice, or left and came back")


class SSGD(Program):
    """``kvstore.create("ssgd")``."""

    rule = SyncUpdate
    waits = True

    def worker(self, bucket: Bucket, transport: Transport, arriving: Pending) -> Synchronous:
        return Synchronous(bucket, transport, arriving)
