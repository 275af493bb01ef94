"""The options of ``odsgd advise``.

    >>> config = AdviseConfig.from_flags(["cluster.yaml", "--workers", "8,16", "--rate", "10gbit", "--model", "cnn"])
    >>> config.profile, config.workers, config.servers
    ('cluster.yaml', (8, 16), ('1', '2', '4', 'auto'))
"""
import dataclasses
from typing import Any, Optional, Sequence, Tuple

from kvstore.errors import ConfigError
from kvstore.messages.codecs import WITHOUT_RESIDUAL
from kvstore.options import PATH, Kind, integer, integers, name, option, several
from odsgd.config.train import read_options
from odsgd.lab.bench import models
from odsgd.lab.bench.systems import AUTO, OURS, System, parse
from odsgd.virtual.description import PAYLOAD, RATE, TIME, VirtualCluster

DESCRIPTION = """\
Predict for every store on a cluster: time per iteration, samples per second,
staleness, memory, and what limits the speed. This only runs a simulation.
The first argument is a PROFILE, which describes the cluster and its times
(docs/how-to/virtual.md). Without one, give the computing time of a worker.

  odsgd advise --compute 400ms --model 25.6M --workers 2 --rate 1gbit \\
    --batch-size 32
  odsgd advise cluster.yaml --model 25.6M --workers 8,16,32 --rate 10gbit
  odsgd advise cluster.yaml --model cnn --now odsgd@1"""


def _servers(value: Any) -> str:
    text = str(value)
    if text != AUTO and not (text.isdigit() and int(text)):
        raise ValueError
    return text


def _system(value: Any) -> System:
    system = parse(str(value))
    if system.name not in OURS:
        raise ConfigError(f"`{system}` is no store of odsgd, so its times are not known")
    return system


SERVERS = Kind("N", "numbers of servers, or auto", _servers)
STORE = Kind("STORE", "names of stores", name("store", tuple(OURS)).convert)
CODEC = Kind("CODEC", "names of codecs", name("codec", tuple(WITHOUT_RESIDUAL)).convert)
SYSTEM = Kind("SYSTEM", "systems as NAME[:OPTION=VALUE][@SERVERS]", _system)
MODEL = Kind("MODEL", "the name of a model, or a number of parameters as 25.6M", lambda value: models.check(str(value)))


@dataclasses.dataclass(frozen=True)
class AdviseConfig:
    """One question to the adviser, checked."""

    profile: str
    model: Optional[str] = option(None, MODEL, "number of parameters, as 25.6M or 50k; or a model of `odsgd bench`, or "
                                  "one of `odsgd train` for 32x32 images of 10 classes", group="The cluster")
    workers: Tuple[int, ...] = option((), integers(1), "numbers of workers", group="The cluster",
                                      otherwise="the profile's")
    compute: Optional[float] = option(None, TIME, "computing time of an iteration, e.g. 400ms, instead of a profile or "
                                      "of the profile's own", group="The cluster", otherwise="the profile's")
    rate: Optional[float] = option(None, RATE, f"rate of all links; {100 * PAYLOAD:.0f} % of it carry data",
                                   group="The cluster", otherwise="the profile's goodput")
    batch_size: int = option(0, integer(0), "samples per worker and iteration; 0: show gradients per second",
                             group="The cluster")
    stores: Tuple[str, ...] = option(tuple(OURS), several(STORE), "stores to compare", group="What is compared",
                                     otherwise="all")
    servers: Tuple[str, ...] = option(("1", "2", "4", AUTO), several(SERVERS), "numbers of servers on hosts of their "
                                      "own, not more than workers; auto: one beside every worker",
                                      group="What is compared", otherwise="1,2,4,auto")
    codecs: Tuple[str, ...] = option((), several(CODEC), "codecs to compare, each in both directions",
                                     group="What is compared",
                                     otherwise="none, and those whose times are in the profile")
    intervals: Tuple[int, ...] = option((1, 4), integers(1), "values of T (iterations between exchanges) for stores "
                                        "that have this option", group="What is compared", otherwise="1,4")
    systems: Tuple[System, ...] = option((), several(SYSTEM), "compare only these systems, written as for `odsgd "
                                         "bench`", group="What is compared")
    now: Optional[System] = option(None, SYSTEM, "the system that you use now; the advice says what to change first",
                                   group="Output", otherwise="the fastest that exchanges every iteration")
    lines: int = option(20, integer(0), "longest table, in lines; a longer one has the fastest of each store; 0: all",
                        group="Output")
    json: Optional[str] = option(None, PATH, "file for all results", group="Output")

    def __post_init__(self) -> None:
        for number in self.workers:  # more than can be computed are refused before any of them is
            VirtualCluster(workers=number)
        for system in filter(None, (*self.systems, self.now)):
            VirtualCluster(servers=system.extra_hosts() or 1)

    @classmethod
    def from_flags(cls, argv: Sequence[str]) -> "AdviseConfig":
        """The question that a command line asks: the profile, and options."""
        fields = {field.name: field for field in dataclasses.fields(cls) if "kind" in field.metadata}
        profile, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("", argv)
        values = read_options(fields, "odsgd advise", rest, DESCRIPTION)
        if not profile and values.get("compute") is None:
            raise ConfigError("no profile: say how long a worker computes (--compute 400ms), or name first the file "
                              "that describes the cluster: `odsgd advise cluster.yaml --model 25.6M`")
        return cls(profile, **values)
