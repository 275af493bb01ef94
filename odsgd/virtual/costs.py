"""How long processors, servers, links and rings take for each bucket, and which links a message passes."""
from typing import Any, Dict, List, Sequence, Tuple

from kvstore.messages.buckets import WIRE_DTYPE, Bucket
from kvstore.messages.codecs import codec
from kvstore.messages.header import HEADER
from kvstore.messages.seam import TrafficSettings
from odsgd.virtual.description import VirtualCluster

NS = 1e9


def ns(seconds: float) -> int:
    """Whole nanoseconds."""
    return round(seconds * NS)


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
    not_added = slower * cluster.worker.gather * WIRE_DTYPE.itemsize * block / 2e6  # what is whole is passed on
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
        self.sent = [ns(per_byte * n) for n in pushes]
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
