"""A ring of workers as a transport: buckets summed without a server, by `rounds` over MPI.

One `Rounds` per process carries every session, each in a line of its own.
"""
from functools import partial
from typing import List, Optional, Sequence

import numpy as np

from kvstore.engine import engine
from kvstore.engine.engine import NDArray
from kvstore.job import ending, software
from kvstore.messages.buckets import Bucket, Parameter
from kvstore.messages.codecs import codec
from kvstore.messages.seam import Pending, Ring, TrafficSettings, Transport
from kvstore.transports.mpi import World
from kvstore.transports.rounds import Line, Round, Rounds, on_ring

ARRAYS = 8
"""Arrays of a bucket whose views are kept: gradients, sums and weights of a few iterations. Making a view takes longer
than beginning a round."""


class MpiTransport(Transport):
    """One session of this process, by MPI."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._line: Optional[Line] = None
        self._rounds = process(timeout_s)
        self._rounds.follow(timeout_s)
        self.worker_rank, self.num_workers = self._rounds.worker_rank, self._rounds.num_workers

    def plan(self, parameters: Sequence[Parameter], traffic: TrafficSettings) -> List[Bucket]:
        self._line = self._rounds.line()
        buckets = on_ring(parameters, traffic, self._rounds.keys, self.num_workers)
        self._views = {bucket.id: engine.CachedById(ARRAYS) for bucket in buckets}
        return buckets

    def total(self, array: np.ndarray) -> np.ndarray:
        return self._rounds.total(array, self._timeout_s)

    def close(self) -> None:
        if self._line:
            self._rounds.end(self._line)


class MpiRing(MpiTransport, Ring):
    def plan(self, parameters: Sequence[Parameter], traffic: TrafficSettings) -> List[Bucket]:
        self._codec = codec(traffic.codec)
        return super().plan(parameters, traffic)

    def allreduce(self, bucket: Bucket, array: NDArray, out: NDArray) -> Pending:
        round_ = self._rounds.ask(Round(str(bucket), self._codec, self._timeout_s, self.finite_check(bucket)),
                                  self._line)
        engine.push_async(partial(self._begin, round_, self._views[bucket.id], array, out), [array], [out])
        return Pending(out)

    def _begin(self, round_: Round, views: engine.CachedById, array: NDArray, out: NDArray, done: engine.Done) -> None:
        self._rounds.begin(round_, views.of(array, engine.view), views.of(out, engine.view), done)


_shared: List[Rounds] = []


def process(timeout_s: float) -> Rounds:
    """What the stores of a process share, made on first use; the job is left in good order when the process ends."""
    if not _shared:
        world = World(timeout_s)
        rounds = Rounds(world.comm, world.mpi, timeout_s)

        def leave() -> None:
            engine.wait_all()  # rounds in flight; their own deadline holds
            world.close()

        ending.end_well(leave)
        software.compare(rounds)
        _shared.append(rounds)
    return _shared[0]
