"""The buffers between a worker and the network: comm_buf_, two for each bucket (virtual time may need more), in turn.

One is on its way while the other still holds what came before, so that the algorithm may read the last answer while
the next exchange runs.
"""
import collections
import functools
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from kvstore.engine import engine
from kvstore.engine.engine import NDArray
from kvstore.job import ending
from kvstore.messages.buckets import WIRE_DTYPE, Bucket
from kvstore.messages.finite import Check
from kvstore.messages.header import FETCH, HEADER, split_lr
from kvstore.messages.seam import Pending, Servers

Tag = Tuple[float, float, int]
"""What follows the version in a message: learning rate, in two floats, and rank."""


class Buffer:
    """One message and its parts (`messages`). Views share the whole's engine variable."""

    def __init__(self, size: int, context: Any) -> None:
        self.size = size
        self.nbytes = WIRE_DTYPE.itemsize * size
        self.whole = engine.zeros(size + HEADER, context)
        self.payload, self.version = self.whole[:size], self.whole[size:size + 1]

    @functools.cached_property
    def floats(self) -> np.ndarray:
        """The whole in place, for operations of the engine that declare it."""
        return engine.view(self.whole)

    def there(self) -> np.ndarray:
        """The same without the engine, once it is written (`engine.memory`)."""
        self.whole.wait_to_read()
        return self.floats

    def fill(self, payload: NDArray, version: NDArray, tag: Tag, behind: Sequence[NDArray] = (),
             check: Optional[Check] = None) -> None:
        """Queue: be a message of `payload`, from a worker at `version`, once all arrays `behind` have been written.

        The process ends if `check` raises.
        """
        there = payload is self.payload

        def write() -> None:
            if not there:
                self.floats[:self.size] = engine.view(payload)
            ending.check_or_die(check, self.floats[:self.size])
            self.floats[self.size] = engine.view(version)[0]
            self.floats[self.size + 1:] = tag

        reads = [version, *behind] if there else [payload, version, *behind]
        engine.push(write, reads, [self.whole])


class Window:
    """The messages of a synchronous job that are in flight to one server: about `nbytes`, two messages at least.

    Each message waits for the ones it displaced or, if it displaced none, for the ones displaced last. Without this,
    messages could overtake each other.
    """

    def __init__(self, nbytes: float) -> None:
        self._nbytes = nbytes
        self._under_way: Dict[int, Buffer] = {}  # by bucket, oldest first
        self._gone: Dict[int, Buffer] = {}       # displaced last

    def make_room(self, bucket_id: int, nbytes: int) -> List[Buffer]:
        """Messages of other buckets whose answers the next message of this bucket has to wait for."""
        for messages in (self._under_way, self._gone):
            messages.pop(bucket_id, None)  # the next message waits for it anyway
        room, gone = self._nbytes - nbytes / 2, {}
        while len(self._under_way) > 1 and sum(buffer.nbytes for buffer in self._under_way.values()) > room:
            oldest = next(iter(self._under_way))
            gone[oldest] = self._under_way.pop(oldest)
        self._gone = gone or self._gone
        return list(self._gone.values())

    def add(self, bucket_id: int, message: Buffer) -> None:
        self._under_way[bucket_id] = message


class BucketBuffers:
    """One bucket's two buffers, or more. `last` was sent last; it holds the answer, or will."""

    def __init__(self, weights: NDArray) -> None:
        self._buffers = collections.deque(Buffer(weights.size, weights.context) for _ in range(2))
        # Asynchronous jobs only:
        self.version = engine.zeros(1, weights.context)  # of the weights this worker has taken
        self.latest = engine.zeros(1, weights.context)   # written with each answer: what reads it is behind that
        self.fetched: Optional[Buffer] = None
        weights.copyto(self.last.payload)

    def under_way(self) -> Optional[Tuple[float, ...]]:
        """The headers of the buffers, if a message waits for its answer; only to look at."""
        buffers = filter(None, [*self._buffers, self.fetched])
        headers = [tuple(buffer.floats[-HEADER:].tolist()) for buffer in buffers]
        return sum(headers, ()) if any(header[-1] for header in headers) else None

    def keep(self, unanswered: int) -> None:
        """Have one buffer more than this number of messages whose answers are still to come."""
        while len(self._buffers) <= unanswered:
            self._buffers.appendleft(Buffer(self.last.size, self.last.whole.context))

    @property
    def last(self) -> Buffer:
        return self._buffers[-1]

    @property
    def next(self) -> Buffer:
        """The buffer of the next message."""
        return self._buffers[0]

    def compose_async(self, payload: NDArray, tag: Tag, check: Optional[Check] = None) -> Buffer:
        """The next message of an asynchronous job: behind the last answer, with the version this worker has taken."""
        self._buffers.rotate(-1)
        self.last.fill(payload, self.version, tag, [self.latest], check)
        return self.last

    def compose_fetch(self, after: NDArray, tag: Tag) -> Buffer:
        """A message that only asks: behind the last answer, and not before `after` has been written."""
        if self.fetched is None:
            self.fetched = Buffer(self.last.size, self.last.whole.context)
        self.fetched.fill(after, self.latest, tag)
        return self.fetched

    def compose(self, payload: NDArray, tag: Tag, behind: Sequence[Buffer] = (),
                check: Optional[Check] = None) -> Buffer:
        """The next message of a synchronous job. What was `last` stays readable until the next but one.

        It leaves after the answer to the last message of this bucket, whose version it reads, and after the answers to
        the messages `behind` of other buckets. Two pushes of one worker must not be at a server at once: MXNet counts
        pushes, not workers.
        """
        before = self.last
        self._buffers.rotate(-1)
        self.last.fill(payload, before.version, tag, [other.whole for other in behind], check)
        return self.last


class VersionedAnswer(Pending):
    """An answer whose version becomes the worker's when the algorithm takes it."""

    def __init__(self, answer: Pending, message: Buffer, buffers: BucketBuffers) -> None:
        super().__init__(message.payload, answer.behind)
        self._answer, self._message, self._buffers, self._taken = answer, message, buffers, False

    def result(self) -> NDArray:
        w = self._answer.result()
        if not self._taken:
            self._message.version.copyto(self._buffers.version)
            self._taken = True
        return w

    def wait(self) -> None:
        self._answer.wait()


class Buffered(Servers):
    """Buffers, tags and versions of transports whose messages lie in buffers.

    `_buffers` is empty until the store opens.
    """

    def __init__(self, worker_rank: int, synchronous: bool) -> None:
        self.worker_rank, self._synchronous = worker_rank, synchronous
        self._buffers: Dict[int, BucketBuffers] = {}

    def _tag(self, lr: float) -> Tag:
        """In a synchronous job only worker 0's learning rate counts."""
        return (*split_lr(lr if not self._synchronous or self.worker_rank == 0 else 0.0), self.worker_rank + 1)

    def _fetch_tag(self, end_round: bool, looks: bool) -> Tag:
        return ((self.worker_rank + 1.0) * (end_round - looks), 0.0, FETCH)

    def room(self, bucket: Bucket) -> NDArray:
        return self._buffers[bucket.id].next.payload

    def versions(self) -> Dict[int, int]:
        return {key: int(buffers.version.asscalar()) for key, buffers in self._buffers.items()}

    def set_versions(self, versions: Dict[int, int]) -> None:
        for key, version in versions.items():
            self._buffers[key].version[:] = version
