"""The server's end of messages with a codec (`courier`): connections of all workers, and the buckets they ask for.

One thread per connection receives. The thread whose message completes a round does the update, under the lock that the
server's commands and MXNet's loop take, too: they may touch the same arrays.
"""
import contextlib
import functools
import socket
import threading
import time
from typing import Any, Callable, Dict, Iterable, Optional, Tuple

import numpy as np

from kvstore.engine import engine
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import EXIT_FAILURE, ProtocolError
from kvstore.job import ending, environment
from kvstore.messages.codecs import NotFiniteError
from kvstore.messages.coded import CodedBucket
from kvstore.messages.header import BEGIN, HEADER
from kvstore.messages.seam import Traffic
from kvstore.weights.servers import courier
from kvstore.weights.servers.courier import Courier

ACCEPT_AGAIN_S = 0.1
WELCOME_S = 30.0  # within which a worker that has called says which it is


class Hub:
    """Takes pushes with a codec and answers them.

    update : the shard's, called as MXNet's loop would, with the `lock` held
    """

    def __init__(self, num_workers: int, timeout_s: float, update: Callable[[int, NDArray, NDArray], None],
                 lock: Any) -> None:
        self._num_workers, self._timeout_s, self._update, self._lock = num_workers, timeout_s, update, lock
        self._arrays: Dict[int, Tuple[NDArray, NDArray, Traffic]] = {}  # pushed and stored
        self._buckets: Dict[int, CodedBucket] = {}  # from their first weights on
        self._couriers: Dict[int, Courier] = {}  # by worker rank
        self._listener = courier.listen()
        at = self._listener.getsockname()
        self.address = at if isinstance(at, str) else "{}:{}".format(*at[:2])
        environment.share_python()
        threading.Thread(target=self._welcome, name="kvstore-hub", daemon=True).start()

    def open(self, sizes: Dict[int, int], traffic: Traffic) -> Dict[int, np.ndarray]:
        """A store begins, with these buckets here: their weights, which worker 0 will send."""
        for key, size in sizes.items():
            self._arrays[key] = mx.nd.zeros(size + HEADER), mx.nd.zeros(size + HEADER), traffic
        mx.nd.waitall()
        return {key: engine.view(self._arrays[key][1])[:size] for key, size in sizes.items()}

    def forget(self, keys: Iterable[int]) -> None:
        """No worker pushes these any more."""
        for key in keys:
            self._arrays.pop(key, None)
            self._buckets.pop(key, None)

    def _welcome(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                time.sleep(ACCEPT_AGAIN_S)  # strangers hold all descriptors, or one went before it was heard
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()  # a stranger may be silent

    def _serve(self, connection: socket.socket) -> None:
        rank: Optional[int] = None
        with contextlib.suppress(OSError):
            rank = courier.welcome(connection, min(self._timeout_s, WELCOME_S))
        if rank is None:
            connection.close()
            return
        with self._lock:  # nothing arrives before its way back is known
            arrived = functools.partial(self._arrived, rank)
            self._couriers[rank] = Courier(connection, functools.partial(self._room, rank), arrived, lambda _: None)

    def _room(self, rank: int, key: int, nbytes: int, mark: float) -> np.ndarray:
        if key not in self._arrays:
            raise ProtocolError(f"worker {rank} sent a message for bucket {key}, which no store has opened")
        if mark == BEGIN:
            w = engine.view(self._arrays[key][1])[:-HEADER]
            if nbytes != w.nbytes:
                raise ProtocolError(f"worker {rank} sent {nbytes} bytes as the weights of bucket {key}, expected "
                                    f"{w.nbytes}; all processes of a job must run the same version of odsgd")
            return w
        return self._buckets[key].room(rank, nbytes)

    def _arrived(self, rank: int, key: int, header: np.ndarray) -> None:
        with self._lock:
            pushed, stored, traffic = self._arrays[key]
            if header[-1] == BEGIN:
                self._buckets[key] = CodedBucket(traffic, self._num_workers, engine.view(pushed), engine.view(stored))
                self._couriers[rank].send(key, header, np.empty(0, np.uint8))
            elif self._buckets[key].add(rank, header):
                self._update(key, pushed, stored)
                self._answer(key, self._buckets[key])

    def _answer(self, key: int, bucket: CodedBucket) -> None:
        try:
            answers = bucket.answers()
        except NotFiniteError as error:
            ending.die(f"bucket {key}: the weights cannot be sent with their codec: {error}", EXIT_FAILURE)
        for rank, message in answers.items():
            self._couriers[rank].send(key, bucket.stored[-HEADER:], message)
