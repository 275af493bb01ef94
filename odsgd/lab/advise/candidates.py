"""The systems that are looked at, written as `odsgd bench` writes them; and what to change first: a system's servers or
codecs, or a part of the cluster for one twice as fast.
"""
import dataclasses
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from kvstore.errors import ConfigError
from odsgd.lab.advise.config import AdviseConfig
from odsgd.lab.advise.predictions import Oracle, Prediction
from odsgd.lab.bench import systems
from odsgd.lab.bench.systems import AUTO, OURS, System
from odsgd.virtual.description import Quantity, VirtualCluster

NOTHING = 0.01
"""A smaller gain counts as nothing."""


def candidates(config: AdviseConfig, workers: int, codecs: Sequence[str] = ("none",)) -> List[System]:
    """Every store on every transport, with every number of servers, codec (both ways) and T that it can have."""
    if config.systems:
        return list(config.systems)
    numbers = [number for number in config.servers if number == AUTO or int(number) <= workers]
    found = []
    for name in config.stores:
        intervals = [{"T": T} for T in config.intervals] if "T" in OURS[name].option_names() else [{}]
        for transport in OURS[name].transports:
            place = {} if transport == OURS[name].transports[0] else {"transport": transport}
            coded = [_coded(codec, transport) for codec in codecs] if _has_codecs(name, transport) else [{}]
            found += [_system(name, {**place, **interval, **codes}, servers) for interval in intervals
                      for codes in coded for servers in (numbers if transport == "server" else [None])]
    return found


def _system(name: str, options: Mapping[str, Any], servers: Optional[str]) -> System:
    at = f"@{servers}" if servers else ""
    return systems.parse(name + "".join(f":{key}={value}" for key, value in options.items()) + at)


def _coded(codec: str, transport: str) -> Dict[str, str]:
    """The options of a codec both ways."""
    ways = () if codec == "none" else ("codec", "codec_weights") if transport == "server" else ("codec",)
    return dict.fromkeys(ways, codec)


def _has_codecs(name: str, transport: str) -> bool:
    """Whether a store lets its user choose how its floats travel."""
    options: Any = OURS[name].Options
    try:
        options(codec="float16")
    except (TypeError, ConfigError):
        return False
    return transport != "sharded"


def coded_alike(system: System) -> Optional[System]:
    """The same system with the codec float16; None if it has a codec, or can have none."""
    transport = system.options.get("transport", OURS[system.name].transports[0])
    if "codec" in system.options or not _has_codecs(system.name, transport):
        return None
    said = {key: value for key, value in system.options.items() if (key, value) != ("warmup", 0)}  # `parse` adds that
    return _system(system.name, {**said, **_coded("float16", transport)}, system.servers)


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
    return f"taking {system.servers} server{'s' * (system.servers != '1')}"


def faster(cluster: VirtualCluster) -> Dict[str, VirtualCluster]:
    """By what is twice as fast, in words: the cluster where it is."""
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
