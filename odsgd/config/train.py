"""The configuration of one training run, checked.

A field of `TrainOptions` is a flag (``--lr-step-epochs``, or ``--lr_step_epochs``), a key of the YAML file, and a row
of docs/reference/configuration.md. So are the options of the methods, which their own files declare
(`kvstore.methods`); a configuration holds the options of its method in `options`. Nothing slow is imported here, so
that a misspelt option costs nobody a second.

    >>> config = TrainConfig.from_flags("--kvstore dist_sync --optimizer_local dcasgd_a --warmup 2epochs".split())
    >>> config.kvstore, config.options.lamda, config.options.warmup.iterations(batches_per_epoch=100)
    ('odsgd', 2.0, 200)
"""
from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import math
import os
import socket
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Type

import yaml

from kvstore import methods as algorithms
from kvstore.errors import ConfigError, shown, unknown
from kvstore.job import environment
from kvstore.methods import fit, local_optimizers
from kvstore.methods.common import Options
from kvstore.methods.contract import Method
from kvstore.options import convert, plain
from odsgd.config import methods
from odsgd.config.files import OptionsLoader, read_cluster, read_yaml_file
from odsgd.config.flags import flag_of, given, parse_flags
from odsgd.config.methods import MXNETS, store_named
from odsgd.config.train_options import DATASETS, GLUON_MODELS, VIRTUAL, AuthorsOptions, TrainOptions, put_into_our_words
from odsgd.virtual import description
from odsgd.virtual.description import VirtualCluster

DESCRIPTION = """\
Train a network with one of the methods of odsgd. To use several workers:
  odsgd launch -n WORKERS -s SERVERS odsgd train [options]
For a single process: `--kvstore local`. Flags take - or _ between words."""
SET_BY_THE_RUN = ("learning_rate", "lr_scheduler", "rescale_grad", "param_idx2name", "sym")
FIRST = ("dataset", "model", "kvstore", "lr", "epochs", "out")


@dataclasses.dataclass(frozen=True, init=False)
class TrainConfig(TrainOptions):
    """One run, checked. Options that do not go together, or that nothing would use, are refused with ConfigError.

    Made from keywords, the options of the method among them: ``TrainConfig(kvstore="easgd", T=4)``. Where a default
    depends on another option (`out`, `transport`, `options.lamda` ...) it is filled in here, so that what is
    printed and saved is what ran.
    """

    options: Options = dataclasses.field(default_factory=Options)  # the method's

    def __init__(self, options: Optional[Options] = None, **values: Any) -> None:
        """`options`: the method's options that `values` does not name, for ``dataclasses.replace``."""
        values = {**(options.plain() if options else {}), **values}
        if values.get("method_file"):
            values.setdefault("kvstore", algorithms.load(values["method_file"]).name)
        for field in dataclasses.fields(TrainOptions):
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            self._set(field.name, convert(field, values.pop(field.name, default), field.name))
        self._resolve_data()
        self._resolve_method({key: value for key, value in values.items() if value is not None})
        self._check_optimizer_params()
        self._check_model_and_devices()
        self._check_schedule()
        self._check_dtype()
        self._resolve_emulation()
        self._check_cluster()
        self._set("out", os.path.expanduser(self.out or Path("runs") / self.name))
        for key in ("checkpoint_to", "trace"):
            self._set(key, getattr(self, key) and os.path.expanduser(getattr(self, key)))

    # --- where values come from and go to -------------------------------------------------------------------------

    @classmethod
    def from_flags(cls, argv: Sequence[str]) -> TrainConfig:
        """The configuration that a command line gives; flags win over ``--config FILE.yaml``.

        Where a flag names another store than the file, the file's options for its own store are dropped: so one preset
        serves for OD-SGD and, with ``--kvstore ssgd`` or ``asgd``, for the controls beside it. The same holds for a
        local optimizer and its options, whose defaults a run's config.yaml has.

        ``--help`` prints and raises SystemExit(0); a mistake raises ConfigError, one line.
        """
        flags, config_file, said = cls.parse(argv)
        if "kvstore" in flags:  # perhaps with options, in the spelling of `odsgd launch --store`
            flags["kvstore"], options = fit.split(flags["kvstore"])
            flags = {**options, **flags}
        if "method_file" in flags:
            flags.setdefault("kvstore", algorithms.load(flags["method_file"]).name)
        values = _known(option_fields(), config_file, said or _lines(config_file)) if config_file else {}
        put_into_our_words(flags, {**values, **flags}.get("dataset", ""))
        if "kvstore" in flags:
            local = {**values, **flags}.get("optimizer_local")
            store = store_named(flags["kvstore"], local)
            before = store_named(values.get("kvstore", cls.kvstore), local)
            values = {key: value for key, value in values.items() if _goes_with(key, store, before)}
        local, field = values.get("optimizer_local"), option_fields()["optimizer_local"]
        if local is not None and local != convert(field, flags.get("optimizer_local", local), flag_of(field)):
            values = {key: value for key, value in values.items() if key not in local_optimizers.COMPENSATION}
        return cls(**{**values, **flags})

    @staticmethod
    def parse(argv: Sequence[str]) -> Tuple[Dict[str, Any], Optional[str], Dict[str, Any]]:
        """The options of a command line, each checked by itself; the file after ``--config``; and its values.

        A method of the user's own is loaded first, so that its options are known. ``--help`` explains the
        options of the method that is asked for.
        """
        config_file, file, asked = given(argv, "--config", "--method-file", "--kvstore")
        config_file = config_file and os.path.expanduser(config_file)
        said = _lines(config_file) if config_file and os.path.exists(config_file) else {}
        file, asked = file or said.get("method_file"), asked or said.get("kvstore")
        method = algorithms.load(str(file)) if file else None
        if asked and str(asked) not in MXNETS:
            with contextlib.suppress(ConfigError):  # raised again later, with the option's name
                method = algorithms.find(str(asked))  # perhaps another package's, with options of its own
        first = (*FIRST, *(name for name in (method.option_names() if method else ()) if name not in methods.COMMON))
        fields = {**option_fields(), **AuthorsOptions.__dataclass_fields__}
        return (*parse_flags(fields, "odsgd train", argv, DESCRIPTION, first), said)

    def to_dict(self) -> Dict[str, Any]:
        """Every option as JSON and YAML have it; ``TrainConfig(**config.to_dict()) == config``."""
        own = {name: plain(getattr(self, name)) for name in TrainOptions.__dataclass_fields__}
        return {**own, **self.options.plain()}

    def to_yaml(self) -> str:
        """The resolved configuration as a file for ``--config``, which repeats a run from its beginning."""
        repeats = {**self.to_dict(), "resume": False}
        return str(yaml.safe_dump(repeats, sort_keys=False, default_flow_style=None, width=120))

    def mismatches(self, saved: Mapping[str, Any]) -> List[str]:
        """The options that keep a run with configuration `saved` (a `to_dict()`) from being resumed with this one."""
        names = [field.name for field in self._fields() if field.metadata["result"]]
        names += ["epochs"] if self.lr_decay == "poly" else []
        mine = self.to_dict()
        pairs = [(key, saved.get(key), mine[key]) for key in names]
        pairs.append(("devices of a worker", _device_count(saved), _device_count(mine)))
        return [f"{key}: {then} in the saved run, {now} now" for key, then, now in pairs if then != now]

    def tuned_with(self) -> Dict[str, Any]:
        """The options that can mend a diverging run, beside the two learning rates."""
        values = {**vars(self), **vars(self.options)}
        return {field.name: values[field.name] for field in self._fields()
                if field.metadata["tunable"] and values[field.name] is not None}

    def _fields(self) -> List[dataclasses.Field[Any]]:
        return [*dataclasses.fields(TrainOptions), *dataclasses.fields(self.options)]

    # --- questions of other modules -------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """``digits-mlp-odsgd-sgd``: the run in a word."""
        other = None if self.transport == "server" else self.transport
        local = getattr(self.options, "optimizer_local", None)
        return "-".join(part for part in (self.dataset, self.model, self.kvstore, local, other) if part)

    @property
    def method(self) -> Type[Method]:
        return algorithms.find(self.kvstore)

    @property
    def input_shape(self) -> Tuple[int, int, int]:
        """Channels, height, width of one example."""
        return self.image_shape or DATASETS[self.dataset].shape

    @property
    def classes(self) -> int:
        return self.num_classes or DATASETS[self.dataset].classes

    @property
    def worker_batch_size(self) -> int:
        """Examples of one worker per iteration, over all its devices: the b of the algorithms' mini-batch mean."""
        return self.batch_size * _device_count(vars(self))

    @property
    def asynchronous(self) -> bool:
        """Whether workers train without waiting for each other."""
        return self.method.asynchronous

    @property
    def admits(self) -> bool:
        """Whether a worker may join the job while it runs (`odsgd join`)."""
        return self.method.admits(self.options)

    @property
    def steps_locally(self) -> bool:
        """Whether workers take steps of their own."""
        return "lr_local" in self.method.option_names() and self.method.local_optimizer(self.options) is not None

    @property
    def needs_servers(self) -> bool:
        """Whether the store sends to servers; without them a job has no server."""
        return (self.transport or self.method.transports[0]) == "server"

    def make_folder(self) -> None:
        """Make the run's folder; ConfigError if this host cannot, or OSError if the job's next attempt may succeed."""
        try:
            str(self.out).encode()
        except UnicodeError:  # checkpoints and logs name it in UTF-8
            raise ConfigError(f"--out {shown(self.out)}: its name is not UTF-8; name another folder") from None
        before = os.umask(int(self.umask, 8))
        try:
            Path(str(self.out)).mkdir(parents=True, exist_ok=True)
            if not os.access(str(self.out), os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            if environment.restarts() and error.errno not in (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
                raise
            raise ConfigError(f"--out {self.out}: {error.strerror} on {socket.gethostname()}; name a folder that can "
                              "be made and written there") from None
        finally:
            os.umask(before)

    @property
    def lr_local(self) -> Optional[float]:
        """The learning rate of a worker's own steps; None: it takes no such steps, or their rate follows lr."""
        return getattr(self.options, "lr_local", None)

    @functools.cached_property
    def virtual_cluster(self) -> VirtualCluster:
        """The run's cluster in virtual time; its file is read once, before the run."""
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
                takers = [name for name, other in DATASETS.items() if key in other.options]
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
        """`given`: options that are no fields of `TrainOptions`."""
        asked = self.kvstore
        self._set("kvstore", store_named(asked, given.get("optimizer_local")))
        for key in given:
            if not methods.takers(key):
                raise unknown("option", key, [*option_fields()], listed="`odsgd train --help` lists all")
            if key not in self.method.option_names():
                raise self._no_meaning(key, methods.takers(key), asked)
        taken = sorted({*TrainOptions.__dataclass_fields__} & {*self.method.option_names()})
        if taken:
            raise ConfigError(f"option {taken[0]} of kvstore `{asked}` is one of `odsgd train`'s own; give it another "
                              f"name in {algorithms.where(self.method)}")
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

    def _no_meaning(self, key: str, takers: Sequence[str], asked: str) -> ConfigError:
        known = MXNETS.get(asked)
        hint = " without optimizer_local, which is ssgd" if known == self.kvstore == "ssgd" else (
            f", which is {self.kvstore}" if known else "")
        return ConfigError(f"{key} has no meaning with kvstore `{asked}`{hint}; it goes with {' or '.join(takers)}")

    def _check_optimizer_params(self) -> None:
        for key, value in self.optimizer_params.items():
            if key in SET_BY_THE_RUN:
                raise ConfigError(f"optimizer_params: the run sets {key} itself; leave it out"
                                  f"{', and give lr' if key == 'learning_rate' else ''}")
            if key in ("wd", "momentum"):
                raise ConfigError(f"optimizer_params: {key} is an option of its own; give it there")
            finite = not isinstance(value, float) or math.isfinite(value)
            if not finite or (isinstance(value, str) and key != "warmup_strategy"):  # lbsgd's
                raise ConfigError(f"optimizer_params: {shown(key)}: expected a number, true or false, got "
                                  f"`{shown(value)}`")

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
        if self.dtype == "float16" and not (self.hybridize or self.num_gpus or self.gpus):
            raise ConfigError("dtype `float16` without hybridize: on CPUs MXNet has no such layers; leave "
                              "--no-hybridize out")

    def _resolve_emulation(self) -> None:
        if self.emulate_compute is not None:
            if self.resume:
                raise ConfigError("resume has no meaning with emulate_compute, which learns nothing and keeps nothing; "
                                  "leave one of them out")
            self._set("eval_every", 0)

    def _check_cluster(self) -> None:
        if self.cluster is None:
            if self.workers is not None:
                raise ConfigError("workers goes with cluster, the description of a cluster in virtual time; the "
                                  "workers of a real job are started by `odsgd launch -n N`")
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
        method = self.method(self.options, cluster.workers)  # refuses options that do not go with this number
        cluster.check_transport(self.transport or method.transports[0])


def option_fields() -> Dict[str, dataclasses.Field[Any]]:
    """Every option by name, with the options of all methods, in the order of the help."""
    return {**TrainOptions.__dataclass_fields__, **methods.fields()}


def _goes_with(key: str, store: str, before: str) -> bool:
    """Whether a file's value of an option serves this store. `before`: the file's store."""
    method = algorithms.find(store)
    if key == "transport":
        return len(method.transports) > 1
    takers = methods.takers("lr_local" if key == "lr_step_epochs_local" else key)
    if not takers:
        return True
    specific = any(field.metadata["method_specific"] for of in (TrainOptions, method.Options,
                   algorithms.find(before).Options) for field in dataclasses.fields(of) if field.name == key)
    return store in takers and (store == before or not specific)


def read_options(fields: Mapping[str, dataclasses.Field[Any]], program: str, argv: Sequence[str],
                 description: str) -> Dict[str, Any]:
    """The options of a command line, and of its ``--config FILE.yaml`` or below a name there (FILE:NAME). Flags win."""
    flags, path = parse_flags(fields, program, argv, description)
    if path is None:
        return flags
    file, colon, name = ("", "", "") if os.path.exists(path) else path.rpartition(":")
    said = _lines(file if colon else path)
    if colon:
        part = said.get(name.replace("-", "_"))
        if not isinstance(part, dict):
            raise unknown("name", name, said, where=f" in `{file}`")
        said = _underscored(part)
    return {**_known(fields, path, said, program), **flags}


def _known(fields: Mapping[str, dataclasses.Field[Any]], path: str, said: Mapping[str, Any],
           program: str = "odsgd train") -> Dict[str, Any]:
    """The options in lines that have been read from the file `path`."""
    for key in said:
        if key not in fields:
            raise unknown("option", key, fields, where=f" in `{path}`", listed=f"`{program} --help` lists all")
    return {key: convert(fields[key], value, f"`{path}`: {key}") for key, value in said.items()}


def _lines(path: str) -> Dict[str, Any]:
    """The lines of a YAML file, whether or not there are such options."""
    values = read_yaml_file(path, loader=OptionsLoader)
    if not isinstance(values, dict):
        raise ConfigError(f"`{path}`: expected lines of the form `option: value`")
    return _underscored(values)


def _underscored(values: Mapping[Any, Any]) -> Dict[str, Any]:
    keys = [shown(key).replace("-", "_") for key in values]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"option {key} stands twice, once with `-` and once with `_`; leave one of them out")
    return dict(zip(keys, values.values()))


def _device_count(options: Mapping[str, Any]) -> int:
    return len(options.get("gpus") or ()) or options.get("num_gpus") or options.get("num_cpus") or 1
