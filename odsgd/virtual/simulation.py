"""When everything of a job happens on a virtual cluster: events in virtual time, the earliest first.

Times depend on no value, so this knows no arrays: it carries out the `programs` of all workers on the links, server
threads and processors that a `description` has. What decides values comes out of it: in an asynchronous job the order
in which questions reach each bucket's rule (`order`).

The life of one iteration of one worker. A layer's forward pass begins when the weights of its buckets are there and the
one before is over; the backward pass goes from the last layer to the first. When the last gradient of a bucket is
there, and gathered, the bucket's `lane` carries out its program; in the end its weights are scattered. No lane waits
for another. What a worker's processor does for them it does one after the other, in two threads: one gathers, steps and
scatters, one has the messages.

A message passes its links one after another, each busy with one message at a time, in the order in which they come; a
link passes it on as it comes in. The answers of a synchronous round leave together and share the link, as TCP's
connections do. Pushes queue for the one thread of their server.

Times are whole nanoseconds, so that a job goes on after a pause as it would have without one. Equal times are ordered
by what happens, worker and bucket, never by the order of calls.

Most of what happens need not wait for its turn among the events.

- A queue that gets everything from one place gets it in the order in which it leaves there, so each thing is carried
  out as soon as it is known (`_InOrder`): a worker's way out, a server's thread behind its link, the answers of that
  thread.
- A worker's link to itself has its turn when an answer is due (`_through`): all that came before is known then.
- The answers of a round are due at one time, at all workers: one event. So are those of a sum.
- No answer of a round can be due within the time that its server's link needs for all of them. Until then a worker's
  gradients concern nobody else, and are carried out one after another (`_gradients`).

An exchange with servers on hosts of their own is then one event in a synchronous job, at the server's link.
"""
import collections
import functools
import heapq
import math
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from kvstore.errors import unknown
from kvstore.messages.buckets import WIRE_DTYPE, Bucket, Parameter
from kvstore.messages.codecs import codec
from kvstore.messages.header import HEADER
from odsgd.virtual.description import VirtualCluster
from odsgd.virtual.programs import Op, Program, Programs

NS = 1e9
MOST_BUCKETS = 2 ** 20
"""More than numbers for buckets (`Keys.LIMIT`)."""

# What happens, in the order in which it does where times are equal.
START, GRADIENTS, PASS, DOOR, HANDLE, ANSWER, SUM, ARRIVED = range(8)

Event = Tuple[int, int, int, int, int, int]
"""When, what, worker, bucket, and two numbers: of a message the hop and its end, of a sum its number and `update`, of
an answer what is known of it and what U takes."""

# What is known of an answer that is due: it is there; or it is once the worker's link is through; so are those of all.
THERE, DUE, ALL_DUE = range(3)


def ns(seconds: float) -> int:
    """Whole nanoseconds."""
    return round(seconds * NS)


_NONE: Dict[int, int] = {}


class _Lane:
    """One bucket of one worker: how far its program is.

    Invariant: `answered` is the number of the last question that has an answer; they are answered in order.
    """

    __slots__ = ("answered", "arrived", "at", "before", "halfway", "held", "hops", "ops", "out", "straight", "through",
                 "time")

    def __init__(self, hops: Sequence["_Hop"], halfway: int, straight: bool) -> None:
        self.ops: Sequence[Op] = ()         # of the iteration; none: it has ended
        self.at = 0                         # the op that is next
        self.time = 0                       # when it can begin, as far as is known
        self.answered = self.arrived = 0    # when the last answer came
        self.before: Dict[int, int] = _NONE  # sum -> when it was there, of the last few; several may be under way
        self.held: List[Tuple[Op, int]] = []  # questions that may not leave yet, and since when
        self.hops, self.halfway = hops, halfway  # to the server and back; how many of them lead there
        self.straight = straight  # whether a message is carried over the first hop as soon as it leaves
        self.out = _out(hops) if straight else None  # that hop, where the next is the server's link before its thread
        self.through: Optional[int] = None  # when the answer that is due has passed the worker's link, once it is known


class _Hop(NamedTuple):
    """A message over one link of its way: how long the link is busy with it, and when it is at the next.

    then    : what follows: PASS, HANDLE or ARRIVED
    at_once : whether that is carried out as soon as it is known
    """

    link: int
    busy: int
    latency: int
    then: int
    at_once: bool


def _out(hops: Sequence[_Hop]) -> Optional[_Hop]:
    first, second = hops[:2]
    return first if first.then == PASS and not first.at_once and second.then == HANDLE and second.at_once else None


class _Agenda:
    """Events, the earliest first: those of the stretch of time that is on in a heap, those of later ones unsorted.

    A heap of all would cost most of the time: every worker has an event for each of its buckets.
    """

    def __init__(self, stretch: float) -> None:
        self.now: List[Event] = []  # a heap, always the same list; it may be empty before the next stretch is on
        self._shift = int(stretch).bit_length()
        self._at = -1
        self._later: Dict[int, List[Event]] = {}
        self._stretches: List[int] = []  # a heap of the keys

    def push(self, event: Event) -> None:
        at = event[0] >> self._shift
        if at <= self._at:
            heapq.heappush(self.now, event)
            return
        try:
            self._later[at].append(event)
        except KeyError:
            self._later[at] = [event]
            heapq.heappush(self._stretches, at)

    def go_on(self) -> bool:
        """Whether there is an event; the earliest is then the first of `now`."""
        if not self.now and self._stretches:
            self._at = heapq.heappop(self._stretches)
            self.now += self._later.pop(self._at)
            self.now.sort()
        return bool(self.now)


class Simulation:
    """A job's times on a virtual cluster.

    Parameters
    ----------
    cluster : its description
    method : of the job; its name decides what an update costs
    programs : what the workers do
    buckets : in the order in which they are iterated
    parameters : in the order of the layers
    codec_name : of gradients, and of weights on their way back
    transport : `server`, `ring` or `sharded`
    stepwise : whether time goes on in steps (`advance`); else everything that is told happens at once, in `met`

    Events are carried out only when nothing earlier can come any more: a worker that has finished an iteration may
    begin the next one, unless it rests or has come to meet the others, so the time waits for it.
    """

    def __init__(self, cluster: VirtualCluster, method: Any, programs: Programs, buckets: Sequence[Bucket],
                 parameters: Sequence[Parameter], codec_name: str = "none", transport: str = "server",
                 stepwise: bool = True) -> None:
        self._cluster, self._programs, self.synchronous = cluster, programs, not method.asynchronous
        self._ring = transport != "server"
        self.num_workers = cluster.workers
        self.buckets = list(buckets)
        self.order: Dict[int, Deque[int]] = {bucket.id: collections.deque() for bucket in buckets}
        self._now = 0
        self._until: float = 0  # what may be carried out is earlier
        self._pauses = False    # when a question has reached an asynchronous server's rule
        self._costs = _Costs(cluster, method, self.buckets, codec_name, transport)
        self._links = _Links(cluster, self.buckets, codec_name)
        self._passes = _PassTimes(cluster, self.buckets, parameters)
        count = range(self.num_workers)
        servers = [bucket.server_rank for bucket in self.buckets]
        self._servers, self._in_order = servers, _InOrder(self._links, self._costs, servers, count, stepwise)
        self._lanes = [self._made_lanes(m) for m in count]
        self._agenda = _Agenda(self._stretch())
        self._together = not stepwise and self._costs.message > 0 and (
            self._ring or (self.synchronous and self._in_order.inboxes))  # what is due at all workers is one event
        self._ahead = self._lookahead()
        self._dues: List[int] = []  # a heap: when answers of rounds and sums are due
        self._inboxes: List[List[int]] = [[] for _ in count]  # heaps: when at the worker's link, and bucket, as one
        self._doors = [lane.hops[1] if lane.out else None for lane in self._lanes[0]]  # by bucket: the server's link
        self._behind: List[Dict[Tuple[int, int], List[int]]] = [{} for _ in count]
        self._begun: List[Deque[int]] = [collections.deque() for _ in count]  # iterations to carry out, the first is on
        self._program: List[Program] = [[] for _ in count]  # of that one
        self._grads: List[List[int]] = [[] for _ in count]  # when its gradients are there, by bucket
        self._group = [0] * self.num_workers      # of buckets whose gradients are next
        self._busy = [0] * self.num_workers       # lanes of the iteration that have not ended
        self._weights = [[0] * len(self.buckets) for _ in count]  # when a bucket's weights are there
        self._computed = [0] * self.num_workers   # when the passes of the last iteration are over
        self._arrays_free = [0] * self.num_workers    # the thread that gathers, steps and scatters
        self._messages_free = [0] * self.num_workers  # the one that has the messages
        self._resting = [False] * self.num_workers
        self._open = set(range(self.num_workers))  # workers that may begin something that they have not told yet
        self._server_free = [0] * cluster.servers
        self._ring_free = 0
        self._came: List[List[int]] = [[] for _ in servers]  # by bucket: workers of this round, in the order they came
        self._parts: Dict[Tuple[int, int], Tuple[int, int, int]] = {}  # of a sum: how many; the last one's time, worker
        self.done: List[int] = [0] * self.num_workers  # the last iteration that is over
        self.over: Callable[[int], Any] = lambda m: None  # called for a worker whose iteration is over

    def _made_lanes(self, m: int) -> List[_Lane]:
        known: Dict[Tuple[int, int], Tuple[Sequence[_Hop], int, bool]] = {}  # buckets of one server and size are alike
        lanes = []
        for b, bucket in enumerate(self.buckets):
            key = bucket.server_rank, bucket.size
            if key not in known:
                way, halfway = self._links.way(m, bucket.server_rank)
                known[key] = (self._links.hops(way, halfway, b, self._in_order, bucket.server_rank), halfway,
                              bool(halfway) and self._in_order.links[way[0]])
            lanes.append(_Lane(*known[key]))
            if self._ring:
                lanes[-1].before = {}
        return lanes

    def _lookahead(self) -> int:
        """Nanoseconds within which nothing becomes due that is not among `_dues`; 0: nothing is known of that."""
        if not self._together:
            return 0
        if self._ring:
            return min(busy + delay for busy, delay in self._costs.ring)
        ways = [self._links.way(0, rank) for rank in self._servers]
        return min(self._costs.update[b] + self.num_workers * self._links.busy[way[halfway]][b]
                   for b, (way, halfway) in enumerate(ways))

    def _stretch(self) -> float:
        """Nanoseconds in which about a dozen events happen: as many as the servers' links, or the passes, let come."""
        compute = self._passes.mean(self.synchronous) / (self.num_workers * len(self.buckets))
        server = self._links.busy[self._cluster.host_of_server(0)] if self._cluster.servers else [0]
        return 4 * max(compute, sum(server) / len(server) / max(self._cluster.servers, 1))

    def loads(self, iterations: Sequence[int]) -> Dict[str, float]:
        """Seconds per iteration that the busiest resource of each kind is at work, the mean over these iterations.

        Of a job that has not begun.
        """
        self._programs.of(1)
        ops = [collections.Counter(op.what for t in iterations for op in self._programs.of(t)[b])
               for b in range(len(self.buckets))]
        asked = [count["exchange"] + count["fetch"] for count in ops]
        costs, sums, num_workers = self._costs, [count["sum"] for count in ops], self.num_workers
        server = [0] * max(self._cluster.servers, 1)
        for b, bucket in enumerate(self.buckets):
            answers = asked[b] if self.synchronous else asked[b] * num_workers
            server[bucket.server_rank] += asked[b] * num_workers * costs.receive[b] + answers * costs.update[b]
        updates = [sum(op.update for t in iterations for op in self._programs.of(t)[b]) for b in range(len(ops))]
        arrays = sum(len(iterations) * (costs.gather[b] + costs.scatter[b]) + costs.step[b] * count["step"]
                     + costs.on_workers[b] * updates[b] for b, count in enumerate(ops))
        messages = 2 * costs.message * (sum(asked) + sum(sums))
        busy = {"worker's processor": max(arrays, messages), "server's thread": max(server),
                "ring": sum(costs.ring[b][0] * count for b, count in enumerate(sums)),
                **self._links.loads(self.buckets, asked, num_workers)}
        if self._cluster.cores:
            on_the_ring = sum(costs.hops[b] * count for b, count in enumerate(sums))
            sent = self._links.processors(asked, sums, [bucket.server_rank for bucket in self.buckets], num_workers)
            passes = len(iterations) * ns(self._cluster.compute.processor)
            workers = num_workers * (arrays + messages + on_the_ring + passes)
            busy["shared cores"] = (workers + sum(server) + sent) // self._cluster.cores
        found = {what: time / len(iterations) for what, time in busy.items() if time}
        return {"passes": self._passes.mean(self.synchronous) / NS, **{what: time / NS for what, time in found.items()}}

    # --- what the workers tell and ask ------------------------------------------------------------------------------

    def begin(self, worker_rank: int, t: int) -> None:
        """A worker's iteration `t` follows what it has begun before."""
        begun, rested = self._begun[worker_rank], self._resting[worker_rank]
        self._resting[worker_rank] = False
        self._open.discard(worker_rank)
        begun.append(t)
        if len(begun) == 1:
            ready = self.ready(worker_rank)
            if rested:
                ready = max(ready, self._now, *(lane.arrived for lane in self._lanes[worker_rank]))
            self._agenda.push((ready, START, worker_rank, 0, 0, 0))

    def rest(self, worker_rank: int) -> None:
        """A worker begins nothing new before all it has asked for has arrived; perhaps it comes to meet the others."""
        self._resting[worker_rank] = True
        self._open.discard(worker_rank)

    def met(self) -> int:
        """All workers meet: everything in flight arrives, and all go on from the time that this is over."""
        self._until, self._pauses = math.inf, False
        self._carry_out()
        assert all(self._resting) and not any(self._begun), "a worker waits for an answer that nobody gives"
        self._resting, self._open = [False] * self.num_workers, set(range(self.num_workers))
        self._programs.forget(min(self.done))
        now = max(self._last(), max(self._server_free), self._ring_free, self._links.last())
        self._computed = [now] * self.num_workers
        self._weights = [[now] * len(self.buckets) for _ in self._weights]
        return now

    def _last(self) -> int:
        heard = [lane.arrived for lanes in self._lanes for lane in lanes]
        return max(*map(max, self._weights), *self._computed, *heard)

    def ready(self, worker_rank: int) -> int:
        """When the weights after a worker's last iteration are there."""
        return max(*self._weights[worker_rank], 0)

    def advance(self) -> bool:
        """Carry out events until a question has reached its rule, or none can follow before a worker goes on.

        Returns whether anything happened.
        """
        # the earliest time at which a worker may begin something that it has not told yet
        self._until = min(map(self.ready, self._open)) if self._open else math.inf
        self._pauses = True
        moved = self._agenda.go_on() and self._agenda.now[0][0] < self._until
        self._carry_out()
        return moved

    # --- an iteration of a worker -----------------------------------------------------------------------------------

    def _start(self, m: int) -> None:
        t = self._begun[m][0]
        _, _, self._grads[m], self._computed[m] = self._passes.times(m, t, self._computed[m], self._weights[m])
        self._busy[m], self._program[m], self._group[m] = len(self.buckets), self._programs.of(t), 0
        self._gradients(m)

    def _gradients(self, m: int) -> None:
        """A worker's gradients, group by group, up to the first that an answer may be earlier than."""
        program, lanes, grads, gather = self._program[m], self._lanes[m], self._grads[m], self._costs.gather
        horizon, groups = self._horizon(), self._passes.together
        for at in range(self._group[m], len(groups)):
            group = groups[at]
            time = grads[group[0]]
            if time > horizon:
                self._group[m] = at
                self._agenda.push((time, GRADIENTS, m, group[0], 0, 0))
                return
            for b in group:
                lane = lanes[b]
                lane.ops, lane.at, lane.time = program[b], 0, self._arrays("gather", m, b, time, gather[b])
                self._go_on(m, b, lane)

    def _horizon(self) -> int:
        """Nothing that is due, or becomes due, is due before."""
        dues, ahead = self._dues, self._now + self._ahead
        while dues and dues[0] < self._now:
            heapq.heappop(dues)
        return dues[0] if dues and dues[0] < ahead else ahead

    def _arrays(self, stage: str, m: int, b: int, time: int, cost: int) -> int:
        """When a worker is through with work on a bucket's arrays that it can begin at `time`."""
        free = self._arrays_free[m]
        over = self._arrays_free[m] = (time if time > free else free) + cost
        return over

    def _message(self, m: int, time: int) -> int:
        """The same for a message."""
        free = self._messages_free[m]
        over = self._messages_free[m] = (time if time > free else free) + self._costs.message
        return over

    def _go_on(self, m: int, b: int, lane: _Lane) -> None:
        """Carry out the lane's program up to an answer that is not known yet."""
        ops, time, at = lane.ops, lane.time, lane.at
        for op in ops[at:] if at else ops:
            what, number, _, _ = op
            if what == "await":
                if number > lane.answered:
                    lane.at, lane.time = at, time
                    return
                arrived = lane.arrived if number == lane.answered else lane.before.get(number, 0)
                if arrived > time:
                    time = arrived
            elif what == "step":
                time = self._arrays("local update", m, b, time, self._costs.step[b])
            else:
                if lane.held or not self._left(m, b, lane, op, time):
                    lane.held.append((op, time))
            at += 1
        lane.ops, lane.at = (), 0
        self._weights[m][b] = self._arrays("scatter", m, b, time, self._costs.scatter[b])
        self._busy[m] -= 1
        if not self._busy[m]:
            self._end(m)

    def _end(self, m: int) -> None:
        """A worker's iteration is over."""
        self.done[m] = self._begun[m].popleft()
        self.over(m)
        if self._begun[m]:
            self._agenda.push((self.ready(m), START, m, 0, 0, 0))
        elif not self._resting[m]:
            self._open.add(m)
            self._until = min(self._until, self.ready(m))

    def _leave(self, m: int, b: int, lane: _Lane) -> None:
        """Send the questions of a lane that may leave."""
        held = lane.held
        while held and self._left(m, b, lane, *held[0]):
            del held[0]

    def _left(self, m: int, b: int, lane: _Lane, op: Op, time: int) -> bool:
        """Send a question, or a part of a sum, unless it waits for answers. Returns whether it left."""
        what, number, behind, update = op
        if what == "sum":
            self._send(m, b, lane, time, number, update)
            return True
        if number > lane.answered + 1:  # never two of a bucket at a time
            return False
        if lane.arrived > time:
            time = lane.arrived
        for other, last in behind:
            before = self._lanes[m][other]
            if last > before.answered:
                self._behind[m].setdefault((other, last), []).append(b)
                return False
            if last == before.answered and before.arrived > time:  # else it was there before the next was asked for
                time = before.arrived
        self._send(m, b, lane, time, number, None)
        return True

    def _send(self, m: int, b: int, lane: _Lane, time: int, number: int, update: Optional[bool]) -> None:
        """The worker's thread has a message to send; `update`: of a sum, whether U follows."""
        leaves = self._message(m, time)
        if update is not None:
            self._part(leaves, m, b, number, update)
        elif lane.out is not None:
            link, busy, latency, _, _ = lane.out
            free = self._links.free[link]
            begins = leaves if leaves > free else free
            passed = self._links.free[link] = begins + busy
            self._agenda.push((begins + latency, DOOR, m, b, 0, passed + latency))
        elif not lane.halfway:
            self._agenda.push((leaves, HANDLE, m, b, 0, 0))
        elif lane.straight:
            self._pass(leaves, m, b, 0, 0)
        else:
            self._agenda.push((leaves, PASS, m, b, 0, 0))

    def _answered(self, m: int, b: int, lane: _Lane, time: int, update: int = 0) -> None:
        """An answer is there; what waited for it goes on. `update`: what U takes, which follows on a ring."""
        number = lane.answered = lane.answered + 1
        arrived = self._message(m, time)
        lane.arrived = self._arrays("update", m, b, arrived, update) if update else arrived
        if self._ring:
            lane.before[number] = lane.arrived
            lane.before.pop(number - 16, None)
        if self._behind[m]:
            for other in self._behind[m].pop((b, number), ()):
                self._leave(m, other, self._lanes[m][other])
        if lane.held:
            self._leave(m, b, lane)
        if lane.ops:
            self._go_on(m, b, lane)

    # --- events -----------------------------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        """What is earlier than `_until`, which what happens may bring nearer."""
        agenda, now, pop = self._agenda, self._agenda.now, heapq.heappop
        while (now or agenda.go_on()) and now[0][0] < self._until:
            time, what, m, b, number, end = pop(now)
            self._now = time
            if what == DOOR:
                self._door(time, m, b, end)
            elif what == PASS:
                self._pass(time, m, b, number, end)
            elif what == ARRIVED:
                if number == ALL_DUE:
                    self._all_due(time, b, end)
                else:
                    self._due(time, m, b, number, end)
            elif what == GRADIENTS:
                self._gradients(m)
            elif what == HANDLE:
                self._handle(time, m, b)
            elif what == START:
                self._start(m)
            elif what == ANSWER:
                self._answer(time, m, b)
            else:
                self._sum(time, b, end)

    def _pass(self, time: int, m: int, b: int, hop: int, end: int) -> None:
        """A message is at the hop-th link of its way, and its last byte will be there at `end`."""
        free, hops = self._links.free, self._lanes[m][b].hops
        while True:
            link, busy, latency, then, at_once = hops[hop]
            begins = free[link]
            if begins < time:
                begins = time
            passed = free[link] = begins + busy
            if end < passed:
                end = passed
            if then != PASS:
                break
            time, end, hop = begins + latency, end + latency, hop + 1
            if not at_once:
                self._agenda.push((time, PASS, m, b, hop, end))
                return
        if at_once:
            self._handle(end, m, b)
        else:
            self._agenda.push((end, then, m, b, 0, 0))

    def _door(self, time: int, m: int, b: int, end: int) -> None:
        """The same at a server's link, which has the server's thread behind it."""
        hop = self._doors[b]
        assert hop is not None
        free = self._links.free[hop.link]
        passed = self._links.free[hop.link] = (time if time > free else free) + hop.busy
        self._handle(passed if passed > end else end, m, b)

    def _handle(self, time: int, m: int, b: int) -> None:
        """A push is at its server's thread."""
        server, costs = self._servers[b], self._costs
        free = self._server_free[server]
        over = (time if time > free else free) + costs.receive[b]
        if self.synchronous:
            came = self._came[b]
            came.append(m)
            if len(came) < self.num_workers:
                self._server_free[server] = over
                return
        else:
            self.order[self.buckets[b].id].append(m)
            if self._pauses:
                self._until = 0
        over = self._server_free[server] = over + costs.update[b]
        if self._in_order.answers[server]:
            self._answer(over, m, b)
        else:
            self._agenda.push((over, ANSWER, m, b, 0, 0))

    def _answer(self, time: int, m: int, b: int) -> None:
        """The server's thread is through: the answer to `m`, or to all, who share its link and are through together."""
        workers = [m]
        if self.synchronous:
            workers, self._came[b] = self._came[b], []
        if self._in_order.inboxes:
            self._post(time, workers, b)
            return
        away = []
        for m in workers:
            lane = self._lanes[m][b]
            if lane.halfway == len(lane.hops):  # on the server's own host
                self._answered(m, b, lane, time)
            else:
                away.append((m, lane))
        if not away:
            return
        first, free = away[0][1], self._links.free
        link, busy, latency, _, _ = first.hops[first.halfway]
        there = max(time, free[link]) + latency
        end = there + busy * len(away)
        free[link] = end - latency
        for m, lane in away:
            hop = lane.halfway
            if lane.hops[hop].at_once:
                self._pass(there, m, b, hop + 1, end)
            else:
                self._agenda.push((there, PASS, m, b, hop + 1, end))
            there += busy

    def _post(self, time: int, workers: Sequence[int], b: int) -> None:
        """The same where a worker's link has nothing but answers: when each is there, and that it is due."""
        lane, free = self._lanes[workers[0]][b], self._links.free
        link, busy, latency, _, _ = lane.hops[lane.halfway]
        there = max(time, free[link]) + latency
        end = there + busy * len(workers)
        free[link] = end - latency
        inboxes, push = self._inboxes, heapq.heappush
        for m in workers:
            push(inboxes[m], there * MOST_BUCKETS + b)
            there += busy
        self._will_be_due(end, workers, b, DUE, 0)

    def _will_be_due(self, time: int, workers: Sequence[int], b: int, known: int, update: int) -> None:
        """The answers to some workers."""
        if self._together:
            heapq.heappush(self._dues, time)
            self._agenda.push((time, ARRIVED, 0, b, ALL_DUE, update))
        else:
            for m in workers:
                self._agenda.push((time, ARRIVED, m, b, known, update))

    def _all_due(self, time: int, b: int, update: int) -> None:
        """An answer is due at all workers. What is due at the same time goes by worker, then by bucket."""
        now, answers, known = self._agenda.now, [(b, update)], THERE if self._ring else DUE
        while now and now[0][:2] == (time, ARRIVED) and now[0][4] == ALL_DUE:
            _, _, _, b, _, update = heapq.heappop(now)
            answers.append((b, update))
        alone = not now or now[0][0] > time
        for m in range(self.num_workers):
            for b, update in answers:
                if alone:
                    self._due(time, m, b, known, update)
                else:
                    self._agenda.push((time, ARRIVED, m, b, known, update))

    def _due(self, time: int, m: int, b: int, known: int, update: int) -> None:
        """An answer is due. It is there, unless the worker's link is through with it later."""
        lane = self._lanes[m][b]
        if known == DUE:
            through = self._through(m, lane)
            if through > time:
                if self._together:
                    heapq.heappush(self._dues, through)
                self._agenda.push((through, ARRIVED, m, b, THERE, update))
                return
        self._answered(m, b, lane, time, update)

    def _through(self, m: int, lane: _Lane) -> int:
        """When an answer has passed its worker's link, after all that came before."""
        if lane.through is None:
            inbox, lanes, free = self._inboxes[m], self._lanes[m], self._links.free
            link = lane.hops[-1].link
            busy, passed = self._links.busy[link], free[link]
            first = None
            while first is not lane:
                there, b = divmod(heapq.heappop(inbox), MOST_BUCKETS)
                passed = (there if there > passed else passed) + busy[b]
                first = lanes[b]
                first.through = passed
            free[link] = passed
        through, lane.through = lane.through, None
        assert through is not None
        return through

    def _part(self, time: int, m: int, b: int, number: int, update: int) -> None:
        """A worker's part of a sum is there then. The last one sets the ring in motion."""
        count, last, by = self._parts.pop((b, number), (0, 0, 0))
        last, by = max((time, m), (last, by))
        if count + 1 < self.num_workers:
            self._parts[b, number] = count + 1, last, by
        else:
            self._agenda.push((last, SUM, by, b, number, update))

    def _sum(self, time: int, b: int, update: int) -> None:
        """All parts of a sum are there. `update`: whether U follows."""
        busy, delay = self._costs.ring[b]
        over = self._ring_free = max(time, self._ring_free) + busy
        self._will_be_due(over + delay, range(self.num_workers), b, THERE, update * self._costs.on_workers[b])


class _Costs:
    """What processors take, in nanoseconds by bucket."""

    def __init__(self, cluster: VirtualCluster, method: Any, buckets: Sequence[Bucket], codec_name: str,
                 transport: str) -> None:
        megabytes = [WIRE_DTYPE.itemsize * bucket.size / 1e6 for bucket in buckets]
        worker, server = cluster.worker, cluster.server
        per_update = server.rules.get(method.name, server.update)
        coded = cluster.codecs.get(codec_name, 0.0) if transport == "server" else 0.0  # on a ring at every hop
        self.message = ns(worker.message)
        own = worker.stores.get(method.name, 0.0)
        self.gather = [ns((worker.gather + own + coded) * mb) for mb in megabytes]
        self.step = [ns(worker.step * mb) for mb in megabytes]
        self.scatter = [ns((worker.scatter + coded) * mb) for mb in megabytes]
        self.receive = [ns(server.message + (server.receive + coded) * mb) for mb in megabytes]
        self.update = [ns((per_update + 2 * coded) * mb) for mb in megabytes]  # the server decodes its answer, too
        share = cluster.workers if transport == "sharded" else 1
        self.on_workers = [ns(worker.step * mb / share) for mb in megabytes]  # U
        rings = [_ring(cluster, bucket, codec_name) for bucket in buckets]
        self.ring = [(busy, delay) for busy, delay, _ in rings]
        self.hops = [hops for _, _, hops in rings]


def _ring(cluster: VirtualCluster, bucket: Bucket, codec_name: str) -> Tuple[int, int, int]:
    """How long a sum keeps the ring busy, how much later it is over, and what it takes of each worker's processor."""
    p = cluster.workers
    if p == 1:
        return 0, 0, 0
    links = [cluster.link(host) for host in (range(p) if cluster.hosts else range(1))]
    block = -(-bucket.size // p)
    transfer = max(link.message + codec(codec_name).nbytes(block) / link.goodput for link in links)
    coded = 2 * cluster.codecs.get(codec_name, 0.0) + cluster.worker.gather
    host = cluster.worker.message + coded * WIRE_DTYPE.itemsize * block / 1e6
    hops = 2 * (p - 1)
    work = host - cluster.worker.gather * WIRE_DTYPE.itemsize * block / 2e6  # what is whole is passed on, not added
    return ns(hops * max(transfer, host)), ns(hops * max(link.latency for link in links)), ns(hops * work)


class _Links:
    """All directions of all links, and the ways through them.

    A way is a list of numbers: out of the worker's host, perhaps out of its rack and into the server's, into the
    server's host; and back.
    """

    def __init__(self, cluster: VirtualCluster, buckets: Sequence[Bucket], codec_name: str) -> None:
        self._cluster, self._hosts, racks = cluster, len(cluster.host_names()), cluster.racks
        links = [cluster.link(host) for host in range(self._hosts)]
        self._uplinks = 0 if racks is None else -(-self._hosts // racks.hosts)
        across = min(cluster.workers, cluster.servers) > 1
        kinds = [(link.goodput * (1 - link.crossing * across), link.message) for link in links] * 2
        kinds += [(racks.goodput, 0.0)] * 2 * self._uplinks if racks else []
        self.latency = [ns(link.latency) for link in links] + [0] * (self._hosts + 2 * self._uplinks)
        nbytes = [codec(codec_name).nbytes(bucket.size) + WIRE_DTYPE.itemsize * HEADER for bucket in buckets]
        busy = {kind: [ns(kind[1] + n / kind[0]) for n in nbytes] for kind in set(kinds)}
        self.busy = [busy[kind] for kind in kinds]  # by link and bucket
        self.free = [0] * len(kinds)
        per_byte = cluster.links.processor / 1e6
        self._sent = [ns(per_byte * n) for n in nbytes]
        blocks = [codec(codec_name).nbytes(-(-bucket.size // cluster.workers)) for bucket in buckets]
        self._summed = [ns(per_byte * 2 * (cluster.workers - 1) * cluster.workers * n) for n in blocks]
        self._ways: Dict[Tuple[int, int], Tuple[List[int], int]] = {}

    def way(self, m: int, server_rank: int) -> Tuple[List[int], int]:
        """The links from a worker to a server and back, and how many of them lead there."""
        known = self._ways.get((m, server_rank))
        if known is None:
            server = self._cluster.host_of_server(server_rank)
            there = self._links(m, server)
            known = self._ways[m, server_rank] = there + self._links(server, m), len(there)
        return known

    def _links(self, source: int, target: int) -> List[int]:
        if source == target:
            return []
        between: List[int] = []
        per_rack = self._cluster.racks.hosts if self._cluster.racks else self._hosts
        if source // per_rack != target // per_rack:
            uplinks = 2 * self._hosts
            between = [uplinks + source // per_rack, uplinks + self._uplinks + target // per_rack]
        return [source, *between, self._hosts + target]

    def hops(self, way: Sequence[int], halfway: int, b: int, in_order: "_InOrder", server_rank: int) -> List[_Hop]:
        """A bucket's way, hop by hop."""
        made = []
        for at, link in enumerate(way, 1):
            then = HANDLE if at == halfway else ARRIVED if at == len(way) else PASS
            at_once = in_order.threads[server_rank] if then == HANDLE else then == PASS and in_order.links[way[at]]
            made.append(_Hop(link, self.busy[link][b], self.latency[link], then, at_once))
        return made

    def no_faster(self, before: int, link: int, bs: Sequence[int]) -> bool:
        """Whether a link takes as long for each of these buckets as the one before it, or longer."""
        slow, fast = self.busy[link], self.busy[before]
        return slow is fast or all(slow[b] >= fast[b] for b in bs)

    def loads(self, buckets: Sequence[Bucket], asked: Sequence[int], num_workers: int) -> Dict[str, int]:
        """How long the busiest link of each kind is at work, where each worker asks a bucket's server so often."""
        of_server: Dict[int, List[int]] = collections.defaultdict(list)
        for b, bucket in enumerate(buckets):
            of_server[bucket.server_rank].append(b)
        work = [0] * len(self.free)
        for server_rank, bs in of_server.items():
            times = {id(busy): sum(busy[b] * asked[b] for b in bs) for busy in self.busy}
            for m in range(num_workers):
                for link in self.way(m, server_rank)[0]:
                    work[link] += times[id(self.busy[link])]
        serving = {self._cluster.host_of_server(server_rank) for server_rank in of_server}
        loads: Dict[str, int] = {}
        for link, time in enumerate(work):
            kind = ("uplink" if link >= 2 * self._hosts else
                    "server's link" if link % self._hosts in serving else "worker's link")
            loads[kind] = max(loads.get(kind, 0), time)
        return loads

    def processors(self, asked: Sequence[int], sums: Sequence[int], server_ranks: Sequence[int],
                   num_workers: int) -> int:
        """What the processors of all hosts take to send and to receive, for so many questions and sums of a bucket."""
        away = [num_workers - (self._cluster.host_of_server(rank) < num_workers) for rank in server_ranks]
        return sum(2 * questions * there * sent + count * summed for questions, there, sent, count, summed
                   in zip(asked, away, self._sent, sums, self._summed))

    def last(self) -> int:
        """When the last link is free."""
        return max(self.free)


class _InOrder:
    """Which queues get everything from one place, where one thing leaves after another.

    links : by number: messages come from one worker's thread, or by one other link
    threads : by server: messages come by one link, and all of a message is there when that link has passed it on
    answers : by server: nothing else leaves by the same link, and no worker is on the same host
    inboxes : that is so for all servers, and their answers come straight to their workers' links

    None does where time goes on in steps, since what is carried out early would be seen too early.
    """

    def __init__(self, links: _Links, costs: _Costs, servers: Sequence[int], workers: Sequence[int],
                 stepwise: bool) -> None:
        sources: Dict[int, Set[Tuple[str, int]]] = collections.defaultdict(set)  # by link
        doors: Dict[int, Set[Tuple[str, int]]] = collections.defaultdict(set)    # by server
        late: Set[int] = set()                                                   # servers that wait for the last byte
        ways = []
        for rank in set(servers):
            bs = [b for b, server in enumerate(servers) if server == rank]
            for m in workers:
                way, halfway = links.way(m, rank)
                ways.append((way, halfway))
                before = [("worker", m), *(("link", link) for link in way)]
                before[halfway] = "server", rank
                for link, source in zip(way, before):
                    sources[link].add(source)
                doors[rank].add(("link", way[halfway - 1]) if halfway else ("worker", m))
                if not all(links.no_faster(*pair, bs) for pair in zip(way[:halfway], way[1:halfway])):
                    late.add(rank)
        busy = {link for link in sources if min(links.busy[link]) > 0}  # one message at a time, so in order
        serial = costs.message > 0
        at_work = {rank for rank in doors if all(costs.receive[b] + costs.update[b] > 0 for b, server
                                                 in enumerate(servers) if server == rank)}

        def in_order(source: Tuple[str, int]) -> bool:
            kind, number = source
            return number in busy if kind == "link" else number in at_work if kind == "server" else serial

        single = {link for link, its in sources.items() if len(its) == 1 and in_order(*its)} if not stepwise else set()
        self.links = [link in single for link in range(len(links.free))]
        self.threads = {rank: not stepwise and rank not in late and len(its) == 1 and min(its)[0] == "link"
                        and in_order(*its) for rank, its in doors.items()}
        self.answers = {rank: any(("server", rank) in sources[link] for link in single)
                        and all(kind == "link" for kind, _ in its) for rank, its in doors.items()}
        self.inboxes = all(self.answers.values()) and all(len(way) - halfway == 2 for way, halfway in ways)


class _PassTimes:
    """When the gradients of an iteration appear."""

    def __init__(self, cluster: VirtualCluster, buckets: Sequence[Bucket], parameters: Sequence[Parameter]) -> None:
        self._compute, self._seed, self._workers = cluster.compute, cluster.seed, cluster.workers
        self._slowness = [1 / cluster.compute.speeds.get(m, 1.0) for m in range(cluster.workers)]
        forward, backward = self._by_layer(parameters)
        layer = {parameter.name: number for number, parameter in enumerate(parameters)}
        reads: List[List[int]] = [[] for _ in parameters]  # buckets, by layer
        self._backward = []  # by bucket: from the beginning of the backward pass to its last gradient
        for b, bucket in enumerate(buckets):
            layers = [layer[segment.parameter.name] for segment in bucket.segments]
            self._backward.append(sum(backward[min(layers):]))
            for number in layers:
                reads[number].append(b)
        groups: List[List[int]] = []
        for b, seconds in enumerate(self._backward):
            if not b or seconds != self._backward[b - 1]:
                groups.append([])
            groups[-1].append(b)
        self.together = sorted(groups, key=lambda group: self._backward[group[0]])  # their gradients appear together
        self._forward: List[Tuple[List[int], float]] = []  # neighbouring layers that read the same buckets are one
        for bs, seconds in zip(reads, forward):
            if self._forward and self._forward[-1][0] == bs:
                bs, seconds = bs, seconds + self._forward.pop()[1]
            self._forward.append((bs, seconds))
        self._whole = sum(backward)

    def mean(self, of_slowest: bool) -> float:
        """Nanoseconds of both passes on average: of the slowest worker, or of all, each as often as it is through."""
        slowness = max(self._slowness) if of_slowest else self._workers / sum(1 / slow for slow in self._slowness)
        draws = self._compute.draws
        pause = ns(draws.values[1]) / draws.values[0] if draws.kind == "pauses" else 0
        return slowness * (sum(seconds for _, seconds in self._forward) + self._whole) + pause

    def _by_layer(self, parameters: Sequence[Parameter]) -> Tuple[List[float], List[float]]:
        """Nanoseconds, forward and backward."""
        compute, names = self._compute, [parameter.name for parameter in parameters]
        if compute.layers:
            for label in compute.layers:
                if label not in names:
                    raise unknown("parameter in compute.layers", label, names)
            pairs = [compute.layers.get(label, (0.0, 0.0)) for label in names]
            return [NS * forward for forward, _ in pairs], [NS * backward for _, backward in pairs]
        whole = sum(parameter.size for parameter in parameters)
        shares = [NS * compute.iteration * parameter.size / whole for parameter in parameters]
        return [compute.forward * share for share in shares], [(1 - compute.forward) * share for share in shares]

    def times(self, m: int, t: int, free: int, weights: Sequence[int]) -> Tuple[int, int, List[int], int]:
        """Of a worker that is `free` then: when the forward pass begins, when the backward pass does, when each
        bucket's gradients are there, and when both passes are over.
        """
        factor, pause = self._draws(t)[m]
        factor, time = factor * self._slowness[m], free
        began = max([time, *(weights[b] for b in self._forward[0][0])])
        for bs, seconds in self._forward:
            for b in bs:
                if weights[b] > time:
                    time = weights[b]
            time += int(seconds * factor)
        time += pause
        grads = [time + int(seconds * factor) for seconds in self._backward]
        return began, time, grads, time + int(self._whole * factor)

    @functools.lru_cache(maxsize=256)  # noqa: B019  as long as a run
    def _draws(self, t: int) -> List[Tuple[float, int]]:
        """Factor and pause of every worker in iteration `t`."""
        kind, values = self._compute.draws.kind, self._compute.draws.values
        random = np.random.RandomState([self._seed, t])
        ones, workers = [(1.0, 0)] * self._workers, self._workers
        if kind == "lognormal":
            sigma = values[0]
            return [(factor, 0) for factor in np.exp(sigma * random.normal(size=workers) - sigma ** 2 / 2).tolist()]
        if kind == "pareto":
            alpha = values[0]
            return [(factor, 0) for factor in ((alpha - 1) / alpha * (1 + random.pareto(alpha, workers))).tolist()]
        if kind == "pauses":
            every, seconds = int(values[0]), values[1]
            return [(1.0, ns(seconds) * ((t + m * every // workers) % every == 0)) for m in range(workers)]
        return ones
