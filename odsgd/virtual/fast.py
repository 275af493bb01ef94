"""The same times sooner, for a job in which nobody looks between two meetings.

Most of what happens need not wait for its turn among the events. Each shortcut says why it changes no time; a test
compares all of them with the exact simulation, to the nanosecond.

- An event that has only one possible place in the order of its queue is carried out when it is known (`_Feeders`).
- A worker's link that has nothing but answers is worked out when an answer is due (`_through`).
- The answers of a round, or of a sum, are one event for all workers (`_all_due`).
- Until the next answer can be due, a worker's gradients are carried out one after another (`_next_gradients`).
- Events far ahead are not sorted yet (`_Stretches`).

An exchange with servers on hosts of their own is then one event in a synchronous job, at the server's link.
"""
import collections
import heapq
import math
from typing import Any, Dict, List, Sequence, Set, Tuple

from odsgd.virtual.costs import Costs, Links
from odsgd.virtual.description import VirtualCluster
from odsgd.virtual.exact import ANSWER, ARRIVED, GRADIENTS, HANDLE, PASS, Agenda, Event, Simulation, WorkerTimes

MOST_BUCKETS = 2 ** 20
"""More than numbers for buckets (`Keys.LIMIT`)."""

THERE, DUE, ALL_DUE = range(3)
"""What an event ARRIVED knows: an answer is there; it is once the worker's link is through; the answers of all are."""


class FastSimulation(Simulation):
    """The simulation with its shortcuts. What is carried out early would be seen too early by `advance`."""

    def __init__(self, cluster: VirtualCluster, *job: Any) -> None:
        super().__init__(cluster, *job)
        self._agenda: Agenda = _Stretches(self._stretch())
        ranks = [bucket.server_rank for bucket in self.buckets]
        feeders = _Feeders(self.links, self.costs, ranks, self.num_workers)
        self._link_at_once = [feeders.in_order(("link", link)) for link in range(len(self.links.free))]
        pushes = {rank: feeders.pushes_in_order(rank) for rank in set(ranks)}
        answers = {rank: feeders.answers_in_order(rank) for rank in set(ranks)}
        self._push_at_once = [pushes[rank] for rank in ranks]  # by bucket
        self._answer_at_once = [answers[rank] for rank in ranks]
        self._has_inboxes = all(map(feeders.straight_to_workers, set(ranks)))
        self._inboxes: List[List[int]] = [[] for _ in self._workers]  # heaps: when at the link, and bucket, as one
        self._passed: List[Dict[int, int]] = [{} for _ in self._workers]  # bucket -> when its answer passed the link
        self._together = self.costs.message > 0 and (self._ring or (self.synchronous and self._has_inboxes))
        self._ahead = self._lookahead()
        self._dues: List[int] = []  # a heap: when answers of rounds and sums are due

    def advance(self) -> bool:
        raise NotImplementedError("a fast simulation goes from meeting to meeting (`met`); `Simulation` goes in steps")

    def _stretch(self) -> float:
        """Nanoseconds in which about a dozen events happen, by the pace of the servers' links or of the passes."""
        compute = self.passes.mean(self.synchronous) / (self.num_workers * len(self.buckets))
        server = self.links.busy[self.cluster.host_of_server(0)] if self.cluster.servers else [0]
        return 4 * max(compute, sum(server) / len(server) / max(self.cluster.servers, 1))

    # --- at once ----------------------------------------------------------------------------------------------------

    def _to_queue(self, time: int, what: int, m: int, b: int, hop: int = 0, end: int = 0) -> None:
        """What has one feeder comes in the order in which it leaves there, so the next one is this one: at a link, at a
        server's thread, and behind that thread, where it is the one feeder of its host's link.
        """
        if what == PASS and self._link_at_once[self._workers[m].lanes[b].way[hop]]:
            self._pass(time, m, b, hop, end)
        elif what == HANDLE and self._push_at_once[b]:
            self._handle(time, m, b, 0, 0)
        elif what == ANSWER and self._answer_at_once[b]:
            self._answer(time, m, b, 0, 0)
        else:
            self._agenda.push((time, what, m, b, hop, end))

    # --- answers ----------------------------------------------------------------------------------------------------

    def _post(self, workers: Sequence[int], b: int, times: Sequence[int], end: int) -> None:
        """An answer is due when its last byte can be there; where its worker's link is, is worked out only then."""
        if not self._has_inboxes:
            return super()._post(workers, b, times, end)
        inboxes, push = self._inboxes, heapq.heappush
        for m, there in zip(workers, times):
            push(inboxes[m], there * MOST_BUCKETS + b)
        self._will_be_due(end, workers, b, DUE, 0)

    def _to_all(self, time: int, b: int, update: int) -> None:
        self._will_be_due(time, range(self.num_workers), b, THERE, update)

    def _will_be_due(self, time: int, workers: Sequence[int], b: int, known: int, update: int) -> None:
        """Answers are due at one time: one event, if they go to all workers."""
        if self._together:
            heapq.heappush(self._dues, time)
            self._agenda.push((time, ARRIVED, 0, b, ALL_DUE, update))
        else:
            for m in workers:
                self._agenda.push((time, ARRIVED, m, b, known, update))

    def _arrived(self, time: int, m: int, b: int, known: int, update: int) -> None:
        if known == ALL_DUE:
            self._all_due(time, b, update)
        else:
            self._due(time, m, b, known, update)

    def _all_due(self, time: int, b: int, update: int) -> None:
        """What is due at all workers at one time is carried out by worker, then by bucket, as single events would be.

        Where other events have the same time, they become single events.
        """
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
        if known == DUE:
            through = self._through(m, b)
            if through > time:
                if self._together:
                    heapq.heappush(self._dues, through)
                self._agenda.push((through, ARRIVED, m, b, THERE, update))
                return
        worker = self._workers[m]
        self._answered(worker, worker.lanes[b], time, update)

    def _through(self, m: int, b: int) -> int:
        """When an answer has passed its worker's link, after all that came to the link before.

        All that came before is in the inbox: an answer is due at its last byte, which is no earlier than its first.
        """
        passed = self._passed[m]
        if b not in passed:
            link = self._workers[m].lanes[b].way[-1]
            inbox, busy, free = self._inboxes[m], self.links.busy[link], self.links.free[link]
            lanes = self._workers[m].lanes
            first = -1
            while first != b:
                there, first = divmod(heapq.heappop(inbox), MOST_BUCKETS)
                free = passed[first] = (there if there > free else free) + busy[lanes[first].back]
            self.links.free[link] = free
        return passed.pop(b)

    # --- gradients --------------------------------------------------------------------------------------------------

    def _lookahead(self) -> int:
        """Nanoseconds within which nothing becomes due that is not among `_dues`; 0: that cannot be said.

        No answer of a round can be due before its server's link has carried all answers, and no sum before the ring
        has carried it.
        """
        if not self._together:
            return 0
        if self._ring:
            return min(busy + delay for busy, delay in self.costs.ring)
        ways = [self.links.way(0, bucket.server_rank) for bucket in self.buckets]
        return min(self.costs.update[b] + self.num_workers * self.links.busy[way[there]][b + len(self.buckets)]
                   for b, (way, there) in enumerate(ways))

    def _horizon(self) -> int:
        """Nothing that is due, or becomes due, is due before."""
        dues, ahead = self._dues, self._now + self._ahead
        while dues and dues[0] < self._now:
            heapq.heappop(dues)
        return dues[0] if dues and dues[0] < ahead else ahead

    def _next_gradients(self, worker: WorkerTimes, group: int) -> None:
        """Gradients that come before an answer can be due meet nothing on their worker but each other."""
        groups, grads, horizon = self.passes.together, worker.grads, self._horizon()
        for at in range(group, len(groups)):
            time = grads[groups[at][0]]
            if time > horizon:
                self._agenda.push((time, GRADIENTS, worker.rank, groups[at][0], at, 0))
                return
            for b in groups[at]:
                self._begin_lane(worker, b, time)


class _Stretches(Agenda):
    """Events of the current stretch of time are in the heap, events of later stretches are unsorted.

    A heap of all would cost most of the time: every worker has an event for each of its buckets.
    """

    def __init__(self, stretch: float) -> None:
        super().__init__()
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

    def earliest(self) -> float:
        now = self.now
        if now:
            return now[0][0]
        if not self._stretches:
            return math.inf
        self._at = heapq.heappop(self._stretches)
        now += self._later.pop(self._at)
        now.sort()
        return now[0][0]


_Station = Tuple[str, int]
"""`worker`, `link` or `server`, and its number."""


class _Feeders:
    """Which stations feed each station: every message goes from its worker by links to its server, and back by links.

    A station that is busy with one thing at a time lets them go one after another, at times that are known as soon as
    their beginnings are. So a queue that has one such feeder gets everything in the order in which it leaves there.
    """

    def __init__(self, links: Links, costs: Costs, ranks: Sequence[int], num_workers: int) -> None:
        self._links, self._costs, self._ranks = links, costs, ranks
        self._ways = {rank: [links.way(m, rank) for m in range(num_workers)] for rank in set(ranks)}
        self._of: Dict[_Station, Set[_Station]] = collections.defaultdict(set)
        for rank, ways in self._ways.items():
            for m, (way, there) in enumerate(ways):
                stations: List[_Station] = [("link", link) for link in way]
                stations[there:there] = [("server", rank)]
                for feeder, station in zip([("worker", m), *stations], stations):
                    self._of[station].add(feeder)

    def in_order(self, station: _Station) -> bool:
        """Whether there is one feeder, and nothing leaves it at the same time as anything else."""
        feeders = self._of.get(station, set())
        return len(feeders) == 1 and all(map(self._takes_time, feeders))

    def _takes_time(self, station: _Station) -> bool:
        kind, number = station
        if kind == "worker":
            return self._costs.message > 0
        if kind == "link":
            return min(self._links.busy[number]) > 0
        return all(self._costs.receive[b] + self._costs.update[b] > 0 for b in self._buckets(number))

    def _buckets(self, rank: int) -> List[int]:
        return [b for b, server in enumerate(self._ranks) if server == rank]

    def pushes_in_order(self, rank: int) -> bool:
        """Whether pushes come to a server's thread by one link, and with their last bytes in order, too.

        A link that is faster than the one before it may have passed on a small message before the last byte of a
        large one is there.
        """
        return self._by_links(rank) and self.in_order(("server", rank)) and all(
            self._no_faster(before, link, self._buckets(rank))
            for way, there in self._ways[rank] for before, link in zip(way[:there], way[1:there]))

    def _by_links(self, rank: int) -> bool:
        """Whether no worker is on a server's host."""
        return all(kind == "link" for kind, _ in self._of["server", rank])

    def _no_faster(self, before: int, link: int, bs: Sequence[int]) -> bool:
        slow, fast = self._links.busy[link], self._links.busy[before]
        headers = 2 * len(self._ranks)
        return slow is fast or all(slow[n] >= fast[n] for b in bs for n in (b, b + headers))

    def answers_in_order(self, rank: int) -> bool:
        """Whether nothing but a server's answers leaves by its link, no answer stays on its host, and none is at the
        next link at once, where it could meet another server's answer that came at the same time.
        """
        if not self._by_links(rank):
            return False
        way, there = self._ways[rank][0]
        alone = self._links.latency[way[there]] > 0 or len(self._ways) == 1
        return alone and self.in_order(("link", way[there]))

    def straight_to_workers(self, rank: int) -> bool:
        """Whether that is so, and the link after the server's is each worker's own."""
        return self.answers_in_order(rank) and all(len(way) - there == 2 for way, there in self._ways[rank])
