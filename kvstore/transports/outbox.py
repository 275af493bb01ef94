"""A worker's own connections: its couriers to all servers, and its end of every bucket's codes."""
import functools
import itertools
import queue
from typing import Callable, Dict, Iterable, List, Sequence, Tuple

import numpy as np

from kvstore.engine import engine
from kvstore.errors import EXIT_FAILURE, KVStoreError
from kvstore.job import ending, environment
from kvstore.job.deadlines import deadlines
from kvstore.messages.buckets import Bucket
from kvstore.messages.codecs import NotFiniteError
from kvstore.messages.coded import WorkerBucket
from kvstore.messages.header import COMMAND, HEADER, SUM, number_of, numbered
from kvstore.messages.seam import TrafficSettings
from kvstore.transports.buffers import Buffer
from kvstore.weights.servers import courier
from kvstore.weights.servers.courier import Courier


class Outbox:
    """The couriers of this process, and what waits for answers: one message per bucket at a time."""

    def __init__(self, addresses: Sequence[str], worker_rank: int, timeout_s: float) -> None:
        self._buckets: Dict[int, WorkerBucket] = {}
        self._asked: Dict[int, Tuple[np.ndarray, engine.Done]] = {}  # where the answer goes
        self._replies: Dict[Tuple[int, int, int], queue.SimpleQueue[np.ndarray]] = {}  # by server, kind and number
        self._numbers = {COMMAND: itertools.count(1), SUM: itertools.count(1)}
        self._gone = ""
        environment.shorten_switch_interval()
        with deadlines.within(timeout_s, f"not all servers answered a call within {timeout_s:g} s, at "
                              f"{', '.join(addresses)}; a firewall?"):
            self._couriers = [self._courier(rank, address, worker_rank, timeout_s)
                              for rank, address in enumerate(addresses)]

    def _courier(self, server_rank: int, address: str, worker_rank: int, timeout_s: float) -> Courier:
        try:
            connection = courier.call_again(address, worker_rank, timeout_s, joined=environment.joined())
        except OSError as error:
            raise KVStoreError(f"no connection to server {server_rank}, which listens at {address}: {error}; "
                               "open its host's ports, or see what it ended with") from None
        return Courier(connection, self._room, functools.partial(self._arrived, server_rank),
                       functools.partial(self._disconnected, address))

    def ask(self, kind: int, message: np.ndarray, servers: Iterable[int]) -> List[Callable[[], np.ndarray]]:
        """Send a COMMAND, or a part of a SUM; a function for each server, which waits for its answer."""
        number = next(self._numbers[kind])
        replies: Dict[int, queue.SimpleQueue[np.ndarray]] = {server: queue.SimpleQueue() for server in servers}
        self._replies.update({(server, kind, number): one for server, one in replies.items()})
        if self._gone:
            self._die()
        for server in replies:
            self._couriers[server].send(kind, numbered(number), message)
        return [one.get for one in replies.values()]

    def open(self, bucket: Bucket, traffic: TrafficSettings, w: np.ndarray) -> None:
        """Take messages of this bucket, whose weights begin as `w`."""
        self._buckets[bucket.id] = WorkerBucket(traffic, w)

    def forget(self, keys: Iterable[int]) -> None:
        """These buckets send no more."""
        for key in keys:
            self._buckets.pop(key, None)

    def codec_state(self, bucket: Bucket) -> Dict[str, np.ndarray]:
        return self._buckets[bucket.id].state()

    def send(self, bucket: Bucket, message: Buffer) -> None:
        """Queue: one message there, one back into the same buffer."""
        engine.push_async(functools.partial(self._start, bucket, message), [], [message.whole])

    def _start(self, bucket: Bucket, message: Buffer, done: engine.Done) -> None:
        try:
            sent = self._buckets[bucket.id].encode(message.floats)
        except NotFiniteError as error:
            ending.die(f"{bucket}: {error}", EXIT_FAILURE)
        self._asked[bucket.id] = message.floats, done
        if self._gone:
            self._die()
        self._couriers[bucket.server_rank].send(bucket.id, message.floats[-HEADER:], sent)

    def _room(self, key: int, nbytes: int, sender_code: float) -> np.ndarray:
        return np.empty(nbytes, np.uint8) if key < 0 else self._buckets[key].answer.room(self._asked[key][0])

    def _arrived(self, server_rank: int, key: int, header: np.ndarray, message: np.ndarray) -> None:
        if key < 0:
            self._replies.pop((server_rank, key, number_of(header))).put(message)
            return
        floats, done = self._asked.pop(key)
        self._buckets[key].answer.decode(floats, header)
        done()

    def _disconnected(self, address: str, reason: str) -> None:
        """Die if something waits for an answer. At the end of a job servers may go first."""
        self._gone = f"the server at {address} does not answer any more: {reason}"
        if self._asked or self._replies:
            self._die()

    def _die(self) -> None:
        ending.die(f"{self._gone}; see what it ended with", EXIT_FAILURE, consequence=True)
