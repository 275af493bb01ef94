"""Sums over the workers of an asynchronous job, for things outside the training loop (`Transport.total`).

In a synchronous job MXNet adds up and answers when all have pushed. Here MXNet answers every push at once, so a worker
asks again until the sum is complete: until every worker has pushed that the launcher has not given up
(`environment.lost_workers`). Each key counts its rounds. Workers use two keys in turn, since one sum may still be read
while the next one begins.
"""
from typing import Set

from kvstore.engine import engine
from kvstore.engine._mxnet import NDArray
from kvstore.job import environment
from kvstore.messages.header import FETCH, HEADER, NOT_YET


class CollectiveSum:
    """The server's side of one key."""

    def __init__(self, num_workers: int) -> None:
        self._all_workers = set(range(num_workers))
        self._round = 0
        self._added: Set[int] = set()

    def receive(self, pushed: NDArray, stored: NDArray) -> None:
        """Add the worker's part; a FETCH adds nothing. Then write the round, or NOT_YET, into `stored`."""
        part, total = engine.memory(pushed), engine.memory(stored)
        round_id, worker_rank = int(part[-HEADER]), int(part[-1])
        if worker_rank != FETCH and round_id >= self._round:  # a worker given up may still speak, of an older round
            if round_id != self._round:
                self._round, self._added = round_id, set()
                total[:] = 0
            total[:-HEADER] += part[:-HEADER]
            self._added.add(worker_rank)
        complete = self._added >= self._all_workers or self._added >= self._all_workers - environment.lost_workers()
        total[-HEADER] = self._round if complete else NOT_YET
