"""How long the busiest resource of each kind is at work for an iteration."""
import collections
from typing import Dict, List, Sequence

from odsgd.virtual.costs import NS, ns
from odsgd.virtual.exact import Simulation


def loads(job: Simulation, iterations: Sequence[int]) -> Dict[str, float]:
    """Seconds per iteration, the mean over these iterations, of a job that has not begun."""
    job.programs.of(1)
    programs = [[op for t in iterations for op in job.programs.of(t)[b]] for b in range(len(job.buckets))]
    counts = [collections.Counter(op.what for op in ops) for ops in programs]
    asked, sums = [count["exchange"] + count["fetch"] for count in counts], [count["sum"] for count in counts]
    costs, num_workers = job.costs, job.num_workers
    server = [0] * max(job.cluster.servers, 1)
    for b, bucket in enumerate(job.buckets):
        answers = asked[b] if job.synchronous else asked[b] * num_workers
        server[bucket.server_rank] += asked[b] * num_workers * costs.receive[b] + answers * costs.update[b]
    arrays = sum(len(iterations) * (costs.gather[b] + costs.scatter[b]) + costs.step[b] * count["step"]
                 + costs.on_workers[b] * sum(op.update for op in programs[b]) for b, count in enumerate(counts))
    messages = 2 * costs.message * (sum(asked) + sum(sums))
    busy = {"worker's processor": max(arrays, messages), "server's thread": max(server),
            "ring": sum(costs.ring[b][0] * count for b, count in enumerate(sums)), **_links(job, asked)}
    if job.cluster.cores:
        on_the_ring = sum(costs.hops[b] * count for b, count in enumerate(sums))
        passes = len(iterations) * ns(job.cluster.compute.processor)
        workers = num_workers * (arrays + messages + on_the_ring + passes)
        busy["shared cores"] = (workers + sum(server) + _sending(job, asked, sums)) // job.cluster.cores
    found = {what: time / len(iterations) for what, time in busy.items() if time}
    return {"passes": job.passes.mean(job.synchronous) / NS, **{what: time / NS for what, time in found.items()}}


def _links(job: Simulation, asked: Sequence[int]) -> Dict[str, int]:
    """How long the busiest link of each kind is at work. `asked`: how often each worker asks each bucket's server."""
    links = job.links
    of_server: Dict[int, List[int]] = collections.defaultdict(list)
    for b, bucket in enumerate(job.buckets):
        of_server[bucket.server_rank].append(b)
    work = [0] * len(links.free)
    for server_rank, bs in of_server.items():
        times = {id(busy): sum(busy[b] * asked[b] for b in bs) for busy in links.busy}
        for m in range(job.num_workers):
            for link in links.way(m, server_rank)[0]:
                work[link] += times[id(links.busy[link])]
    serving = {job.cluster.host_of_server(server_rank) for server_rank in of_server}
    busiest: Dict[str, int] = {}
    for link, time in enumerate(work):
        kind = ("uplink" if link >= 2 * links.hosts else
                "server's link" if link % links.hosts in serving else "worker's link")
        busiest[kind] = max(busiest.get(kind, 0), time)
    return busiest


def _sending(job: Simulation, asked: Sequence[int], sums: Sequence[int]) -> int:
    """How long the processors of all hosts send and receive, by the number of questions and sums of each bucket."""
    hosts = [job.cluster.host_of_server(bucket.server_rank) for bucket in job.buckets]
    away = [job.num_workers - (host < job.num_workers) for host in hosts]
    return sum(2 * questions * there * sent + count * summed for questions, there, sent, count, summed
               in zip(asked, away, job.links.sent, sums, job.links.summed))
