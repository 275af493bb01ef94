"""Global weights without a server: every worker holds them and the optimizer's state, and applies the same sums.

    W_{t+1} = U(W_t, G_t),    G_t = 1/M allreduce(g_t)

All workers begin with the same bits and get the same bits from every sum, so they need not compare notes. One thing is
each worker's own, the rate at which they move: it must be the same on all, which `check` looks after.
"""
import struct
import zlib
from typing import Any, Callable, Dict, List, Optional, Sequence

from kvstore.algorithms.program import Rule
from kvstore.buckets import Bucket
from kvstore.engine._mxnet import NDArray, mx
from kvstore.engine.updaters import build, elementwise, queue
from kvstore.errors import ConfigError
from kvstore.job import agreement
from kvstore.server.shard import npz, put_back, saved, un_npz
from kvstore.tracing import recorder as trace
from kvstore.wire.codecs import codec
from kvstore.wire.interfaces import Opening, Pending, State, Transport


class Replica(Rule):
    """U for one bucket on this worker; what a checkpoint keeps of it is what a server would."""

    def __call__(self, w: NDArray, total: NDArray, lr: float, out: NDArray) -> None:
        """out <- U(w, total / M), as operations of the engine; `out` may be `w`."""
        self.optimizer.lr, self.optimizer.rescale_grad = lr, 1.0 / self.num_workers
        queue(self.optimizer, self.index, w, total, self.state, self.shape, out)
        self.version += 1


class _InTurn:
    """Arrays like one of a bucket's, made when they are first needed and then used in turn."""

    def __init__(self, like: NDArray, number: int) -> None:
        self._like, self._number = like, number
        self._arrays: List[NDArray] = []

    def next(self) -> NDArray:
        """The array that has not been used for longest; it is to be written as a whole."""
        new = len(self._arrays) < self._number
        self._arrays.append(mx.nd.zeros(self._like.size, self._like.context) if new else self._arrays.pop(0))
        return self._arrays[-1]


class Replicated(Transport):
    """What transports without servers have in common. The others say how an array is summed.

    Subclasses define `plan`, `total`, `close` and `_allreduce_into`.
    """

    has_servers = False

    def __init__(self, codec_name: str = "none") -> None:
        self.codec_name, self._codec = codec_name, codec(codec_name)
        self._lr = 0.0
        self._rates = 0  # checksum of all learning rates so far
        self._replicas: Dict[int, Replica] = {}
        self._sums: Dict[int, _InTurn] = {}
        self._weights: Dict[int, _InTurn] = {}
        self._arriving: Dict[int, Pending] = {}  # the global weights asked for last, where `exchange` is used

    @property
    def lr(self) -> float:
        return self._lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self._lr = lr
        self._rates = zlib.crc32(struct.pack("<d", lr), self._rates)

    def _allreduce_into(self, bucket: Bucket, array: NDArray, out: NDArray) -> None:
        """Begin to sum every worker's `array` into `out`."""
        raise NotImplementedError

    def open(self, opening: Opening, weights: Callable[[Bucket], NDArray]) -> Dict[int, Pending]:
        optimizer = build(opening.optimizer, trusted=True)  # this process's own
        optimizer.set_lr_mult({bucket.id: bucket.first.lr_mult for bucket in opening.buckets})
        optimizer.set_wd_mult({bucket.id: bucket.first.wd_mult for bucket in opening.buckets})
        for bucket in opening.buckets:
            w = weights(bucket)
            shape = None if elementwise(optimizer) else bucket.shape
            self._replicas[bucket.id] = Replica(bucket.id, shape, self.num_workers, optimizer)
            self._replicas[bucket.id].start(w)
            self._sums[bucket.id], self._weights[bucket.id] = _InTurn(w, opening.depth), _InTurn(w, 2)
            self._arriving[bucket.id] = Pending(w)
        return dict(self._arriving)

    def allreduce(self, bucket: Bucket, array: NDArray) -> Pending:
        out = self._sums[bucket.id].next()
        self._allreduce_into(bucket, array, out)
        if trace.on is not None:
            trace.on.span("exchange", bucket, reads=[array], writes=[out])
        return Pending(out)

    def exchange(self, bucket: Bucket, grad: NDArray) -> Pending:
        before, after, lr = self._arriving[bucket.id], self._weights[bucket.id].next(), self._lr

        def update(total: NDArray) -> NDArray:
            self._replicas[bucket.id](before.result(), total, lr, after)
            if trace.on is not None:
                trace.on.span("update", bucket, reads=[total], writes=[after])
            return after

        self._arriving[bucket.id] = self.allreduce(bucket, grad).then(update)
        return self._arriving[bucket.id]

    def replica(self, bucket: Bucket) -> Replica:
        return self._replicas[bucket.id]

    def check(self) -> None:
        agreement.check(self, "the learning rates of the global weights, which without a server each applies itself",
                        [f"the last one: {self._lr!r}", f"all so far, as a checksum: {self._rates:08x}"])

    def statistics(self) -> Dict[int, Dict[str, Any]]:
        raise ConfigError("there is nothing to count without a server: the staleness of every gradient is known")

    def export_state(self) -> State:
        return {key: saved(replica) for key, replica in self._replicas.items()}

    def import_state(self, state: Optional[State], buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            mine = b"" if state is None or self.worker_rank != 0 else npz(state[bucket.id])
            data = agreement.from_worker_0(self, mine)
            if data:
                put_back(self._replicas[bucket.id], un_npz(data))
