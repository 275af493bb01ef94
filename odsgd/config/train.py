"""The configuration of one training run: every option of ``odsgd train``, with default, unit and meaning.

A field of TrainConfig is a flag (``--lr-step-epochs``, or ``--lr_step_epochs``), a key of the YAML file, and a row of
docs/reference/configuration.md. So are the options of the methods, which their own files declare
(`kvstore.methods`); a configuration holds those of its method in `options`. Nothing slow is imported here, so that a
misspelt option costs nobody a second.

    >>> config = TrainConfig.from_flags("--kvstore dist_sync --optimizer_local dcasgd_a --warmup 2epochs".split())
    >>> config.kvstore, config.options.lamda, config.options.warmup.iterations(batches_per_epoch=100)
    ('odsgd', 2.0, 200)
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Type

import yaml

from kvstore import methods as algorithms
from kvstore.errors import ConfigError, shown, unknown
from kvstore.methods import fit, local_optimizers
from kvstore.methods.common import Options
from kvstore.methods.contract import Method
from kvstore.options import (
    FLAG,
    LENGTH,
    PATH,
    TEXT,
    TrainingLength,
    convert,
    integer,
    integers,
    name,
    option,
    plain,
    real,
)
from odsgd.config import methods
from odsgd.config.files import read_cluster, read_yaml_file
from odsgd.config.flags import given, parse_flags
from odsgd.config.kinds import COMPUTE, KEYWORDS, SHAPE, UMASK, Compute
from odsgd.config.names import GLUON_MODELS, MODELS
from odsgd.virtual import description
from odsgd.virtual.description import VirtualCluster


@dataclasses.dataclass(frozen=True)
class DatasetSpec:
    """What the name of a data set settles: shape and classes (or their defaults) and the options that go with it."""

    shape: Tuple[int, int, int]
    classes: int
    options: Tuple[str, ...] = ()


DATASETS = {
    "digits": DatasetSpec((1, 8, 8), 10, ("num_examples", "holdout")),
    "mnist": DatasetSpec((1, 28, 28), 10, ("data_dir", "num_examples", "holdout")),
    "cifar10": DatasetSpec((3, 32, 32), 10, ("data_dir", "augment", "num_examples", "holdout")),
    "imagenet": DatasetSpec((3, 224, 224), 1000, ("data_dir", "augment", "image_shape", "num_classes", "data_threads")),
    "synthetic": DatasetSpec((3, 32, 32), 10, ("image_shape", "num_classes", "num_examples")),
}

VIRTUAL = "virtual"

_AUTHORS = "In the words of the OD-SGD authors' scripts"

_MXNETS = {**dict.fromkeys(("dist_sync", "dist_device_sync", "dist"), "ssgd"),
           **dict.fromkeys(("dist_async", "dist_device_async"), "asgd"), "device": "local"}
"""MXNet's name of a store -> ours, so that old job scripts work as they are; with a local optimizer ssgd is odsgd."""

AUTHORS = {field.name: field for field in dataclasses.fields(dataclasses.make_dataclass("Authors", [
    ("num_worker", int, option(4, integer(0), "that many data_threads, where the data set has them", group=_AUTHORS)),
    ("mode", str, option("hybrid", name("mode", ("symbolic", "hybrid", "imperative")), "imperative: no_hybridize; "
                         "the others: hybridize", group=_AUTHORS))]))}
"""Flags of the OD-SGD authors' scripts that are none of ours, and what they come to."""

_data, _devices, _algorithm, _schedule, _run, _virtual = (
    partial(option, group=title) for title in ("Model and data", "Devices of a worker", "Algorithm", "Schedule", "Run",
                                               "Virtual time"))


@dataclasses.dataclass(frozen=True, init=False)
class TrainConfig:
    """One run, checked. Options that do not go together, or that nothing would use, are refused with ConfigError.

    Made from keywords, the options of the method among them: ``TrainConfig(kvstore="easgd", T=4)``. Where a default
    depends on another option (`out`, `transport`, `options.lamda` ...) it is filled in here, so that what is
    printed and saved is what ran.
    """

    model: str = _data("mlp", name("model", MODELS),
                       "network: mlp, lenet, one of the papers' (mlp_500, caffe_cifar10, caffe_cifar10_pixels, "
                       "sasgd_cnn, vgg_f), or a name of Gluon's or GluonCV's model zoo, e.g. resnet18_v2")
    weights: Optional[str] = _data(None, PATH, "file of weights to begin with, e.g. a checkpoint's weights.params; a "
                                   "last layer of another shape is drawn anew", result=False)
    trainable: str = _data("all", name("part", ("all", "last")), "which layers learn: all, or the last alone; the "
                           "others are frozen, with the statistics of their BatchNorm")
    dataset: str = _data("digits", name("data set", tuple(DATASETS)), "training and test data")
    data_dir: Optional[str] = _data(None, PATH, "folder with the files of mnist, cifar10 or imagenet", result=False)
    batch_size: int = _data(32, integer(1), "examples per iteration on ONE device; a worker's batch is batch size x "
                            "its devices, the global batch that x workers", tunes=True)
    augment: bool = _data(False, FLAG, "random crops and mirror images in training (cifar10: padded by 4; imagenet: "
                          "resized crops)")
    image_shape: Optional[Tuple[int, int, int]] = _data(
        None, SHAPE, "channels,height,width of synthetic images, or the crop of imagenet",
        otherwise="3,32,32 and 3,224,224")
    num_classes: Optional[int] = _data(None, integer(2), "classes of synthetic or imagenet data",
                                       otherwise="10 and 1000")
    num_examples: Optional[int] = _data(None, integer(1), "the first so many training examples alone; of synthetic "
                                        "ones so many are made, and a quarter as many for the test",
                                        otherwise="all, and 2048 synthetic ones")
    holdout: Optional[int] = _data(None, integer(1), "the last so many training examples are not learned from; they "
                                   "are the test, in place of the test set, to choose options by", otherwise="none")
    thumbnail: bool = _data(False, FLAG, "for small images, start a Gluon ResNet or MobileNet with a 3x3 convolution "
                            "of stride 1: more accurate, 4 to 16 times the work")
    data_threads: Optional[int] = _data(None, integer(1), "threads that decode imagenet", otherwise="4", result=False)

    num_gpus: int = _devices(0, integer(0), "use GPUs 0 to N-1", result=False)
    gpus: Tuple[int, ...] = _devices((), integers(0), "use these GPUs, e.g. 0,2", result=False)
    num_cpus: int = _devices(1, integer(1), "without GPUs: devices cpu(0) to cpu(N-1), a way to try several devices on "
                             "any machine", result=False)
    dtype: str = _devices("float32", name("number type", ("float32", "float16")), "of weights, gradients and what the "
                          "network computes: float16 has a dynamic loss scale, and the store updates in float32; a CPU "
                          "computes products in float32, too")
    hybridize: bool = _devices(True, FLAG, "compile the network into one graph")

    kvstore: str = _algorithm("odsgd", TEXT, f"{', '.join(algorithms.METHODS)}; or MXNet's dist_sync (odsgd when "
                              "--optimizer-local is named, else ssgd), dist_async (asgd) and device (local)")
    method_file: Optional[str] = _algorithm(None, TEXT, "a method of your own, as FILE.py or MODULE:CLASS; it is "
                                            "the one that runs, unless --kvstore names another", result=False)
    transport: Optional[str] = _algorithm(None, name("transport", ("server", "ring", "sharded")), "what sums and "
                                          "updates, for a method that runs on several: parameter servers, a ring of "
                                          "the workers, or workers that each update a part of the weights",
                                          otherwise="the method's first choice", result=False)
    optimizer: str = _algorithm("sgd", name("optimizer", local_optimizers.NAMES), "optimizer of the global weights",
                                tunes=True)
    lr: float = _algorithm(0.1, real(at_least=0), "its learning rate, before the schedule")
    momentum: float = _algorithm(0.0, real(at_least=0, at_most=1), "its momentum", tunes=True)
    wd: float = _algorithm(0.0, real(at_least=0), "its weight decay", tunes=True)
    optimizer_params: Dict[str, Any] = _algorithm({}, KEYWORDS, "further arguments of the optimizer, e.g. "
                                                  "clip_gradient=5")

    epochs: int = _schedule(10, integer(1), "passes over the training data", result=False)
    iterations: Optional[int] = _schedule(None, integer(1), "stop after this many iterations, though epochs are left",
                                          result=False)
    lr_decay: str = _schedule("step", name("decay", ("step", "poly")), "step: by --lr-factor at --lr-step-epochs; "
                              "poly: with the square to 0, over all epochs from the end of --lr-warmup")
    lr_step_epochs: Tuple[int, ...] = _schedule((), integers(1), "multiply lr by the factor after these epochs, e.g. "
                                                "80,120")
    lr_step_epochs_local: Optional[Tuple[int, ...]] = _schedule(None, integers(1), "the same for --lr-local",
                                                                otherwise="--lr-step-epochs", portable=False)
    lr_factor: float = _schedule(0.1, real(above=0), "the factor, for lr and lr_local")
    lr_warmup: TrainingLength = _schedule(TrainingLength(0), LENGTH, "raise lr, and only it, linearly to its value "
                                          "over this span, e.g. 5epochs", tunes=True)
    lr_scaling: str = _schedule("none", name("scaling", ("none", "linear", "sqrt")), "what becomes of lr, which is for "
                                "MAX workers, while a job of -n MIN:MAX has fewer: it stays, or is multiplied by their "
                                "part of MAX, or by its root")
    lr_warmup_from: float = _schedule(0.0, real(at_least=0), "where it starts")

    seed: int = _run(0, integer(0), "of the initial weights, the order of the data, and augmentation")
    out: Optional[str] = _run(None, PATH, "folder of the run", otherwise="runs/DATASET-MODEL-STORE", result=False)
    umask: str = _run("077", UMASK, "what its files and folders do not allow: by default they are this user's alone; "
                      "022: others may read them", result=False)
    resume: bool = _run(False, FLAG, "go on with the run in that folder", result=False)
    log_interval: int = _run(50, integer(1), "iterations between two log lines", result=False)
    eval_every: int = _run(1, integer(0), "epochs between two evaluations; 0: never", result=False)
    checkpoint_every: TrainingLength = _run(TrainingLength(1, "epochs"), LENGTH, "between two checkpoints, e.g. 1epoch "
                                            "or 500; 0: only at the end", result=False)
    keep_checkpoints: int = _run(3, integer(1), "how many of the newest are kept", result=False)
    checkpoint_to: Optional[str] = _run(None, TEXT, "a second place that checkpoints are copied to, and brought back "
                                        "from if --out has none: a folder, or HOST:FOLDER, by ssh", result=False)
    emulate_compute: Optional[Compute] = _run(
        None, COMPUTE, "forward and backward take this time per iteration and no core, gradients appear layer by "
        "layer, with the values of the first batch. For measuring time: nothing is learned, evaluated or kept")
    board: bool = _run(False, FLAG, "write TensorBoard's event files into the folder of the run", result=False)
    trace: Optional[str] = _run(None, PATH, "folder for a timeline of the job, which `odsgd trace` reads and Perfetto "
                                "shows", result=False)

    cluster: Optional[str] = _virtual(None, TEXT, "train all workers in this one process, on a cluster in virtual "
                                      "time: its YAML file, or `virtual` for one with the defaults", result=False)
    workers: Optional[int] = _virtual(None, integer(1), "workers of that cluster", otherwise="what the file says, or 2",
                                      result=False)

    options: Options = dataclasses.field(default_factory=Options)  # the method's

    def __init__(self, options: Optional[Options] = None, **values: Any) -> None:
        """`options`: where the method's come from that `values` does not name, for ``dataclasses.replace``."""
        values = {**(options.plain() if options else {}), **values}
        if values.get("method_file"):
            values.setdefault("kvstore", algorithms.load(values["method_file"]).name)
        for field in own_fields():
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            self._set(field.name, convert(field, values.pop(field.name, default), field.name))
        self._resolve_data()
        self._resolve_method({key: value for key, value in values.items() if value is not None})
        self._check_model_and_devices()
        self._check_schedule()
        self._check_dtype()
        self._resolve_emulation()
        self._check_cluster()
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
        flags, config_file, said = cls.parse(argv)
        _put_into_our_words(flags)
        if "method_file" in flags:
            flags.setdefault("kvstore", algorithms.load(flags["method_file"]).name)
        values = _known(option_fields(), config_file, said or _lines(config_file)) if config_file else {}
        if "kvstore" in flags:
            local = {**values, **flags}.get("optimizer_local")
            store = _store_named(flags["kvstore"], local)
            same = store == _store_named(values.get("kvstore", cls.kvstore), local)
            values = {key: value for key, value in values.items() if _goes_with(key, store, same)}
        return cls(**{**values, **flags})

    @staticmethod
    def parse(argv: Sequence[str]) -> Tuple[Dict[str, Any], Optional[str], Dict[str, Any]]:
        """The options given on a command line, each checked for itself, the file after ``--config``, and what it says.

        A method of the user's own is loaded first, since its options are among those that are known.
        """
        config_file, file, asked = given(argv, "--config", "--method-file", "--kvstore")
        said = _lines(config_file) if config_file and os.path.exists(config_file) else {}
        file, asked = file or said.get("method_file"), asked or said.get("kvstore")
        if file:
            algorithms.load(str(file))
        if asked and asked not in _MXNETS:
            with contextlib.suppress(ConfigError):  # is told later
                algorithms.find(str(asked))  # perhaps another package's, with options of its own
        return (*parse_flags({**option_fields(), **AUTHORS}, "odsgd train", argv), said)

    def to_dict(self) -> Dict[str, Any]:
        """Every option as JSON and YAML have it; ``TrainConfig(**config.to_dict()) == config``."""
        return {**{field.name: plain(getattr(self, field.name)) for field in own_fields()}, **self.options.plain()}

    def to_yaml(self) -> str:
        """The resolved configuration as a file for ``--config``."""
        return str(yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None, width=120))

    def mismatches(self, saved: Mapping[str, Any]) -> List[str]:
        """What keeps a run with configuration `saved` (a `to_dict()`) from being resumed with this one, by name."""
        names = [field.name for field in self._fields() if field.metadata["result"]]
        names += ["epochs"] if self.lr_decay == "poly" else []
        mine = self.to_dict()
        pairs = [(key, saved.get(key), mine[key]) for key in names]
        pairs.append(("devices of a worker", _device_count(saved), _device_count(mine)))
        return [f"{key}: {then} in the saved run, {now} now" for key, then, now in pairs if then != now]

    def tuned_with(self) -> Dict[str, Any]:
        """The options that a run which diverges is mended with, beside the two learning rates."""
        values = {**vars(self), **vars(self.options)}
        return {field.name: values[field.name] for field in self._fields()
                if field.metadata["tunes"] and values[field.name] is not None}

    def _fields(self) -> List[dataclasses.Field[Any]]:
        """Of its own options and of its method's."""
        return [*own_fields(), *dataclasses.fields(self.options)]

    # --- what the other modules ask -------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """``digits-mlp-odsgd-sgd``: the run in a word."""
        other = None if self.transport == "server" else self.transport
        local = getattr(self.options, "optimizer_local", None)
        return "-".join(part for part in (self.dataset, self.model, self.kvstore, local, other) if part)

    @property
    def method(self) -> Type[Method]:
        """The algorithm of the store."""
        return algorithms.find(self.kvstore)

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
        return self.method.asynchronous

    @property
    def steps_locally(self) -> bool:
        """Whether workers take steps of their own."""
        return "lr_local" in self.method.option_names() and self.method.local_optimizer(self.options) is not None

    @property
    def needs_servers(self) -> bool:
        """Whether the store sends to servers; a job of one that does not has none."""
        return (self.transport or self.method.transports[0]) == "server"

    @property
    def lr_local(self) -> Optional[float]:
        """The learning rate of a worker's own steps; None: there are none, or it follows lr."""
        return getattr(self.options, "lr_local", None)

    @functools.cached_property
    def virtual_cluster(self) -> VirtualCluster:
        """The cluster that the run is on, if it has one in virtual time; its file is read once, before the run."""
        assert self.cluster is not None
        given = {} if self.workers is None else {"workers": self.workers}
        if self.cluster == VIRTUAL:
            return description.of({"compute": {"draws": "lognormal:0.1"}}, **given)
        return read_cluster(self.cluster, **given)

    def optimizer_arguments(self) -> Dict[str, Any]:
        """Arguments of the global optimizer, as gluon.Trainer takes them."""
        momentum = {"momentum": self.momentum} if self.momentum else {}
        return {"learning_rate": self.lr, "wd": self.wd, **momentum, **self.optimizer_params}

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
        for key, value in (("image_shape", spec.shape), ("num_classes", spec.classes), ("data_threads", 4)):
            if key in spec.options:
                self._default(key, value)
        if self.dataset == "synthetic":
            self._default("num_examples", 2048)

    def _resolve_method(self, given: Dict[str, Any]) -> None:
        """`given`: what is no option of TrainConfig itself."""
        asked = self.kvstore
        self._set("kvstore", _store_named(asked, given.get("optimizer_local")))
        for key in given:
            if not methods.takers(key):
                raise unknown("option", key, [*option_fields()], listed="`odsgd train --help` lists all")
            if key not in self.method.option_names():
                raise self._no_meaning(key, methods.takers(key), asked)
        self._set("options", self.method.Options(**given))
        either = [store for store, method in algorithms.METHODS.items() if len(method.transports) > 1]
        if self.kvstore in either:
            self._default("transport", self.method.transports[0])
        elif self.transport is not None:
            raise self._no_meaning("transport", either, asked)
        fit.check(self.method, self.options, fit.transport_of(self.method, self.transport))
        if self.lr_step_epochs_local is not None and "lr_local" not in self.method.option_names():
            raise self._no_meaning("lr_step_epochs_local", methods.takers("lr_local"), asked)
        if self.lr_step_epochs_local is not None and not self.steps_locally:
            raise ConfigError("lr_step_epochs_local has no meaning with optimizer_local "
                              f"`{getattr(self.options, 'optimizer_local', 'none')}`, which takes no local step")
        if self.method.plain_sgd and (self.optimizer != "sgd" or self.momentum):
            raise ConfigError(f"kvstore `{self.kvstore}` takes plain SGD steps of its own: leave optimizer and "
                              f"momentum out (momentum: {self.method.plain_sgd})")
        local_optimizers.check_momentum("momentum", self.momentum, self.optimizer)

    @staticmethod
    def _no_meaning(key: str, takers: Sequence[str], asked: str) -> ConfigError:
        hint = " without optimizer_local, which is ssgd" if _MXNETS.get(asked) == "ssgd" else ""
        return ConfigError(f"{key} has no meaning with kvstore `{asked}`{hint}; it goes with {' or '.join(takers)}")

    def _check_model_and_devices(self) -> None:
        if self.thumbnail and not (self.model in GLUON_MODELS and self.model.startswith(("resnet", "mobilenet"))):
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

    def _check_dtype(self) -> None:
        for key in ("emulate_compute", "cluster"):
            if self.dtype != "float32" and getattr(self, key) is not None:
                raise ConfigError(f"dtype `{self.dtype}` has no meaning with {key}, which has its own account of what "
                                  "computing takes; leave one of them out")

    def _resolve_emulation(self) -> None:
        if self.emulate_compute is not None:
            if self.resume:
                raise ConfigError("resume has no meaning with emulate_compute, which learns nothing and keeps nothing; "
                                  "leave one of them out")
            self._set("eval_every", 0)


    def _check_cluster(self) -> None:
        if self.cluster is None:
            if self.workers is not None:
                raise ConfigError("workers goes with cluster, the description of a cluster in virtual time; those of a "
                                  "real job are started by `odsgd launch -n N`")
            return
        if self.kvstore == "local":
            raise ConfigError("kvstore `local` is for one process without a network; take another one with cluster")
        if self.options.uneven == "join":
            raise ConfigError("uneven `join` has no meaning with cluster: its workers' data are of one length; leave "
                              "it out")
        for key, why in (("emulate_compute", "computing times are the cluster's"), ("num_gpus", "it computes on CPUs"),
                         ("gpus", "it computes on CPUs")):
            if getattr(self, key):
                raise ConfigError(f"{key} has no meaning with cluster: {why}; leave one of them out")
        cluster = self.virtual_cluster
        method = self.method(self.options, cluster.workers)  # complains of options that do not go with so many
        cluster.check_transport(self.transport or method.transports[0], method.traffic(whole=False).coded)


def own_fields() -> List[dataclasses.Field[Any]]:
    """The options of a run that are no method's."""
    return [field for field in dataclasses.fields(TrainConfig) if field.name != "options"]


def option_fields() -> Dict[str, dataclasses.Field[Any]]:
    """Every option by name, those of all methods included, in the order in which they are shown."""
    own = {field.name: field for field in own_fields()}
    return {**own, **methods.fields()}


def _put_into_our_words(flags: Dict[str, Any]) -> None:
    """What the authors' words come to, in their place; an option of ours beside them wins."""
    if "mode" in flags:
        flags.setdefault("hybridize", flags.pop("mode") != "imperative")
    threads = flags.pop("num_worker", None)
    dataset = DATASETS.get(flags.get("dataset", ""))
    if threads and dataset and "data_threads" in dataset.options:
        flags.setdefault("data_threads", threads)


def _goes_with(key: str, store: str, same: bool) -> bool:
    """Whether a file's value of an option is one for this store, which is the `same` as the file's or another."""
    takers = methods.takers("lr_local" if key == "lr_step_epochs_local" else key)
    if not takers and key != "transport":
        return True
    method = algorithms.find(store)
    if key == "transport":
        return len(method.transports) > 1
    fields = {field.name: field for field in (*own_fields(), *dataclasses.fields(method.Options))}
    return store in takers and (same or fields[key].metadata["portable"])


def read_yaml(fields: Mapping[str, dataclasses.Field[Any]], path: str, program: str = "odsgd train") -> Dict[str, Any]:
    """The options in a YAML file, converted; what is wrong names the file, the key and the nearest right one."""
    return _known(fields, path, _lines(path), program)


def _known(fields: Mapping[str, dataclasses.Field[Any]], path: str, said: Mapping[str, Any],
           program: str = "odsgd train") -> Dict[str, Any]:
    """The same, of what the file has said."""
    for key in said:
        if key not in fields:
            raise unknown("option", key, fields, where=f" in `{path}`", listed=f"`{program} --help` lists all")
    return {key: convert(fields[key], value, f"`{path}`: {key}") for key, value in said.items()}


def _lines(path: str) -> Dict[str, Any]:
    """What a YAML file says, whether or not there are such options."""
    values = read_yaml_file(path)
    if not isinstance(values, dict):
        raise ConfigError(f"`{path}`: expected lines of the form `option: value`")
    return {shown(key).replace("-", "_"): value for key, value in values.items()}


def _store_named(asked: str, optimizer_local: Optional[str]) -> str:
    """Our name of the store that a user asks for, perhaps in MXNet's words."""
    if asked in _MXNETS:
        return "odsgd" if _MXNETS[asked] == "ssgd" and optimizer_local is not None else _MXNETS[asked]
    return algorithms.find(asked, "kvstore", also=_MXNETS).name


def _device_count(options: Mapping[str, Any]) -> int:
    return len(options.get("gpus") or ()) or options.get("num_gpus") or options.get("num_cpus") or 1
