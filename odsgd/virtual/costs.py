"""How long each worker's passes take; what each bucket takes of processors, servers, links and rings; which links a
message passes.
"""
import functools
import math
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

from kvstore.errors import unknown
from kvstore.messages.buckets import WIRE_DTYPE, Bucket, Parameter
from kvstore.messages.codecs import codec
from kvstore.messages.header import HEADER
from kvstore.messages.seam import TrafficSettings
from odsgd.virtual.description import VirtualCluster

NS = 1e9


def ns(seconds: float) -> int:
    """Whole nanoseconds."""
    return round(seconds * NS)


class PassTimes:
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
        self._forward: List[Tuple[List[int], float]] = []  # neighbouring layers that read the same buckets are one
        for bs, seconds in zip(reads, forward):
            if self._forward and self._forward[-1][0] == bs:
                bs, seconds = bs, seconds + self._forward.pop()[1]
            self._forward.append((bs, seconds))
        self._whole = sum(backward)

    def mean(self, of_slowest: bool) -> float:
        """Nanoseconds of both passes on average: of the slowest worker, or over the iterations of all workers."""
        slowness = max(self._slowness) if of_slowest else self._workers / sum(1 / slow for slow in self._slowness)
        draws = self._compute.draws
        pause = ns(draws.values[1]) / draws.values[0] if draws.kind == "pauses" else 0
        passes = slowness * (sum(seconds for _, seconds in self._forward) + self._whole)
        every, away = self._compute.failures or (math.inf, 0.0)
        return passes * (1 + away / every) + pause

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
        """When worker `m`, free at `free`, begins the forward pass, and the backward pass; when each bucket's gradients
        are there; and when both passes are over. `weights`: when each bucket's weights are there.
        """
        factor, pause = self._draws(t)[m]
        factor, time = factor * self._slowness[m], free
        began = max([time, *(weights[b] for b in self._forward[0][0])])
        for bs, seconds in self._forward:
            for b in bs:
                if weights[b] > time:
                    time = weights[b]
            time += int(seconds * factor)
        time += pause + self.away(m, t)
        grads = [time + int(seconds * factor) for seconds in self._backward]
        return began, time, grads, time + int(self._whole * factor)

    def away(self, m: int, t: int) -> int:
        """For how many nanoseconds a worker that fails in iteration `t`, perhaps again and again, is away; else 0."""
        return 0 if self._compute.failures is None else self._failures(t)[m]

    @functools.lru_cache(maxsize=256)  # noqa: B019  as long as a run
    def _failures(self, t: int) -> List[int]:
        assert self._compute.failures is not None
        every, away = self._compute.failures
        random = np.random.RandomState([self._seed, t, 1])
        passes = sum(seconds for _, seconds in self._forward) + self._whole
        lasts = np.array(self._slowness) * passes / (NS * every)  # times until a failure, on average
        first = -np.log1p(-random.random_sample(self._workers))
        lengths = random.exponential(size=self._workers)
        again = random.poisson(np.clip(lasts - first, 0, 1e6))  # no more than can be drawn
        return [ns(away * length) * bool(fails) for length, fails in zip(lengths + random.gamma(again), first < lasts)]

    @functools.lru_cache(maxsize=256)  # noqa: B019  as long as a run
    def _draws(self, t: int) -> List[Tuple[float, int]]:
        """Factor and pause of every worker in iteration `t`."""
        kind, values, workers = self._compute.draws.kind, self._compute.draws.values, self._workers
        random = np.random.RandomState([self._seed, t])
        factors, pauses = np.ones(workers), [0] * workers
        if kind == "lognormal":
            sigma = values[0]
            factors = np.exp(sigma * random.normal(size=workers) - sigma ** 2 / 2)
        elif kind == "pareto":
            alpha = values[0]
            factors = (alpha - 1) / alpha * (1 + random.pareto(alpha, workers))
        elif kind == "pauses":
            every, seconds = int(values[0]), values[1]
            pauses = [ns(seconds) * ((t + m * every // workers) % every == 0) for m in range(workers)]
        return list(zip(factors.tolist(), pauses))


class Costs:
    """The time that processors take, in nanoseconds by bucket. `slower`: a factor on all of it."""

    def __init__(self, cluster: VirtualCluster, method: Any, buckets: Sequence[Bucket], codec_name: str,
                 transport: str, slower: float) -> None:
        def work(seconds: float) -> int:
            return ns(slower * seconds)

        megabytes = [WIRE_DTYPE.itemsize * bucket.size / 1e6 for bucket in buckets]
        worker, server = cluster.worker, cluster.server
        per_update = server.rules.get(method.name, server.update)
        coded = cluster.codecs.get(codec_name, 0.0) if transport == "server" else 0.0  # on a ring at every hop
        self.message = work(worker.message)
        own = worker.stores.get(method.name, 0.0)
        self.gather = [work((worker.gather + own + coded) * mb) for mb in megabytes]
        self.step = [work(worker.step * mb) for mb in megabytes]
        self.scatter = [work((worker.scatter + coded) * mb) for mb in megabytes]
        self.receive = [work(server.message + (server.receive + coded) * mb) for mb in megabytes]
        self.update = [work((per_update + 2 * coded) * mb) for mb in megabytes]  # the server decodes its answer, too
        share = cluster.workers if transport == "sharded" else 1
        self.on_workers = [work(worker.step * mb / share) for mb in megabytes]  # U
        rings = [_ring(cluster, bucket, codec_name, slower) for bucket in buckets]
        self.ring = [(busy, delay) for busy, delay, _ in rings]
        self.hops = [hops for _, _, hops in rings]


def _ring(cluster: VirtualCluster, bucket: Bucket, codec_name: str, slower: float) -> Tuple[int, int, int]:
    """How long a sum keeps the ring busy, how much later it is over, and what it takes of each worker's processor."""
    p = cluster.workers
    if p == 1:
        return 0, 0, 0
    links = [cluster.link(host) for host in (range(p) if cluster.hosts else range(1))]
    block = -(-bucket.size // p)
    nbytes = codec(codec_name).nbytes(block)
    transfer = max(link.message + nbytes / link.goodput for link in links)
    if cluster.racks and p > cluster.racks.hosts:  # in the order of the ranks one hop leaves each rack, and one enters
        transfer = max(transfer, nbytes / cluster.racks.goodput)
    coded = 2 * cluster.codecs.get(codec_name, 0.0) + cluster.worker.gather
    host = slower * (cluster.worker.message + coded * WIRE_DTYPE.itemsize * block / 1e6)
    hops, latency = 2 * (p - 1), slower * max(link.latency for link in links)
    not_added = slower * cluster.worker.gather * WIRE_DTYPE.itemsize * block / 2e6  # half of the hops only pass on
    return ns(hops * max(transfer, host)), ns(hops * latency), ns(hops * (host - not_added))


class Links:
    """All directions of all links, and the ways through them.

    A way is a list of numbers: out of the worker's host, perhaps out of its rack and into the server's, into the
    server's host; and back.

    busy : how long, by link and by what passes it: of bucket b a push (b), an answer (b + B), a header (b + 2 B), or
        whole floats (b + 3 B)
    slower : a factor on the latency, most of which processors take to wake up
    """

    def __init__(self, cluster: VirtualCluster, buckets: Sequence[Bucket], traffic: TrafficSettings,
                 slower: float) -> None:
        self._cluster, self.hosts, racks = cluster, len(cluster.host_names()), cluster.racks
        links = [cluster.link(host) for host in range(self.hosts)]
        self._uplinks = 0 if racks is None else -(-self.hosts // racks.hosts)
        across = min(cluster.workers, cluster.servers) > 1
        kinds = [(link.goodput * (1 - link.crossing * across), link.message) for link in links] * 2
        kinds += [(racks.goodput, 0.0)] * 2 * self._uplinks if racks else []
        self.latency = [ns(slower * link.latency) for link in links] + [0] * (self.hosts + 2 * self._uplinks)
        there, back, header = codec(traffic.codec), codec(traffic.codec_weights), WIRE_DTYPE.itemsize * HEADER
        pushes = [there.nbytes(bucket.size) + header for bucket in buckets]
        answers = [back.nbytes(bucket.size) + header for bucket in buckets]
        passes = [*pushes, *answers, *[header] * len(buckets),
                  *[WIRE_DTYPE.itemsize * bucket.size + header for bucket in buckets]]
        busy = {kind: [ns(kind[1] + n / kind[0]) for n in passes] for kind in set(kinds)}
        self.busy = [busy[kind] for kind in kinds]
        self.free = [0] * len(kinds)  # when each link is
        per_byte = cluster.links.processor / 1e6
        self.sent = [ns(per_byte * n) for n in pushes]  # what a push, or a sum, takes of all hosts' processors together
        blocks = [there.nbytes(-(-bucket.size // cluster.workers)) for bucket in buckets]
        self.summed = [ns(per_byte * 2 * (cluster.workers - 1) * cluster.workers * n) for n in blocks]
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
        per_rack = self._cluster.racks.hosts if self._cluster.racks else self.hosts
        if source // per_rack != target // per_rack:
            uplinks = 2 * self.hosts
            between = [uplinks + source // per_rack, uplinks + self._uplinks + target // per_rack]
        return [source, *between, self.hosts + target]
