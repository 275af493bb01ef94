"""Workers on a virtual cluster: one process computes the values, the simulation decides their order and the time.

    stage = VirtualStage(cluster)
    stage.run(train)                         called once per worker, with its transport
    stage.run(train, stage.ring_worker)      without servers

A worker's thread runs ahead of the virtual time until it reads an answer of an asynchronous server. The answer is made,
with the real arrays, when the simulation lets the question reach the bucket's rule, after all that came there before.
So the gradients of several workers are computed at a time, and no bit depends on it. Each bucket of a worker waits by
itself, in a coroutine (greenlet): the question that is asked first may reach its rule last.
"""
import collections
from pathlib import Path
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from greenlet import getcurrent, greenlet

from kvstore import methods
from kvstore.engine.engine import NDArray
from kvstore.errors import ConfigError
from kvstore.messages.buckets import Bucket, Parameter
from kvstore.messages.codecs import codec
from kvstore.messages.finite import Check
from kvstore.messages.seam import Pending, Setup, TrafficSettings, Transport
from kvstore.methods.contract import Step
from kvstore.options import DEFAULT_TIMEOUT_S
from kvstore.session.session import Session
from kvstore.transports.buffers import Buffer
from kvstore.transports.in_process import Asked, InProcess, InProcessRing, InProcessSharded, Stage
from kvstore.transports.rounds import on_ring
from kvstore.transports.sizing import on_servers
from kvstore.transports.turns import LateAnswer
from odsgd.virtual.costs import NS
from odsgd.virtual.description import VirtualCluster
from odsgd.virtual.simulation import Simulation
from odsgd.virtual.timeline import TracedSimulation

QUESTIONS, NOTHING = ("exchange", "fetch", "sum"), "nothing"
MOST_UNANSWERED = 256
"""Pushes of a worker to one bucket that may wait for their answers."""


class VirtualStage(Stage):
    """The servers' side of a virtual cluster, and whose turn it is. `trace`: the folder of a timeline, if wanted."""

    def __init__(self, cluster: VirtualCluster, timeout_s: float = DEFAULT_TIMEOUT_S,
                 trace: Optional[str] = None) -> None:
        super().__init__(cluster.workers, timeout_s, cluster.servers)
        self.cluster, self._trace = cluster, trace
        self.simulation: Optional[Simulation] = None  # from the first session on
        self._questions: Dict[Tuple[int, int], Deque[Tuple[Bucket, Buffer, LateAnswer]]] = collections.defaultdict(
            collections.deque)  # bucket id and rank -> not answered
        self._iterating = [0] * cluster.workers  # the iteration that a worker has begun; 0: it meets the others
        self._due: List[Dict[int, Iterator[str]]] = [{} for _ in self._iterating]  # by bucket: questions to come
        self.answered = [0] * cluster.workers  # questions of each worker that have their answers

    def worker(self, worker_rank: int) -> "VirtualWorker":
        return VirtualWorker(self, worker_rank)

    def ring_worker(self, worker_rank: int) -> "VirtualRing":
        return VirtualRing(self, worker_rank)

    def sharded_worker(self, worker_rank: int) -> InProcessSharded:
        self.cluster.check_transport("sharded")
        return super().sharded_worker(worker_rank)

    # -- what workers tell and ask ---------------------------------------------------------------------------

    def opens(self, setup: Setup, layers: Sequence[Parameter], ring: bool) -> None:
        """A worker's session begins; all workers' sessions are alike."""
        if self.simulation is not None:
            if self.simulation.buckets != list(setup.buckets):
                raise ConfigError("a virtual cluster trains one model at a time; make another one for another store")
            return
        method = methods.load(setup.method, trusted=True)
        job = (self.cluster, method, method.Options(**setup.options), setup.buckets, layers,
               "ring" if ring else "server", setup.traffic)
        self.simulation = Simulation(*job) if self._trace is None else TracedSimulation(Path(self._trace), *job)

    def finish_trace(self) -> None:
        """The files of the timeline, if there is one, are whole."""
        if isinstance(self.simulation, TracedSimulation):
            self.simulation.close()

    def begins(self, worker_rank: int, t: int) -> None:
        assert self.simulation is not None
        self._ends(worker_rank)
        self._iterating[worker_rank] = t
        program = self.simulation.programs[worker_rank].of(t)
        self._due[worker_rank] = {bucket.id: iter([op.what for op in ops if op.what in QUESTIONS])
                                  for bucket, ops in zip(self.simulation.buckets, program)}
        self.simulation.begin(worker_rank, t)

    def asks(self, worker_rank: int, bucket_id: int, what: str) -> None:
        """ConfigError if an iteration does not ask next for what its program has, by which its times are found."""
        if not self._iterating[worker_rank]:
            return
        due = next(self._due[worker_rank][bucket_id], NOTHING)
        if what != due:
            raise ConfigError(
                f"worker {worker_rank}, iteration {self._iterating[worker_rank]}, bucket {bucket_id}: the method asks "
                f"for {what} now, and asked for {due} when it ran on zeros, by which times are found. In virtual time "
                "what a method asks may depend on the iteration and on its options, and on no value; train it as real "
                "processes (odsgd launch)")

    def _ends(self, worker_rank: int) -> None:
        """A worker's iteration is over."""
        for bucket_id in self._due[worker_rank]:
            self.asks(worker_rank, bucket_id, NOTHING)
        self._iterating[worker_rank] = 0

    def failed(self, worker_rank: int, t: int) -> bool:
        """Whether a worker has failed in its iteration `t`, and is back."""
        return self.simulation is not None and self.simulation.passes.away(worker_rank, t) > 0

    def comes_back(self, worker_rank: int) -> None:
        """Let time go on until a worker is back; what it fetches now are the weights of then."""
        self.seconds(worker_rank)
        self._ends(worker_rank)

    def seconds(self, worker_rank: int) -> float:
        """When the last iteration that a worker has begun is over; lets others run until that is known."""
        simulation, t = self.simulation, self._iterating[worker_rank]
        if simulation is None:
            return 0.0
        self.wait_until(lambda: simulation.done(worker_rank) >= t, f"worker {worker_rank}: the time of iteration {t}")
        return simulation.ready(worker_rank) / NS

    # -- the order that the times decide ---------------------------------------------------------------------

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Let the worker's other buckets go on, if there are some (`VirtualSession.each`), then other workers."""
        worker = getcurrent().parent
        if worker is not None and not ready():
            worker.switch((ready, what))
        super().wait_until(ready, what)

    def push(self, worker_rank: int, bucket: Bucket, answer: Buffer, synchronous: bool,
             check: Optional[Check] = None) -> LateAnswer:
        if synchronous:
            return super().push(worker_rank, bucket, answer, synchronous, check)
        return self._ask(worker_rank, bucket, answer, check)

    def fetch(self, worker_rank: int, bucket: Bucket, answer: Buffer) -> LateAnswer:
        if not self._iterating[worker_rank]:  # between iterations, with all workers at a meeting
            return super().fetch(worker_rank, bucket, answer)
        return self._ask(worker_rank, bucket, answer)

    def _ask(self, worker_rank: int, bucket: Bucket, answer: Buffer, check: Optional[Check] = None) -> LateAnswer:
        """A question to an asynchronous server; it is answered when the simulation lets it reach the rule."""
        late = LateAnswer(self, worker_rank, f"{bucket}: the answer", answer.payload, check)
        self._questions[bucket.id, worker_rank].append((bucket, answer, late))
        self._answer_in_order(bucket.id)
        return late

    def _answer_in_order(self, bucket_id: int) -> None:
        """Answer the questions that have reached the rule, up to the first one whose worker has not asked it yet."""
        assert self.simulation is not None
        order = self.simulation.order[bucket_id]
        while order and self._questions[bucket_id, order[0]]:
            worker_rank = order.popleft()
            bucket, answer, late = self._questions[bucket_id, worker_rank].popleft()
            answered = self._may_answer_fetch(bucket, answer)
            assert answered, "nobody waits where the quorum is not all workers"
            self._answer(bucket, [(worker_rank, answer, late)])

    def _answer(self, bucket: Bucket, round_: List[Asked]) -> None:
        super()._answer(bucket, round_)
        for worker_rank, _, _ in round_:
            self.answered[worker_rank] += 1

    def idle(self) -> bool:
        """Let time go on."""
        if self.simulation is None or not self.simulation.advance():
            return False
        self._answer_what_came()
        return True

    def _answer_what_came(self) -> None:
        assert self.simulation is not None
        for bucket_id, order in self.simulation.order.items():
            if order:
                self._answer_in_order(bucket_id)

    def rest(self, worker_rank: int) -> None:
        if self.simulation is not None:
            self.simulation.rest(worker_rank)

    def total(self, worker_rank: int, array: np.ndarray) -> np.ndarray:
        self._ends(worker_rank)
        self.rest(worker_rank)
        return super().total(worker_rank, array)

    def all_arrived(self) -> None:
        if self.simulation is not None:
            self.simulation.met()
            self._answer_what_came()  # which workers may read later, as elastic averaging does


class VirtualSession(Session):
    """A session that tells the stage how far its worker is."""

    transport: "_OnStage"

    def plan(self, parameters: Sequence[Parameter]) -> List[Bucket]:
        self._layers = parameters
        return super().plan(parameters)

    def begin(self, weights: Callable[[Bucket], NDArray],
              w_local: Optional[Callable[[Bucket], NDArray]] = None) -> None:
        self.transport.stage.opens(self._setup(), self._layers, isinstance(self.transport, VirtualRing))
        super().begin(weights, w_local)

    def next_step(self, lr: float, lr_local: Optional[float], counts: float = 1.0) -> Step:
        if self.outer is not None and self.method.asynchronous and self.transport.stage.failed(
                self.transport.worker_rank, self.step.t):
            self._come_back()
        if self.transport.runs_ahead():
            self.transport.seconds()  # lets time go on
        step = super().next_step(lr, lr_local, counts)
        self.transport.stage.begins(self.transport.worker_rank, step.t)
        return step

    def _come_back(self) -> None:
        """Begin anew at the servers' weights, as a worker would that had joined in the place of this one."""
        self.transport.stage.comes_back(self.transport.worker_rank)
        self._use_inner(self.optimizer if self.local_optimizer is not None else None)  # its steps begin anew, too
        for bucket in self.buckets:
            worker = self.workers[bucket.id]
            worker.wait()
            servers: Any = self.weights_holder
            own = self.w_local[bucket.id] = servers.fetch(bucket, worker.last_exchange.untaken()).result().copy()
            worker.last_exchange, worker.begun = Pending(own), self.step.t
            worker.local_optimizer = self._local_step(bucket, own)
            worker.start(own)

    def each(self, function: Callable[[Any], None], lanes: Iterable[Any]) -> None:
        """An asynchronous server's answers come in any order: no bucket waits for another one's."""
        if not self.method.asynchronous:
            return super().each(function, lanes)
        waiting = [one for lane in lanes for one in _until_it_waits(greenlet(function), lane)]
        seen = -1

        def some_ready() -> bool:
            """Look at the buckets, which may be hundreds, only when this worker has got another answer."""
            nonlocal seen
            answered = self.transport.stage.answered[self.transport.worker_rank]
            if seen == answered:
                return False
            if any(one.ready() for one in waiting):
                return True
            seen = answered
            return False

        while waiting:
            self.transport.stage.wait_until(some_ready, waiting[0].what)
            one = next(one for one in waiting if one.ready())
            waiting.remove(one)
            waiting += _until_it_waits(one.bucket)
        return None


class _Waiting(NamedTuple):
    """A bucket's coroutine, whether it can go on, and what it waits for, in words."""

    bucket: greenlet
    ready: Callable[[], bool]
    what: str


def _until_it_waits(bucket: greenlet, *values: Any) -> List[_Waiting]:
    """Go on with a bucket until it waits (`VirtualStage.wait_until`), or is done: then the list is empty."""
    asked = bucket.switch(*values)
    return [] if bucket.dead else [_Waiting(bucket, *asked)]


class _OnStage(Transport):
    """The common part of both kinds of worker."""

    session_class = VirtualSession
    stage: VirtualStage

    def seconds(self) -> float:
        """When the last iteration that was begun is over, in virtual time. Lets others run until that is known."""
        return self.stage.seconds(self.worker_rank)

    def iterations(self) -> int:
        """How many are over, of all workers together."""
        return self.stage.simulation.iterations if self.stage.simulation else 0

    def runs_ahead(self) -> bool:
        """Whether it has asked for more than time has had answered."""
        return False


class VirtualWorker(_OnStage, InProcess):
    """One worker's end of a virtual cluster with servers."""

    stage: VirtualStage

    def __init__(self, stage: VirtualStage, worker_rank: int) -> None:
        super().__init__(stage, worker_rank)
        self._unanswered: Dict[int, Deque[Any]] = collections.defaultdict(collections.deque)  # pushes by bucket

    def plan(self, parameters: Sequence[Parameter], traffic: TrafficSettings) -> List[Bucket]:
        if 1 < traffic.quorum == self.num_workers:
            raise ConfigError(f"quorum is the number of workers ({traffic.quorum}); with cluster it has to be smaller")
        self._synchronous = not traffic.asynchronous
        cluster = self.stage.cluster
        return on_servers(parameters, traffic, self.stage.keys[self.worker_rank], cluster.workers, cluster.round_pace)

    def room(self, bucket: Bucket) -> NDArray:
        self._make_room(bucket)
        return super().room(bucket)

    def rest(self) -> None:
        """Nothing: in virtual time it would take place when all workers meet, and then nobody sends any more."""

    def exchange(self, bucket: Bucket, grad: NDArray, lr: float) -> Pending:
        """Time goes on when a worker reads an answer, or is done with its iteration. So no push of an asynchronous job
        waits here for the answer to the one before; `downpour` may fetch so rarely that it never reads that one.
        """
        self.stage.asks(self.worker_rank, bucket.id, "exchange")
        if self._synchronous:
            return super().exchange(bucket, grad, lr)
        self._make_room(bucket)
        self._last.pop(bucket.id, None)
        answer = super().exchange(bucket, grad, lr)
        self._unanswered[bucket.id].append(self._last[bucket.id])
        return answer

    def fetch(self, bucket: Bucket, after: NDArray, end_round: bool = False, looks: bool = False) -> Pending:
        self.stage.asks(self.worker_rank, bucket.id, "fetch")
        return super().fetch(bucket, after, end_round, looks)

    def _make_room(self, bucket: Bucket) -> None:
        """Give the bucket's next message an array that holds no unanswered one; ConfigError if there are too many."""
        asked = self._unanswered[bucket.id]
        while asked and asked[0].arrived:
            asked.popleft()
        if len(asked) == MOST_UNANSWERED:
            raise ConfigError(f"{MOST_UNANSWERED} pushes of worker {self.worker_rank} wait for their answers, and each "
                              "takes memory in virtual time; fetch more often (fetch_every)")
        self._buffers[bucket.id].keep(len(asked))

    def runs_ahead(self) -> bool:
        """Whether a bucket has two pushes whose answers are still to come, as far as time has gone."""
        return any(len(asked) > 1 and not asked[-2].arrived for asked in self._unanswered.values())


class VirtualRing(_OnStage, InProcessRing):
    """One worker of a virtual cluster without servers."""

    stage: VirtualStage

    def plan(self, parameters: Sequence[Parameter], traffic: TrafficSettings) -> List[Bucket]:
        self._codec = codec(traffic.codec)
        return on_ring(parameters, traffic, self.stage.keys[self.worker_rank], self.num_workers)

    def allreduce(self, bucket: Bucket, array: NDArray, out: NDArray) -> Pending:
        self.stage.asks(self.worker_rank, bucket.id, "sum")
        return super().allreduce(bucket, array, out)
