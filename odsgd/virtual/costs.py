"""How long processors, servers, links and rings take for each bucket, and which links a message passes."""
from typing import Any, Dict, List, Optional, Sequence, Tuple

from kvstore.messages.buckets import WIRE_DTYPE, Bucket
from kvstore.messages.codecs import codec
from kvstore.messages.header import HEADER
from odsgd.virtual.description import VirtualCluster

NS = 1e9


def ns(seconds: float) -> int:
    """Whole nanoseconds."""
    return round(seconds * NS)


class Costs:
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


class Links:
    """All directions of all links, and the ways through them.

    A way is a list of numbers: out of the worker's host, perhaps out of its rack and into the server's, into the
    server's host; and back.

    busy : how long, by link and by what passes it: of bucket b a push (b), an answer (b + B), or a header (b + 2 B)
    """

    def __init__(self, cluster: VirtualCluster, buckets: Sequence[Bucket], codec_name: str,
                 back: Optional[str] = None) -> None:
        self._cluster, self.hosts, racks = cluster, len(cluster.host_names()), cluster.racks
        links = [cluster.link(host) for host in range(self.hosts)]
        self._uplinks = 0 if racks is None else -(-self.hosts // racks.hosts)
        across = min(cluster.workers, cluster.servers) > 1
        kinds = [(link.goodput * (1 - link.crossing * across), link.message) for link in links] * 2
        kinds += [(racks.goodput, 0.0)] * 2 * self._uplinks if racks else []
        self.latency = [ns(link.latency) for link in links] + [0] * (self.hosts + 2 * self._uplinks)
        nbytes = [codec(codec_name).nbytes(bucket.size) + WIRE_DTYPE.itemsize * HEADER for bucket in buckets]
        header = WIRE_DTYPE.itemsize * HEADER
        weights = [codec(back or codec_name).nbytes(bucket.size) + header for bucket in buckets]
        passes = [*nbytes, *weights, *[header] * len(buckets)]
        busy = {kind: [ns(kind[1] + n / kind[0]) for n in passes] for kind in set(kinds)}
        self.busy = [busy[kind] for kind in kinds]
        self.free = [0] * len(kinds)  # when each link is
        per_byte = cluster.links.processor / 1e6
        self.sent = [ns(per_byte * n) for n in nbytes]
        blocks = [codec(codec_name).nbytes(-(-bucket.size // cluster.workers)) for bucket in buckets]
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

    def last(self) -> int:
        """When the last link is free."""
        return max(self.free)
