"""One bucket's messages between workers and servers, where they have a codec: gradients there, weights back.

    push      c_t = code(g_t + b r_t),  r_{t+1} = g_t + b r_t - float(c_t)   r: residual on the worker; b: `codec_keeps`
    answer    d_t = code(W_t - s_t),    s_{t+1} = s_t + float(d_t)           s: the weights as the worker has them

Only `2bit`, `1bit` and `largest` have a residual; r_0 = 0. Without a codec weights come back as they are. With one
their changes come back, and what it leaves of a change is part of the next one; both ends keep s, s_0 = W_0. A fetch
without a push brings W as it is and does not change s. With a `quorum` the answer to a push is empty, and the fetch
that ends the round brings d_t.
"""
from typing import Dict

import numpy as np

from kvstore.errors import ProtocolError
from kvstore.messages.codecs import Plain, codec
from kvstore.messages.header import BEGIN, FETCH, HEADER, rank_whose_round_ends
from kvstore.messages.seam import TrafficSettings

BLOCK = 64 * 1024  # floats that stay in a core's cache from one pass to the next
NOTHING = np.empty(0, np.uint8)


def answer_kind(quorum: int, header: np.ndarray) -> str:
    """What the answer to the message with this header brings: `nothing`, the weights `plain`, or `coded`."""
    if header[-1] == FETCH:
        return "coded" if rank_whose_round_ends(header) >= 0 else "plain"
    return "nothing" if quorum or header[-1] == BEGIN else "coded"


class CodedPush:
    """A worker's end of one bucket's pushes. One push at a time is on its way."""

    def __init__(self, traffic: TrafficSettings, size: int) -> None:
        self._codec = codec(traffic.codec, traffic.codec_threshold)
        self._residual_factor = np.float32(traffic.codec_keeps)
        self._message = np.empty(0 if isinstance(self._codec, Plain) else self._codec.nbytes(size), np.uint8)
        self.residual = np.zeros(size, np.float32) if self._codec.residual else None

    def encode(self, grad: np.ndarray) -> np.ndarray:
        """The message for `grad`, valid until its answer is there; it may be in `grad` itself."""
        message = self._codec.room(grad, self._message)
        with np.errstate(all="ignore"):  # gradients may diverge; their reader will say so
            if self.residual is None:
                self._codec.encode(grad, message)
            else:
                self._encode_with(self.residual, grad, message)
        return message

    def _encode_with(self, residual: np.ndarray, grad: np.ndarray, message: np.ndarray) -> None:
        for start in range(0, grad.size, BLOCK):
            left, part = residual[start:start + BLOCK], message[self._codec.nbytes(start):][:self._codec.nbytes(BLOCK)]
            left *= self._residual_factor
            left += grad[start:start + BLOCK]
            self._codec.encode(left, part)
            sent = np.empty_like(left)
            self._codec.decode(part, sent)
            left -= sent


class CodedAnswer:
    """One end of the answers with a bucket's weights, to one worker or to all workers alike; s begins as `w`."""

    def __init__(self, traffic: TrafficSettings, w: np.ndarray) -> None:
        self._codec, self._quorum = codec(traffic.codec_weights), traffic.quorum
        self._shown = None if isinstance(self._codec, Plain) else w.copy()
        self._message = np.empty(0 if self._shown is None else self._codec.nbytes(w.size), np.uint8)

    def encode(self, w: np.ndarray, header: np.ndarray) -> np.ndarray:
        """The server's end: the answer to the message with this header, valid until the next; it may be `w` itself."""
        kind = answer_kind(self._quorum, header)
        if kind == "nothing":
            return NOTHING
        if kind == "plain" or self._shown is None:
            return w.view(np.uint8)
        with np.errstate(all="ignore"):
            change = w - self._shown
            self._codec.encode(change, self._message)
            self._codec.decode(self._message, change)
            self._shown += change
        return self._message

    def room(self, floats: np.ndarray) -> np.ndarray:
        """The worker's end: where the answer to the message in `floats` is received."""
        w, kind = floats[:-HEADER], answer_kind(self._quorum, floats[-HEADER:])
        return NOTHING if kind == "nothing" else w.view(np.uint8) if kind == "plain" else self._codec.room(
            w, self._message)

    def decode(self, floats: np.ndarray, header: np.ndarray) -> None:
        """The answer has been received: write its weights, and its header, in the place of the message."""
        if self._shown is not None and answer_kind(self._quorum, floats[-HEADER:]) == "coded":
            w = floats[:-HEADER]
            with np.errstate(all="ignore"):
                self._codec.decode(self._message, w)
                self._shown += w
            w[:] = self._shown
        floats[-HEADER:] = header


class WorkerBucket:
    """A worker's bucket on direct connections: its pushes, and the answers. Messages are ``[ payload … | header ]``."""

    def __init__(self, traffic: TrafficSettings, w: np.ndarray) -> None:
        self.push, self.answer = CodedPush(traffic, w.size), CodedAnswer(traffic, w)

    def encode(self, floats: np.ndarray) -> np.ndarray:
        """The bytes that are sent of a message beside its header; they may be in `floats` itself."""
        if floats[-1] == FETCH:
            return NOTHING
        payload = floats[:-HEADER]
        return payload.view(np.uint8) if floats[-1] == BEGIN else self.push.encode(payload)

    def state(self) -> Dict[str, np.ndarray]:
        """What a checkpoint keeps: the residual, if the codec has one."""
        return {} if self.push.residual is None else {"residual": self.push.residual}


class DirectBucket:
    """A server's bucket on direct connections: the workers' pushes, decoded, and the answers. No network, no clock.

    A synchronous round adds in the order of the workers' ranks, in whatever order they come, so its bits are
    the same each time.

    pushed, stored : ``[ payload … | header ]``, as `Shard.handle_push` wants them
    """

    def __init__(self, traffic: TrafficSettings, num_workers: int, pushed: np.ndarray, stored: np.ndarray) -> None:
        self._asynchronous, self._num_workers = traffic.asynchronous, num_workers
        self.pushed, self.stored, size = pushed, stored, stored.size - HEADER
        self._total, self._w = pushed[:size], stored[:size]
        self._codec = codec(traffic.codec, traffic.codec_threshold)
        self._messages = [np.empty(self._codec.nbytes(size), np.uint8) for _ in range(num_workers)]
        self._decoded = np.empty(size, np.float32)
        self._here: Dict[int, np.ndarray] = {}  # headers of this round's messages, by rank
        self._added = 0  # how many of them are in the sum
        self._answers = [CodedAnswer(traffic, self._w) for _ in range(num_workers if traffic.asynchronous else 1)]

    def room(self, worker_rank: int, nbytes: int) -> np.ndarray:
        """Where a worker's next message is received; ProtocolError if it has another length than expected."""
        message = self._messages[worker_rank]
        if nbytes not in (0, message.size):  # 0: a worker only asks
            raise ProtocolError(f"worker {worker_rank} sent {nbytes} bytes for a bucket of {self._w.size} floats, "
                                f"expected {message.size}; all processes of a job must run the same version of odsgd")
        return message[:nbytes]

    def renew_room(self, worker_rank: int) -> None:
        """Another worker has this rank now, and messages of the one before may still be written to its room."""
        self._messages[worker_rank] = np.empty_like(self._messages[worker_rank])

    def add(self, worker_rank: int, header: np.ndarray) -> bool:
        """The worker's message is there. Whether `pushed` now is what the shard wants: one push, or all workers'."""
        if worker_rank in self._here:
            raise ProtocolError(f"worker {worker_rank} pushed a bucket twice in a round")
        self._here[worker_rank] = header
        if self._asynchronous:
            self._begin(worker_rank)
            return True
        while self._added in self._here:
            if self._added == 0:
                self._begin(0)
            else:
                self._total += self._codec.floats(self._messages[self._added], self._decoded)
                self.pushed[-HEADER:] += self._here[self._added]
            self._added += 1
        return self._added == self._num_workers

    def _begin(self, worker_rank: int) -> None:
        self.pushed[-HEADER:] = self._here[worker_rank]
        if self.pushed[-1] != FETCH:
            values = self._codec.floats(self._messages[worker_rank], self._total)
            if values is not self._total:
                self._total[:] = values

    def answers(self) -> Dict[int, np.ndarray]:
        """The update is done: the messages of the answers that are due, by rank. The next round begins."""
        ranks, self._added = list(self._here), 0
        self._here.clear()
        header = self.pushed[-HEADER:]
        if not self._asynchronous:
            return dict.fromkeys(ranks, self._answers[0].encode(self._w, header))
        rank, = ranks
        message = self._answers[rank].encode(self._w, header)
        if np.may_share_memory(message, self._w):  # W may change before it has left
            message = message.copy()
        return {rank: message}
