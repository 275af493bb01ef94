"""The server's end of our own connections (`courier`) to all workers, and the buckets they ask for.

One thread per connection receives. The thread whose message completes a round does the update, under the lock that the
server's commands and MXNet's loop take, too: they may touch the same arrays.
"""
import collections
import contextlib
import functools
import os
import socket
import threading
import time
from typing import Any, Callable, Dict, Iterable, Optional, Tuple

import numpy as np

from kvstore.engine import engine
from kvstore.engine.engine import NDArray
from kvstore.errors import EXIT_FAILURE, ProtocolError
from kvstore.job import ending, environment
from kvstore.messages.codecs import NotFiniteError
from kvstore.messages.coded import NOTHING, DirectBucket
from kvstore.messages.header import BEGIN, COMMAND, HEADER, SUM, number_of, numbered, rank_whose_round_ends
from kvstore.messages.seam import TrafficSettings
from kvstore.weights.servers import courier
from kvstore.weights.servers.courier import Courier
from kvstore.weights.servers.sums import OrderedSums

LOOK_AGAIN_S = 0.1
"""How often a hub looks for workers that the launcher has given up."""


class Hub:
    """Takes pushes and answers them; in a job on sockets also commands and parts of sums.

    update           : the shard's, called as MXNet's loop would, with the `lock` held
    may_answer_fetch : the shard's, whether a fetch is answered now
    command          : carries out a command, with the `lock` held; returns its answer
    """

    def __init__(self, num_workers: int, timeout_s: float, update: Callable[[int, NDArray, NDArray], None],
                 may_answer_fetch: Callable[[int, np.ndarray, NDArray], bool], lock: Any,
                 command: Optional[Callable[[bytes], bytes]] = None) -> None:
        self._num_workers, self._update, self._may_answer_fetch = num_workers, update, may_answer_fetch
        self._lock, self._command = lock, command
        self._waiting_fetches: Dict[int, Dict[int, np.ndarray]] = collections.defaultdict(dict)
        """By bucket and worker rank: the headers of fetches that wait for the end of a round."""
        self._sums = OrderedSums(num_workers)
        self._arrays: Dict[int, Tuple[NDArray, NDArray, TrafficSettings]] = {}  # pushed and stored
        self._buckets: Dict[int, DirectBucket] = {}  # from their first weights on
        self._connections: Dict[int, socket.socket] = {}  # by worker rank: of the worker that has it now
        self._couriers: Dict[int, Courier] = {}  # by worker rank
        self._joined: Dict[int, int] = {}  # by worker rank: its `environment.joined`
        self._listener = courier.listen()
        at = self._listener.getsockname()
        self.address = at if isinstance(at, str) else "{}:{}".format(*at[:2])
        environment.shorten_switch_interval()
        courier.take_calls(self._listener, timeout_s, self._called)
        if "ODSGD_LOST" in os.environ:
            threading.Thread(target=self._watch_for_lost_workers, name="kvstore-hub", daemon=True).start()

    def open(self, sizes: Dict[int, int], traffic: TrafficSettings, context: Any = None) -> Dict[int, np.ndarray]:
        """A store begins, with these buckets here. Returns their weights, which worker 0 will send."""
        for key, size in sizes.items():
            pushed, stored = (engine.zeros(size + HEADER, context) for _ in range(2))
            stored.wait_to_read()
            self._arrays[key] = pushed, stored, traffic
        return {key: engine.view(self._arrays[key][1])[:size] for key, size in sizes.items()}

    def forget(self, keys: Iterable[int]) -> None:
        """No worker pushes these any more."""
        for key in keys:
            for known in (self._arrays, self._buckets, self._waiting_fetches):
                known.pop(key, None)

    def _called(self, connection: socket.socket, rank: int, said: Dict[str, Any]) -> None:
        with self._lock:  # no message is handled before its way back is known
            before, joined = self._joined.get(rank, -1), said.get("joined", 0)
            if joined < before:  # it was given up before its call came
                connection.close()
                return
            self._joined[rank] = joined
            if joined > before >= 0:  # it replaces a lost worker, though this host may not have heard of the loss
                self._forget_worker(rank)
            elif joined == before or rank >= self._num_workers:
                ending.die(f"a worker has called as worker {rank}, which is here already or not one of the job's "
                           f"{self._num_workers}; ODSGD_WORKER_RANK must be another number for each", EXIT_FAILURE)
            self._connections[rank] = connection
            self._couriers[rank] = Courier(connection, functools.partial(self._room, rank, connection),
                                           functools.partial(self._arrived, rank, connection), lambda _: None)

    def _forget_worker(self, rank: int) -> None:
        """Hang up on a worker that was given up: it may still send."""
        with contextlib.suppress(OSError):  # it has gone
            self._connections.pop(rank).shutdown(socket.SHUT_RDWR)
        for waiting in self._waiting_fetches.values():
            waiting.pop(rank, None)
        for bucket in self._buckets.values():
            bucket.renew_room(rank)

    def _watch_for_lost_workers(self) -> None:
        while True:
            time.sleep(LOOK_AGAIN_S)
            if self._sums.parts or any(self._waiting_fetches.values()):
                with self._lock:
                    self._answer_sums()
                    self.answer_waiting()

    def _answer_sums(self) -> None:
        for number, ranks, total in self._sums.take():
            for rank in ranks:
                if not self._joined[rank]:  # else the lost worker that it replaces has asked
                    self._couriers[rank].send(SUM, numbered(number), total.view(np.uint8))

    def _room(self, rank: int, connection: socket.socket, key: int, nbytes: int, sender_code: float) -> np.ndarray:
        if key < 0 and self._command is not None:
            return np.empty(nbytes, np.uint8)
        if key not in self._arrays:
            raise ProtocolError(f"worker {rank} sent a message for bucket {key}, which no store has opened")
        if sender_code == BEGIN:
            return engine.view(self._arrays[key][1])[:-HEADER]
        room = self._buckets[key].room(rank, nbytes)
        return room if self._connections.get(rank) is connection else np.empty_like(room)

    def _arrived(self, rank: int, connection: socket.socket, key: int, header: np.ndarray, message: np.ndarray) -> None:
        with self._lock:
            if self._connections[rank] is not connection:  # another worker has joined in its place
                return
            if key == COMMAND:
                assert self._command is not None
                answer = self._command(message.tobytes())
                self._couriers[rank].send(key, header, np.frombuffer(answer, np.uint8) if answer else NOTHING)
                return
            if key == SUM:
                self._sums.add(rank, number_of(header), message.view(np.float32))
                self._answer_sums()
                return
            pushed, stored, traffic = self._arrays[key]
            if header[-1] == BEGIN:
                self._buckets[key] = DirectBucket(traffic, self._num_workers, engine.view(pushed), engine.view(stored))
                self._couriers[rank].send(key, header, NOTHING)
                return
            if rank_whose_round_ends(header) < 0:
                self._take(key, rank, header)
            else:
                self._waiting_fetches[key][rank] = header
            self._answer_fetches(key)

    def _take(self, key: int, rank: int, header: np.ndarray) -> None:
        """It is a message's turn."""
        (pushed, stored, _), bucket = self._arrays[key], self._buckets[key]
        if not bucket.add(rank, header):
            return
        self._update(key, pushed, stored)
        try:
            answers = bucket.answers()
        except NotFiniteError as error:
            ending.die(f"bucket {key}: the weights cannot be sent with their codec: {error}", EXIT_FAILURE)
        for one, message in answers.items():
            self._couriers[one].send(key, bucket.stored[-HEADER:], message)

    def answer_waiting(self) -> None:
        """Answer the fetches of all buckets whose rounds are over, with the `lock` held."""
        for key in self._waiting_fetches:
            self._answer_fetches(key)

    def _answer_fetches(self, key: int) -> None:
        """Answer the fetches of a bucket whose rounds are over."""
        waiting, stored = self._waiting_fetches.get(key, {}), self._arrays[key][1]
        while True:
            rank = next((one for one in waiting if self._may_answer_fetch(key, waiting[one], stored)), None)
            if rank is None:
                return
            self._take(key, rank, waiting.pop(rank))
