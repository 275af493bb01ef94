"""What to change first: the servers or codecs of a system, or a part of the cluster for one twice as fast."""
import dataclasses
from typing import Any, Dict, List, NamedTuple, Sequence

from odsgd.lab.advise.predictions import Oracle, Prediction
from odsgd.lab.bench.systems import AUTO, System
from odsgd.virtual.description import Quantity, VirtualCluster

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
    def linked(by: float, name: str) -> VirtualCluster:
        hosts = {label: _multiplied(link, by, name) for label, link in cluster.hosts.items()}
        return dataclasses.replace(cluster, links=_multiplied(cluster.links, by, name), hosts=hosts)

    def halved(part: str, *names: str) -> VirtualCluster:
        return dataclasses.replace(cluster, **{part: _multiplied(getattr(cluster, part), 0.5, *names)})

    uplinks = cluster.racks and _multiplied(cluster.racks, 2, "goodput")
    found = {"twice the goodput of all links": dataclasses.replace(linked(2, "goodput"), racks=uplinks),
             "half the latency of all links": linked(0.5, "latency"),
             "half the time of the passes": halved("compute", "iteration"),
             "half the work of a server": halved("server"),
             "half the work of a worker's host": halved("worker")}
    if cluster.codecs:
        found["half the work of the codecs at both ends"] = _multiplied(cluster, 0.5, "codecs")
    return found


def _multiplied(part: Any, by: float, *names: str) -> Any:
    """A part of a cluster with these of its times or rates multiplied, or without names all of them."""
    def changed(value: Any) -> Any:
        return {name: changed(own) for name, own in value.items()} if isinstance(value, dict) else Quantity(by * value)

    return dataclasses.replace(part, **{name: changed(getattr(part, name)) for name in names or vars(part)})
