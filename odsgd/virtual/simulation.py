"""When everything of a job happens on a virtual cluster: events in virtual time, the earliest first.

Times depend on no value, so there are no arrays here. The simulation carries out the `programs` of all workers on the
links, server threads and processors of a `description`; `costs` says how long each of them takes. One
result decides values: in an asynchronous job, the order in which questions reach each bucket's rule (`order`).

The rules.

1. A layer's forward pass begins when the weights of its buckets are there and the layer before it is through. The
   backward pass goes from the last layer to the first.
2. Each bucket of a worker has a lane. The lane begins when the bucket's last gradient is there, and gathers it, carries
   out the bucket's program, and scatters the weights. No lane waits for another one.
3. A worker's processor has two threads, and each does one thing at a time: one gathers, steps and scatters, the other
   sends and receives messages.
4. A question leaves when the bucket's question before it is answered, and all questions that it is `behind`.
5. A message passes the links of its way one after another. A link is busy with one message at a time, in the order in
   which their first bytes come, and passes bytes on as they come in.
6. A server has one thread. It takes a push when the last byte is there. A synchronous round is updated and answered
   after the last worker's push, an asynchronous question by itself.
7. The answers of a round leave together and share the server's link, as TCP's connections do: each has its first byte
   at the next link after the one before, and all have their last byte there at the same time; so they share uplinks.
8. A sum on a ring begins when the last worker's part is there and the sum before it is through.
9. An event is carried out only when nothing earlier can come any more. A worker whose iteration is over may begin the
   next one, unless it rests or has come to meet the others, so time waits for it.
10. Times are whole nanoseconds, so that a job goes on after a pause as it would have without one. Events at equal times
    are ordered by what happens, worker and bucket, never by the order of calls.
"""
import collections
import heapq
import math
from typing import Any, Callable, Deque, Dict, List, Sequence, Tuple, Type

from kvstore.messages.buckets import Bucket, Parameter
from kvstore.messages.seam import TrafficSettings
from kvstore.methods.common import Options
from kvstore.methods.contract import Method
from kvstore.transports import sizing
from odsgd.virtual.costs import Costs, Links, PassTimes
from odsgd.virtual.description import VirtualCluster
from odsgd.virtual.programs import Op, Program, by_worker

START, GRADIENTS, PASS, HANDLE, ANSWER, SUM, ARRIVED = range(7)
"""Kinds of events; of events at equal times the smaller kind comes first."""

Event = Tuple[int, int, int, int, int, int]
"""When, what, worker, bucket, and two numbers, which are 0 but for

PASS      : which link of the way, and when the message's last byte is there
SUM       : the sum's number, and whether U follows
ARRIVED   : the second one is how long U takes on the worker
"""


class LaneTimes:
    """One bucket of one worker, and how far its program is. Questions are answered in the order of their numbers."""

    __slots__ = ("answered", "arrived", "b", "back", "before", "held", "next", "ops", "sent", "there", "time", "way")

    def __init__(self, b: int, way: Sequence[int], there: int) -> None:
        self.b = self.sent = self.back = b  # the bucket; what passes links there and back, as `Links.busy` has it
        self.way, self.there = way, there   # links to the server and back; how many of them lead there
        self.ops: Sequence[Op] = ()         # of the iteration; none: it has ended
        self.next = 0                       # the op that is next
        self.time = 0                       # when that can begin, by what is known
        self.answered = self.arrived = 0    # the last question that has an answer; when that came
        self.before: Dict[int, int] = {}    # of the last sums, several of which may be under way: when they were there
        self.held: List[Tuple[Op, int]] = []  # questions that may not leave yet, and since when


class WorkerTimes:
    """How far a worker is."""

    __slots__ = ("arrays_free", "begun", "behind", "busy", "computed", "done", "grads", "lanes", "messages_free",
                 "program", "rank", "resting", "weights")

    def __init__(self, rank: int, lanes: List[LaneTimes]) -> None:
        self.rank, self.lanes = rank, lanes
        self.begun: Deque[int] = collections.deque()  # iterations to carry out; the first one is under way
        self.program: Program = []            # of that one
        self.grads: List[int] = []            # by bucket: when its gradients are there
        self.busy = 0                         # lanes that have not ended
        self.done = 0                         # the last iteration that is over
        self.computed = 0                     # when the passes of the last iteration are over
        self.weights = [0] * len(lanes)       # by bucket: when its weights are there
        self.arrays_free = self.messages_free = 0  # when its two threads are free
        self.behind: Dict[Tuple[int, int], List[int]] = {}  # bucket and question -> buckets that wait for its answer
        self.resting = False


class Simulation:
    """A job's times on a virtual cluster.

    Parameters
    ----------
    cluster : its description
    method, options : of the job; the method's name decides what an update costs
    buckets : in the order in which they are iterated
    parameters : in the order of the layers
    transport : `server`, `ring` or `sharded`
    slower : a factor on the time of all processors
    """

    def __init__(self, cluster: VirtualCluster, method: Type[Method], options: Options, buckets: Sequence[Bucket],
                 parameters: Sequence[Parameter], transport: str, traffic: TrafficSettings, slower: float = 1.0
                 ) -> None:
        self.cluster, self.synchronous, self._ring = cluster, not method.asynchronous, transport != "server"
        self.buckets, self.num_workers, self.quorum = list(buckets), cluster.workers, traffic.quorum
        window = None  # no bound
        if not (self._ring or traffic.asynchronous):
            window = sizing.window_nbytes(sum(parameter.size for parameter in parameters), traffic.waits)
        self.programs = by_worker(method, options, cluster.workers, buckets, self._ring, window)
        self.costs = Costs(cluster, method, self.buckets, traffic.codec, transport, slower)
        self.links = Links(cluster, self.buckets, traffic, slower)
        B, rounds, own = len(self.buckets), self.quorum > 0, traffic.own_connections
        self.sizes = {"exchange": (0, 2 * B if rounds else B),  # what passes links there and back, of the first bucket
                      "fetch": (2 * B if own else 0, B if rounds or not own else 3 * B)}
        self.passes = PassTimes(cluster, self.buckets, parameters)
        self.order: Dict[int, Deque[int]] = {bucket.id: collections.deque() for bucket in buckets}
        self.over: Callable[[int], Any] = lambda m: None  # called for a worker whose iteration is over
        self.iterations = 0  # of all workers, that are over
        self._workers = [WorkerTimes(m, [LaneTimes(b, *self.links.way(m, bucket.server_rank))
                                         for b, bucket in enumerate(self.buckets)]) for m in range(self.num_workers)]
        self._open = set(range(self.num_workers))  # workers that may begin something that they have not told yet
        self._server_free = [0] * cluster.servers
        self._came: List[List[int]] = [[] for _ in buckets]  # by bucket: workers of this round, in the order they came
        self._ring_free = 0
        self._parts: Dict[Tuple[int, int], List[Tuple[int, int]]] = collections.defaultdict(list)  # when, and by whom
        self._events: List[Event] = []  # a heap
        self._now = 0
        self._until: float = 0  # events that may be carried out are earlier
        self._pauses = False    # whether to pause when a question has reached an asynchronous server's rule

    # --- what the workers tell and ask ------------------------------------------------------------------------------

    def begin(self, worker_rank: int, t: int) -> None:
        """A worker's iteration `t` follows what it has begun before."""
        worker = self._workers[worker_rank]
        rested, worker.resting = worker.resting, False
        self._open.discard(worker_rank)
        worker.begun.append(t)
        if len(worker.begun) == 1:
            ready = self.ready(worker_rank)
            if rested:
                ready = max(ready, self._now, *(lane.arrived for lane in worker.lanes))
            self._push((ready, START, worker_rank, 0, 0, 0))

    def rest(self, worker_rank: int) -> None:
        """A worker begins nothing new before every answer to it has arrived; perhaps it comes to meet the others."""
        self._workers[worker_rank].resting = True
        self._open.discard(worker_rank)

    def met(self) -> int:
        """All workers meet: everything in flight arrives, and all go on from the time that this is over."""
        self._until, self._pauses = math.inf, False
        self._carry_out()
        workers = self._workers
        assert all(worker.resting and not worker.begun for worker in workers), \
            "a worker waits for an answer that nobody gives"
        now = max(*map(self._last, workers), *self._server_free, self._ring_free, *self.links.free)
        for worker in workers:
            worker.resting, worker.computed, worker.weights = False, now, [now] * len(self.buckets)
        self._open = set(range(self.num_workers))
        return now

    def _last(self, worker: WorkerTimes) -> int:
        return max(worker.computed, *worker.weights, *(lane.arrived for lane in worker.lanes))

    def ready(self, worker_rank: int) -> int:
        """When the weights after a worker's last iteration are there."""
        return max(self._workers[worker_rank].weights, default=0)

    def done(self, worker_rank: int) -> int:
        """A worker's last iteration that is over."""
        return self._workers[worker_rank].done

    def advance(self) -> bool:
        """Carry out events until a question has reached its rule, or none can follow before a worker goes on.

        Returns whether anything happened.
        """
        self._until = min(map(self.ready, self._open)) if self._open else math.inf
        self._pauses = True
        return self._carry_out()

    def _carry_out(self) -> bool:
        """Carry out all events before `_until`, which events may bring nearer; returns whether there were any."""
        do = [self._start, self._begin_lane, self._pass, self._handle, self._answer, self._sum, self._answered]
        events, moved = self._events, False
        while events and events[0][0] < self._until:
            self._now, what, m, b, number, end = heapq.heappop(events)
            do[what](self._now, m, b, number, end)
            moved = True
        return moved

    def _push(self, event: Event) -> None:
        heapq.heappush(self._events, event)

    # --- an iteration of a worker -----------------------------------------------------------------------------------

    def _start(self, time: int, m: int, b: int, number: int, end: int) -> None:
        worker = self._workers[m]
        t = worker.begun[0]
        _, _, worker.grads, worker.computed = self.passes.times(m, t, worker.computed, worker.weights)
        worker.busy, worker.program = len(self.buckets), self.programs[m].of(t)
        for b, there in enumerate(worker.grads):
            self._push((there, GRADIENTS, m, b, 0, 0))

    def _begin_lane(self, time: int, m: int, b: int, number: int, end: int) -> None:
        """A bucket's gradients are there."""
        worker = self._workers[m]
        lane = worker.lanes[b]
        lane.ops, lane.next = worker.program[b], 0
        lane.time = self._arrays(worker, "gather", b, time, self.costs.gather[b])
        self._go_on(worker, lane)

    def _arrays(self, worker: WorkerTimes, stage: str, b: int, time: int, cost: int) -> int:
        """When a worker is through with work on a bucket's arrays that it can begin at `time`."""
        free = worker.arrays_free
        over = worker.arrays_free = (time if time > free else free) + cost
        return over

    def _message(self, worker: WorkerTimes, time: int) -> int:
        """When its other thread is through with a message."""
        free = worker.messages_free
        over = worker.messages_free = (time if time > free else free) + self.costs.message
        return over

    def _go_on(self, worker: WorkerTimes, lane: LaneTimes) -> None:
        """Carry out the lane's program up to an answer that is not known yet."""
        time, b = lane.time, lane.b
        for at, op in enumerate(lane.ops[lane.next:] if lane.next else lane.ops, lane.next):
            what, number, _, _ = op
            if what == "await":
                if number > lane.answered:
                    lane.next, lane.time = at, time
                    return
                arrived = lane.arrived if number == lane.answered else lane.before.get(number, 0)
                time = arrived if arrived > time else time
            elif what == "step":
                time = self._arrays(worker, "local update", b, time, self.costs.step[b])
            elif lane.held or not self._try_to_send(worker, lane, op, time):
                lane.held.append((op, time))
        lane.ops = ()
        worker.weights[b] = self._arrays(worker, "scatter", b, time, self.costs.scatter[b])
        worker.busy -= 1
        if not worker.busy:
            self._end(worker)

    def _end(self, worker: WorkerTimes) -> None:
        m, worker.done = worker.rank, worker.begun.popleft()
        if m == 0:  # often enough
            for programs in set(self.programs):
                programs.forget(min(other.done for other in self._workers))
        self.iterations += 1
        self.over(m)
        if worker.begun:
            self._push((self.ready(m), START, m, 0, 0, 0))
        elif not worker.resting:
            self._open.add(m)
            self._until = min(self._until, self.ready(m))

    def _try_to_send(self, worker: WorkerTimes, lane: LaneTimes, op: Op, time: int) -> bool:
        """Send a question, or a part of a sum, unless it waits for answers. Returns whether it left."""
        if op.what == "sum":
            self._send(worker, lane, time, op)
            return True
        if op.number > lane.answered + 1:
            return False
        if lane.arrived > time:
            time = lane.arrived
        for b, last in op.behind:
            other = worker.lanes[b]
            if last > other.answered:
                worker.behind.setdefault((b, last), []).append(lane.b)
                return False
            if last == other.answered and other.arrived > time:  # an earlier one was there before the next one left
                time = other.arrived
        self._send(worker, lane, time, op)
        return True

    def _send(self, worker: WorkerTimes, lane: LaneTimes, time: int, op: Op) -> None:
        """A worker's message can leave at `time`."""
        leaves = self._message(worker, time)
        lane.sent, lane.back = (lane.b + more for more in self.sizes.get(op.what, (0, 0)))
        if op.what == "sum":
            self._part(leaves, worker.rank, lane.b, op.number, op.update)
        else:  # without a way the server is on the worker's host
            self._push((leaves, PASS if lane.way else HANDLE, worker.rank, lane.b, 0, 0))

    def _answered(self, time: int, m: int, b: int, number: int, update: int) -> None:
        """A worker receives an answer, and on a ring U follows, which takes `update`; what waited for it goes on."""
        worker = self._workers[m]
        lane = worker.lanes[b]
        lane.answered += 1
        lane.arrived = self._message(worker, time)
        if update:
            lane.arrived = self._arrays(worker, "update", lane.b, lane.arrived, update)
        if self._ring:
            lane.before[lane.answered] = lane.arrived
            lane.before.pop(lane.answered - 16, None)
        if worker.behind:
            for b in worker.behind.pop((lane.b, lane.answered), ()):
                self._send_held(worker, worker.lanes[b])
        if lane.held:
            self._send_held(worker, lane)
        if lane.ops:
            self._go_on(worker, lane)

    def _send_held(self, worker: WorkerTimes, lane: LaneTimes) -> None:
        """Send the questions of a lane that may leave now."""
        while lane.held and self._try_to_send(worker, lane, *lane.held[0]):
            del lane.held[0]

    # --- links and servers ------------------------------------------------------------------------------------------

    def _pass(self, time: int, m: int, b: int, hop: int, end: int) -> None:
        """A message is at the hop-th link of its way, and its last byte will be there at `end`."""
        lane, links = self._workers[m].lanes[b], self.links
        link = lane.way[hop]
        free = links.free[link]
        begins = time if time > free else free
        passed = links.free[link] = begins + links.busy[link][lane.sent if hop < lane.there else lane.back]
        if passed > end:
            end = passed
        hop += 1
        if hop == lane.there:
            self._push((end, HANDLE, m, b, 0, 0))
        elif hop == len(lane.way):
            self._push((end, ARRIVED, m, b, 0, 0))
        else:
            self._push((begins + links.latency[link], PASS, m, b, hop, end + links.latency[link]))

    def _handle(self, time: int, m: int, b: int, number: int, end: int) -> None:
        """A push is at its server's thread, with its last byte."""
        server = self.buckets[b].server_rank
        free = self._server_free[server]
        over = self._server_free[server] = (time if time > free else free) + self.costs.receive[b]
        if self.synchronous:
            came = self._came[b]
            came.append(m)
            if len(came) < self.num_workers:
                return
        else:
            self.order[self.buckets[b].id].append(m)
            if self._pauses:
                self._until = 0
        over = self._server_free[server] = over + self.costs.update[b]
        self._push((over, ANSWER, m, b, 0, 0))

    def _answer(self, time: int, m: int, b: int, number: int, end: int) -> None:
        """An answer leaves for a worker, or the answers of a round leave for all workers."""
        workers = [m]
        if self.synchronous:
            workers, self._came[b] = self._came[b], []
        away = []
        for m in workers:
            if self._workers[m].lanes[b].way:
                away.append(m)
            else:
                self._answered(time, m, b, 0, 0)
        if away:
            self._share_link(time, away, b)

    def _share_link(self, time: int, workers: Sequence[int], b: int) -> None:
        """The answers to some workers share the server's link: they come to the link behind it one after the other, and
        their last bytes are there at one time, or later where they share an uplink that is slower.
        """
        lane, links = self._workers[workers[0]].lanes[b], self.links
        link = lane.way[lane.there]
        busy, there = links.busy[link][lane.back], max(time, links.free[link]) + links.latency[link]
        end = there + busy * len(workers)
        links.free[link] = end - links.latency[link]
        ends = [end] * len(workers) if self.cluster.racks is None else self._uplinks_shared(workers, b, there, end)
        for number, (m, last) in enumerate(zip(workers, ends)):
            self._push((there + number * busy, PASS, m, b, self._workers[m].lanes[b].there + 1, last))

    def _uplinks_shared(self, workers: Sequence[int], b: int, begins: int, end: int) -> List[int]:
        """When the last bytes of answers that share uplinks from `begins` on are through, no sooner than `end`."""
        lanes = [self._workers[m].lanes[b] for m in workers]
        uplinks = [lane.way[lane.there + 1:-1] for lane in lanes]
        sharing = collections.Counter(link for way in uplinks for link in way)
        return [max([end, *(begins + sharing[link] * self.links.busy[link][lane.back] for link in way)])
                for lane, way in zip(lanes, uplinks)]

    # --- sums -------------------------------------------------------------------------------------------------------

    def _part(self, time: int, m: int, b: int, number: int, update: int) -> None:
        """A worker's part of a sum is there then. The last one sets the ring in motion."""
        parts = self._parts[b, number]
        parts.append((time, m))
        if len(parts) == self.num_workers:
            del self._parts[b, number]
            last, m = max(parts)
            self._push((last, SUM, m, b, number, update))

    def _sum(self, time: int, m: int, b: int, number: int, update: int) -> None:
        """All parts of a sum are there."""
        busy, delay = self.costs.ring[b]
        over = self._ring_free = max(time, self._ring_free) + busy
        for m in range(self.num_workers):
            self._push((over + delay, ARRIVED, m, b, 0, update * self.costs.on_workers[b]))
