"""What an algorithm may ask of the wire, and what carries it.

An algorithm file sees few calls, and none waits for the network:

    pending = transport.exchange(bucket, grad)     my gradient goes out; the global weights after it will come back
    pending = transport.allreduce(bucket, grad)    my gradient goes out; the sum of all workers' will come back
    array = pending.result()                       the array that holds the answer, or will

Parameter servers offer the first, a ring of workers both: there every worker applies the global optimizer itself
(`replica`).

On a real transport `result` returns at once with an array that is still being written; MXNet's engine lets everything
that reads it wait. A transport that runs in a script's time (`inprocess`) may wait in `result`. Hence the rule for
algorithms: call `result` where the answer is needed, not earlier.

Buffers. `exchange` copies `grad`, the caller may go on reading it. A result stays valid until the second next
exchange of the same bucket: one buffer is on its way while the other still holds what came before. Likewise the result
of an `allreduce`, until `Opening.depth` later ones of the bucket have been asked for; what it sums may be overwritten
at once, which waits in the engine.
Order. Exchanges of one bucket take place in the order they were asked for, never two at a time. Allreduces begin in the
order they were asked for, which is the same on all workers.
"""
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence

import numpy as np

from kvstore.buckets import Bucket
from kvstore.engine._mxnet import NDArray
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.transports.replica import Replica

State = Dict[int, Dict[str, np.ndarray]]
"""Bucket id -> arrays of its optimizer: ``0``, ``1`` … and ``meta``, JSON as bytes."""


class Pending:
    """An answer that may still be on its way."""

    def __init__(self, array: NDArray) -> None:
        self._array = array

    def result(self) -> NDArray:
        """The array that holds the answer, or will."""
        return self._array

    def untaken(self) -> NDArray:
        """The same, for who only looks: a worker's version is that of the answer it took last."""
        return self._array

    def wait(self) -> None:
        """Wait until the answer is there, without taking it."""
        self._array.wait_to_read()

    def then(self, function: Callable[[NDArray], NDArray]) -> "Pending":
        """What `function` makes of the answer."""
        return Pending(function(self.result()))


class Transport:
    """The calls a store makes. One instance serves one store; several may share a connection."""

    worker_rank: int
    num_workers: int
    has_servers: bool
    lr: float  # the learning rate of the global weights, which the next exchanges carry

    def plan(self, parameters: Sequence[Any], nbytes: Optional[int], whole: bool, waits: bool) -> List[Bucket]:
        """The buckets, numbered for this transport; `nbytes` None: as large as suits it and who `waits` for answers."""
        raise NotImplementedError

    def open(self, opening: "Opening", weights: Callable[[Bucket], NDArray]) -> Dict[int, Pending]:
        """Give whoever updates the global weights the rule and W_0. Collective, once.

        Returns W_0 per bucket as the first answer.
        """
        raise NotImplementedError

    def exchange(self, bucket: Bucket, grad: NDArray) -> Pending:
        """Send `grad`; the global weights after the round it belongs to will come back."""
        raise NotImplementedError

    def fetch(self, bucket: Bucket, after: NDArray) -> Pending:
        """The global weights as they stand once `after` has been written and the last answer is there.

        Asynchronous jobs only. The result stays valid until the next fetch of the bucket.
        """
        raise NotImplementedError

    def allreduce(self, bucket: Bucket, array: NDArray) -> Pending:
        """The sum of every worker's `array`, which is as long as the bucket. Rings only."""
        raise ConfigError("servers offer no sum over the workers; this store needs a ring (`odsgd launch -s 0`)")

    def replica(self, bucket: Bucket) -> "Replica":
        """The global optimizer of `bucket` on this worker, for algorithms that apply it themselves. Rings only."""
        raise NotImplementedError

    def total(self, array: np.ndarray) -> np.ndarray:
        """The sum of every worker's `array` (float32). Collective; waits. For things outside the training loop."""
        raise NotImplementedError

    def statistics(self) -> Dict[int, Dict[str, Any]]:
        """What the servers have counted, per bucket id. Any one worker may ask at any time."""
        raise NotImplementedError

    def export_state(self) -> State:
        """The global optimizer's state. One worker may ask alone, with nothing of its own under way."""
        raise NotImplementedError

    def import_state(self, state: Optional[State], buckets: Sequence[Bucket]) -> None:
        """Put back what `export_state` gave: worker 0's, if it has one. Collective, before the first exchange."""
        raise NotImplementedError

    def check(self) -> None:
        """ProtocolError if workers have come to mean different things. Collective; may wait."""

    def versions(self) -> Dict[int, int]:
        """Bucket id -> version of the weights this worker has taken; empty in a synchronous job."""
        return {}

    def set_versions(self, versions: Dict[int, int]) -> None:
        """Go on with versions that `versions` gave, before the first exchange."""

    def close(self) -> None:
        """Collective end."""
        raise NotImplementedError


@dataclass(frozen=True)
class Opening:
    """How a store begins: what its servers are told.

    `waits`: whether workers wait for answers before they compute. `depth`: how many results of a bucket's allreduces
    the algorithm reads at a time.
    """

    store: str
    optimizer: Dict[str, Any]
    rule_options: Dict[str, Any]
    buckets: Sequence[Bucket]
    synchronous: bool
    waits: bool
    depth: int = 2

    def command(self) -> Dict[str, Any]:
        """The payload of the command `open`."""
        return {"store": self.store, "optimizer": self.optimizer, "rule_options": self.rule_options, "buckets": {
            bucket.id: {"server_rank": bucket.server_rank, "size": bucket.size, "shape": bucket.shape,
                        "lr_mult": bucket.first.lr_mult, "wd_mult": bucket.first.wd_mult} for bucket in self.buckets}}


def by_bucket(arrays: Dict[str, np.ndarray]) -> State:
    """``{"7/meta": …}`` as ``{7: {"meta": …}}``."""
    state: State = {}
    for name, array in arrays.items():
        bucket, part = name.split("/")
        state.setdefault(int(bucket), {})[part] = array
    return state
