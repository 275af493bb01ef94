"""What a virtual cluster is like: workers, servers, links, and how long everything takes. Tables, as of YAML, checked.

    workers: 30
    servers: 1
    compute: {iteration: 100ms, draws: lognormal:0.1, speeds: {3: 0.5}}
    links: {goodput: 954mbit, latency: 50us}
    hosts: {server0: {goodput: 10gbit}}

docs/how-to/virtual.md lists all keys. Hosts are called after what runs on them: ``worker0`` …, ``server0`` …; servers
that stand beside workers have no host of their own. Times are written 200ms, 50us, 0.2s; rates 954mbit, 1gbit.
Nothing here imports MXNet or makes anything, so that a wrong file is refused before a run begins.
"""
import dataclasses
import json
import math
import re
import zlib
from typing import Any, Dict, Mapping, Optional, Tuple, Type

from kvstore.errors import ConfigError, shown, unknown
from kvstore.options import Kind, as_text, convert, integer, name, option, real

MOST_WORKERS = 2 ** 17
"""And servers. More would take a day; a larger number is a slip of the pen."""

PAYLOAD = 0.954
"""The share of a link's rate that TCP's payload gets, measured on emulated links of 1 and 10 Gbit/s: headers take the
rest."""

TRANSPORTS = ("server", "ring")

_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_RATES = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}


class Quantity(float):
    """Seconds, or bytes per second: converted from text with a unit."""


def _quantity(value: Any, units: Mapping[str, float], ending: str = "") -> Quantity:
    if isinstance(value, Quantity):
        return value
    text = as_text(value).strip().lower()
    match = re.fullmatch(rf"((?:\d+\.?\d*|\.\d+)(?:e-?\d+)?) ?({'|'.join(units)}){ending}", text)
    if not match and text != "0":
        raise ValueError
    found = Quantity(float(match[1]) * units[match[2]] if match else 0)
    if math.isinf(found):
        raise ValueError
    return found


def _time(value: Any) -> Quantity:
    return _quantity(value, _TIMES)


def _rate(value: Any) -> Quantity:
    rate = _quantity(value, _RATES, r"(?:\s*/s)?")
    if not rate > 0:
        raise ValueError
    return rate


TIME = Kind("TIME", "a time of 0 or more with its unit, as 200ms, 50us or 0.2s", _time)
RATE = Kind("RATE", "a rate above 0 with its unit, as 954mbit or 10gbit", _rate)


@dataclasses.dataclass(frozen=True)
class Draws:
    """By what factor an iteration takes longer or shorter than the mean: drawn anew for each worker and iteration.

    kind   : constant, lognormal (of mean 1, sigma), pareto (of mean 1, alpha), or pauses (every so many, so long)
    values : sigma; alpha; iterations between two pauses of a worker, and seconds of one
    """

    kind: str = "constant"
    values: Tuple[float, ...] = ()

    def __str__(self) -> str:
        return ":".join([self.kind, *(f"{value:g}" for value in self.values)])


def _draws(value: Any) -> Draws:
    if isinstance(value, Draws):
        return value
    kind, *texts = as_text(value).strip().split(":")
    if kind == "pauses" and len(texts) == 2 and int(texts[0]) > 0:
        return Draws(kind, (float(int(texts[0])), _time(texts[1])))
    values = tuple(map(float, texts))
    if kind == "lognormal" and values == (0.0,):
        return Draws()
    least = {"constant": (), "lognormal": (0.0,), "pareto": (1.0,)}.get(kind)
    if least is None or len(values) != len(least) or not all(least < v < math.inf for v, least in zip(values, least)):
        raise ValueError
    return Draws(kind, values)


def _failures(value: Any) -> Tuple[float, float]:
    every, away = map(_time, value if isinstance(value, tuple) else as_text(value).split(":"))
    if not every:
        raise ValueError
    return every, away


def _table(keys: Kind, values: Kind) -> Kind:
    def convert(value: Any) -> Dict[Any, Any]:
        if not isinstance(value, dict):
            raise ValueError
        return {keys.convert(key): values.convert(item) for key, item in value.items()}
    return Kind("TABLE", f"a table of {keys.expected}: {values.expected}", convert)


def _passes(value: Any) -> Tuple[float, float]:
    if not isinstance(value, (list, tuple)):
        raise ValueError
    forward, backward = map(_time, value)
    return forward, backward


DRAWS = Kind("DRAWS", "constant, lognormal:SIGMA, pareto:ALPHA (above 1) or pauses:ITERATIONS:TIME", _draws)
FAILURES = Kind("TIME:TIME", "two times with their units, as 60s:5s", _failures)
_NAME = Kind("NAME", "a name", as_text)
_PASSES = Kind("PAIR", "[time forward, time backward]", _passes)


class _Checked:
    """A frozen dataclass whose fields are options."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if "kind" in field.metadata:
                object.__setattr__(self, field.name, convert(field, getattr(self, field.name), field.name))


@dataclasses.dataclass(frozen=True)
class LayerTimes(_Checked):
    """How long forward and backward take on a worker."""

    iteration: float = option("100ms", TIME, "both passes together, spread over the layers as they have elements")
    forward: float = option(1 / 3, real(at_least=0, at_most=1), "the forward pass's share of it")
    layers: Dict[str, Tuple[float, float]] = option({}, _table(_NAME, _PASSES), "measured times of each parameter's "
                                                    "layer, forward and backward, in place of both")
    draws: Draws = option(Draws(), DRAWS, "how the time differs from worker to worker and iteration to iteration")
    speeds: Dict[int, float] = option({}, _table(integer(0), real(above=0)), "workers that are faster or slower than "
                                      "the others: worker, and the factor on its speed")
    failures: Optional[Tuple[float, float]] = option(
        None, FAILURES, "mean times for which a worker computes until it fails, and is away then (both exponential); "
        "where an asynchronous store takes weights, it comes back with the servers' weights", otherwise="none fails")
    processor: float = option(0, TIME, "of a worker's host, for an iteration of both passes; counts where there are "
                              "`cores`")


@dataclasses.dataclass(frozen=True)
class Link(_Checked):
    """A host's link to the network, each way the same, both ways at a time."""

    goodput: float = option("954mbit", RATE, "payload that it carries per second")
    latency: float = option("50us", TIME, "from one host to another")
    message: float = option("20us", TIME, "that it is busy with a message beyond its bytes")
    crossing: float = option(0.0, real(at_least=0, below=1), "share of the goodput that is lost where several workers "
                             "and several servers send across each other")
    processor: float = option(0, TIME, "per megabyte, of the processors that send and receive it together; counts "
                              "where there are `cores`")


@dataclasses.dataclass(frozen=True)
class Rack(_Checked):
    """Hosts in racks, whose uplinks are shared."""

    hosts: int = option(16, integer(1), "hosts of a rack: workers' first, then servers', as they are numbered")
    goodput: float = option("10gbit", RATE, "of a rack's uplink, each way")


@dataclasses.dataclass(frozen=True)
class WorkerCost(_Checked):
    """What a worker's processor takes beside the passes. Per megabyte: 10^6 bytes of single-precision floats."""

    message: float = option("40us", TIME, "per message, each way")
    gather: float = option("0.3ms", TIME, "per megabyte, from gradients to the message")
    step: float = option("0.4ms", TIME, "per megabyte, an optimizer on the worker: a local step, or U on a ring")
    scatter: float = option("0.3ms", TIME, "per megabyte, from the answer to the parameters")
    stores: Dict[str, float] = option({}, _table(_NAME, TIME), "per megabyte and iteration, what the worker's own "
                                      "lines of these stores take beside all that")


@dataclasses.dataclass(frozen=True)
class ServerCost(_Checked):
    """What the one thread of a server takes."""

    message: float = option("40us", TIME, "per push")
    receive: float = option("0.3ms", TIME, "per megabyte of a push")
    update: float = option("0.5ms", TIME, "per megabyte of an update")
    rules: Dict[str, float] = option({}, _table(_NAME, TIME), "the same for the rules of these stores")


@dataclasses.dataclass(frozen=True)
class VirtualCluster(_Checked):
    """A whole cluster, checked. Made from keywords, or by `of` from tables."""

    workers: int = option(2, integer(1), "number of workers")
    servers: int = option(1, integer(1), "number of servers; a ring has none")
    placement: str = option("apart", name("placement", ("apart", "beside")), "apart: servers on hosts of their own; "
                            "beside: on those of the first workers")
    seed: int = option(0, integer(0), "of the draws")
    cores: Optional[int] = option(None, integer(1), "that all workers and servers share, as on an emulated cluster; "
                                  "none: they do not. Counts in times alone")
    compute: LayerTimes = LayerTimes()
    links: Link = Link()
    hosts: Dict[str, Link] = dataclasses.field(default_factory=dict)
    racks: Optional[Rack] = None
    worker: WorkerCost = WorkerCost()
    server: ServerCost = ServerCost()
    codecs: Dict[str, float] = option({}, _table(_NAME, TIME), "per megabyte of floats that a codec encodes or decodes")

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, number in (("workers", self.workers), ("servers", self.servers)):
            if number > MOST_WORKERS:
                raise ConfigError(f"{key}: {number} are more than can be computed, expected at most {MOST_WORKERS}")
        if self.placement == "beside" and self.servers > self.workers:
            raise ConfigError(f"servers: {self.servers} servers have no place beside {self.workers} workers; take "
                              f"{self.workers} at most, or `placement: apart`")
        names = set(self.host_names() if self.hosts else ())
        for label in self.hosts:
            if label not in names:
                raise unknown("host", label, self.host_names()[:20])
        for worker in self.compute.speeds:
            if worker >= self.workers:
                raise ConfigError(f"compute.speeds: there is no worker {worker}; they are 0 to {self.workers - 1}")

    def host_names(self) -> Tuple[str, ...]:
        """Every host once, in the order of their numbers."""
        own = self.servers if self.placement == "apart" else 0
        return (*(f"worker{m}" for m in range(self.workers)), *(f"server{s}" for s in range(own)))

    def host_of_server(self, server_rank: int) -> int:
        """The number of a server's host."""
        return self.workers + server_rank if self.placement == "apart" else server_rank

    def round_pace(self) -> float:
        """What `kvstore.transports.sizing.measured_pace` measures: seconds that a round of a server takes for each byte
        of a worker's message.

        All workers' messages share the link of the server, each way, and its thread, which receives while others come.
        """
        host = self.host_of_server(0)
        away, link, receive = self.workers - (host < self.workers), 1e6 / self.link(host).goodput, self.server.receive
        first = link if away == self.workers else 0.0
        there = max(away * link + receive, first + self.workers * receive)
        return (there + self.server.update + away * link) / 1e6

    def check_transport(self, transport: str) -> None:
        """ConfigError for a kind of transport whose times nothing here tells."""
        if transport not in TRANSPORTS:
            raise ConfigError(f"a cluster in virtual time has no transport `{transport}`; take "
                              f"{' or '.join(f'`{known}`' for known in TRANSPORTS)}, as far as the store runs on it")

    def link(self, host: int) -> Link:
        """The link of a host."""
        return self.hosts.get(f"worker{host}" if host < self.workers else f"server{host - self.workers}", self.links)


PARTS: Dict[str, Type[Any]] = {"compute": LayerTimes, "links": Link, "racks": Rack, "worker": WorkerCost,
                                "server": ServerCost}


def of(values: Any, **given: Any) -> VirtualCluster:
    """The cluster that a table of tables describes; an error names the key. `given` wins over the table. A part that is
    empty is the default.
    """
    values = {key: value for key, value in {**_mapping("a cluster", values), **given}.items()
              if value is not None or key not in PARTS}
    parts = {key: _made(kind, key, values[key]) for key, kind in PARTS.items() if key in values}
    links = dataclasses.asdict(parts.get("links", Link()))
    hosts = {str(label): _made(Link, f"hosts.{shown(label)}", {**links, **_mapping(f"hosts.{shown(label)}", own)})
             for label, own in _mapping("hosts", values.get("hosts") or {}).items()}
    return _made(VirtualCluster, "", {**values, **parts, "hosts": hosts})


def checksum(cluster: VirtualCluster) -> int:
    """Tells clusters apart by settings that are not defaults, so that a later version's new settings change nothing."""
    return zlib.crc32(json.dumps(_chosen(cluster), sort_keys=True).encode())


def _chosen(value: Any) -> Any:
    if isinstance(value, _Checked):
        usual = vars(type(value)())
        return {name: _chosen(own) for name, own in vars(value).items() if own != usual[name]}
    if isinstance(value, dict):
        return {str(name): _chosen(own) for name, own in value.items()}
    return str(value) if isinstance(value, Draws) else value


def _made(kind: Type[Any], where: str, values: Any) -> Any:
    known = [field.name for field in dataclasses.fields(kind)]
    for key in _mapping(where, values):
        if key not in known:
            raise unknown(f"key of {where}" if where else "key", key, known)
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}" if where else str(error)) from None


def _mapping(where: str, value: Any) -> Dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected keys with values, got `{shown(value)}`")
    return value
