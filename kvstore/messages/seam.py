"""The calls of an algorithm to the holder of the global weights. None of them waits for the network:

    pending = holder.exchange(bucket, grad, lr)   my gradient goes out; the global weights after it will come back
    pending = holder.allreduce(bucket, grad, lr)  my gradient goes out; the sum of all workers' will come back
    array = pending.result()                      the array that holds the answer, or will

There are three kinds of transport. Parameter servers hold the global weights (`Servers`). Without servers the workers
only add (`Ring`), or each worker owns a part of every bucket (`Sharded`). `kvstore.weights.on_workers` makes `exchange`
of both, with the global weights on every worker.

On a real transport `result` returns at once, and the engine lets readers of the array wait. A transport in one process
(`in_process`) may wait in it. So an algorithm calls `result` where it needs the answer.

Buffers. `exchange` copies `grad`, so the caller may go on reading it; an array from `room` is not copied and belongs to
the transport again. A result stays valid until the second next exchange of the same bucket. The result of an
`allreduce` stays valid until `TrafficSettings.depth` later ones of the bucket; the caller may overwrite its input at
once, since the engine delays that write until the sum has read it.
Order. Exchanges of one bucket take place in the order they were asked for, never two at a time. Allreduces begin in the
order they were asked for, which is the same on all workers.
"""
import functools
from dataclasses import dataclass, field
from typing import Any, Callable, ClassVar, Dict, List, Optional, Sequence, Tuple

import numpy as np

from kvstore.errors import ConfigError, ProtocolError
from kvstore.messages.buckets import Bucket, Parameter
from kvstore.messages.codecs import THRESHOLD
from kvstore.messages.finite import SAMPLE, Check, check, names

Array = Any  # MXNet's, which has no types, or ours: flat, single precision, as long as the bucket

Saved = Tuple[Dict[str, np.ndarray], Dict[str, Any]]
"""What a checkpoint keeps of something: arrays by name, and facts, which are JSON."""
State = Dict[int, Saved]
"""The same by bucket id."""

KINDS = ("server", "ring", "sharded")
"""The kinds of transports, as in `Method.transports`."""


class Pending:
    """An answer that may still be on its way. `behind`: the arrays that have to be written before it is asked for."""

    gone = ""
    """Why the array does not hold the answer any more; empty: it does."""

    def __init__(self, array: Array, behind: Sequence[Array] = ()) -> None:
        self._array, self.behind = array, behind

    def result(self) -> Array:
        """The array that holds the answer, or will."""
        if self.gone:
            raise ProtocolError(self.gone)
        return self._array

    def untaken(self) -> Array:
        """The same array, only to look at: unlike `result` this does not take the answer's version."""
        return self._array

    def wait(self) -> None:
        """Wait until the answer is there, without taking it."""
        self._array.wait_to_read()

    def then(self, function: Callable[[Array], Array]) -> "Pending":
        """What `function` makes of the answer."""
        return Pending(function(self.result()))


@dataclass(frozen=True)
class TrafficSettings:
    """How a method's buckets are cut, sent and answered."""

    asynchronous: bool = False  # whether servers answer each push by itself, or when all workers have pushed
    waits: bool = False  # whether the next iteration waits for this one's exchange, so that its latency counts
    depth: int = 1  # how many sums of a bucket are read at a time; `exchange` reads one
    codec: str = "none"  # of gradients
    codec_threshold: float = THRESHOLD
    codec_keeps: float = 1.0  # what of a residual is added to what is sent next
    codec_weights: str = "none"  # of weights on their way back from servers
    bucket_nbytes: Optional[int] = None  # most bytes of a bucket; None: what suits the transport
    whole: bool = False  # whether a bucket is one parameter, however large
    any_cut: bool = False  # whether the weights have the same bits however buckets are cut
    on_nan: str = "continue"  # when a gradient is not finite: one of `finite.ON_NAN`
    quorum: int = 0  # pushes that a round of asynchronous servers has at least; fetches get the result. 0: no rounds

    @property
    def has_codec(self) -> bool:
        """Whether anything has a codec."""
        return (self.codec, self.codec_weights) != ("none", "none")

    @property
    def own_connections(self) -> bool:
        """Whether servers answer otherwise than MXNet's, so that messages take direct connections of our own."""
        return self.has_codec or self.quorum > 0


@dataclass(frozen=True)
class Setup:
    """What the holder of the global weights learns when a session begins."""

    method: str
    options: Dict[str, Any]
    optimizer: Dict[str, Any]
    buckets: Sequence[Bucket]
    traffic: TrafficSettings
    local_step: Dict[str, Any] = field(default_factory=dict)  # about workers' own steps: what is the same on all

    def command(self) -> Dict[str, Any]:
        """The payload of the commands `open` and `use`."""
        return {"method": self.method, "options": self.options, "optimizer": self.optimizer,
                "local_step": self.local_step, "buckets": {
            bucket.id: {"server_rank": bucket.server_rank, "size": bucket.size, "shape": bucket.shape,
                        "names": names(bucket)} for bucket in self.buckets}}


class Transport:
    """What every transport offers. One instance serves one session; several may share a connection."""

    kind: ClassVar[str] = ""  # one of `KINDS`
    worker_rank: int
    num_workers: int
    joins = False  # whether this worker joins a running job
    checks_all = False  # whether a worker checks all that it sends with on_nan `stop` and `skip`, too
    session_class: ClassVar[Any] = None  # the subclass of `Session` that trains on it; None: `Session` itself
    context: Any = None  # of the arrays that it wants: one of MXNet's, or None for NumPy's
    on_nan, iteration = "continue", 0  # the session keeps both up to date, for `finite_check`

    def plan(self, parameters: Sequence[Parameter], traffic: TrafficSettings) -> List[Bucket]:
        """The buckets, numbered for this transport. Called once."""
        raise NotImplementedError

    def total(self, array: np.ndarray) -> np.ndarray:
        """The sum of every worker's `array` (float32). Collective; waits. For things outside the training loop."""
        raise NotImplementedError

    def close(self) -> None:
        """Collective end."""

    def finite_check(self, bucket: Bucket) -> Optional[Check]:
        """What checks the floats of a bucket before they are sent in this iteration; None: nothing does."""
        if self.on_nan == "continue":
            return None
        sample = None if self.checks_all or self.on_nan == "find" else SAMPLE
        return functools.partial(check, self.worker_rank, self.iteration, bucket, sample, self.on_nan == "skip")


class Export:
    """The global optimizer's state at the moment of the request, on its way here. In this base class it has arrived."""

    left = 0
    """Pieces that are still to come."""

    def __init__(self, state: State) -> None:
        self._state = state

    def settle(self) -> None:
        """Wait until no later push can be in it."""

    def fetch(self) -> None:
        """Bring the next piece, if there is one. Waits; not beside another call to the transport."""

    def state(self) -> State:
        """The whole state, once nothing is left; in any thread."""
        return self._state

    def read(self) -> State:
        """Bring all pieces. Waits."""
        while self.left:
            self.fetch()
        return self.state()


class GlobalWeights:
    """What holds the global weights and their optimizer: servers, every worker for itself, or all of them together."""

    state_is_shared = False  # whether `exporting` is collective: every worker has a part
    adds = False  # whether workers have asked for sums alone, so that only they know W

    def set_up(self, setup: Setup, weights: Callable[[Bucket], Array]) -> Dict[int, Pending]:
        """Begin with `weights`. Collective, once. Returns W_0 per bucket as the first answer."""
        raise NotImplementedError

    def use(self, setup: Setup, weights: Callable[[Bucket], Array], leads: bool) -> None:
        """Go on with the new optimizer of `setup`. All workers call, with nothing in flight; it is done when all have
        returned. `weights`: W as it is; `leads`: this worker tells the servers.
        """
        raise NotImplementedError

    def exchange(self, bucket: Bucket, grad: Array, lr: float) -> Pending:
        """Send `grad` and its learning rate; the global weights after the round it belongs to will come back.

        In a synchronous job of servers the rate of worker 0 counts.
        """
        raise NotImplementedError

    def allreduce(self, bucket: Bucket, array: Array, lr: float) -> Pending:
        """The sum of every worker's `array`, which is as long as the bucket; on a ring.

        `lr`: the rate at which it will move the global weights. It must be the same on all workers, see `check`.
        """
        raise ConfigError("a worker asks for an `allreduce`, which only a ring has; let its method have "
                          "`transports = (\"ring\",)`, or call `exchange`")

    def room(self, bucket: Bucket) -> Optional[Array]:
        """An array from which the next `exchange` sends without a copy, and that the answer overwrites; None: no array.

        It may be written at once: the engine lets the write wait.
        """
        return None

    def exporting(self) -> Export:
        """The global optimizer's state, to be fetched while other things go on. Any one worker may ask, with nothing of
        its own in flight; all of them ask where `state_is_shared`.
        """
        raise NotImplementedError

    def import_state(self, state: Optional[State], buckets: Sequence[Bucket]) -> None:
        """Put back an exported state, which one worker has, or none. Collective, with nothing in flight."""
        raise NotImplementedError

    def codec_state(self, bucket: Bucket) -> Dict[str, np.ndarray]:
        """Arrays of a codec that a checkpoint keeps, by name. Nothing may be in flight."""
        return {}

    def rest(self) -> None:
        """This worker meets all others, or has ended: it sends nothing before all have met. Waits."""

    def check(self) -> None:
        """ProtocolError if the workers' settings differ by now. Collective; may wait."""


class Replicated(GlobalWeights):
    """Global weights on a ring, where every worker holds them and may apply the sums itself: it has `allreduce`."""


class Servers(Transport, GlobalWeights):
    """Parameter servers. The calls below are for asynchronous jobs, where each push has an answer of its own."""

    kind = "server"

    def fetch(self, bucket: Bucket, after: Array, end_round: bool = False, looks: bool = False) -> Pending:
        """The global weights as they stand once `after` has been written and the last answer is there.

        `end_round`: the weights after the round of this worker's last push, which this may end (`Rule.end_round`).
        `looks`: they are for an evaluation (`Rule.look`); the answer does not wait.
        The result stays valid until the next fetch of the bucket.
        """
        raise NotImplementedError

    def statistics(self) -> Dict[int, Dict[str, Any]]:
        """What the servers have counted, per bucket id. Any one worker may ask at any time."""
        raise NotImplementedError

    def versions(self) -> Dict[int, int]:
        """Bucket id -> version of the weights this worker has taken."""
        raise NotImplementedError

    def set_versions(self, versions: Dict[int, int]) -> None:
        """Go on with versions that `versions` gave, before the first exchange."""
        raise NotImplementedError


class Ring(Transport):
    """Workers that add up their arrays."""

    kind = "ring"
    checks_all = True  # there is no server to do it
    in_place = False  # whether `array` and `out` of `allreduce` may be one array

    def allreduce(self, bucket: Bucket, array: Array, out: Array) -> Pending:
        """Begin to sum every worker's `array` into `out`, as the traffic's codec has it."""
        raise NotImplementedError


class Sharded(Transport):
    """Workers that each own a part of every bucket."""

    kind = "sharded"
    checks_all = True

    def part(self, bucket: Bucket) -> slice:
        """The elements that this worker owns; may be empty, or all."""
        raise NotImplementedError

    def exchange(self, bucket: Bucket, array: Array, update: Callable[[Array], None], out: Array) -> Pending:
        """Begin to sum every worker's `array`, to update each part on its owner, and to gather the parts in `out`.

        `update` gets this worker's part of the sum, one float if the part is empty, and queues the operation that
        writes this worker's part of `out`.
        """
        raise NotImplementedError
