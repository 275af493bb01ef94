"""What every algorithm's file offers the store: options, a worker per bucket, a server rule per bucket.

A `Program` is one store's algorithm. It makes one `Worker` per bucket, which holds the lines of the paper, and is told
when an iteration begins. Its `rule` runs on the servers, one object per bucket, too.
"""
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Type

from kvstore.buckets import Bucket
from kvstore.engine._mxnet import NDArray, mx
from kvstore.engine.updaters import progress, set_progress, shaped, state_arrays
from kvstore.errors import ConfigError
from kvstore.job.control import DEFAULT_TIMEOUT_S
from kvstore.wire.interfaces import Pending, Transport
from kvstore.wire.messages import Header


@dataclass(frozen=True)
class Options:
    """Options of every store."""

    bucket_nbytes: Optional[int] = None
    """Most bytes of weights that travel together; None: what suits the transport."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """How long any wait for another process may last, in seconds."""

    def __post_init__(self) -> None:
        for name in ("bucket_nbytes", "timeout_s"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ConfigError(f"`{name}` is {getattr(self, name)}, expected a number above 0")


def check_plain_sgd(optimizer: mx.optimizer.Optimizer, what: str) -> None:
    """ConfigError unless the trainer's optimizer has nothing but a learning rate and weight decay."""
    if type(optimizer) is not mx.optimizer.SGD or optimizer.momentum or optimizer.clip_gradient is not None:
        raise ConfigError(f"{what} takes SGD steps of its own: the trainer's optimizer must be `sgd` without momentum "
                          "or clip_gradient")


def check_iterations(options: Options, least: int, *names: str) -> None:
    """Refuse options that are to be a number of iterations and are none; None leaves the choice to the store."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not (value >= least and value % 1 == 0):
            raise ConfigError(f"`{name}` is {value}, expected a whole number of iterations, {least} or more")


class Worker:
    """The worker's side of an algorithm, for one bucket.

    arriving : the exchange asked for last
    t        : iterations done
    """

    def __init__(self, bucket: Bucket, transport: Transport, arriving: Pending) -> None:
        self.bucket, self.transport, self.arriving = bucket, transport, arriving
        self.t = 0

    def iterate(self, grad: NDArray) -> NDArray:
        """One iteration after its gradient is there (or will be); returns the weights of the next one."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until nothing of this worker's is under way."""
        self.arriving.wait()

    def global_weights(self) -> NDArray:
        """W, for evaluation and checkpoints; all workers ask, with nothing of their own under way."""
        return self.arriving.result()

    def memory(self) -> List[NDArray]:
        """The arrays, like the bucket, that a checkpoint keeps beside the weights."""
        return []

    def resume(self, t: int, w_local: NDArray, memory: List[NDArray]) -> None:
        """Go on after iteration `t`, at `w_local`; `arriving` holds the global weights already."""
        self.t = t


class Rule:
    """The server's side of an algorithm, for one bucket: what a push does to the global weights.

    version : updates done
    state   : the global optimizer's
    """

    def __init__(self, index: int, shape: Optional[Sequence[int]], num_workers: int, optimizer: Any) -> None:
        self.index, self.shape, self.num_workers, self.optimizer = index, shape, num_workers, optimizer
        self.state: Any = None
        self.version = 0

    def start(self, w: NDArray) -> None:
        """Make the optimizer's state for weights like `w`."""
        self.state = self.optimizer.create_state_multi_precision(self.index, shaped(w, self.shape))

    def receive(self, header: Header, payload: NDArray, w: NDArray) -> None:
        """Bring `w` to what the answer shall be, in place. `payload` may be overwritten."""
        raise NotImplementedError

    def memory(self) -> List[Any]:
        """The arrays, like the bucket, that a checkpoint keeps."""
        return state_arrays(self.state)

    def statistics(self) -> Dict[str, Any]:
        """What is of interest while it runs, as JSON."""
        return {"version": self.version}

    def progress(self) -> Dict[str, Any]:
        """What a checkpoint keeps beside arrays, as JSON."""
        return progress(self.optimizer, self.index)

    def resume(self, saved: Dict[str, Any]) -> None:
        """Put back what `progress` gave; the arrays of `memory` are filled afterwards."""
        set_progress(self.optimizer, self.index, saved)


class Program:
    """One store's algorithm."""

    Options: Type[Options] = Options
    rule: Type[Rule]
    synchronous = True
    """Whether servers answer when all workers have pushed, or each push by itself."""
    resumes_from_optimizer = True
    """Whether the global optimizer's state alone is enough to go on with."""

    waits = False
    """Whether the next iteration waits for this one's exchange, so that every moment of that counts."""

    def __init__(self, options: Any, optimizer: mx.optimizer.Optimizer) -> None:
        self.options, self.optimizer = options, optimizer

    @staticmethod
    def on_ring(options: Any) -> bool:
        """Whether it runs on a ring of workers, or on parameter servers."""
        return False

    @property
    def depth(self) -> int:
        """How many sums of a bucket it reads at a time (`Opening.depth`)."""
        return 2

    def worker(self, bucket: Bucket, transport: Transport, arriving: Pending) -> Worker:
        """The worker of one bucket; `arriving` holds W_0."""
        raise NotImplementedError

    def rule_options(self, num_workers: int) -> Dict[str, Any]:
        """Keywords of `rule`, as JSON."""
        return {}

    @property
    def optimizers(self) -> List[mx.optimizer.Optimizer]:
        """All optimizers that are applied to buckets."""
        return [self.optimizer]

    def begin_iteration(self, lr: float, lr_local: float) -> None:
        """The rates of the iteration that begins: the trainer's, and the one for local steps."""

    def global_rate(self, lr: float, lr_local: float) -> float:
        """Of these, the one that moves the global weights. Without servers it must be the same on all workers."""
        return lr

    def progress(self) -> Dict[str, Any]:
        """What a checkpoint keeps beside arrays, as JSON."""
        return {}

    def resume(self, saved: Dict[str, Any]) -> None:
        """Put back what `progress` gave."""
