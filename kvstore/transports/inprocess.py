"""A whole job inside one process: workers as threads, a shard instead of servers or a ring without a network.

For tests, where arrivals follow a script, and for ``kvstore.create("local")``, a job of one worker. The
algorithm files run on it unchanged.

Only one thread runs at a time, and it hands over only where it has to wait: MXNet's front end is not made for
several threads, and a run is repeatable. The scripted order is that of exchanges:

    stage = Stage(num_workers=2, order=[0, 1, 1, 0])        # round 0: worker 0, then 1; round 1: worker 1, then 0
    stage.run(lambda transport: train(transport))              # called once per worker, with its transport
"""
import collections
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Deque, Dict, Iterable, List, Optional, Sequence, Tuple

import numpy as np

from kvstore.buckets import Bucket, Keys, Parameter, plan
from kvstore.engine import engine
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import RoundTimeoutError, WorkerLostError
from kvstore.job import control
from kvstore.server.shard import Shard
from kvstore.transports.rounds import Messages, Round
from kvstore.transports.sharded import PartRound, cuts, part
from kvstore.transports.wires import FETCH_TAG, Buffer, Taken, Wire, Wired
from kvstore.wire.codecs import Plain, codec
from kvstore.wire.coded import CodedAnswer, CodedBucket, CodedPush
from kvstore.wire.interfaces import Opening, Pending, Ring, Sharded, State, Traffic
from kvstore.wire.messages import FETCH, HEADER
from kvstore.wire.saved import by_bucket, un_npz

_threads = ThreadPoolExecutor(1000)
"""Of the workers of all stages, started when needed and kept: MXNet keeps 5 MB for each thread that ever computed."""


class _Codes:
    """One worker's end of one bucket's codes."""

    def __init__(self, worker_rank: int, traffic: Traffic, w: np.ndarray) -> None:
        self.worker_rank = worker_rank
        self.push, self.answer = CodedPush(traffic, w.size), CodedAnswer(traffic, w, alike=True)


class _Late(Pending):
    """An answer that comes when every worker's push has; `result` lets others run until then."""

    def __init__(self, stage: "Stage", what: str, array: NDArray, codes: Optional[_Codes] = None) -> None:
        super().__init__(array)
        self._stage, self._what, self.codes = stage, what, codes
        self.arrived = False

    def result(self) -> NDArray:
        self._stage.wait_until(lambda: self.arrived, self._what)
        return super().result()

    def wait(self) -> None:
        self.result().wait_to_read()

    def then(self, function: Callable[[NDArray], NDArray]) -> Pending:
        return _Then(self, function)


class _Then(Pending):
    """What a function makes of a late answer, as soon as somebody asks."""

    def __init__(self, late: _Late, function: Callable[[NDArray], NDArray]) -> None:
        super().__init__(None)
        self._late, self._function = late, function
        self._made: Optional[NDArray] = None

    def result(self) -> NDArray:
        if self._made is None:
            self._made = self._function(self._late.result())
        return self._made

    untaken = result

    def wait(self) -> None:
        self.result().wait_to_read()


class Stage:
    """The servers' side, and whose turn it is.

    Parameters
    ----------
    num_workers : how many transports `worker` gives out
    order : worker ranks, one per exchange, in the order in which exchanges reach the server; None: as they come
    timeout_s : how long a worker waits for its turn or its answer
    """

    def __init__(self, num_workers: int, order: Optional[Iterable[int]] = None,
                 timeout_s: float = control.DEFAULT_TIMEOUT_S) -> None:
        self.num_workers, self.timeout_s = num_workers, timeout_s
        self.shard = Shard(0, num_workers, trusted=True)
        self.keys = [Keys(1) for _ in range(num_workers)]  # a worker's stores share their numbers
        self.log: List[int] = []  # worker ranks in the order of their exchanges
        self._order: Optional[Deque[int]] = None if order is None else collections.deque(order)
        self._baton = threading.Condition(threading.RLock())
        self._failure: Optional[BaseException] = None
        self._stored: Dict[int, NDArray] = {}
        self._coded: Dict[int, Tuple[NDArray, CodedBucket]] = {}  # where there are codecs: room for a push, the codes
        self._rounds: Dict[int, List[Tuple[Buffer, _Late]]] = collections.defaultdict(list)  # pushes not answered yet
        self._totals: Dict[int, Dict[int, np.ndarray]] = collections.defaultdict(dict)  # by worker rank
        self._asked = [0] * num_workers  # totals that each worker has asked for
        self._sums: Dict[Tuple[int, int], Dict[int, _Term]] = collections.defaultdict(dict)  # by worker rank
        self._begun: Dict[Tuple[int, int], int] = collections.Counter()  # (worker rank, bucket id) -> sums asked for

    def worker(self, worker_rank: int) -> "InProcess":
        return InProcess(self, worker_rank)

    def ring_worker(self, worker_rank: int) -> "InProcessRing":
        return InProcessRing(self, worker_rank)

    def sharded_worker(self, worker_rank: int) -> "InProcessSharded":
        return InProcessSharded(self, worker_rank)

    def run(self, function: Callable[[Any], Any], make: Optional[Callable[[int], Any]] = None) -> List[Any]:
        """Call `function` on every worker's transport, each in a thread; their results.

        `make` gives a worker's transport by its rank; None: `worker`. Raises what the first failure raised.
        """
        make = make or self.worker

        def body(worker_rank: int) -> Any:
            with self._baton:
                try:
                    return function(make(worker_rank))
                except BaseException as error:  # raised again below
                    self._failure = self._failure or error
                finally:
                    self._baton.notify_all()

        results = list(_threads.map(body, range(self.num_workers)))
        if self._failure is not None:
            raise self._failure
        return results

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Let other workers run until `ready`."""
        deadline = time.monotonic() + self.timeout_s
        with self._baton:
            while not ready():
                if self._failure is not None:
                    raise WorkerLostError(f"another worker failed first: {self._failure}")
                if not self._baton.wait(max(0, deadline - time.monotonic())):
                    raise RoundTimeoutError(f"{what}: not within {self.timeout_s:g} s; the others are waiting, too, or "
                                            "the scripted order asks for a worker that cannot come")

    def take_turn(self, worker_rank: int) -> None:
        """Wait until the script lets this worker's exchange arrive."""
        order = self._order
        if order is not None:
            self.wait_until(lambda: bool(order) and order[0] == worker_rank, f"worker {worker_rank}'s turn")
            order.popleft()
            self._baton.notify_all()
        self.log.append(worker_rank)

    def open(self, key: int, whole: NDArray) -> None:
        """The first worker's weights are the global ones; all have the same."""
        if key not in self._stored:
            self._stored[key] = whole.copy()
            self._stored[key].wait_to_read()  # as on a server, nothing is in flight when an update begins

    def open_coded(self, key: int, traffic: Traffic) -> np.ndarray:
        """The same of a bucket with codecs; its weights."""
        stored = engine.memory(self._stored[key])
        if key not in self._coded:
            pushed = mx.nd.zeros(stored.size)
            self._coded[key] = pushed, CodedBucket(traffic, self.num_workers, engine.memory(pushed), stored)
        return stored[:-HEADER]

    def push(self, worker_rank: int, bucket: Bucket, answer: Buffer, synchronous: bool,
             codes: Optional[_Codes] = None) -> "_Late":
        """One worker's message; its answer is written in its place, when all have pushed or at once."""
        with self._baton:
            if worker_rank != FETCH:
                self.take_turn(worker_rank)
            round_ = self._rounds[bucket.id]
            late = _Late(self, f"worker {worker_rank}, {bucket}: the answer", answer.payload, codes)
            round_.append((answer, late))
            if len(round_) == (self.num_workers if synchronous else 1):
                self._answer(bucket, self._rounds.pop(bucket.id))
            return late

    def _answer(self, bucket: Bucket, round_: List[Tuple[Buffer, _Late]]) -> None:
        if bucket.id in self._coded:
            self._answer_coded(bucket.id, {late.codes.worker_rank: (engine.memory(buffer.whole), late.codes)
                                           for buffer, late in round_ if late.codes})
        else:
            self._answer_plain(bucket, round_)
        for _, late in round_:
            late.arrived = True
        self._baton.notify_all()

    def _answer_coded(self, key: int, round_: Dict[int, Tuple[np.ndarray, _Codes]]) -> None:
        """What an outbox and a hub do."""
        (pushed, coded), stored = self._coded[key], self._stored[key]
        for rank, (floats, codes) in round_.items():
            message = codes.push.encode(floats[:-HEADER]) if floats[-1] != FETCH else np.empty(0, np.uint8)
            coded.room(rank, message.size)[:] = message
            coded.add(rank, floats[-HEADER:].copy())
        self.shard.update(key, pushed, stored)
        for rank, message in coded.answers().items():
            floats, codes = round_[rank]
            if floats[-1] == FETCH:
                floats[:-HEADER].view(np.uint8)[:] = message
            else:
                codes.answer.room(floats[:-HEADER])[:] = message
                codes.answer.decode(floats[:-HEADER])
            floats[-HEADER:] = coded.stored[-HEADER:]

    def _answer_plain(self, bucket: Bucket, round_: List[Tuple[Buffer, _Late]]) -> None:
        merged = round_[0][0].whole.copy()
        for buffer, _ in round_[1:]:
            merged += buffer.whole
        stored = self._stored[bucket.id]
        stored.wait_to_read()
        self.shard.update(bucket.id, merged, stored)
        for buffer, _ in round_:
            stored.copyto(buffer.whole)

    def sum(self, worker_rank: int, bucket: Bucket, term: "_Term") -> _Late:
        """One worker's part of its next sum of a bucket; the last one to come makes the messages of all."""
        with self._baton:
            self._begun[worker_rank, bucket.id] += 1
            number = bucket.id, self._begun[worker_rank, bucket.id]
            round_ = self._sums[number]
            round_[worker_rank] = term
            term.late = _Late(self, f"worker {worker_rank}, {bucket}: the sum over the workers", term.out)
            if len(round_) == self.num_workers:
                _travel_round([round_[rank] for rank in range(self.num_workers)])
                del self._sums[number]
                self._baton.notify_all()
            return term.late

    def total(self, worker_rank: int, array: np.ndarray) -> np.ndarray:
        """The sum of what every worker asks for as its nth, always in the same order."""
        with self._baton:
            parts = self._totals[self._asked[worker_rank]]
            self._asked[worker_rank] += 1
            parts[worker_rank] = array
            self._baton.notify_all()
            self.wait_until(lambda: len(parts) == self.num_workers, "a sum over the workers")
            return sum((parts[rank] for rank in range(1, self.num_workers)), parts[0].copy())


class _Term:
    """What one worker adds to a sum, and where it waits for the whole."""

    late: _Late

    def __init__(self, round_: Round, own: NDArray, out: NDArray) -> None:
        self.round, self.out = round_, out
        round_.own, round_.total = own.asnumpy(), np.empty(own.size, np.float32)

    def begin(self, worker_rank: int, num_workers: int) -> Messages:
        longest = self.round.longest(num_workers)
        return self.round.messages(worker_rank, num_workers, (np.empty(longest, np.uint8), np.empty(longest, np.uint8)))


class _PartTerm(_Term):
    """The same where workers own parts: of its part of the sum `update` makes that of `out`."""

    round: PartRound

    def __init__(self, round_: PartRound, own: NDArray, out: NDArray, mine: slice,
                 update: Callable[[NDArray], None]) -> None:
        super().__init__(round_, own, out)
        round_.part, round_.summed = np.empty(mine.stop - mine.start, np.float32), self._turn
        self._update = update

    def _turn(self) -> None:
        """What the round pauses for."""
        self._update(mx.nd.array(self.round.part if self.round.part.size else np.zeros(1)))
        self.round.total = self.out.asnumpy()


def _travel_round(terms: List[_Term]) -> None:
    """The messages of a round, all workers' at once: the bits are those of a real one."""
    travels = [term.begin(m, len(terms)) for m, term in enumerate(terms)]
    while True:
        pairs = [next(travel, ()) for travel in travels]  # those of one round pause together
        if () in pairs:
            break
        sent = [pair[0].copy() for pair in pairs if pair]
        for m, pair in enumerate(pairs):
            if pair:
                pair[1][:] = sent[m - 1]
    for term in terms:
        term.out[:] = term.round.total
        term.late.arrived = True


class InProcess(Wired):
    """One worker's end of a `Stage`."""

    def __init__(self, stage: Stage, worker_rank: int) -> None:
        super().__init__(worker_rank, synchronous=True)  # until `plan` says otherwise
        self._stage = stage
        self.num_workers = stage.num_workers
        self._last: Dict[int, Pending] = {}
        self._codes: Dict[int, _Codes] = {}

    def plan(self, parameters: Sequence[Parameter], traffic: Traffic) -> List[Bucket]:
        self._synchronous = not traffic.asynchronous
        return plan(parameters, self._stage.keys[self.worker_rank], traffic.bucket_nbytes, traffic.whole)

    def open(self, opening: Opening, weights: Callable[[Bucket], NDArray]) -> Dict[int, Pending]:
        self._wires = {bucket.id: Wire(weights(bucket)) for bucket in opening.buckets}
        for key, wire in self._wires.items():
            self._stage.open(key, wire.last.whole)
        if self.worker_rank == 0:
            self._stage.shard.command("open", opening.command())
        self.total(np.zeros(1))
        if opening.traffic.coded:
            self._open_coded(opening)
        return {key: Pending(wire.last.payload) for key, wire in self._wires.items()}

    def _open_coded(self, opening: Opening) -> None:
        for bucket in opening.buckets:
            w = self._stage.open_coded(bucket.id, opening.traffic)
            engine.memory(self._wires[bucket.id].last.whole)[:-HEADER] = w
            self._codes[bucket.id] = _Codes(self.worker_rank, opening.traffic, w)
            if opening.traffic.codec_weights != "none":
                self._stage.shard.keep({bucket.id: w})
        self.total(np.zeros(1))

    def kept(self, bucket: Bucket) -> Dict[str, np.ndarray]:
        codes = self._codes.get(bucket.id)
        return {} if codes is None or codes.push.residual is None else {"residual": codes.push.residual}

    def exchange(self, bucket: Bucket, grad: NDArray, lr: float) -> Pending:
        if bucket.id in self._last:
            self._last[bucket.id].result()  # never two exchanges of a bucket at a time
        wire, compose = self._wires[bucket.id], Wire.compose if self._synchronous else Wire.compose_async
        send = compose(wire, grad, self._tag(lr))
        late = self._stage.push(self.worker_rank, bucket, send, self._synchronous, self._codes.get(bucket.id))
        self._last[bucket.id] = late
        return late if self._synchronous else Taken(send, wire)

    def fetch(self, bucket: Bucket, after: NDArray) -> Pending:
        wire = self._wires[bucket.id]
        send = wire.compose_fetch(after, FETCH_TAG)
        self._stage.push(FETCH, bucket, send, synchronous=False, codes=self._codes.get(bucket.id))
        return Taken(send, wire)

    def total(self, array: np.ndarray) -> np.ndarray:
        return self._stage.total(self.worker_rank, np.array(array, np.float32))

    def statistics(self) -> Dict[int, Dict[str, Any]]:
        return {int(key): one for key, one in json.loads(self._stage.shard.statistics()).items()}

    def export_state(self) -> State:
        return by_bucket(un_npz(self._stage.shard.export()))

    def import_state(self, state: Optional[State], buckets: Sequence[Bucket]) -> None:
        if state is not None and self.worker_rank == 0:
            self._stage.shard.restore(state)


class InProcessRing(Ring):
    """One worker of a `Stage` without a shard."""

    def __init__(self, stage: Stage, worker_rank: int) -> None:
        self._stage = stage
        self.worker_rank, self.num_workers = worker_rank, stage.num_workers

    def plan(self, parameters: Sequence[Parameter], traffic: Traffic) -> List[Bucket]:
        self._codec = codec(traffic.codec)
        return plan(parameters, self._stage.keys[self.worker_rank], traffic.bucket_nbytes, traffic.whole)

    def allreduce(self, bucket: Bucket, array: NDArray, out: NDArray) -> Pending:
        return self._stage.sum(self.worker_rank, bucket, _Term(Round(0, str(bucket), self._codec), array, out))

    def total(self, array: np.ndarray) -> np.ndarray:
        return self._stage.total(self.worker_rank, np.array(array, np.float32))


class InProcessSharded(Sharded):
    """The same, with a part of every bucket."""

    def __init__(self, stage: Stage, worker_rank: int) -> None:
        self._stage = stage
        self.worker_rank, self.num_workers = worker_rank, stage.num_workers

    def plan(self, parameters: Sequence[Parameter], traffic: Traffic) -> List[Bucket]:
        buckets = plan(parameters, self._stage.keys[self.worker_rank], traffic.bucket_nbytes, traffic.whole)
        self._cuts = cuts(buckets, self.num_workers, traffic.whole)
        return buckets

    def part(self, bucket: Bucket) -> slice:
        return part(self._cuts[bucket.id], self.worker_rank)

    def exchange(self, bucket: Bucket, array: NDArray, update: Callable[[NDArray], None], out: NDArray) -> Pending:
        round_ = PartRound(0, str(bucket), Plain())
        round_.cuts = self._cuts[bucket.id]
        return self._stage.sum(self.worker_rank, bucket, _PartTerm(round_, array, out, self.part(bucket), update))

    def gather(self, bucket: Bucket, mine: np.ndarray) -> np.ndarray:
        whole = np.zeros(bucket.size, np.float32)
        whole[self.part(bucket)] = mine
        return self.total(whole)

    def total(self, array: np.ndarray) -> np.ndarray:
        return self._stage.total(self.worker_rank, np.array(array, np.float32))
