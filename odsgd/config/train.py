"""The configuration of one training run: every option of ``odsgd train``, with default, unit and meaning.

A field of TrainConfig is a flag (``--lr-local``, or ``--lr_local``), a key of the YAML file (``lr_local``), and a
row of docs/configuration.md. Nothing slow is imported here, so that a misspelt option costs nobody a second.

    >>> config = TrainConfig.from_flags("--kvstore dist_sync --optimizer_local dcasgd_a --warmup 2epochs".split())
    >>> config.kvstore, config.lamda, config.warmup.iterations(batches_per_epoch=100)
    ('odsgd', 2.0, 200)

Names of stores. Ours are the keys of STORES; MXNet's are taken for the nearest of them (`_store_named`), so that a
job script written for ``dist_sync`` or ``dist_async`` works as it is. A new algorithm adds a line to STORES.
"""
from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import yaml

from kvstore.errors import ConfigError, unknown
from kvstore.options import (
    COMPUTE,
    FLAG,
    KEYWORDS,
    PATH,
    SHAPE,
    SPAN,
    TEXT,
    Compute,
    Span,
    convert,
    integer,
    integers,
    name,
    option,
    real,
)
from kvstore.wire.codecs import CODECS
from odsgd.config.flags import parse_flags
from odsgd.config.names import MODELS, MXNET_OPTIMIZERS, WITH_MOMENTUM, takes_thumbnail


@dataclasses.dataclass(frozen=True)
class DatasetSpec:
    """What the name of a data set settles: shape and classes (or their defaults) and the options that go with it."""

    shape: Tuple[int, int, int]
    classes: int
    options: Tuple[str, ...] = ()


DATASETS = {
    "digits": DatasetSpec((1, 8, 8), 10),
    "mnist": DatasetSpec((1, 28, 28), 10, ("data_dir",)),
    "cifar10": DatasetSpec((3, 32, 32), 10, ("data_dir", "augment")),
    "imagenet": DatasetSpec((3, 224, 224), 1000, ("data_dir", "augment", "image_shape", "num_classes", "data_threads")),
    "synthetic": DatasetSpec((3, 32, 32), 10, ("image_shape", "num_classes", "num_examples")),
}

_WIRE = ("bucket_nbytes", "timeout_s")
_LOCAL = ("optimizer_local", "lr_local", "momentum_local", "wd_local", "lr_step_epochs_local", "lamda", "m", "epsilon")

STORES: Dict[str, Tuple[str, ...]] = {
    "local": _WIRE,
    "ssgd": _WIRE,
    "odsgd": _WIRE + ("warmup", "transport") + _LOCAL,
    "delayed": _WIRE + ("warmup", "transport"),
    "asgd": _WIRE,
    "dcasgd_c": _WIRE + ("lamda",),
    "dcasgd_a": _WIRE + ("lamda", "m", "epsilon"),
    "softsync": _WIRE + ("n", "modulate"),
    "downpour": _WIRE + ("T", "push_every", "fetch_every", "lr_local", "lr_step_epochs_local"),
    "easgd": _WIRE + ("T", "alpha", "beta"),
    "eamsgd": _WIRE + ("T", "alpha", "beta", "delta"),
    "sasgd": _WIRE + ("T", "gamma_p", "lr_local", "lr_step_epochs_local"),
    "dsync": _WIRE,
    "pipesgd": _WIRE + ("K", "codec", "warmup"),
}
"""Name of a store -> the options below that go with it."""

ASYNCHRONOUS = ("asgd", "dcasgd_c", "dcasgd_a", "softsync", "downpour", "easgd", "eamsgd")
"""Stores whose workers wait for nobody while they train."""

WITHOUT_SERVERS = ("local", "sasgd", "dsync", "pipesgd")
"""Stores that never need a server; of the others some can do without (`transport`)."""

PLAIN_SGD = ("easgd", "eamsgd", "sasgd")
"""Stores that take SGD steps of their own, and no other optimizer."""

_STORE_OPTIONS = tuple(dict.fromkeys(key for options in STORES.values() for key in options))

_OF_ONE_STORE = ("lamda", "m", "epsilon", "lr_local", "lr_step_epochs_local")
"""Options whose good values are others with another store that takes them, too."""

NOT_YET = ("horovod", "byteps")

MXNET_ASYNC = ("dist_async", "dist_device_async")
MXNET_SYNC = ("dist_sync", "dist_device_sync", "dist")
MXNET_LOCAL = ("device",)

DELAY_COMPENSATED = {"dcasgd_c": {"lamda": 0.04}, "dcasgd_a": {"lamda": 2.0, "m": 0.95, "epsilon": 1e-7}}
"""Local updaters, and asynchronous stores, with options of their own, and the defaults of these (Eq. 4-6)."""

_DEFAULTS: Dict[str, Dict[str, Any]] = {
    **DELAY_COMPENSATED,
    "softsync": {"modulate": True},
    "downpour": {"T": 1},
    "easgd": {"T": 4, "beta": 0.9},
    "eamsgd": {"T": 4, "beta": 0.9, "delta": 0.9},
    "odsgd": {"warmup": Span(200), "transport": "server"},
    "delayed": {"warmup": Span(0), "transport": "server"},
    "sasgd": {"T": 1},
    "pipesgd": {"K": 2, "codec": "none", "warmup": Span(0)},
}
"""Store -> defaults of its options; those that depend on the job are left to the store."""

_REPLACED_BY = {"beta": ("alpha",), "T": ("push_every", "fetch_every")}
"""Option -> what makes it superfluous."""

LOCAL_OPTIMIZERS = ("none", *DELAY_COMPENSATED, *MXNET_OPTIMIZERS)
OPTIMIZERS = (*MXNET_OPTIMIZERS, *DELAY_COMPENSATED)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run, checked. Options that do not go together, or that nothing would use, are refused with ConfigError.

    Where the default depends on another option (`out`, `optimizer_local`, `warmup`, `lamda` ...) it is filled in here,
    so that what is printed and saved is what ran.
    """

    model: str = option("Model and data", "mlp", name("model", MODELS),
                        "network: mlp, lenet, or a name of Gluon's or GluonCV's model zoo, e.g. resnet18_v2")
    dataset: str = option("Model and data", "digits", name("data set", tuple(DATASETS)), "training and test data")
    data_dir: Optional[str] = option("Model and data", None, PATH,
                                     "folder with the files of mnist, cifar10 or imagenet", result=False)
    batch_size: int = option("Model and data", 32, integer(1),
                             "examples per iteration on ONE device; a worker's batch is batch size x its devices, "
                             "the global batch that x workers")
    augment: bool = option("Model and data", False, FLAG,
                           "random crops and mirror images in training (cifar10: padded by 4; imagenet: resized crops)")
    image_shape: Optional[Tuple[int, int, int]] = option(
        "Model and data", None, SHAPE, "channels,height,width of synthetic images, or the crop of imagenet "
        "(default: 3,32,32 and 3,224,224)")
    num_classes: Optional[int] = option("Model and data", None, integer(2),
                                        "classes of synthetic or imagenet data (default: 10 and 1000)")
    num_examples: Optional[int] = option("Model and data", None, integer(1),
                                         "synthetic training examples; a quarter as many are made for the test "
                                         "(default: 2048)")
    thumbnail: bool = option("Model and data", False, FLAG,
                             "for small images, start a Gluon ResNet or MobileNet with a 3x3 convolution of stride 1: "
                             "more accurate, 4 to 16 times the work")
    data_threads: Optional[int] = option("Model and data", None, integer(1),
                                         "threads that decode imagenet (default: 4)", result=False)

    num_gpus: int = option("Devices of a worker", 0, integer(0), "use GPUs 0 to N-1", result=False)
    gpus: Tuple[int, ...] = option("Devices of a worker", (), integers(0), "use these GPUs, e.g. 0,2", result=False)
    num_cpus: int = option("Devices of a worker", 1, integer(1),
                           "without GPUs: devices cpu(0) to cpu(N-1), a way to try several devices on any machine",
                           result=False)
    hybridize: bool = option("Devices of a worker", True, FLAG, "compile the network into one graph")

    kvstore: str = option("Algorithm", "odsgd", TEXT,
                          f"{', '.join(STORES)}; or MXNet's dist_sync (odsgd when --optimizer-local is named, else "
                          "ssgd), dist_async (asgd) and device (local)")
    optimizer: str = option("Algorithm", "sgd", name("optimizer", OPTIMIZERS), "optimizer of the global weights")
    lr: float = option("Algorithm", 0.1, real(at_least=0), "its learning rate, before the schedule")
    momentum: float = option("Algorithm", 0.0, real(at_least=0, at_most=1), "its momentum")
    wd: float = option("Algorithm", 0.0, real(at_least=0), "its weight decay")
    optimizer_params: Dict[str, Any] = option("Algorithm", {}, KEYWORDS,
                                              "further arguments of the optimizer, e.g. clip_gradient=5,nesterov=true")
    warmup: Optional[Span] = option("Algorithm", None, SPAN,
                                    "synchronous iterations before the delay, e.g. 200, or 2epochs "
                                    "(default: 200 for odsgd, 0 for delayed and pipesgd)")
    transport: Optional[str] = option("Algorithm", None, name("transport", ("server", "ring")),
                                      "odsgd, delayed: who sums and updates: parameter servers, or a ring of the "
                                      "workers (default: server)", result=False)
    optimizer_local: Optional[str] = option(
        "Algorithm", None, name("local optimizer", LOCAL_OPTIMIZERS),
        "odsgd: what a worker updates its own weights with: none, sgd, dcasgd_c, dcasgd_a, or another optimizer of "
        "MXNet (default: sgd)")
    lr_local: Optional[float] = option("Algorithm", None, real(at_least=0),
                                       "its learning rate; that of downpour's and sasgd's local steps (default: that "
                                       "of the global optimizer, as scheduled)")
    momentum_local: Optional[float] = option("Algorithm", None, real(at_least=0, at_most=1),
                                             "its momentum (default: 0)")
    wd_local: Optional[float] = option("Algorithm", None, real(at_least=0),
                                       "its weight decay (default: that of the global optimizer)")
    lamda: Optional[float] = option("Algorithm", None, real(at_least=0),
                                    "dcasgd_c, dcasgd_a, as local optimizer or as store: strength of the compensation "
                                    "(default: 0.04 for c, 2 for a)")
    m: Optional[float] = option("Algorithm", None, real(at_least=0, at_most=1),
                                "dcasgd_a: decay of the mean square (default: 0.95)")
    epsilon: Optional[float] = option("Algorithm", None, real(above=0),
                                      "dcasgd_a: keeps the root away from zero (default: 1e-7)")
    n: Optional[int] = option("Algorithm", None, integer(1),
                              "softsync: updates while every worker pushes once; the servers collect workers / n "
                              "gradients for one (default: the number of workers, an update per push)")
    modulate: Optional[bool] = option("Algorithm", None, FLAG,
                                      "softsync: divide a gradient's learning rate by its staleness (default: true; "
                                      "--no-modulate turns it off)")
    T: Optional[int] = option("Algorithm", None, integer(1),
                              "downpour, easgd, eamsgd, sasgd: iterations between exchanges (default: 4 for easgd and "
                              "eamsgd, 1 for the others)")
    push_every: Optional[int] = option("Algorithm", None, integer(1),
                                       "downpour: iterations between pushes (default: T)")
    fetch_every: Optional[int] = option("Algorithm", None, integer(1),
                                        "downpour: iterations between fetches (default: T)")
    alpha: Optional[float] = option("Algorithm", None, real(at_least=0, below=1),
                                    "easgd, eamsgd: strength of the elastic force in one exchange (default: beta / "
                                    "number of workers)")
    beta: Optional[float] = option("Algorithm", None, real(at_least=0, below=1),
                                   "easgd, eamsgd: strength of the force of all workers together (default: 0.9)")
    delta: Optional[float] = option("Algorithm", None, real(at_least=0, below=1),
                                    "eamsgd: Nesterov's momentum of the local steps (default: 0.9)")
    gamma_p: Optional[float] = option("Algorithm", None, real(at_least=0),
                                      "sasgd: learning rate of the aggregation, for the sum of all workers' gradients "
                                      "(default: that of the local steps / number of workers, which averages models)")
    K: Optional[int] = option("Algorithm", None, integer(1),
                              "pipesgd: iterations between a gradient and its update; 1 waits for it (default: 2)")
    codec: Optional[str] = option("Algorithm", None, name("codec", tuple(CODECS)),
                                  "pipesgd: how gradients travel: none (as they are), truncate (the upper 16 bits of "
                                  "each float), quantize (8 bits each and a scale per block) (default: none)")

    epochs: int = option("Schedule", 10, integer(1), "passes over the training data", result=False)
    iterations: Optional[int] = option("Schedule", None, integer(1),
                                       "stop after this many iterations, though epochs are left", result=False)
    lr_decay: str = option("Schedule", "step", name("decay", ("step", "poly")),
                           "step: by --lr-factor at --lr-step-epochs; poly: lr (1 - t/T)^2 over all epochs")
    lr_step_epochs: Tuple[int, ...] = option("Schedule", (), integers(1),
                                             "multiply lr by the factor after these epochs, e.g. 80,120")
    lr_step_epochs_local: Optional[Tuple[int, ...]] = option(
        "Schedule", None, integers(1), "the same for --lr-local (default: --lr-step-epochs)")
    lr_factor: float = option("Schedule", 0.1, real(above=0), "the factor, for lr and lr_local")
    lr_warmup: Span = option("Schedule", Span(0), SPAN,
                             "raise lr, and only it, linearly to its value over this span, e.g. 5epochs")
    lr_warmup_from: float = option("Schedule", 0.0, real(at_least=0), "where it starts")

    seed: int = option("Run", 0, integer(0), "of the initial weights, the order of the data, and augmentation")
    out: Optional[str] = option("Run", None, PATH, "folder of the run (default: runs/DATASET-MODEL-STORE)",
                                result=False)
    resume: bool = option("Run", False, FLAG, "go on with the run in that folder", result=False)
    log_interval: int = option("Run", 50, integer(1), "iterations between two log lines", result=False)
    eval_every: int = option("Run", 1, integer(0), "epochs between two evaluations; 0: never", result=False)
    checkpoint_every: Span = option("Run", Span(1, "epochs"), SPAN,
                                    "between two checkpoints, e.g. 1epoch or 500; 0: only at the end", result=False)
    keep_checkpoints: int = option("Run", 3, integer(1), "how many of the newest are kept", result=False)
    on_nan: str = option("Run", "stop", name("answer", ("stop", "continue")),
                         "what to do when the loss is infinite or not a number", result=False)
    emulate_compute: Optional[Compute] = option(
        "Run", None, COMPUTE, "forward and backward take this time per iteration and no core, gradients appear layer "
        "by layer, with the values of the first batch. For measuring time: nothing is learned, evaluated or kept")
    trace: Optional[str] = option("Run", None, PATH,
                                  "folder for a timeline of the job, which `odsgd trace` reads and Perfetto shows",
                                  result=False)
    bucket_nbytes: Optional[int] = option("Run", None, integer(1), "bytes of one message (default: the store's)",
                                          result=False)
    timeout_s: Optional[float] = option("Run", None, real(above=0),
                                        "seconds to wait for an answer before the job is given up "
                                        "(default: the store's)", result=False)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._set(field.name, convert(field, getattr(self, field.name), field.name))
        self._resolve_data()
        self._resolve_algorithm()
        self._check_model_and_devices()
        self._check_schedule()
        self._resolve_emulation()
        if self.out is None:
            self._set("out", str(Path("runs") / self.name))

    # --- where values come from and go to -------------------------------------------------------------------------

    @classmethod
    def from_flags(cls, argv: Sequence[str]) -> TrainConfig:
        """The configuration that a command line gives; flags win over ``--config FILE.yaml``.

        So does a store named by a flag: what the file says of another store alone gives way, and one preset serves
        for OD-SGD and, with ``--kvstore ssgd`` or ``asgd``, for the controls beside it.

        ``--help`` prints and raises SystemExit(0); everything wrong raises ConfigError, one line.
        """
        flags, config_file = parse_flags(cls, "odsgd train", argv)
        values = read_yaml(cls, config_file) if config_file else {}
        if "kvstore" in flags:
            local = {**values, **flags}.get("optimizer_local")
            store = _store_named(flags["kvstore"], local)
            same = store == _store_named(values.get("kvstore", cls.kvstore), local)
            kept = STORES[store] if same else set(STORES[store]) - set(_OF_ONE_STORE)
            values = {key: value for key, value in values.items() if key in kept or key not in _STORE_OPTIONS}
        return cls(**{**values, **flags})

    def to_dict(self) -> Dict[str, Any]:
        """Every option as JSON and YAML have it; ``TrainConfig(**config.to_dict()) == config``."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def to_yaml(self) -> str:
        """The resolved configuration as a file for ``--config``."""
        return str(yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None, width=120))

    def save(self, path: os.PathLike[str]) -> None:
        """Write `to_yaml()`."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")

    def mismatches(self, saved: Mapping[str, Any]) -> List[str]:
        """What keeps a run with configuration `saved` (a `to_dict()`) from being resumed with this one, by name."""
        fields = [field for field in dataclasses.fields(self) if field.metadata["result"]]
        names = [field.name for field in fields] + (["epochs"] if self.lr_decay == "poly" else [])
        mine = self.to_dict()
        pairs = [(key, saved.get(key), mine[key]) for key in names]
        pairs.append(("devices of a worker", _device_count(saved), _device_count(mine)))
        return [f"{key}: {then} in the saved run, {now} now" for key, then, now in pairs if then != now]

    # --- what the other modules ask -------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """``digits-mlp-odsgd-sgd``: the run in a word."""
        ring = "ring" if self.transport == "ring" else None
        return "-".join(part for part in (self.dataset, self.model, self.kvstore, self.optimizer_local, ring) if part)

    @property
    def input_shape(self) -> Tuple[int, int, int]:
        """Channels, height, width of one example."""
        return self.image_shape or DATASETS[self.dataset].shape

    @property
    def classes(self) -> int:
        """Number of classes of the data set."""
        return self.num_classes or DATASETS[self.dataset].classes

    @property
    def device_count(self) -> int:
        """How many devices a worker computes on."""
        return _device_count(vars(self))

    @property
    def worker_batch_size(self) -> int:
        """Examples of one worker per iteration, over all its devices: the b of the algorithms' mini-batch mean."""
        return self.batch_size * self.device_count

    @property
    def asynchronous(self) -> bool:
        """Whether workers train without waiting for each other."""
        return self.kvstore in ASYNCHRONOUS

    @property
    def needs_servers(self) -> bool:
        """Whether the store sends to servers; a job of one that does not has none."""
        return needs_servers(self.kvstore, self.transport)

    @property
    def steps_locally(self) -> bool:
        """Whether `lr_local` is the learning rate of something."""
        return self.kvstore in ("downpour", "sasgd") or self.optimizer_local not in (None, "none")

    def optimizer_arguments(self) -> Dict[str, Any]:
        """Arguments of the global optimizer, as gluon.Trainer takes them."""
        momentum = {"momentum": self.momentum} if self.momentum else {}
        return {"learning_rate": self.lr, "wd": self.wd, **momentum, **self.optimizer_params}

    def store_options(self, batches_per_epoch: int) -> Dict[str, Any]:
        """Options of ``kvstore.create(config.kvstore, ...)``, `transport` included; a warm-up in epochs becomes
        iterations."""
        names = [key for key in STORES[self.kvstore] if key != "lr_step_epochs_local"]
        given = {key: getattr(self, key) for key in names if getattr(self, key) is not None}
        if self.warmup is not None:
            given["warmup"] = self.warmup.iterations(batches_per_epoch)
        return given

    # --- checks ---------------------------------------------------------------------------------------------------

    def _set(self, key: str, value: Any) -> None:
        object.__setattr__(self, key, value)  # the dataclass is frozen for everyone else

    def _default(self, key: str, value: Any) -> None:
        if getattr(self, key) is None:
            self._set(key, value)

    def _resolve_data(self) -> None:
        spec = DATASETS[self.dataset]
        for key in sorted({key for other in DATASETS.values() for key in other.options} - set(spec.options)):
            if getattr(self, key) not in (None, False):
                takers = [other for other, its in DATASETS.items() if key in its.options]
                raise ConfigError(f"{key} goes with {' or '.join(takers)}, not with dataset `{self.dataset}`; "
                                  "leave it out")
        if "data_dir" in spec.options and self.data_dir is None:
            raise ConfigError(f"dataset `{self.dataset}` needs data_dir, the folder of its files (--data-dir DIR)")
        for key, value in (("image_shape", spec.shape), ("num_classes", spec.classes), ("num_examples", 2048),
                           ("data_threads", 4)):
            if key in spec.options:
                self._default(key, value)

    def _resolve_algorithm(self) -> None:
        asked = self.kvstore
        self._set("kvstore", _store_named(asked, self.optimizer_local))
        options = STORES[self.kvstore]
        for key in _STORE_OPTIONS:
            if key not in options and getattr(self, key) is not None:
                raise ConfigError(f"{key} has no meaning with kvstore `{asked}`{_sync_hint(asked)}; "
                                  f"it goes with {' or '.join(s for s in STORES if key in STORES[s])}")
        if "optimizer_local" in options:
            self._default("optimizer_local", "sgd")
            self._resolve_local()
        self._resolve_defaults()
        if self.kvstore in PLAIN_SGD and (self.optimizer != "sgd" or self.momentum):
            hint = " (momentum: kvstore `eamsgd`, option delta)" if "beta" in options else ""
            raise ConfigError(f"kvstore `{self.kvstore}` takes plain SGD steps of its own: leave optimizer and "
                              f"momentum out{hint}")
        self._check_momentum("momentum", self.optimizer)

    def _resolve_local(self) -> None:
        local = str(self.optimizer_local)
        if local == "none":
            for key in _LOCAL[1:]:
                if getattr(self, key) is not None:
                    raise ConfigError(f"{key} has no meaning with optimizer_local `none`, which takes no local step")
            return
        for key in ("lamda", "m", "epsilon"):
            takers = [other for other, defaults in DELAY_COMPENSATED.items() if key in defaults]
            if local not in takers and getattr(self, key) is not None:
                raise ConfigError(f"{key} goes with optimizer_local {' or '.join(takers)}, not with `{local}`")
        for key, value in DELAY_COMPENSATED.get(local, {}).items():
            self._default(key, value)
        self._check_momentum("momentum_local", local)

    def _resolve_defaults(self) -> None:
        replaced = [key for key, others in _REPLACED_BY.items()
                    if all(getattr(self, other) is not None for other in others)]
        for key in replaced:
            if getattr(self, key) is not None:
                raise ConfigError(f"{key} has no meaning beside {' and '.join(_REPLACED_BY[key])}; leave one of them "
                                  "out")
        for key, value in _DEFAULTS.get(self.kvstore, {}).items():
            if key not in replaced:
                self._default(key, value)

    def _check_momentum(self, key: str, optimizer: str) -> None:
        if getattr(self, key) and optimizer not in (*WITH_MOMENTUM, *DELAY_COMPENSATED):
            raise ConfigError(f"{key}: optimizer `{optimizer}` takes no momentum; leave it out")

    def _check_model_and_devices(self) -> None:
        if self.thumbnail and not takes_thumbnail(self.model):
            raise ConfigError(f"thumbnail is for Gluon's ResNets and MobileNets, not for model `{self.model}`")
        if (bool(self.gpus) + bool(self.num_gpus) + (self.num_cpus > 1)) > 1:
            raise ConfigError("give one of num_gpus, gpus and num_cpus: a worker computes on one kind of device")
        if len(set(self.gpus)) != len(self.gpus):
            raise ConfigError(f"gpus: {','.join(map(str, self.gpus))} names a device twice")

    def _check_schedule(self) -> None:
        for key in ("lr_step_epochs", "lr_step_epochs_local"):
            steps = getattr(self, key) or ()
            if list(steps) != sorted(set(steps)):
                raise ConfigError(f"{key}: {','.join(map(str, steps))} does not rise from epoch to epoch")
            if steps and self.lr_decay == "poly":
                raise ConfigError(f"{key} has no meaning with lr_decay `poly`; leave one of them out")
        if self.lr_step_epochs_local is not None and self.lr_local is None:
            raise ConfigError("lr_step_epochs_local needs lr_local; without it the local learning rate follows lr")
        if self.lr_warmup_from and not self.lr_warmup.count:
            raise ConfigError("lr_warmup_from needs lr_warmup, the span over which lr rises")


    def _resolve_emulation(self) -> None:
        if self.emulate_compute is None:
            return
        if self.resume:
            raise ConfigError("resume has no meaning with emulate_compute, which learns nothing and keeps nothing; "
                              "leave one of them out")
        self._set("eval_every", 0)


def read_yaml(config_class: Any, path: str, program: str = "odsgd train") -> Dict[str, Any]:
    """The options in a YAML file, converted; what is wrong names the file, the key and the nearest right one."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read `{path}`: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"`{path}` is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"`{path}`: expected lines of the form `option: value`")
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    known = {str(key).replace("-", "_"): value for key, value in values.items()}
    for key in known:
        if key not in fields:
            raise unknown("option", key, fields, where=f" in `{path}`", listed=f"`{program} --help` lists all")
    return {key: convert(fields[key], value, f"`{path}`: {key}") for key, value in known.items()}


def options_table(config_class: Any = TrainConfig) -> str:
    """The Markdown table of docs/configuration.md: option, default, what it takes, meaning."""
    rows = ["| option | default | value | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(config_class):
        default = "" if field.default in (None, (), dataclasses.MISSING) else f"`{_plain(field.default)}`"
        rows.append(f"| `{field.name}` | {default.replace('`True`', '`true`').replace('`False`', '`false`')} | "
                    f"{field.metadata['kind'].expected} | {field.metadata['help']} |")
    return "\n".join(rows) + "\n"


def _store_named(asked: str, optimizer_local: Optional[str]) -> str:
    """Our name of the store that a user asks for, perhaps in MXNet's words."""
    if asked in STORES:
        return asked
    if asked in MXNET_SYNC:
        return "odsgd" if optimizer_local is not None else "ssgd"
    if asked in MXNET_ASYNC:
        return "asgd"
    if asked in MXNET_LOCAL:
        return "local"
    if asked in NOT_YET:
        raise ConfigError(f"kvstore `{asked}` is not available yet; available: {', '.join(STORES)}")
    raise unknown("kvstore", asked, (*STORES, *MXNET_SYNC, *MXNET_ASYNC, *MXNET_LOCAL))


def needs_servers(store: str, transport: Optional[str]) -> bool:
    """Whether a store sends to servers on this transport; None is its default."""
    return store not in WITHOUT_SERVERS and transport != "ring"


def _sync_hint(asked: str) -> str:
    return " without optimizer_local, which is ssgd" if asked in MXNET_SYNC else ""


def _device_count(options: Mapping[str, Any]) -> int:
    return len(options.get("gpus") or ()) or options.get("num_gpus") or options.get("num_cpus") or 1


def _plain(value: Any) -> Any:
    if isinstance(value, (Span, Compute)):
        return value.plain()
    return list(value) if isinstance(value, tuple) else value
