"""Sums over the workers without a server: a ring of workers, each sending to the next, over MPI.

An array is cut into one block per worker. First partial sums of every block travel round the ring, and each worker
adds its own block (reduce-scatter). Then the whole sums travel round (allgather). Each worker sends 2 (p - 1)/p of the
array's bytes, which no allreduce can beat. `Round.messages` is the whole algorithm, without a network.

One thread of each process moves all messages. It has several rounds in flight, so that one adds while others transfer.
It sleeps between its looks at MPI, since other workers need the core. Each session has a line of rounds, which start in
the order of its calls; rounds of two sessions may start in any order, as gradients appear.
"""
import collections
import contextlib
import itertools
import threading
import traceback
from functools import partial
from typing import Any, Callable, Deque, Dict, Generator, Iterator, List, Optional, Sequence, Tuple, TypeVar

import numpy as np

from kvstore.errors import EXIT_FAILURE, KVStoreError
from kvstore.job import ending, environment
from kvstore.job.deadlines import CALLS, deadlines
from kvstore.job.pulse import pulse
from kvstore.messages.buckets import Bucket, Keys, Parameter, plan
from kvstore.messages.codecs import Codec, NotFiniteError, Plain
from kvstore.messages.codecs import codec as named
from kvstore.messages.finite import Check
from kvstore.messages.seam import TrafficSettings

MESSAGE_NBYTES = 1024 * 1024
"""A message that suits a ring: a smaller one takes nearly as much processor time, a larger one is added late."""
LEAST_ROUNDS = 8  # rounds that a small model is cut into, so that one transfers while another adds
LEAST_BUCKET_NBYTES, LEAST_PATIENT_NBYTES = 128 * 1024, 512 * 1024
"""The second is for methods that need a sum an iteration later (docs/results/benchmarks/tried.md)."""

Pair = Tuple[np.ndarray, np.ndarray]  # two messages: to the next worker, from the previous one
Pairs = Generator[Pair, None, np.ndarray]
Messages = Iterator[Optional[Pair]]


def owned(worker_rank: int, num_workers: int) -> int:
    """Which block's sum is whole on this worker first."""
    return (worker_rank + 1) % num_workers


def reduce_scatter(worker_rank: int, codec: Codec, ours: Sequence[np.ndarray], sums: Sequence[np.ndarray],
                   scratch: Pair) -> Pairs:
    """Partial sums of the blocks travel round the ring, and each worker adds its own to them (in `sums`, by block).

    Returns the message of the block that is whole here, which is in the first of `scratch` unless it is sent in place.
    """
    m, p = worker_rank, len(ours)
    mine, theirs = scratch
    outgoing = _encoded(codec, m, ours, mine)
    for step in range(p - 1):
        block = (m - 1 - step) % p
        incoming = codec.room(sums[block], theirs)
        yield outgoing, incoming
        codec.decode(incoming, sums[block])
        np.add(sums[block], ours[block], out=sums[block])
        outgoing = _encoded(codec, block, sums, mine)
    return outgoing


def allgather(worker_rank: int, codec: Codec, outgoing: np.ndarray, parts: Sequence[np.ndarray],
              scratch: Pair) -> Pairs:
    """Each worker's block, whose message is `outgoing`, travels to all others (into `parts`, by block)."""
    m, p = worker_rank, len(parts)
    mine, theirs = scratch
    for step in range(p - 1):
        block = (m - step) % p
        incoming = codec.room(parts[block], theirs)
        yield outgoing, incoming
        codec.decode(incoming, parts[block])
        outgoing, mine, theirs = incoming, theirs, mine  # forwarded as it came
    return outgoing


def _encoded(codec: Codec, block: int, values: Sequence[np.ndarray], scratch: np.ndarray) -> np.ndarray:
    message = codec.room(values[block], scratch)
    try:
        codec.encode(values[block], message)
    except NotFiniteError as error:
        raise KVStoreError(f"block {block} of {len(values)}: {error}") from None
    return message


def blocks(array: np.ndarray, number: int) -> List[np.ndarray]:
    """`array` in `number` parts of about the same size, some empty if it is short."""
    bounds = [array.size * index // number for index in range(number + 1)]
    return [array[start:stop] for start, stop in zip(bounds, bounds[1:])]


def on_ring(parameters: Sequence[Parameter], traffic: TrafficSettings, keys: Keys, num_workers: int) -> List[Bucket]:
    """The buckets of a job."""
    floats = sum(parameter.size for parameter in parameters)
    suits = bucket_nbytes(named(traffic.codec), num_workers, floats, traffic.waits)
    return plan(parameters, keys, traffic.bucket_nbytes or suits, traffic.whole)


def bucket_nbytes(codec: Codec, num_workers: int, floats: int, waits: bool) -> int:
    """The size of buckets that suits a ring which sums `floats` per iteration, by whether the method waits."""
    whole_messages = 4 * num_workers * (MESSAGE_NBYTES * 4096 // codec.nbytes(4096))
    least = LEAST_BUCKET_NBYTES if waits else LEAST_PATIENT_NBYTES
    return max(least, min(whole_messages, 4 * floats // LEAST_ROUNDS))


class Round:
    """One allreduce. `timeout_s`: for how long nothing may move while it is in flight; 0: what `Rounds` has."""

    line: "Line"
    number: int  # in its line
    own: np.ndarray  # what this worker adds
    total: np.ndarray  # where the sum is written
    over: Callable[[], None]  # called when the round is over
    under_way: Messages
    left: int  # pairs of messages

    def __init__(self, what: str, codec: Codec, timeout_s: float = 0.0, check: Optional[Check] = None) -> None:
        self.what, self.codec, self.timeout_s, self.check = what, codec, timeout_s, check

    def __str__(self) -> str:
        return f"round {self.number}, {self.what}"

    def longest(self, num_workers: int) -> int:
        """Bytes of its longest message."""
        return self.codec.nbytes(-(-self.own.size // num_workers))

    def messages(self, worker_rank: int, num_workers: int, scratch: Pair) -> Messages:
        """The sum of every worker's `own` in `total`, as one worker's pairs of messages (to the next, from the
        previous); None: the round pauses until `Rounds.resume`.

        The caller sends and receives each pair, and goes on when both are over. `scratch`: two buffers, each large
        enough for the message of one block.
        """
        if num_workers == 1:
            np.copyto(self.total, self.own)
            return
        ours, sums = blocks(self.own, num_workers), blocks(self.total, num_workers)
        outgoing = yield from reduce_scatter(worker_rank, self.codec, ours, sums, scratch)
        self.codec.decode(outgoing, sums[owned(worker_rank, num_workers)])  # as the others will decode it
        yield from allgather(worker_rank, self.codec, outgoing, sums, scratch)


AnyRound = TypeVar("AnyRound", bound=Round)


class Line:
    """Rounds that begin in the order in which they were asked for. `tags`: the first tag of their messages."""

    TAGS = 64  # rounds in flight are fewer apart

    def __init__(self, tags: int) -> None:
        self.tags, self.asked, self.begun = tags, 0, 0
        self.given: Dict[int, Round] = {}  # their arrays are there, and they have not begun

    def may_begin(self, slots: Sequence[Optional[Round]]) -> bool:
        """Whether the next round is here, a slot is free, and none has a round that may share its tag."""
        number = self.begun + 1
        return number in self.given and None in slots and all(
            round_ is None or round_.number > number - self.TAGS for round_ in slots)


class Rounds:
    """All rounds of this process. `line` and `ask` on the main thread, `begin` and `resume` on any.

    Invariants:
      1. Rounds of a line begin in the order of their numbers: round n only when all before it have begun, and all that
         may have had its tag are over, however long one is or pauses.
      2. A slot has one round, and that one pair of messages in flight, or none while it pauses. Each line has slots of
         its own, so that a round never waits for one of another line.
      3. When a round is over here, all that it sent has arrived, so a process without rounds may go at any time.
    """

    WINDOW = 8  # rounds of a line in flight
    SHORTEST_S, LONGEST_S = 50e-6, 1e-3  # pauses between looks at MPI while nothing arrives

    def __init__(self, comm: Any, mpi: Any, timeout_s: float) -> None:
        self._comm, self._mpi = comm, mpi
        self.worker_rank, self.num_workers, self.keys = comm.Get_rank(), comm.Get_size(), Keys(1)
        self._resumed: Deque[int] = collections.deque()  # slots
        self._news = threading.Lock()  # free while there are any
        self._lines: List[Optional[Line]] = []  # line n has the slots from n * WINDOW on
        past = mpi.COMM_WORLD.Get_attr(mpi.TAG_UB) + 2 - Line.TAGS
        self._tags = itertools.cycle(range(Line.TAGS, past, Line.TAGS))  # of lines of sessions
        self._slots: List[Optional[Round]] = []
        self._scratch: List[Pair] = []
        self._requests: List[Any] = []  # of slot n: 2 n is a receive, 2 n + 1 a send
        self._totals = self._with_slots(Line(0))
        self._in_flight = 0  # requests
        self._moved = 0  # messages that have come or gone
        environment.shorten_switch_interval()
        threading.Thread(target=self._guarded_run, name="kvstore-ring", daemon=True).start()
        self._timeout_s = timeout_s
        self.follow(timeout_s)

    def follow(self, timeout_s: float) -> None:
        """Watch for rounds that may last this long."""
        deadlines.follow((self, timeout_s), timeout_s, partial(self._under_way, timeout_s),
                         partial(self._overdue, timeout_s))

    def line(self) -> Line:
        """A new line; workers ask in the same order."""
        return self._with_slots(Line(next(self._tags)))

    def _with_slots(self, line: Line) -> Line:
        if None in self._lines:
            self._lines[self._lines.index(None)] = line
        else:
            self._slots += [None] * self.WINDOW
            self._scratch += [(np.empty(0, np.uint8), np.empty(0, np.uint8))] * self.WINDOW
            self._requests += [self._mpi.REQUEST_NULL] * (2 * self.WINDOW)
            self._lines.append(line)
        return line

    def end(self, line: Line) -> None:
        """All rounds of the line are over."""
        self._lines[self._lines.index(line)] = None

    def ask(self, round_: AnyRound, line: Optional[Line] = None) -> AnyRound:
        """This is the next round of a line, in the same order on every worker."""
        round_.line = line or self._totals
        round_.line.asked += 1
        round_.number, round_.timeout_s = round_.line.asked, round_.timeout_s or self._timeout_s
        return round_

    def begin(self, round_: Round, own: np.ndarray, total: np.ndarray, over: Callable[[], None]) -> None:
        """Sum `own` into `total`, once all earlier rounds of the line have begun. The ring's thread calls `over` at the
        end."""
        round_.own, round_.total, round_.over = own, total, over
        self.give(round_)

    def give(self, round_: Round) -> None:
        """The arrays of a round are there."""
        ending.check_or_die(round_.check, round_.own)
        round_.line.given[round_.number] = round_
        self._tell()

    def resume(self, round_: Round) -> None:
        """Go on with a round that pauses."""
        self._resumed.append(self._slots.index(round_))
        self._tell()

    def _tell(self) -> None:
        """Wake the ring's thread, or keep it from falling asleep."""
        with contextlib.suppress(RuntimeError):  # there are news already
            self._news.release()

    def total(self, array: np.ndarray, timeout_s: float = 0.0) -> np.ndarray:
        """The sum of every worker's `array` (float32). Collective; waits. Beside the rounds of all sessions."""
        own = np.ascontiguousarray(array, np.float32).reshape(-1)
        total = np.empty_like(own)
        round_, over = self.ask(Round("a sum over the workers", Plain(), timeout_s)), threading.Event()
        with deadlines.waiting_for(round_.what, round_.timeout_s, "another worker is late, stopped or unreachable, "
                                   f"has left, or {CALLS}"):
            self.begin(round_, own, total, over.set)
            over.wait()
        return total.reshape(np.shape(array))

    def _guarded_run(self) -> None:
        try:
            with np.errstate(all="ignore"):  # gradients may diverge; their reader will say so
                self._run()
        except self._mpi.Exception as error:
            ending.die(f"{self._first()}: MPI reports an error: {error}; has another worker of the ring died, or "
                       "taken other steps than this one?", EXIT_FAILURE, consequence=True)
        except BaseException:
            ending.die(traceback.format_exc(), EXIT_FAILURE)

    def _run(self) -> None:
        pause_s = self.SHORTEST_S
        while True:
            self._take_news()
            over = self._mpi.Request.Testsome(self._requests) if self._in_flight else None
            if over:
                self._advance(over)
            elif self._news.acquire(timeout=pause_s if self._in_flight else -1):
                pause_s = self.SHORTEST_S
                continue
            pause_s = self.SHORTEST_S if over else min(1.25 * pause_s, self.LONGEST_S)

    def _take_news(self) -> None:
        """Go on with rounds that have paused, and begin what may begin."""
        while self._resumed:
            self._go_on(self._resumed.popleft())
        for at, line in enumerate(self._lines):
            its = slice(at * self.WINDOW, (at + 1) * self.WINDOW)
            while line and line.may_begin(self._slots[its]):
                self._begin(self._slots.index(None, its.start), line.given.pop(line.begun + 1))

    def _begin(self, slot: int, round_: Round) -> None:
        round_.line.begun = round_.number
        longest = round_.longest(self.num_workers)
        if self._scratch[slot][0].size < longest:
            self._scratch[slot] = (np.empty(longest, np.uint8), np.empty(longest, np.uint8))
        round_.under_way = round_.messages(self.worker_rank, self.num_workers, self._scratch[slot])
        round_.left = 2 * (self.num_workers - 1)
        self._slots[slot] = round_
        self._go_on(slot)

    def _advance(self, over: List[int]) -> None:
        self._moved += len(over)
        self._in_flight -= len(over)
        null = self._mpi.REQUEST_NULL
        for slot in {index // 2 for index in over}:
            if self._requests[2 * slot] == null and self._requests[2 * slot + 1] == null:
                self._go_on(slot)

    def _go_on(self, slot: int) -> None:
        """The next pair of messages of the round in `slot`, if there is one."""
        round_ = self._slots[slot]
        assert round_ is not None
        try:
            pair = next(round_.under_way, ())
        except KVStoreError as error:
            ending.die(f"{round_}, {error}", EXIT_FAILURE)
        if pair is None:
            return  # it pauses
        if not pair:
            self._slots[slot] = None
            round_.over()
            return
        outgoing, incoming = pair
        pulse.nbytes += outgoing.nbytes
        tag = round_.line.tags + round_.number % Line.TAGS
        round_.left -= 1
        # The last message is only over when it has been received, and all before it have then, too.
        send = self._comm.Isend if round_.left else self._comm.Issend
        self._requests[2 * slot] = self._comm.Irecv(incoming, (self.worker_rank - 1) % self.num_workers, tag)
        self._requests[2 * slot + 1] = send(outgoing, (self.worker_rank + 1) % self.num_workers, tag)
        self._in_flight += 2

    def _under_way(self, timeout_s: float) -> Optional[int]:
        return self._moved if any(round_ and round_.timeout_s == timeout_s for round_ in self._slots) else None

    def _overdue(self, timeout_s: float) -> str:
        previous = (self.worker_rank - 1) % self.num_workers
        return (f"{self._first()}: nothing has moved on the ring for {timeout_s:g} s; worker "
                f"{previous}, from which this one receives, or one before it is late, stopped or unreachable, or has "
                "taken fewer steps and left. Check that all are alive, or raise `timeout_s`")

    def _first(self) -> str:
        """The first round that is in flight."""
        under_way = [round_ for round_ in self._slots if round_]
        return str(min(under_way, key=lambda round_: round_.number)) if under_way else "between rounds"
