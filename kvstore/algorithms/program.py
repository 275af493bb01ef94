"""What every algorithm's file offers the store: options, a worker per bucket, a server rule.

A `Program` is one store's algorithm. It makes one worker object per bucket, which holds the lines of the paper, and is
told when an iteration begins. Its `rule` runs on the servers, one object per bucket, too.
"""
from dataclasses import dataclass
from typing import Any, Dict, List, Type

from .._mxnet import NDArray, mx
from ..buckets import DEFAULT_NBYTES, Bucket
from ..control import DEFAULT_TIMEOUT_S
from ..errors import ConfigError
from ..transport import Pending, Transport


@dataclass(frozen=True)
class Options:
    """Options of every store."""

    bucket_nbytes: int = DEFAULT_NBYTES
    """Largest message in bytes."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """How long any wait for another process may last, in seconds."""

    def __post_init__(self) -> None:
        for name in ("bucket_nbytes", "timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"`{name}` is {getattr(self, name)}, expected a number above 0")


class Worker:
    """The worker's side of an algorithm, for one bucket.

    arriving : the exchange asked for last; its result is the global weights
    t        : iterations done
    """

    def __init__(self, bucket: Bucket, transport: Transport, arriving: Pending) -> None:
        self.bucket, self.transport, self.arriving = bucket, transport, arriving
        self.t = 0

    def iterate(self, grad: NDArray) -> NDArray:
        """One iteration after its gradient is there (or will be); returns the weights of the next one."""
        raise NotImplementedError

    def memory(self) -> List[NDArray]:
        """The arrays, like the bucket, that a checkpoint keeps beside the weights."""
        return []

    def resume(self, t: int, memory: List[NDArray]) -> None:
        """Go on after iteration `t`; `arriving` holds the global weights already."""
        self.t = t


class Program:
    """One store's algorithm."""

    Options: Type[Options] = Options
    rule: Any  # the class of the server's side

    def __init__(self, options: Any, optimizer: mx.optimizer.Optimizer) -> None:
        self.options, self.optimizer = options, optimizer

    def worker(self, bucket: Bucket, transport: Transport, arriving: Pending) -> Worker:
        raise NotImplementedError

    @property
    def optimizers(self) -> List[mx.optimizer.Optimizer]:
        """All optimizers that are applied to buckets."""
        return [self.optimizer]

    def begin_iteration(self, lr: float, lr_local: float) -> None:
        """The rates of the iteration that begins: the trainer's, and the one for local steps."""

    def progress(self) -> Dict[str, Any]:
        """What a checkpoint keeps beside arrays, as JSON."""
        return {}

    def resume(self, progress: Dict[str, Any]) -> None:
        """Put back what `progress` gave."""
