"""A job on a virtual cluster with times only: no arrays, no gradients, thousands of workers.

    pace = simulate(of({"workers": 8, "links": {"goodput": "10gbit"}}), "odsgd", layers({"dense": 25_000_000}))
    pace.iteration, pace.staleness, pace.loads
"""
import collections
import math
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Type

from kvstore import methods
from kvstore.errors import ConfigError
from kvstore.messages.buckets import Keys, Parameter, by_layer, in_fragments
from kvstore.methods import fit
from kvstore.methods.common import Options
from kvstore.methods.contract import Method
from kvstore.transports.rounds import on_ring
from kvstore.transports.sizing import on_servers
from odsgd.virtual.costs import NS, ns
from odsgd.virtual.description import VirtualCluster
from odsgd.virtual.programs import Programs
from odsgd.virtual.simulation import Simulation

ITERATIONS, WARM_UP = 16, 4

CLOSE = 1.05
"""Factors on the time of processors that differ by no more are the same."""
BUSIEST = 0.99
"""The largest share of the hosts' cores at work; where more is asked of them, they are the bound themselves."""


class Pace(NamedTuple):
    """How long the iterations of a job took.

    iteration : seconds of one iteration of a worker, the mean over workers and the iterations that count
    staleness : of an asynchronous job: tau -> pushes
    loads : seconds per iteration that the busiest resource of each kind is at work (`times.loads`); no iteration
        takes less than the largest of them on average
    """

    iteration: float
    staleness: Dict[int, int]
    loads: Dict[str, float]


def layers(sizes: Mapping[str, int]) -> List[Parameter]:
    """Parameters by name, each with its number of floats, in the order of the layers."""
    return [Parameter(number, name, (size,)) for number, (name, size) in enumerate(sizes.items())]


def simulate(cluster: VirtualCluster, store: str, parameters: Sequence[Parameter],
             options: Optional[Mapping[str, Any]] = None, iterations: int = ITERATIONS, warm_up: int = WARM_UP,
             transport: Optional[str] = None) -> Pace:
    """The pace of a store on a cluster over at least this number of iterations; the first `warm_up` do not count.

    `options`: of the store. Its own `warmup`, whose iterations are SSGD's, is 0 if it is not given. Of a store that
    exchanges every T iterations a multiple of T counts. Where hosts share `cores`, processors take longer (`_shared`).
    """
    method = methods.find(store)
    given = {"warmup": 0, **(options or {})} if "warmup" in method.option_names() else dict(options or {})
    checked = fit.options_of(method, given)
    every = method.intervals(checked)
    period = every[0] * every[1] // math.gcd(*every)
    counted = max(1, -(-(iterations - warm_up) // period)) * period
    averaged = method.traits(checked, cluster.workers).collected

    def found(slower: float) -> Pace:
        job = simulation(cluster, method, checked, parameters, transport, slower=slower)
        bounds = loads(job, range(warm_up + 1, warm_up + period + 1))
        iteration = iteration_s(job, warm_up + counted, warm_up, period)
        orders = job.order.values()
        taus = (staleness_of_rounds(orders, every[0], job.quorum, cluster.workers, warm_up) if job.quorum else
                staleness(orders, every, averaged, warm_up))
        return Pace(iteration, taus, bounds)

    return found(1.0) if cluster.cores is None else _shared(found, cluster.cores)


def _shared(found: Callable[[float], Pace], cores: int) -> Pace:
    """The pace where all hosts share this number of cores; `found`: with processors that are slower by a factor.

    With a share rho of the cores at work, work takes 1 / (1 - rho^cores) times as long, as in a queue before as many
    servers as there are cores (M/M/c, approximately). That factor decides how long an iteration is, which decides rho.
    Bisection finds the factor where both agree.
    """
    alone = found(1.0)
    busy = alone.loads.get("shared cores", 0.0)

    def longer(pace: Pace) -> float:
        return 1 / (1 - min(busy / max(pace.iteration, busy), BUSIEST) ** cores) if busy else 1.0

    low, high, pace = 1.0, longer(alone), alone
    if high > CLOSE:
        while high > CLOSE * low:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if longer(found(middle)) > middle else (low, middle)
        pace = found(low)
    return Pace(max(pace.iteration, busy), pace.staleness, alone.loads)


def simulation(cluster: VirtualCluster, method: Type[Method], options: Options, parameters: Sequence[Parameter],
               transport: Optional[str] = None, slower: float = 1.0) -> Simulation:
    """The job before its first iteration. `transport`: `server`, `ring` or `sharded`; None: the method's first choice.

    `slower`: a factor on all that processors do, which comes too late to change the buckets.
    """
    options = method.fitted(options, len(parameters))
    made, kind = method(options, cluster.workers), fit.transport_of(method, transport)
    fit.check(method, options, kind)
    layers, traffic = in_fragments(by_layer(parameters), method.fragments(options)), made.traffic(whole=False)
    buckets = (on_servers(layers, traffic, Keys(cluster.servers), cluster.workers, cluster.round_pace)
               if kind == "server" else on_ring(layers, traffic, Keys(1), cluster.workers))
    return Simulation(cluster, method, options, buckets, layers, kind, traffic, slower)


def iteration_s(simulation: Simulation, iterations: int, warm_up: int = 0, period: int = 1) -> float:
    """Seconds of an iteration, from a run of so many by each worker; if nobody waits, all go on until the last is done.

    Of each worker's a multiple of `period` counts, in an asynchronous job only while all are at work and warm.
    """
    over: List[List[float]] = [[0.0] for _ in range(simulation.num_workers)]
    running = simulation.num_workers

    def next_one(m: int) -> None:
        nonlocal running
        over[m].append(simulation.ready(m) / NS)
        running -= len(over[m]) == iterations + 1
        if len(over[m]) > iterations:
            _rate(over[m][-1 - iterations:], iterations)  # raises if time stands still: this would never end
        if running and not simulation.synchronous:
            simulation.begin(m, len(over[m]) + 1)
            simulation.rest(m)

    simulation.over = next_one
    for m in range(simulation.num_workers):
        for t in range(1, (iterations if simulation.synchronous else 2) + 1):
            simulation.begin(m, t)
        simulation.rest(m)
    simulation.met()
    warm, end = (max(times[count] for times in over) for count in (warm_up, iterations))
    rates = []
    for times in over:
        together = [time for time in times if warm <= time <= end]
        own = simulation.synchronous or len(together) <= period
        rates.append(_rate(times[warm_up:iterations + 1] if own else together, period))
    return simulation.num_workers / sum(rates)


def _rate(over: Sequence[float], period: int) -> float:
    """Iterations per second, by when iterations were over, of a multiple of `period`; ConfigError: they take none."""
    count = (len(over) - 1) // period * period
    if over[count] == over[0]:
        raise ConfigError("nothing that a worker does takes any time on this cluster; take a `compute.iteration` above "
                          "0")
    return count / (over[count] - over[0])


def staleness(orders: Iterable[Sequence[int]], every: Tuple[int, int], averaged: int, warm_up: int) -> Dict[int, int]:
    """Updates between a worker's last fetch and its push: tau -> pushes, over all buckets.

    orders : the workers whose questions reached each bucket's rule, one after another
    every : iterations between pushes, between fetches
    averaged : pushes that make one update
    warm_up : iterations of each worker that do not count, nor does what follows the first worker's last question
    """
    period = every[0] * every[1]
    asks = [t for t in range(1, period + 1) if t % every[0] == 0 or t % every[1] == 0]  # iterations with a question
    taus: Dict[int, int] = collections.Counter()
    for order in orders:
        seen: Dict[int, int] = collections.defaultdict(int)
        pushed = 0
        for m, periods, place in _questions(order, len(asks)):
            t = periods * period + asks[place]
            if t % every[0] == 0:
                if t > warm_up:
                    taus[pushed // averaged - seen[m]] += 1
                pushed += 1
            if t % every[1] == 0:
                seen[m] = pushed // averaged
    return dict(sorted(taus.items()))


def staleness_of_rounds(orders: Iterable[Sequence[int]], every: int, quorum: int, workers: int, warm_up: int
                        ) -> Dict[int, int]:
    """The same where servers have rounds (`kvstore.methods.quorum`): of a worker's questions each second one fetches,
    and ends its round if that has its quorum. A round of all workers ends at once.

    every : iterations between pushes
    """
    taus: Dict[int, int] = collections.Counter()
    for order in orders:
        seen: Dict[int, int] = collections.defaultdict(int)
        version, members = 0, set()
        for m, turn, fetches in _questions(order, 2):
            if not fetches:
                if (turn + 1) * every > warm_up:
                    taus[version - seen[m]] += 1
                members.add(m)
            if len(members) == workers or (fetches and m in members and len(members) >= quorum):
                version, members = version + 1, set()
            if fetches:
                seen[m] = version
    return dict(sorted(taus.items()))


def _questions(order: Sequence[int], number: int) -> Iterator[Tuple[int, int, int]]:
    """Worker, period and place of each question, where a period has this `number`; up to a worker's last one."""
    of_all, asked = collections.Counter(order), collections.Counter()  # type: Dict[int, int], Dict[int, int]
    for m in order:
        yield (m, *divmod(asked[m], number))
        asked[m] += 1
        if asked[m] == of_all[m]:
            return


def loads(job: Simulation, iterations: Sequence[int]) -> Dict[str, float]:
    """Seconds per iteration, the mean over these iterations, of a job that has not begun."""
    costs, by_programs = job.costs, collections.defaultdict(list)  # workers
    for m, programs in enumerate(job.programs):
        by_programs[programs].append(m)
    alike, each = list(by_programs.values()), [_counts(programs, iterations) for programs in by_programs]
    asked = [[count["exchange"] + count["fetch"] for count in counts] for counts in each]
    sums = [count["sum"] for count in each[0]]  # on a ring all are alike
    server = [0] * max(job.cluster.servers, 1)
    for ranks, questions in zip(alike, asked):
        for b, bucket in enumerate(job.buckets):
            answers = questions[b] if job.synchronous else questions[b] * len(ranks)
            server[bucket.server_rank] += questions[b] * len(ranks) * costs.receive[b] + answers * costs.update[b]
    arrays = [sum(len(iterations) * (costs.gather[b] + costs.scatter[b]) + costs.step[b] * count["step"]
                  + costs.on_workers[b] * count["update"] for b, count in enumerate(counts)) for counts in each]
    messages = [2 * costs.message * (sum(questions) + sum(sums)) for questions in asked]
    busy = {"worker's processor": max(arrays + messages), "server's thread": max(server),
            "ring": sum(costs.ring[b][0] * count for b, count in enumerate(sums)), **_links(job, alike, each)}
    if job.cluster.cores:
        others = sum(costs.hops[b] * count for b, count in enumerate(sums)) + len(iterations) * ns(
            job.cluster.compute.processor)
        workers = sum(len(ranks) * (own + sends + others) for ranks, own, sends in zip(alike, arrays, messages))
        sending = sum(_sending(job, ranks, questions, sums) for ranks, questions in zip(alike, asked))
        busy["shared cores"] = (workers + sum(server) + sending) // job.cluster.cores
    found = {what: time / len(iterations) for what, time in busy.items() if time}
    return {"passes": job.passes.mean(job.synchronous) / NS, **{what: time / NS for what, time in found.items()}}


def _counts(programs: Programs, iterations: Sequence[int]) -> List[Dict[str, int]]:
    """How often a worker carries out each kind of op, by bucket; `update`: sums that U follows."""
    programs.of(1)
    return [collections.Counter(what for ops in of_bucket for op in ops for what in [op.what] + ["update"] * op.update)
            for of_bucket in zip(*map(programs.of, iterations))]


def _links(job: Simulation, alike: Sequence[Sequence[int]], each: Sequence[Sequence[Dict[str, int]]]) -> Dict[str, int]:
    """How long the busiest link of each kind is at work, by what workers that are alike do how often."""
    links = job.links
    of_server: Dict[int, List[int]] = collections.defaultdict(list)
    for b, bucket in enumerate(job.buckets):
        of_server[bucket.server_rank].append(b)
    work = [0] * len(links.free)
    for server_rank, bs in of_server.items():
        for ranks, counts in zip(alike, each):
            times = {id(busy): [sum(busy[b + more[back]] * counts[b][what] for b in bs
                                    for what, more in job.sizes.items()) for back in (False, True)]
                     for busy in links.busy}
            for m in ranks:
                way, there = links.way(m, server_rank)
                for at, link in enumerate(way):
                    work[link] += times[id(links.busy[link])][at >= there]
    serving = {job.cluster.host_of_server(server_rank) for server_rank in of_server}
    busiest: Dict[str, int] = {}
    for link, time in enumerate(work):
        kind = ("uplink" if link >= 2 * links.hosts else
                "server's link" if link % links.hosts in serving else "worker's link")
        busiest[kind] = max(busiest.get(kind, 0), time)
    return busiest


def _sending(job: Simulation, ranks: Sequence[int], asked: Sequence[int], sums: Sequence[int]) -> int:
    """How long all hosts' processors send and receive for these workers. `asked`, `sums`: how many, by bucket."""
    hosts = [job.cluster.host_of_server(bucket.server_rank) for bucket in job.buckets]
    away = [len(ranks) - (host in ranks) for host in hosts]
    return sum(2 * questions * there * sent + count * summed for questions, there, sent, count, summed
               in zip(asked, away, job.links.sent, sums, job.links.summed))
