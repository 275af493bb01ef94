"""A whole job inside one process: workers as threads, a shard instead of servers or a ring without a network.

For tests, for a virtual cluster, and for ``kvstore.create("local")``, a job of one worker. The files of the methods run
on it unchanged. Only one thread runs at a time (`turns`).

    Stage(num_workers=2).run(lambda transport: train(transport))    # called once per worker, with its transport
"""
import collections
import json
import operator
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from kvstore.engine import engine
from kvstore.engine.engine import NDArray
from kvstore.messages.buckets import Bucket, Keys, Parameter, plan
from kvstore.messages.codecs import codec
from kvstore.messages.coded import DirectBucket, WorkerBucket
from kvstore.messages.finite import Check
from kvstore.messages.header import HEADER
from kvstore.messages.seam import Export, Pending, Ring, Setup, State, TrafficSettings, Transport
from kvstore.options import DEFAULT_TIMEOUT_S
from kvstore.state.npz import from_bytes
from kvstore.transports.buffers import BucketBuffers, Buffer, Buffered, VersionedAnswer
from kvstore.transports.ring import Owner, PartRound
from kvstore.transports.rounds import Messages, Round
from kvstore.transports.turns import LateAnswer, Turns
from kvstore.weights.servers.shard import Shard


class Stage(Turns):
    """The servers' side of the job, and whose turn it is.

    Parameters
    ----------
    num_workers : how many transports `worker` gives out
    timeout_s : how long a worker waits for its turn or its answer
    num_servers : over how many the buckets are spread
    """

    def __init__(self, num_workers: int, timeout_s: float = DEFAULT_TIMEOUT_S, num_servers: int = 1) -> None:
        super().__init__(num_workers, timeout_s)
        self.shards = [Shard(server, num_workers, trusted=True) for server in range(num_servers)]
        self.keys = [Keys(num_servers) for _ in range(num_workers)]  # a worker's stores share their numbers
        self._stored: Dict[int, NDArray] = {}
        self._direct: Dict[int, Tuple[NDArray, DirectBucket]] = {}  # with codecs: where a push goes, and its codes
        self.codes: Dict[Tuple[int, int], WorkerBucket] = {}  # with codecs: the worker's end, by its rank and bucket id
        self._rounds: Dict[int, List[Asked]] = collections.defaultdict(list)  # pushes not answered yet
        self._fetches: Dict[int, List[Asked]] = collections.defaultdict(list)  # fetches not answered yet
        self._parts: Dict[int, np.ndarray] = {}  # of the next total, by worker rank
        self._terms: Dict[int, List[List[_Term]]] = collections.defaultdict(
            lambda: [[] for _ in range(num_workers)])  # of sums to come, by bucket id and worker rank

    def worker(self, worker_rank: int) -> "InProcess":
        return InProcess(self, worker_rank)

    def ring_worker(self, worker_rank: int) -> "InProcessRing":
        return InProcessRing(self, worker_rank)

    def sharded_worker(self, worker_rank: int) -> "InProcessSharded":
        return InProcessSharded(self, worker_rank)

    # -- the servers -----------------------------------------------------------------------------------------

    def hold(self, key: int, whole: NDArray) -> None:
        """The first worker's weights are the global ones; all have the same."""
        if key not in self._stored:
            self._stored[key] = whole.copy()
            self._stored[key].wait_to_read()  # as on a server, nothing is in flight when an update begins

    def hold_direct(self, worker_rank: int, key: int, traffic: TrafficSettings) -> np.ndarray:
        """As `hold`, and after it, for a bucket with codecs. Returns the bucket's weights."""
        stored = engine.memory(self._stored[key])
        if key not in self._direct:
            pushed = engine.zeros(stored.size, self._stored[key].context)
            self._direct[key] = pushed, DirectBucket(traffic, self.num_workers, engine.memory(pushed), stored)
        w = stored[:-HEADER]
        self.codes[worker_rank, key] = WorkerBucket(traffic, w)
        return w

    def push(self, worker_rank: int, bucket: Bucket, answer: Buffer, synchronous: bool,
             check: Optional[Check] = None) -> LateAnswer:
        """One worker's message. The answer takes its place: when all have pushed, or at once if not `synchronous`."""
        round_ = self._rounds[bucket.id]
        late = LateAnswer(self, worker_rank, f"{bucket}: the answer", answer.payload, check)
        round_.append((worker_rank, answer, late))
        if len(round_) == (self.num_workers if synchronous else 1):
            self._answer(bucket, self._rounds.pop(bucket.id))
            self._answer_fetches(bucket)
        return late

    def sends_nothing(self, worker_rank: int, buckets: Sequence[Bucket]) -> None:
        """A worker sends nothing before all have met: that may end rounds that others wait for."""
        for shard in self.shards:
            shard.command("rest", {"worker_rank": worker_rank, "buckets": [bucket.id for bucket in buckets]})
        for bucket in buckets:
            self._answer_fetches(bucket)

    def fetch(self, worker_rank: int, bucket: Bucket, answer: Buffer) -> LateAnswer:
        """A message that only asks; it is answered at once, unless its round goes on."""
        late = LateAnswer(self, worker_rank, f"{bucket}: what it has fetched", answer.payload)
        self._fetches[bucket.id].append((worker_rank, answer, late))
        self._answer_fetches(bucket)
        return late

    def _answer_fetches(self, bucket: Bucket) -> None:
        fetches = self._fetches[bucket.id]
        while True:
            due = next((one for one in fetches if self._may_answer_fetch(bucket, one[1])), None)
            if due is None:
                return
            fetches.remove(due)
            self._answer(bucket, [due])

    def _may_answer_fetch(self, bucket: Bucket, message: Buffer) -> bool:
        shard = self.shards[bucket.server_rank]
        return shard.may_answer_fetch(bucket.id, message.there()[-HEADER:], self._stored[bucket.id])

    def _answer(self, bucket: Bucket, round_: List["Asked"]) -> None:
        for _, buffer, late in round_:
            if late.check is not None:
                late.check(buffer.there()[:-HEADER])
        if bucket.id in self._direct:
            self._answer_direct(bucket, {rank: buffer.there() for rank, buffer, _ in round_})
        else:
            self._answer_plain(bucket, round_)
        for _, _, late in round_:
            late.arrived = True

    def _answer_direct(self, bucket: Bucket, round_: Dict[int, np.ndarray]) -> None:
        """What `Outbox` and `Hub` do between processes."""
        pushed, direct = self._direct[bucket.id]
        for rank, floats in round_.items():
            message = self.codes[rank, bucket.id].encode(floats)
            direct.room(rank, message.size)[:] = message
            direct.add(rank, floats[-HEADER:].copy())
        self.shards[bucket.server_rank].handle_push(bucket.id, pushed, self._stored[bucket.id])
        for rank, message in direct.answers().items():
            floats, answer = round_[rank], self.codes[rank, bucket.id].answer
            answer.room(floats)[:] = message
            answer.decode(floats, direct.stored[-HEADER:])

    def _answer_plain(self, bucket: Bucket, round_: List["Asked"]) -> None:
        round_.sort(key=operator.itemgetter(0))  # so that a sum has the same bits each time
        # In place and past the engine, whose operators take longer and wait behind all queued gradients. No queued
        # operation reads or writes a message between its push and its answer.
        messages = [buffer.there() for _, buffer, _ in round_]
        with np.errstate(all="ignore"):  # a run may diverge
            for message in messages[1:]:
                messages[0] += message  # the answer is written there in any case
        stored = self._stored[bucket.id]
        self.shards[bucket.server_rank].handle_push(bucket.id, round_[0][1].whole, stored)
        answer = engine.memory(stored)
        for message in messages:
            message[:] = answer

    def sum(self, worker_rank: int, bucket: Bucket, term: "_Term") -> LateAnswer:
        """One worker's part of its next sum of a bucket; the last one to come makes the messages of all."""
        terms = self._terms[bucket.id]
        terms[worker_rank].append(term)
        if all(terms):
            _travel_round([of_worker.pop(0) for of_worker in terms])
        return term.late

    def total(self, worker_rank: int, array: np.ndarray) -> np.ndarray:
        """The sum of every worker's array, always in the same order. A worker waits, so has one at a time."""
        parts = self._parts
        parts[worker_rank] = array
        if len(parts) == self.num_workers:
            self._parts = {}
            self.all_arrived()
        self.wait_until(lambda: len(parts) == self.num_workers, "a sum over the workers")
        return sum((parts[rank] for rank in range(1, self.num_workers)), parts[0].copy())

    def all_arrived(self) -> None:
        """All workers have come to one of their sums. For subclasses."""


Asked = Tuple[int, Buffer, LateAnswer]
"""A worker's rank, its message, and its answer."""


class _Term:
    """What one worker adds to a sum, in arrays that nobody keeps; `late` is the sum."""

    def __init__(self, on: "_Staged", round_: Round, own: NDArray, out: NDArray) -> None:
        self.late = LateAnswer(on.stage, on.worker_rank, f"{round_.what}: the sum over the workers", out)
        self.round, self.out = round_, out
        self._own = own.copy()  # in the engine: the worker goes on

    def begin(self, worker_rank: int, num_workers: int) -> Messages:
        self.round.own, self.round.total = self._own.asnumpy(), np.empty(self._own.size, np.float32)
        if self.round.check is not None:
            self.round.check(self.round.own)
        longest = self.round.longest(num_workers)
        return self.round.messages(worker_rank, num_workers, (np.empty(longest, np.uint8), np.empty(longest, np.uint8)))


def _travel_round(terms: List[_Term]) -> None:
    """Move the messages of a round of all workers: the same bits as on a real ring."""
    travels = [term.begin(m, len(terms)) for m, term in enumerate(terms)]
    while True:
        pairs = [next(travel, ()) for travel in travels]  # all pause at the same point
        if () in pairs:
            break
        sent = [pair[0].copy() for pair in pairs if pair]
        for m, pair in enumerate(pairs):
            if pair:
                pair[1][:] = sent[m - 1]
    for term in terms:
        term.out[:] = term.round.total
        term.late.arrived = True


class _Staged(Transport):
    """What the transports of all kinds of workers have in common."""

    def __init__(self, stage: Stage, worker_rank: int) -> None:
        self.stage = stage
        self.worker_rank, self.num_workers = worker_rank, stage.num_workers

    def plan(self, parameters: Sequence[Parameter], traffic: TrafficSettings) -> List[Bucket]:
        return plan(parameters, self.stage.keys[self.worker_rank], traffic.bucket_nbytes, traffic.whole)

    def total(self, array: np.ndarray) -> np.ndarray:
        return self.stage.total(self.worker_rank, np.array(array, np.float32))


class InProcess(_Staged, Buffered):
    """One worker's end of a `Stage`."""

    checks_all = True

    def __init__(self, stage: Stage, worker_rank: int) -> None:
        _Staged.__init__(self, stage, worker_rank)
        Buffered.__init__(self, worker_rank, synchronous=True)  # until `plan` says otherwise
        self._last: Dict[int, Pending] = {}
        self._in_rounds: Sequence[Bucket] = ()  # buckets that may wait for this worker

    def plan(self, parameters: Sequence[Parameter], traffic: TrafficSettings) -> List[Bucket]:
        self._synchronous = not traffic.asynchronous
        return super().plan(parameters, traffic)

    def set_up(self, setup: Setup, weights: Callable[[Bucket], NDArray]) -> Dict[int, Pending]:
        self._buffers = {bucket.id: BucketBuffers(weights(bucket)) for bucket in setup.buckets}
        self._in_rounds = setup.buckets if setup.traffic.quorum > 1 else ()
        for key, buffers in self._buffers.items():
            self.stage.hold(key, buffers.last.whole)
        if self.worker_rank == 0:
            for shard in self.stage.shards:
                shard.command("open", setup.command())
        self.total(np.zeros(1))
        if setup.traffic.own_connections:
            self._set_up_direct(setup)
        return {key: Pending(buffers.last.payload) for key, buffers in self._buffers.items()}

    def _set_up_direct(self, setup: Setup) -> None:
        for bucket in setup.buckets:
            w = self.stage.hold_direct(self.worker_rank, bucket.id, setup.traffic)
            self._buffers[bucket.id].last.there()[:-HEADER] = w
            if setup.traffic.codec_weights != "none":
                self.stage.shards[bucket.server_rank].add_to_export({bucket.id: w})
        self.total(np.zeros(1))

    def use(self, setup: Setup, weights: Callable[[Bucket], NDArray], leads: bool) -> None:
        if leads:
            for shard in self.stage.shards:
                shard.command("use", setup.command())

    def codec_state(self, bucket: Bucket) -> Dict[str, np.ndarray]:
        codes = self.stage.codes.get((self.worker_rank, bucket.id))
        return {} if codes is None else codes.state()

    def exchange(self, bucket: Bucket, grad: NDArray, lr: float) -> Pending:
        if bucket.id in self._last:
            self._last[bucket.id].result()  # never two exchanges of a bucket at a time
        buffers = self._buffers[bucket.id]
        send = (buffers.compose if self._synchronous else buffers.compose_async)(grad, self._tag(lr))
        late = self.stage.push(self.worker_rank, bucket, send, self._synchronous, self.finite_check(bucket))
        self._last[bucket.id] = late
        return late if self._synchronous else VersionedAnswer(late, send, buffers)

    def fetch(self, bucket: Bucket, after: NDArray, end_round: bool = False, looks: bool = False) -> Pending:
        buffers = self._buffers[bucket.id]
        send = buffers.compose_fetch(after, self._fetch_tag(end_round, looks))
        return VersionedAnswer(self.stage.fetch(self.worker_rank, bucket, send), send, buffers)

    def rest(self) -> None:
        self.stage.sends_nothing(self.worker_rank, self._in_rounds)

    def statistics(self) -> Dict[int, Dict[str, Any]]:
        return {int(key): one for shard in self.stage.shards for key, one in json.loads(shard.statistics()).items()}

    def exporting(self) -> Export:
        return Export({key: saved for shard in self.stage.shards for key, saved in from_bytes(shard.export()).items()})

    def import_state(self, state: Optional[State], buckets: Sequence[Bucket]) -> None:
        if state is not None:
            for bucket in buckets:
                self.stage.shards[bucket.server_rank].restore({bucket.id: state[bucket.id]})


class InProcessRing(_Staged, Ring):
    """One worker of a `Stage` without a shard."""

    def plan(self, parameters: Sequence[Parameter], traffic: TrafficSettings) -> List[Bucket]:
        self._codec = codec(traffic.codec)
        return super().plan(parameters, traffic)

    def allreduce(self, bucket: Bucket, array: NDArray, out: NDArray) -> Pending:
        round_ = Round(str(bucket), self._codec, check=self.finite_check(bucket))
        return self.stage.sum(self.worker_rank, bucket, _Term(self, round_, array, out))


class InProcessSharded(Owner, _Staged):
    """One worker of a `Stage` that owns a part of every bucket."""

    def exchange(self, bucket: Bucket, array: NDArray, update: Callable[[NDArray], None], out: NDArray) -> Pending:
        round_, mine = PartRound(str(bucket), self._cuts[bucket.id], check=self.finite_check(bucket)), self.part(bucket)
        round_.part = np.empty(mine.stop - mine.start, np.float32)

        def update_part() -> None:
            update(engine.array(round_.part if round_.part.size else np.zeros(1), out.context))
            round_.total = out.asnumpy()

        round_.summed = update_part
        return self.stage.sum(self.worker_rank, bucket, _Term(self, round_, array, out))
