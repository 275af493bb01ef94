"""Sums over the workers, for things outside the training loop (`Transport.total`).

On sockets a server answers (`OrderedSums`) when all have pushed. On ps-lite an asynchronous job needs `CollectiveSum`:
in a synchronous one MXNet adds up and answers when all have pushed, but there it answers every push at once, so a
worker asks again. Either is complete when every worker has pushed that the launcher has not given up
(`environment.lost_workers`). Each key counts its rounds. Workers use two keys in turn, since one sum may still be read
while the next one begins.
"""
from typing import Dict, Iterator, List, Set, Tuple

import numpy as np

from kvstore.engine import engine
from kvstore.engine.engine import NDArray
from kvstore.errors import ProtocolError
from kvstore.job import environment
from kvstore.messages.header import FETCH, HEADER, NOT_YET


class CollectiveSum:
    """The server's side of one key."""

    def __init__(self, num_workers: int) -> None:
        self._all_workers = set(range(num_workers))
        self._round = self._first_open = 0
        self._added: Set[int] = set()

    def receive(self, pushed: NDArray, stored: NDArray) -> None:
        """Add the worker's part; a FETCH adds nothing. Then write the round, or NOT_YET, into `stored`."""
        part, total = engine.memory(pushed), engine.memory(stored)
        round_id, worker_rank = int(part[-HEADER]), int(part[-1])
        if worker_rank != FETCH and round_id >= self._first_open:  # a worker given up may still speak, of an older one
            if round_id != self._round:
                self._round, self._added = round_id, set()
                total[:] = 0
            total[:-HEADER] += part[:-HEADER]
            self._added.add(worker_rank)
        complete = self._added >= self._all_workers or self._added >= self._all_workers - environment.lost_workers()
        self._first_open = self._round + complete
        total[-HEADER] = self._round if complete else NOT_YET


class OrderedSums:
    """Parts of sums by number and worker, added in the order of ranks, so that the bits are the same each time."""

    def __init__(self, num_workers: int) -> None:
        self._all_workers = set(range(num_workers))
        self._parts: Dict[int, Dict[int, np.ndarray]] = {}
        self._next = 1  # the number of the first sum that is not complete

    @property
    def waits(self) -> bool:
        """Whether some have pushed and not all."""
        return bool(self._parts)

    def add(self, worker_rank: int, number: int, part: np.ndarray) -> None:
        """A worker's part is there; one given up may still speak, of an older sum."""
        if number >= self._next:
            parts = self._parts.setdefault(number, {})
            parts[worker_rank] = part
            other, first = next(iter(parts.items()))
            if part.size != first.size:
                raise ProtocolError(f"workers {other} and {worker_rank} add up {first.size} and {part.size} numbers; "
                                    "all workers make the same collective calls, in the same order")

    def take(self) -> Iterator[Tuple[int, List[int], np.ndarray]]:
        """The sums that are complete by now, each with the ranks that wait for it: the launcher has given up the
        others, and who has joined in their place waits for no sum."""
        while self._next in self._parts:
            parts = self._parts[self._next]
            lost = environment.lost_workers()
            if self._all_workers - set(parts) - lost:
                return
            del self._parts[self._next]
            first, *others = sorted(parts)
            total = sum((parts[rank] for rank in others), parts[first])
            yield self._next, sorted(set(parts) - lost), total.view(np.uint8)
            self._next += 1
