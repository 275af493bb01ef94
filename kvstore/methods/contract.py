"""What a method's file says: options and traits, the worker's lines, the server's lines.

A `Method` is one store's algorithm. For each bucket it has a `Worker` with the worker's lines of the paper and, where
there are servers, a `Rule` with the server's lines. Nothing here and in the methods' files imports MXNet, so that the
command line, the docs and the checks can read them at once.

State is declared. `arrays` names the attributes that hold arrays as long as the bucket, with their meaning: an array, a
list of arrays, or a deque of answers in flight. `facts` names the attributes that hold JSON. Checkpoints save and
restore them, and `store.memory()` counts them, without code in the method. Buckets may have different ones.
"""
import dataclasses
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar, Collection, Dict, List, Mapping, Optional, Sequence, Tuple, Type

import numpy as np

from kvstore.errors import ConfigError
from kvstore.messages.buckets import Bucket
from kvstore.messages.header import Header
from kvstore.messages.seam import Array, GlobalWeights, Pending, TrafficSettings
from kvstore.methods.common import CodedOptions, Options
from kvstore.state import declared


@dataclass(frozen=True)
class Step:
    """One iteration: its number, of which 1 is the first, and its learning rates."""

    t: int
    lr: float  # the trainer's, for the global weights
    lr_local: float  # for a worker's own steps; the trainer's, unless `lr_local` says otherwise
    counts: float = 1.0  # M / workers that have data; where weights are taken, that had since the last exchange
    samples: float = 1.0  # this worker's examples in the iteration; where weights are taken, their mean since it sent
    joined: bool = False  # this worker's data have ended: its gradient is 0, and it takes no steps


class Update:
    """An optimizer for one bucket: U, the global one, or L, a worker's own. On a worker it is queued."""

    def __call__(self, w: Any, grad: Any, lr: float, gradient_weight: float = 1.0, out: Any = None) -> Any:
        """out <- U(w, gradient_weight * grad); `out` None: `w` itself, as always on a server. Returns `out`.

        A server's is applied at once to the `w` that `receive` was given, and may overwrite `grad`.
        """
        raise NotImplementedError

    def accrue(self, total: Array, grad: Array) -> None:
        """total <- total + grad, unless the step along `grad` is left out because `grad` is not finite."""
        total += grad

    def trial(self, w: Array, grad: Array, lr: float, gradient_weight: float, out: Array) -> Array:
        """As `__call__`, but the optimizer counts no step and keeps its state."""
        raise NotImplementedError

    def start(self, w: Array) -> None:
        """Begin at `w`, with a state that has seen nothing yet; steps count on."""
        raise NotImplementedError


@dataclass(eq=False)
class Worker:
    """The worker's side of a method, for one bucket. The session makes it, and gives it the fields below."""

    arrays: ClassVar[Mapping[str, str]] = {}
    facts: ClassVar[Sequence[str]] = ()
    returned: ClassVar[str] = ""
    """Which of `arrays` holds what `iterate` returned last; empty: an answer does. Checkpoints keep it as `local`."""
    sends_gradient_in_place: ClassVar[bool] = False
    """Whether nothing reads a gradient after `exchange` has it, so that it may be sent from its place. Not inherited: a
    class that defines `iterate` declares it again, because its version may read the gradient after the exchange."""

    options: Any
    num_workers: int
    bucket: Bucket
    weights_holder: GlobalWeights
    last_exchange: Pending  # the exchange asked for last; it holds W_0 to begin with
    wd: float  # the trainer's weight decay, times the bucket's multiplier
    lr_given: float  # the trainer's learning rate before any schedule
    local_optimizer: Optional[Update]  # the optimizer of `Method.local_optimizer`
    update: Optional[Update]  # U, where the worker applies the global optimizer itself: on a ring
    begun: int  # iterations that the run had done when this worker began
    w_local: InitVar[Array]

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "iterate" in vars(cls) and "sends_gradient_in_place" not in vars(cls):
            cls.sends_gradient_in_place = False

    def __post_init__(self, w_local: Array) -> None:
        self.start(w_local)
        declared.check(self, w_local)

    def start(self, w: Array) -> None:
        """Make the arrays; `w` are the weights that the first gradient is taken at."""

    def iterate(self, grad: Array, step: Step) -> Array:
        """One iteration after its gradient is there (or will be); returns the weights of the next one."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until nothing of this worker's is in flight."""
        self.last_exchange.wait()

    def global_weights(self, step: Step) -> Array:
        """W after iteration `step`, for evaluation and checkpoints; all workers ask, with nothing in flight. But for
        `FrontEnd.snapshot` one worker of an asynchronous job asks alone, at any time."""
        if self.weights_holder.adds:
            raise ConfigError(f"{type(self).__name__} calls `allreduce`, which brings sums and no weights, and does "
                              "not say what the global weights are; write its `global_weights(step)`")
        return self.last_exchange.result()

    def replaced(self, lr: float) -> None:
        """U is another optimizer from here on, and `lr` its rate. Nothing is in flight."""

    def resumed(self) -> None:
        """Arrays and facts come from a checkpoint now; ConfigError if they do not go with the options."""


class Rule:
    """The server's side of a method, for one bucket: what a push does to the global weights.

    Before the first push there are no weights here, so `start` comes with it; `statistics` may be asked for earlier.

    version : updates done
    """

    arrays: ClassVar[Mapping[str, str]] = {}
    facts: ClassVar[Sequence[str]] = ()
    by_element: ClassVar[bool] = False
    """Whether an element's update depends on no other element, however a bucket is cut. Not inherited: a class that
    defines `receive` declares it again."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for name in {"by_element", "skip"} - set(vars(cls)) if "receive" in vars(cls) else ():
            setattr(cls, name, getattr(Rule, name))

    def __init__(self, index: int, options: Any, num_workers: int, update: Update) -> None:
        self.index, self.options, self.num_workers, self.update = index, options, num_workers, update
        self.version = 0

    def start(self, w: np.ndarray) -> None:
        """Make the arrays, for weights `w`."""

    def receive(self, header: Header, grad: np.ndarray, w: np.ndarray) -> None:
        """Bring `w` to what the answer shall be, in place. `grad`, what was pushed, may be overwritten."""
        raise NotImplementedError

    def skip(self, header: Header, w: np.ndarray) -> None:
        """In place of `receive`, where what was pushed is not finite and is left out: the answer is `w` as it is. Not
        inherited: a class that defines `receive` declares it again. Without one there is no on_nan `skip`."""
        raise NotImplementedError

    def end_round(self, worker_rank: int, w: np.ndarray) -> bool:
        """A worker has fetched with `end_round`. Updates `w` if its round can end now, and returns whether `w` answers
        the fetch; if not, this is called again after each push."""
        return True

    def look(self, w: np.ndarray) -> None:
        """A worker has fetched `w` for an evaluation, with `looks`. May update it, as the end of a round does."""

    def rest(self, worker_rank: int) -> None:
        """A worker has closed its store, or waits until all others have come to where it is."""

    def statistics(self) -> Dict[str, Any]:
        """What `store.statistics()` asks for while a run goes on, as JSON."""
        return {"version": self.version}


@dataclass(frozen=True)
class Traits:
    """What the steps of a job are like, for code that plans or advises.

    in_flight : gradients under way at a time; each is applied to weights that the others have changed since
    collected : pushes that servers collect for one update
    damped    : whether a gradient's learning rate is divided by its staleness
    momentum  : name and value of the option that is the momentum; None: it is the trainer's
    """

    in_flight: int
    collected: int = 1
    damped: bool = False
    momentum: Optional[Tuple[str, float]] = None


class Method:
    """One store's algorithm. Subclasses give names and traits; they are looked at before anything is made."""

    name: ClassVar[str]
    Options: ClassVar[Type[Options]] = Options
    worker: ClassVar[Type[Worker]]
    rule: ClassVar[Type[Rule]]  # where it runs on servers

    transports: ClassVar[Tuple[str, ...]] = ("server",)
    """What it runs on: `server`, `ring`, `sharded`, or several; the first is the default. A method with a rule of its
    own runs on servers, which alone know rules, unless it says otherwise."""
    takes: ClassVar[str] = "gradients"
    """What a `Worker.iterate` is given: `gradients`, in every iteration; or `weights`, every `intervals` iterations, as
    the trainer's optimizer has made them on this worker meanwhile. U is `outer_sgd` then."""
    asynchronous: ClassVar[bool] = False  # whether workers wait for nobody while they train
    reduces: ClassVar[bool] = True  # whether one update takes several gradients
    waits: ClassVar[bool] = False  # whether the next iteration waits for this one's exchange
    plain_sgd: ClassVar[str] = ""
    """Not empty: it takes SGD steps itself, so the trainer's optimizer must be plain SGD; says how to get momentum."""
    update_decays: ClassVar[bool] = True  # whether U adds weight decay; else the workers' gradients have it already
    resumes_from_optimizer: ClassVar[bool] = True
    """Whether the state of the global optimizer alone is enough to go on with."""

    def __init_subclass__(cls, **_: Any) -> None:
        if "rule" in vars(cls) and "transports" not in vars(cls):
            cls.transports = ("server",)

    def __init__(self, options: Any, num_workers: int) -> None:
        self.options, self.num_workers = options, num_workers
        self.check()

    def check(self) -> None:
        """ConfigError for options that do not go with the number of workers."""

    def check_buckets(self, buckets: Collection[int]) -> None:
        """The same for options that do not go with these buckets, by number; on worker 0, before anything is sent."""

    # -- what follows from the options -------------------------------------------------------------------------

    @classmethod
    def admits(cls, options: Any) -> bool:
        """Whether a worker may join a running job in the place of one that is not there (`odsgd join`)."""
        return False

    @classmethod
    def intervals(cls, options: Any) -> Tuple[int, int]:
        """Iterations between two pushes, and between two fetches."""
        return 1, 1

    @classmethod
    def local_optimizer(cls, options: Any) -> Optional[Tuple[str, Dict[str, Any]]]:
        """Name and settings of the optimizer of the worker's own steps. A `wd` that is None is the trainer's."""
        return None

    @classmethod
    def outer_sgd(cls, options: Any) -> Optional[Tuple[float, float]]:
        """Rate and Nesterov's momentum of U, where the method takes weights and the trainer's optimizer steps locally.

            v <- momentum v + g,    w <- w - lr (g + momentum v)        g: the mean of what workers send
        """
        return None

    @classmethod
    def fragments(cls, options: Any) -> int:
        """In how many groups of whole parameters, of about equal bytes, weights travel; each is `due` by itself."""
        return 1

    @classmethod
    def fitted(cls, options: Any, parameters: int) -> Any:
        """The options for a model with this number of parameters."""
        return options

    @classmethod
    def of_worker(cls, options: Any, worker_rank: int) -> Any:
        """The options by which the turns of one worker are `due`, where an asynchronous method has some more often."""
        return options

    @classmethod
    def due(cls, options: Any, t: int, fragment: int) -> bool:
        """Whether `Worker.iterate` has its turn in iteration `t`, for buckets of this fragment."""
        return cls.takes == "gradients" or t % cls.intervals(options)[0] == 0

    def advice(self) -> Optional[str]:
        """What worker 0 says before the first step, in a line; None: nothing."""
        return None

    @classmethod
    def traits(cls, options: Any, num_workers: int) -> Traits:
        return Traits(in_flight=num_workers if cls.asynchronous and cls.takes == "gradients" else 1)

    @classmethod
    def option_names(cls) -> List[str]:
        return [field.name for field in dataclasses.fields(cls.Options)]

    def traffic(self, whole: bool) -> TrafficSettings:
        """How the method uses its transport; `whole`: an optimizer needs whole parameters."""
        settings = TrafficSettings(self.asynchronous, self.waits, bucket_nbytes=self.options.bucket_nbytes, whole=whole,
                                   on_nan=self.options.on_nan, any_cut=getattr(self, "rule", Rule).by_element)
        if not isinstance(self.options, CodedOptions):
            return settings
        return dataclasses.replace(settings, codec=self.options.codec, codec_threshold=self.options.codec_threshold,
                                   codec_weights=self.options.codec_weights)
