"""Global weights without a server: on a ring every worker holds them and the optimizer's state, and applies the same
sums (`Replicas`); or every worker updates a part of them and keeps the optimizer's state of that part (`Parts`).

    W_{t+1} = U(W_t, G_t),    G_t = 1/M allreduce(g_t)
    W_{t+1} = allgather(U(W_t, G_t)),    G_t = 1/M reduce-scatter(g_t)      each worker: its part of G, U and W

All workers begin with the same bits and get the same bits from every sum. Only the learning rate is each worker's own:
`check` compares it.
"""
import collections
import struct
import zlib
from functools import partial
from typing import Any, Callable, Deque, Dict, Optional, Sequence

import numpy as np

from kvstore.engine import engine
from kvstore.engine.engine import NDArray
from kvstore.job import agreement
from kvstore.messages import finite
from kvstore.messages.buckets import Bucket
from kvstore.messages.seam import Export, GlobalWeights, Pending, Replicated, Ring, Setup, Sharded, State, Transport
from kvstore.optimizers import described
from kvstore.optimizers.apply import QueuedOptimizer
from kvstore.state.npz import below, from_bytes, to_bytes

TOO_LATE = ("the result of an `allreduce` is read too late, when its array is in use again for a newer one; read it "
            "earlier, or let the method's `traffic` have a larger `depth`")


class WeightsOnWorkers(GlobalWeights):
    """Global weights that live on the workers and are updated by them."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.buckets: Sequence[Bucket] = ()
        self.updates: Dict[int, QueuedOptimizer] = {}  # U, by bucket
        self._weights: Dict[int, engine.InTurn] = {}
        self._last_exchange: Dict[int, Pending] = {}  # the global weights asked for last, where `exchange` is used
        self._rate, self._rates = 0.0, 0  # the last learning rate; a checksum of all so far

    def set_up(self, setup: Setup, weights: Callable[[Bucket], NDArray]) -> Dict[int, Pending]:
        self.buckets = setup.buckets
        # What a worker's gradient counts in a sum. A method of a user's own may have no option `reduction`.
        self.gradient_weight = 1.0 if setup.options.get("reduction") == "sum" else 1.0 / self._transport.num_workers
        optimizer = described.build(setup.optimizer, trusted=True)  # this process's own
        for bucket in setup.buckets:
            w = weights(bucket)
            mine = self.mine(bucket, w)
            shape = bucket.shape if mine.size == bucket.size else [1] * len(bucket.shape or [1])
            self.updates[bucket.id] = QueuedOptimizer(optimizer, bucket.id, shape)
            self.updates[bucket.id].start(mine)
            self._weights[bucket.id] = engine.InTurn(w.size, w.context, 2, first=[w])
            self._last_exchange[bucket.id] = Pending(w)
        return dict(self._last_exchange)

    def use(self, setup: Setup, weights: Callable[[Bucket], NDArray], leads: bool) -> None:
        optimizer = described.build(setup.optimizer, trusted=True)
        for bucket in setup.buckets:
            self.updates[bucket.id].use(optimizer)
            self.updates[bucket.id].start(self.mine(bucket, weights(bucket)))

    def mine(self, bucket: Bucket, whole: NDArray) -> NDArray:
        """The part of a bucket's array that this worker updates, in place."""
        return whole

    def note(self, lr: float) -> None:
        """The next update is at this learning rate."""
        self._rate, self._rates = lr, zlib.crc32(struct.pack("<d", lr), self._rates)

    def check(self) -> None:
        agreement.check(self._transport, "the learning rates of the global weights, which without a server each "
                        "applies itself", [f"the last one: {self._rate!r}",
                                           f"all so far, as a checksum: {self._rates:08x}"])

    def exporting(self) -> Export:
        """With the names that a server gives (`shard.Entry.saved`)."""
        return Export({bucket.id: ({f"optimizer/{name}": self.whole(bucket, array)
                                    for name, array in self.updates[bucket.id].arrays().items()},
                                   {"optimizer": self.updates[bucket.id].facts(), "rule": {}})
                       for bucket in self.buckets})

    def whole(self, bucket: Bucket, array: NDArray) -> np.ndarray:
        """An array of the optimizer's state of a whole bucket, flat."""
        return array.asnumpy().reshape(-1)

    def import_state(self, state: Optional[State], buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            data = agreement.from_one(self._transport, b"" if state is None else to_bytes({0: state[bucket.id]}))
            if data:
                arrays, facts = from_bytes(data)[0]
                self.restore(bucket, below("optimizer/", arrays), facts["optimizer"])

    def restore(self, bucket: Bucket, arrays: Dict[str, np.ndarray], facts: Dict[str, Any]) -> None:
        """The optimizer goes on from this state of a whole bucket."""
        self.updates[bucket.id].restore(arrays, facts)


class Replicas(WeightsOnWorkers, Replicated):
    """`exchange` made of a ring's sums."""

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring)
        self.ring = ring
        self._sums: Dict[int, engine.InTurn] = {}
        self._asked: Dict[int, Deque[Pending]] = {}  # the sums that may be read, by bucket
        self._exchanged = False  # workers have asked for W, perhaps beside other sums
        self._rooms: Dict[int, NDArray] = {}  # arrays of the next sums, where gradients are written to them

    def set_up(self, setup: Setup, weights: Callable[[Bucket], NDArray]) -> Dict[int, Pending]:
        first_answers = super().set_up(setup, weights)
        for bucket in setup.buckets:
            w = first_answers[bucket.id].result()
            early = self.ring.in_place and not setup.traffic.waits  # the next gradient comes while a sum is read
            self._sums[bucket.id] = engine.InTurn(w.size, w.context, setup.traffic.depth + early)
            self._asked[bucket.id] = collections.deque(maxlen=setup.traffic.depth)
            if setup.traffic.on_nan == "skip":
                where = f"worker {self.ring.worker_rank}, the sum over the workers"
                self.updates[bucket.id].skips = partial(finite.skips, where, finite.names(bucket))
        return first_answers

    def room(self, bucket: Bucket) -> Optional[NDArray]:
        if self.ring.in_place:
            self._rooms[bucket.id] = self._sums[bucket.id].next()
        return self._rooms.get(bucket.id)

    def allreduce(self, bucket: Bucket, array: NDArray, lr: float) -> Pending:
        self.adds = not self._exchanged
        return self._sum(bucket, array, lr)

    def _sum(self, bucket: Bucket, array: NDArray, lr: float) -> Pending:
        self.note(lr)
        room, asked = self._rooms.pop(bucket.id, None), self._asked[bucket.id]
        total = self.ring.allreduce(bucket, array, self._sums[bucket.id].next() if room is None else room)
        if len(asked) == asked.maxlen:
            asked[0].gone = TOO_LATE
        asked.append(total)
        return total

    def exchange(self, bucket: Bucket, grad: NDArray, lr: float) -> Pending:
        self._exchanged, self.adds = True, False
        # In one process `result` lets U read the last sum before the next one takes its array.
        w, after = self._last_exchange[bucket.id].result(), self._weights[bucket.id].next()
        update = self.updates[bucket.id]
        self._last_exchange[bucket.id] = self._sum(bucket, grad, lr).then(
            lambda total: update(w, total, lr, self.gradient_weight, out=after))
        return self._last_exchange[bucket.id]


class Parts(WeightsOnWorkers):
    """`exchange` by workers that each own a part of every bucket: ZeRO's first stage (Rajbhandari et al., 2020, section
    5.1). U does 1/M of the work and keeps 1/M of the state of `Replicas`; the traffic is the same.

    A worker whose part of a bucket is empty updates one unused float, so that its optimizer counts the same updates.
    """

    state_is_shared = True

    def __init__(self, sharded: Sharded) -> None:
        super().__init__(sharded)
        self.sharded = sharded
        self._no_part: Dict[int, NDArray] = {}

    def mine(self, bucket: Bucket, whole: NDArray) -> NDArray:
        mine = self.sharded.part(bucket)
        if mine.start < mine.stop:
            return whole[mine.start:mine.stop]
        if bucket.id not in self._no_part:
            self._no_part[bucket.id] = engine.zeros(1, whole.context)
        return self._no_part[bucket.id]

    def exchange(self, bucket: Bucket, grad: NDArray, lr: float) -> Pending:
        self.note(lr)
        before, after = self._last_exchange[bucket.id], self._weights[bucket.id].next()
        update = self.updates[bucket.id]

        def update_part(total: NDArray) -> None:
            update(self.mine(bucket, before.result()), total, lr, self.gradient_weight, out=self.mine(bucket, after))

        self._last_exchange[bucket.id] = self.sharded.exchange(bucket, grad, update_part, after)
        return self._last_exchange[bucket.id]

    def whole(self, bucket: Bucket, array: NDArray) -> np.ndarray:
        """Collective; every worker gets all of it."""
        whole = np.zeros(bucket.size, np.float32)
        if bucket.id not in self._no_part:
            whole[self.sharded.part(bucket)] = super().whole(bucket, array)
        return self.sharded.total(whole)

    def restore(self, bucket: Bucket, arrays: Dict[str, np.ndarray], facts: Dict[str, object]) -> None:
        mine = self.sharded.part(bucket)
        if bucket.id in self._no_part:
            arrays = {name: np.zeros(1, np.float32) for name in arrays}
        else:
            arrays = {name: array.reshape(-1)[mine] for name, array in arrays.items()}
        self.updates[bucket.id].restore(arrays, facts)
