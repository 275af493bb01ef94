"""Global weights without a server. Every worker updates a part of them and keeps the optimizer's state of that part.

    G_t = 1/M reduce-scatter(g_t),    W_{t+1} = allgather(U(W_t, G_t))    each worker: its part of G, U and W

This is ZeRO's first stage (Rajbhandari et al., 2020, section 5.1). U does 1/M of the work and keeps 1/M of the state of
`replicas`; the traffic is the same.
"""
from typing import Dict

import numpy as np

from kvstore.engine import engine
from kvstore.engine.engine import NDArray
from kvstore.messages.buckets import Bucket
from kvstore.messages.seam import Pending, Sharded
from kvstore.weights.replicas import WeightsOnWorkers


class Parts(WeightsOnWorkers):
    """`exchange` by workers that each own a part of every bucket.

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
