"""The systems that are looked at, written as `odsgd bench` writes them, and the cluster that each would run on."""
import dataclasses
from typing import Any, Dict, List, Mapping, Optional, Sequence

from kvstore.errors import ConfigError
from odsgd.lab.advise.config import AdviseConfig
from odsgd.lab.bench import systems
from odsgd.lab.bench.systems import AUTO, OURS, System
from odsgd.virtual.description import PAYLOAD, Quantity, VirtualCluster


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
    return _system(system.name, {**system.options, **_coded("float16", transport)}, system.servers)


def linked(cluster: VirtualCluster, rate: float) -> VirtualCluster:
    """The cluster with all links of one rate, in bytes per second; hosts that differ otherwise still do."""
    goodput = Quantity(PAYLOAD * rate)
    links = dataclasses.replace(cluster.links, goodput=goodput)
    rated = {name: dataclasses.replace(link, goodput=goodput) for name, link in cluster.hosts.items()}
    others = {name: link for name, link in rated.items() if link != links}
    return dataclasses.replace(cluster, links=links, hosts=others)


def placed(cluster: VirtualCluster, system: System, workers: int) -> VirtualCluster:
    """The cluster with this number of workers, and with the servers of a system.

    What the profile says of single hosts and workers stays where the cluster has them. A server that the profile does
    not name has the link of the first one.
    """
    beside = system.servers in (AUTO, None)
    servers = workers if system.servers == AUTO else system.extra_hosts() or 1
    speeds = {worker: speed for worker, speed in cluster.compute.speeds.items() if worker < workers}
    names = [f"worker{m}" for m in range(workers)] + ([] if beside else [f"server{s}" for s in range(servers)])
    first = cluster.hosts.get("server0")
    hosts = {name: cluster.hosts.get(name, first if name.startswith("server") else None) for name in names}
    return dataclasses.replace(cluster, workers=workers, servers=servers, placement="beside" if beside else "apart",
                               compute=dataclasses.replace(cluster.compute, speeds=speeds),
                               hosts={name: link for name, link in hosts.items() if link is not None})
