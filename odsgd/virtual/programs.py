"""What a method asks of the holder of the weights in each iteration, found out by running the method's own lines once.

A worker's lines run here on arrays of one element, with a holder that only writes down what it is asked for, in the
order in which it is asked. This gives, for a bucket and an iteration, a list of

    exchange n, behind    the bucket's nth question, a push, leaves once the questions in `behind` are answered
    fetch n               the same without a gradient
    sum n                 the bucket's nth sum over the workers begins; `update`: and U follows it, on every worker
    await n               what follows needs the answer
    step                  an optimizer runs on the worker

All workers run the same lines, so one program serves all that ask in the same iterations. A program has no times.
"""
from collections import deque
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Type

from kvstore.engine import engine
from kvstore.errors import ConfigError
from kvstore.messages.buckets import WIRE_DTYPE, Bucket
from kvstore.messages.seam import Array, GlobalWeights, Pending
from kvstore.methods.common import Options
from kvstore.methods.contract import Method, Step, Update, Worker
from kvstore.transports.buffers import Window

LR = 0.1
"""The rate of the steps that are recorded; no method asks for other things because of it."""


class Op(NamedTuple):
    """One line of a program. `behind`: bucket and number of questions that must have been answered."""

    what: str
    number: int = 0
    behind: Tuple[Tuple[int, int], ...] = ()
    update: bool = False


Program = List[List[Op]]
"""The ops of one iteration, by the position of the bucket."""


class Programs:
    """The programs of workers whose turns come alike, iteration after iteration.

    The first iteration asked for is the first that is run; what a resumed job asked for before it has been answered.

    Parameters
    ----------
    method, num_workers : of the job
    options : of these workers (`Method.of_worker`)
    buckets : in the order in which they are iterated
    ring : whether workers add, or ask servers
    window_nbytes : how many bytes of a synchronous job may be in flight to one server; None: no bound
    """

    def __init__(self, method: Type[Method], options: Options, num_workers: int, buckets: Sequence[Bucket],
                 ring: bool, window_nbytes: Optional[float] = None) -> None:
        self._method, self._options = method, options
        self._recorder = ProgramRecorder(buckets, ring, engine.zeros(1), window_nbytes)
        self._next, self._made = 0, {}  # type: int, Dict[int, Program]
        self._workers = [self._recorder.worker(method, options, num_workers, bucket, engine.zeros(1))
                         for bucket in buckets]

    def of(self, t: int) -> Program:
        self._next = self._next or t
        while self._next <= t:
            self._made[self._next] = [self._record(worker, self._next) for worker in self._workers]
            self._next += 1
        return self._made[t]

    def forget(self, t: int) -> None:
        """Iterations up to `t` are over."""
        self._made = {number: program for number, program in self._made.items() if number > t}

    def arrays(self) -> int:
        """How many arrays as long as its bucket a worker of the method keeps; answers in flight are not its own."""
        kept = [getattr(self._workers[0], name) for name in self._workers[0].arrays]
        return sum(len(value) if isinstance(value, list) else value is not None for value in kept
                   if not isinstance(value, deque))

    def _record(self, worker: Worker, t: int) -> List[Op]:
        self._recorder.ops = [Op("step")] if self._method.takes == "weights" else []  # the trainer's optimizer's
        if self._method.due(self._options, t, worker.bucket.first.fragment):
            worker.iterate(engine.zeros(1), Step(t, LR, LR))
        return self._recorder.ops


def by_worker(method: Type[Method], options: Options, num_workers: int, buckets: Sequence[Bucket], ring: bool,
              window_nbytes: Optional[float]) -> List[Programs]:
    """The programs of each worker of a job; those whose turns come alike share them."""
    own = [method.of_worker(options, rank) for rank in range(num_workers)]
    kinds = {each: Programs(method, each, num_workers, buckets, ring, window_nbytes) for each in set(own)}
    return [kinds[each] for each in own]


class ProgramRecorder(GlobalWeights):
    """A holder of weights that writes down what it is asked for in `ops`, and always answers the same.

    `ring`: whether workers add, where an exchange is a sum and U; `window_nbytes`: as in `Programs`.
    """

    def __init__(self, buckets: Sequence[Bucket], ring: bool, answer: Array,
                 window_nbytes: Optional[float] = None) -> None:
        self.ops: List[Op] = []
        self._ring, self._answer = ring, answer
        self._places = {bucket.id: place for place, bucket in enumerate(buckets)}
        self._asked = dict.fromkeys(self._places, 0)  # questions so far
        self._windows: Dict[int, Any] = {} if window_nbytes is None else {
            bucket.server_rank: Window(window_nbytes) for bucket in buckets}

    def worker(self, method: Type[Method], options: Options, num_workers: int, bucket: Bucket, w: Array) -> Worker:
        """A method's worker with this holder and weights `w`; its optimizers do nothing."""
        local = method.local_optimizer(options) is not None
        return method.worker(options=options, num_workers=num_workers, bucket=bucket, weights_holder=self,
                             last_exchange=Pending(w), wd=0.0, lr_given=LR,
                             local_optimizer=_Stepped(self) if local else None,
                             update=_Stepped(self) if self._ring else None, begun=0, w_local=w)

    def exchange(self, bucket: Bucket, grad: Array, lr: float) -> Pending:
        if self._ring:
            return self._ask("sum", bucket, update=True)
        if not self._windows:
            return self._ask("exchange", bucket)
        window = self._windows[bucket.server_rank]
        answer = self._ask("exchange", bucket, window.make_room(bucket.id, _nbytes(bucket)))
        window.add(bucket.id, answer)
        return answer

    def fetch(self, bucket: Bucket, after: Array, end_round: bool = False, looks: bool = False) -> Pending:
        if self._ring:
            raise ConfigError("a worker of this method calls `fetch`, which only servers have; a ring has `exchange` "
                              "and `allreduce`")
        return self._ask("fetch", bucket)

    def allreduce(self, bucket: Bucket, array: Array, lr: float) -> Pending:
        return self._ask("sum", bucket) if self._ring else super().allreduce(bucket, array, lr)

    def _ask(self, what: str, bucket: Bucket, behind: Sequence["_Answer"] = (), update: bool = False) -> "_Answer":
        self._asked[bucket.id] += 1
        question = self._places[bucket.id], self._asked[bucket.id]
        self.ops.append(Op(what, question[1], tuple(one.question for one in behind), update))
        return _Answer(self, question, _nbytes(bucket), self._answer)


def _nbytes(bucket: Bucket) -> int:
    return WIRE_DTYPE.itemsize * bucket.size


class _Answer(Pending):
    """An answer, whose first reading is recorded. `question`: the bucket and the number of the question."""

    def __init__(self, recorder: ProgramRecorder, question: Tuple[int, int], nbytes: int, array: Array) -> None:
        super().__init__(array)
        self.question, self.nbytes = question, nbytes
        self._recorder, self._read = recorder, False

    def result(self) -> Array:
        if not self._read:
            self._read = True
            self._recorder.ops.append(Op("await", self.question[1]))
        return super().result()


class _Stepped(Update):
    """An optimizer on the worker, of which only that it runs is recorded."""

    def __init__(self, recorder: ProgramRecorder) -> None:
        self._recorder = recorder

    def __call__(self, w: Array, grad: Array, lr: float, gradient_weight: float = 1.0, out: Any = None) -> Array:
        self._recorder.ops.append(Op("step"))
        return w if out is None else out

    trial = __call__

    def start(self, w: Array) -> None:
        """Nothing to begin."""
