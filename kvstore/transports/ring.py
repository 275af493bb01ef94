"""Rings of workers as transports, by `rounds` over MPI: buckets summed without a server, or updated part by part.

One `Rounds` per process carries every session, each in a line of its own.

Where each worker owns a part of every bucket (`kvstore.weights.on_workers`), a round is an allreduce with a pause.
First the sums grow (reduce-scatter). Then every worker updates its own block while other rounds transfer. The updated
blocks travel round (allgather). Messages and bits are the same as in an allreduce. What `gloo` and `in_process` have in
common with it is in `Owner`.
"""
from functools import partial
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from kvstore.engine import engine
from kvstore.engine.engine import NDArray
from kvstore.job import agreement, ending
from kvstore.messages.buckets import WIRE_DTYPE, Bucket, Parameter
from kvstore.messages.codecs import Plain, codec
from kvstore.messages.finite import Check
from kvstore.messages.seam import Pending, Ring, Sharded, TrafficSettings, Transport
from kvstore.transports.mpi import World
from kvstore.transports.rounds import Line, Messages, Pair, Round, Rounds, allgather, on_ring, owned, reduce_scatter

ARRAYS = 8
"""Arrays of a bucket whose views are kept: gradients, sums and weights of a few iterations. Making a view takes longer
than beginning a round."""

Cuts = Sequence[int]
"""Where the blocks of a bucket begin and end, one block per worker."""
Halves = Tuple[Callable[[NDArray, NDArray, engine.Done], None], Callable[[NDArray, engine.Done], None]]
"""The functions that begin the two halves of an exchange: the first gets an array and this worker's part of the sum,
the second the array that all parts go to."""


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


def cuts(buckets: Sequence[Bucket], num_workers: int, whole: bool) -> Dict[int, Cuts]:
    """The cuts of every bucket, by id; `whole`: the optimizer needs whole parameters, so one worker owns a bucket."""
    ends = range(num_workers + 1)
    if whole:
        return {bucket.id: [0 if index <= owned(number % num_workers, num_workers) else bucket.size for index in ends]
                for number, bucket in enumerate(buckets)}
    return {bucket.id: [bucket.size * index // num_workers for index in ends] for bucket in buckets}


def part(of: Cuts, worker_rank: int) -> slice:
    """The elements that a worker owns."""
    block = owned(worker_rank, len(of) - 1)
    return slice(of[block], of[block + 1])


def cut(array: np.ndarray, at: Cuts) -> List[np.ndarray]:
    """The blocks of `array`."""
    return [array[start:stop] for start, stop in zip(at, at[1:])]


class PartRound(Round):
    """One exchange: each worker gets its part of the sum, the round pauses, then all updated parts travel.

    part    : where this worker's block of the sum is written; `summed` is called then
    total   : after the pause, all blocks; this worker's is in its place already
    """

    part: np.ndarray
    summed: Callable[[], None]

    def __init__(self, what: str, at: Cuts, timeout_s: float = 0.0, check: Optional[Check] = None) -> None:
        super().__init__(what, Plain(), timeout_s, check)
        self.cuts = at

    def longest(self, num_workers: int) -> int:
        return WIRE_DTYPE.itemsize * max(stop - start for start, stop in zip(self.cuts, self.cuts[1:]))

    def messages(self, worker_rank: int, num_workers: int, scratch: Pair) -> Messages:
        m, p, ours = worker_rank, num_workers, cut(self.own, self.cuts)
        # A partial sum is sent from one scratch while the next is received in the other.
        sums = [scratch[(m - block) % p % 2][:ours[block].nbytes].view(np.float32) for block in range(p)]
        sums[owned(m, p)] = self.part
        if p == 1:
            np.copyto(self.part, self.own)
        yield from reduce_scatter(m, Plain(), ours, sums, scratch)
        self.summed()
        yield None
        updated = cut(self.total, self.cuts)
        yield from allgather(m, Plain(), updated[owned(m, p)].view(np.uint8), updated, scratch)


class Owner(Sharded):
    """A worker that owns parts. Each exchange is two operations of the engine, with U between. The next base class cuts
    buckets, a subclass sends (`_ask`)."""

    def plan(self, parameters: Sequence[Parameter], traffic: TrafficSettings) -> List[Bucket]:
        buckets = super().plan(parameters, traffic)
        self._cuts = cuts(buckets, self.num_workers, traffic.whole)
        self._sums: Dict[int, NDArray] = {}
        return buckets

    def part(self, bucket: Bucket) -> slice:
        return part(self._cuts[bucket.id], self.worker_rank)

    def exchange(self, bucket: Bucket, array: NDArray, update: Callable[[NDArray], None], out: NDArray) -> Pending:
        mine = self.part(bucket)
        if bucket.id not in self._sums:
            self._sums[bucket.id] = engine.zeros(max(1, mine.stop - mine.start), array.context)
        total, (collect, spread) = self._sums[bucket.id], self._ask(bucket)
        engine.push_async(partial(collect, array, total), [array], [total], here=True)
        update(total)
        engine.push_async(partial(spread, out), [total], [out])  # it reads `total` to come after the sum in any case
        return Pending(out)

    def _ask(self, bucket: Bucket) -> Halves:
        """The next exchange, in the same order on every worker."""
        raise NotImplementedError


class MpiSharded(Owner, MpiTransport):
    def _ask(self, bucket: Bucket) -> Halves:
        check = self.finite_check(bucket)
        round_ = self._rounds.ask(PartRound(str(bucket), self._cuts[bucket.id], self._timeout_s, check), self._line)
        views = self._views[bucket.id]
        return partial(self._begin, round_, views), partial(self._resume, round_, views)

    def _begin(self, round_: PartRound, views: engine.CachedById, array: NDArray, total: NDArray, done: engine.Done
               ) -> None:
        mine, sums = part(round_.cuts, self.worker_rank), views.of(total, engine.view)
        round_.own, round_.part, round_.summed = views.of(array, engine.view), sums[:mine.stop - mine.start], done
        self._rounds.give(round_)

    def _resume(self, round_: PartRound, views: engine.CachedById, out: NDArray, done: engine.Done) -> None:
        round_.total, round_.over = views.of(out, engine.view), done
        self._rounds.resume(round_)


_shared: List[Rounds] = []


def process(timeout_s: float) -> Rounds:
    """What the stores of a process share, made on first use; the process leaves the job in good order at its end."""
    if not _shared:
        world = World(timeout_s)
        rounds = Rounds(world.comm, world.mpi, timeout_s)
        ending.end_well(world.close)
        agreement.compare_versions(rounds)
        _shared.append(rounds)
    return _shared[0]
