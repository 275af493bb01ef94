"""What to change first: the servers or codecs of a system, or a part of the cluster for one twice as fast."""
import dataclasses
from typing import Any, Dict, List, NamedTuple, Sequence

from odsgd.lab.advise.predictions import Oracle, Prediction
from odsgd.lab.bench.systems import AUTO, System
from odsgd.virtual.description import Link, Quantity, VirtualCluster

NOTHING = 0.01
"""A smaller gain counts as nothing."""

ORDINALS = {1: "one server", 2: "a second server", 3: "a third server", 4: "a fourth server"}


class Change(NamedTuple):
    """Something that may be changed, and how much throughput it gains: 0.31 for 31 %."""

    what: str
    gain: float

    def __str__(self) -> str:
        does = "gains" if self.gain > 0 else "loses"
        return f"{self.what} {does} {100 * abs(self.gain):.0f} %" if abs(self.gain) >= NOTHING else \
            f"{self.what} gains nothing"


def changes(oracle: Oracle, now: Prediction, known: Sequence[Prediction]) -> List[Change]:
    """What a system would gain, the most first; `known`: the other candidates."""
    found = {what: Oracle(cluster, oracle.parameters).predict(now.system, now.workers)
             for what, cluster in faster(oracle.cluster).items()}
    for other in known:
        if other.system.label != now.system.label and other.system.name == now.system.name:
            if _apart_from(other.system, "servers") == _apart_from(now.system, "servers"):
                found[_servers(other.system)] = other
            elif _apart_from(other.system, "codecs") == _apart_from(now.system, "codecs"):
                found[f"codec `{other.system.options.get('codec', 'none')}`"] = other
    return sorted((Change(what, other.rate / now.rate - 1) for what, other in found.items()),
                  key=lambda change: -change.gain)


def _apart_from(system: System, what: str) -> object:
    """All of a system but its servers, or its codecs."""
    codecs = ("codec", "codec_weights", "codec_threshold")
    options = {key: value for key, value in system.options.items() if what == "servers" or key not in codecs}
    return system.name, options, system.servers is None if what == "servers" else system.servers


def _servers(system: System) -> str:
    if system.servers == AUTO:
        return "a server beside every worker"
    return ORDINALS.get(system.extra_hosts(), f"servers, {system.servers} of them,")


def faster(cluster: VirtualCluster) -> Dict[str, VirtualCluster]:
    """What could be twice as fast, and the cluster where it is."""
    compute, racks = cluster.compute, cluster.racks
    accelerator = dataclasses.replace(compute, iteration=Quantity(compute.iteration / 2))
    uplinks = racks and dataclasses.replace(racks, goodput=Quantity(2 * racks.goodput))
    return {"twice the goodput of all links": dataclasses.replace(_linked(cluster, goodput=2.0), racks=uplinks),
            "half the latency of all links": _linked(cluster, latency=0.5),
            "half the time of the passes": dataclasses.replace(cluster, compute=accelerator),
            "half the work of a server": dataclasses.replace(cluster, server=_halved(cluster.server)),
            "half the work of a worker's host": dataclasses.replace(cluster, worker=_halved(cluster.worker))}


def _linked(cluster: VirtualCluster, **factors: float) -> VirtualCluster:
    """The cluster with this of every link multiplied."""
    def changed(link: Link) -> Link:
        return dataclasses.replace(link, **{name: Quantity(by * getattr(link, name)) for name, by in factors.items()})

    return dataclasses.replace(cluster, links=changed(cluster.links),
                               hosts={name: changed(link) for name, link in cluster.hosts.items()})


def _halved(cost: Any) -> Any:
    def half(time: Any) -> Any:
        return {store: Quantity(own / 2) for store, own in time.items()} if isinstance(time, dict) else \
            Quantity(time / 2)

    return dataclasses.replace(cost, **{name: half(time) for name, time in vars(cost).items()})
