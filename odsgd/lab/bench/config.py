"""The configuration of a benchmark: every option of ``odsgd bench``, as a flag and as a key of a YAML file.

    >>> config = BenchConfig.from_flags("--systems ssgd,odsgd@1 --compute 34ms,wire/5 --rates 1gbit".split())
    >>> [str(compute) for compute in config.compute], config.workers
    (['34ms', 'wire/5'], (2,))
"""
from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, Dict, Optional, Sequence, Tuple

from kvstore.errors import ConfigError
from kvstore.messages.buckets import TRAINABLE_DTYPES
from kvstore.options import PATH, TEXT, Kind, integer, integers, items, option, real, several
from odsgd.config.train import read_options
from odsgd.lab.bench import models, systems
from odsgd.lab.cluster import links

DESCRIPTION = """\
Measure how long an iteration takes with several systems on the same links: on
an emulated cluster (`odsgd cluster`; Linux, root), or with `--rates none` on
this machine's loopback. The jobs of all systems alternate and are repeated.

  odsgd bench --systems mxnet/dist_sync@1,ssgd,odsgd --models cnn \\
    --compute 34ms --rates 1gbit --workers 2,4
  odsgd bench --config configs/bench.yaml:peers --markdown peers.md"""

NO_CLUSTER = "none"


@dataclasses.dataclass(frozen=True)
class ComputingTime:
    """T_cop of one iteration: milliseconds, or a multiple of one server's T_wire; of all models or of one."""

    text: str = "0"  # as it was written
    model: Optional[str] = None
    ms: float = 0.0
    wires: float = 0.0

    def milliseconds(self, wire_ms: float) -> float:
        return self.ms + self.wires * wire_ms

    def __str__(self) -> str:
        return self.text


_DURATION = re.compile(r"(?:(?P<number>\d+(?:\.\d+)?)(?P<unit>ms|s)|(?P<factor>\d+(?:\.\d+)?)?wire(?:/(?P<divisor>\d+"
                       r"(?:\.\d+)?))?|0)")


def _computing_time(value: Any) -> ComputingTime:
    text = str(value).strip()
    model, _, duration = text.rpartition("=")
    match = _DURATION.fullmatch(duration)
    if not match or (match["divisor"] and not float(match["divisor"])):
        raise ValueError
    ms = float(match["number"]) * (1000 if match["unit"] == "s" else 1) if match["number"] else 0.0
    wires = float(match["factor"] or 1) / float(match["divisor"] or 1) if "wire" in duration else 0.0
    return ComputingTime(text, models.check(model) if model else None, ms, wires)


def _rate(value: Any) -> str:
    if str(value) != NO_CLUSTER:
        links.parse_rate(str(value), "--rate")  # complains
    return str(value)


def _references(value: Any) -> Dict[str, float]:
    pairs = value.items() if isinstance(value, dict) else [str(part).rpartition("=")[::2] for part in items(value)]
    if not all(key for key, _ in pairs):
        raise ValueError
    return {str(key).strip(): real().convert(number) for key, number in pairs}


SYSTEM = Kind("SYSTEM", "systems as NAME[:OPTION=VALUE][@SERVERS]", lambda value: systems.parse(str(value)))
MODEL = Kind("MODEL", "names of models", lambda value: models.check(str(value)))
COMPUTE = Kind("TIME", "times as 272ms, 0, wire/5 or 2wire, of one model as cnn=34ms", _computing_time)
REFERENCES = Kind("KEY=X,...", "numbers as RATE/WORKERS/MODEL/SYSTEM=NUMBER", _references)
RATE = Kind("RATE", "rates as 1gbit, or none", _rate)
DTYPE = Kind("DTYPE", "float32 or float16", lambda value: TRAINABLE_DTYPES[TRAINABLE_DTYPES.index(str(value))])
COLUMNS = ("cpu", "memory", "size")
COLUMN = Kind("COLUMN", "columns: " + ", ".join(COLUMNS), lambda value: COLUMNS[COLUMNS.index(str(value))])

_what, _how, _output = (
    functools.partial(option, group=title) for title in ("What is measured", "How", "What is written"))


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """One benchmark, checked."""

    systems: Tuple[systems.System, ...] = _what(
        None, several(SYSTEM), "systems: a store (odsgd, ssgd ...), mxnet/dist_sync, mxnet/dist_async, mxnet/p3, "
        "torch/ddp, horovod/mxnet; with options as odsgd:transport=sharded or pipesgd:codec=quantize; @1, @2: this "
        "number of servers on hosts of their own, @auto (default): one beside every worker")
    models: Tuple[str, ...] = _what(
        ("cnn",), several(MODEL), "models: 4.2M (10 tensors), cnn (0.5 M), 0.27M (about 100 tensors), 25.6M "
        "(ResNet-50), 138M (VGG-16), 355M (a transformer), 5000x1000 (as many tensors), 5M (one), or one of `odsgd "
        "train`, for 32x32 images of 10 classes")
    compute: Tuple[ComputingTime, ...] = _what((), several(COMPUTE), "T_cop: how long the emulated accelerator "
                                               "computes per iteration; each value is measured: 272ms; cnn=34ms for "
                                               "one model; wire/5, 2wire: of the time that the links need with one "
                                               "server; 0 (default): the exchange alone")
    dtype: str = _what("float32", DTYPE, "type of weights and gradients: float32, or float16 on MXNet (but not on "
                       "servers)")
    workers: Tuple[int, ...] = _what((2,), integers(1), "numbers of workers; each is measured")
    rates: Tuple[str, ...] = _what((NO_CLUSTER,), several(RATE), "rates of the hosts' links in each direction, e.g. "
                                   "1gbit; none: this machine's loopback")
    repeat: int = _how(5, integer(1), "number of jobs for each system and number of workers, interleaved")
    seconds: float = _how(4.0, real(above=0), "seconds of one measurement, estimated from T_cop + T_wire; at least 8 "
                          "iterations")
    warm_up: int = _how(3, integer(1), "iterations before a measurement, which do not count")
    timeout_s: float = _how(240.0, real(above=0), "seconds after which a job is ended and counts as failed")
    torch_python: Optional[str] = _how(None, PATH, "Python with PyTorch, for torch/ddp, which is left out without it")
    horovod_python: Optional[str] = _how(None, PATH, "Python with Horovod's MXNet build, for horovod/mxnet, likewise")
    batch_size: int = _output(0, integer(0), "samples per worker and iteration, to show the samples per second of all "
                              "workers; 0: not shown")
    baseline: Optional[str] = _output(None, TEXT, "one of the systems, to show how much faster the others are (Eq. 7 "
                                      "of the OD-SGD paper)")
    columns: Tuple[str, ...] = _output(
        (), several(COLUMN), "more columns: cpu (of a worker and of a server, per iteration), memory (their largest, "
        "and as multiples of the model; a job then measures one model), size (milliseconds per million parameters)")
    title: str = _output("Benchmark", TEXT, "title of the Markdown page and the picture")
    note: str = _output("", TEXT, "text below the title")
    reference: str = _output("", TEXT, "description of the numbers in --reference-values")
    reference_values: Dict[str, float] = _output({}, REFERENCES, "others' numbers to show beside ours, by "
                                                 "RATE/WORKERS/MODEL/SYSTEM")
    markdown: Optional[str] = _output(None, PATH, "file for the tables and the configuration")
    json: Optional[str] = _output(None, PATH, "file for every measured value")

    @classmethod
    def from_flags(cls, argv: Sequence[str]) -> BenchConfig:
        """The benchmark that a command line and the file after ``--config`` ask for; flags win."""
        return cls(**read_options(cls.__dataclass_fields__, "odsgd bench", argv, DESCRIPTION))

    def __post_init__(self) -> None:
        if not self.systems:
            raise ConfigError("no systems: say what to measure, e.g. --systems mxnet/dist_sync@1,ssgd,odsgd")
        for key in ("systems", "models", "compute", "workers", "rates"):
            named = list(map(str, getattr(self, key)))
            twice = next((text for text in named if named.count(text) > 1), None)
            if twice is not None:
                raise ConfigError(f"{key}: `{twice}` is there more than once; name each once")
        foreign = [system.label for system in self.systems if system.name in systems.FOREIGN or system.on_torch]
        if foreign and self.dtype != "float32":
            raise ConfigError(f"{foreign[0]} is measured in float32; leave it out, or dtype `{self.dtype}`")
        labels = [system.label for system in self.systems]
        if self.baseline is not None and self.baseline not in labels:
            raise ConfigError(f"baseline `{self.baseline}` is not among the systems: {', '.join(labels)}")
        for compute in self.compute:
            if compute.model and compute.model not in self.models:
                raise ConfigError(f"compute {compute}: the models are {', '.join(self.models)}")
            if compute.wires and NO_CLUSTER in self.rates:
                raise ConfigError(f"compute {compute}: loopback has no T_wire; give a time, or --rates 1gbit")
        idle = [model for model in self.models if not self.computes(model)]
        if idle:
            raise ConfigError(f"compute has no time for model {', '.join(idle)}; add {idle[0]}=..., or leave it out "
                              "of models")

    def python(self, name: str) -> Optional[str]:
        """The Python of a foreign system's workers."""
        return {systems.DDP: self.torch_python, systems.HOROVOD: self.horovod_python}.get(name)

    def computes(self, model: str) -> Sequence[ComputingTime]:
        if not self.compute:
            return (ComputingTime(),)
        return tuple(compute for compute in self.compute if compute.model in (None, model))
