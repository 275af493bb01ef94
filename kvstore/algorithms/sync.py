"""SSGD, synchronous SGD on a parameter server (hardsync, PS-Sync).

Xu et al., "OD-SGD", arXiv:2005.06728, Algorithm 1 and Fig. 7; the baseline of every paper here.

Each iteration, every worker pushes its gradient and waits for the weights that all gradients together have updated.

    paper      code       meaning
    w_t        w          global weights after t updates, W_t
    g_m        grad       worker m's gradient, mean over its own mini-batch
    gradient   grad_sum   sum over the M workers

Deviation: Algorithm 1 counts pushes; the version in each message is compared as well, so that a push counted into a
round it does not belong to is an error and not a silent mix of two iterations.
"""
from typing import Any, Optional, Sequence

from .._mxnet import NDArray
from ..buckets import Bucket
from ..errors import ProtocolError
from ..transport import Pending, Transport
from ..updaters import apply, shaped
from .program import Program, Worker


class Synchronous(Worker):
    """The worker, for one bucket. Every weight it computes on is W_t."""

    def iterate(self, grad: NDArray) -> NDArray:
        """Push g_t; the weights of the next iteration are W_{t+1}."""
        self.arriving = self.transport.exchange(self.bucket, grad)
        self.t += 1
        return self.arriving.result()


class SyncUpdate:
    """The server, for one bucket: Algorithm 1, l.3-8.

        W_{t+1} = U(W_t, G_t),    G_t = 1/M sum_m g_t^m

    Invariants
      1. version starts at 0 and grows by exactly 1 per update.
      2. all M gradients of a round were sent by workers that have the same version, the server's own.
    """

    def __init__(self, index: int, shape: Optional[Sequence[int]], num_workers: int, optimizer: Any) -> None:
        self.index, self.shape, self.num_workers, self.optimizer = index, shape, num_workers, optimizer
        self.state: Any = None
        self.version = 0

    def start(self, w: NDArray) -> None:
        """Make the optimizer's state for weights like `w`."""
        self.state = self.optimizer.create_state_multi_precision(self.index, shaped(w, self.shape))

    def push_all(self, grad_sum: NDArray, w: NDArray, version_sum: int, modulus: int) -> None:
        """l.5: count == M. Update `w` in place; the optimizer divides the sum by M."""
        expected = self.num_workers * (self.version % modulus)
        if version_sum != expected:
            raise ProtocolError(
                f"bucket {self.index}: the versions in this round add up to {version_sum}, expected {expected} "
                f"({self.num_workers} workers at version {self.version}); a worker pushed twice, or left and came back")
        apply(self.optimizer, self.index, w, grad_sum, self.state, self.shape)           # l.6
        self.version += 1                                                                # l.7


class SSGD(Program):
    """``kvstore.create("ssgd")``."""

    rule = SyncUpdate

    def worker(self, bucket: Bucket, transport: Transport, arriving: Pending) -> Synchronous:
        return Synchronous(bucket, transport, arriving)
