"""Sums over the workers, for things outside the training loop (`Transport.total`).

A sum is complete when every worker has pushed its part, but those that the launcher has given up (`lost_workers`). On
sockets a server answers then. On ps-lite a synchronous job needs nothing of this: MXNet adds up and answers when all
have pushed. In an asynchronous job MXNet answers every push at once, so a worker asks again (`receive`). There
each key counts its rounds, and workers use two keys in turn: one sum may still be read while the next one begins.
"""
from typing import Dict, Iterator, List, Tuple

import numpy as np

from kvstore.engine import engine
from kvstore.engine.engine import NDArray
from kvstore.errors import ProtocolError
from kvstore.job import environment
from kvstore.messages.header import FETCH, HEADER, number_of, numbered


class OrderedSums:
    """Parts of sums by number and worker, added in the order of ranks, so that the bits are the same each time."""

    def __init__(self, num_workers: int) -> None:
        self._all_workers = set(range(num_workers))
        self.parts: Dict[int, Dict[int, np.ndarray]] = {}  # of sums that are not complete
        self._next = 1  # the number of the first of them

    def add(self, worker_rank: int, number: int, part: np.ndarray) -> None:
        """A worker's part is there. A worker that was given up may still send one of an older sum."""
        if number >= self._next:
            parts = self.parts.setdefault(number, {})
            parts[worker_rank] = part
            other, first = next(iter(parts.items()))
            if part.size != first.size:
                raise ProtocolError(f"workers {other} and {worker_rank} add up {first.size} and {part.size} numbers; "
                                    "all workers make the same collective calls, in the same order")

    def take(self) -> Iterator[Tuple[int, List[int], np.ndarray]]:
        """The sums that are complete by now, each with the ranks that wait for it. Those that the launcher has given up
        do not, nor do workers that have joined in their place."""
        while self._next in self.parts:
            parts = self.parts[self._next]
            lost = environment.lost_workers()
            if self._all_workers - set(parts) - lost:
                return
            del self.parts[self._next]
            first, *others = sorted(parts)
            total: np.ndarray = sum((parts[rank] for rank in others), parts[first])
            yield self._next, sorted(set(parts) - lost), total
            self._next += 1

    def receive(self, pushed: NDArray, stored: NDArray) -> None:
        """Take the worker's part, on a key of ps-lite; a FETCH brings none. `stored` holds the last sum that is
        complete, and its round."""
        part, told = engine.memory(pushed), engine.memory(stored)
        if part[-1] != FETCH:
            self.add(int(part[-1]), number_of(part[-HEADER:]), part[:-HEADER].copy())
        for round_id, _, total in self.take():
            told[:-HEADER], told[-HEADER:] = total, numbered(round_id)
