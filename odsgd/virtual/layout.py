"""Buckets as the real transports lay them out, so that virtual messages are as large as real ones."""
from typing import List, Sequence

from kvstore.messages.buckets import Bucket, Keys, Parameter
from kvstore.messages.seam import TrafficSettings
from kvstore.transports import sizing
from odsgd.virtual.description import VirtualCluster


def on_servers(parameters: Sequence[Parameter], traffic: TrafficSettings, keys: Keys, cluster: VirtualCluster
               ) -> List[Bucket]:
    """The buckets that `pslite.ParameterServer.plan` makes."""
    return sizing.on_servers(parameters, traffic, keys, cluster.workers, lambda: round_pace(cluster))


def round_pace(cluster: VirtualCluster) -> float:
    """What `sizing.measured_pace` measures: seconds that a round of a server takes for each byte of a worker's message.

    All workers' messages share the link of the server, each way, and its thread, which receives while others come.
    """
    server, workers = cluster.host_of_server(0), cluster.workers
    away, link, receive = workers - (server < workers), 1e6 / cluster.link(server).goodput, cluster.server.receive
    first = link if away == workers else 0.0
    there = max(away * link + receive, first + workers * receive)
    return (there + cluster.server.update + away * link) / 1e6
