"""Optimizers by name: MXNet's, and ours with delay compensation, with their options and defaults.

A worker of OD-SGD takes any of them for its local step; with `dcasgd_c` or `dcasgd_a` it has the options of the store
of that name (`dcasgd`).
"""
import dataclasses
import os
import sys
from typing import Any, Dict

from kvstore.errors import ConfigError
from kvstore.methods import common, dcasgd
from kvstore.options import name, option

MXNET = ("adadelta", "adagrad", "adam", "adamax", "dcasgd", "ftml", "ftrl", "lamb", "lars", "lbsgd", "nadam", "nag",
         "rmsprop", "sgd", "sgld", "signum")

COMPENSATED: Dict[str, Any] = {store.name: store.Options for store in (dcasgd.DCASGDC, dcasgd.DCASGDA)}
"""Names of those with delay compensation -> their options."""

COMPENSATION = tuple(field.name for field in dataclasses.fields(dcasgd.DCASGDA.Options)
                     if field.name not in common.CodedOptions.__dataclass_fields__)

FORMULAS = ("adamw",)
"""PyTorch's, by the names under which MXNet knows them (`optimizers.compensated`)."""

NAMES = (*MXNET, *FORMULAS, *COMPENSATED)

WITH_MOMENTUM = ("dcasgd", "lars", "lbsgd", "nag", "sgd", "signum", *COMPENSATED)
"""Their constructors take `momentum`; for the others the option is an error, not a silent nothing."""

PLAIN = ("sgd", "nag", "dcasgd", *COMPENSATED)
"""Their step is the learning rate times the gradient; what others make of the rate depends on the gradients."""

SCALED = ("adagrad", "adam", "adamax", "adamw", "ftml", "lamb", "nadam", "rmsprop", "signum")
"""Their step is as large as the learning rate, or the rate times the weights, however small gradients are. The others:
ftrl, lars and lbsgd step about as far as plain SGD or less, and adadelta has no rate."""

AUTHORS = {"psgd": "sgd", "lasgd": "dcasgd", "adcasgd": "dcasgd_a", "cadcasgd": "dcasgd_a"}
"""Names of local optimizers in the code of OD-SGD's authors -> ours. Theirs keep the weights that they last saw, as
MXNet's DCASGD does; ADCASGD and CADCASGD differ in where they are computed."""

_listed = name("local optimizer", ("none", *NAMES))


def _local(value: Any) -> str:
    """A name of the list, or one that a script has registered with MXNet; a server cannot check that, and takes any."""
    text, mxnet = str(value).lower(), sys.modules.get("mxnet")
    text = AUTHORS.get(text, text)
    registered = mxnet is not None and text in mxnet.optimizer.Optimizer.opt_registry
    return text if registered or os.environ.get("DMLC_ROLE") == "server" else str(_listed.convert(text))


LOCAL = dataclasses.replace(_listed, convert=_local)


def compensation_option(option_name: str) -> Any:
    """The option of this name for a local optimizer; its default is the default of the chosen optimizer."""
    field = dcasgd.DCASGDA.Options.__dataclass_fields__[option_name]
    return option(None, field.metadata["kind"], field.metadata["help"], tunable=field.metadata["tunable"],
                  method_specific=True, otherwise="the default of optimizer_local")


def fill_in(options: Any, optimizer: str) -> None:
    """Give `options` the defaults of `optimizer`, its `optimizer_local`; ConfigError for options that one lacks."""
    for option_name in COMPENSATION:
        takers = [taker for taker, its in COMPENSATED.items() if option_name in its.__dataclass_fields__]
        if optimizer not in takers and getattr(options, option_name) is not None:
            raise ConfigError(f"{option_name} goes with optimizer_local {' or '.join(takers)}, not with `{optimizer}`")
        if optimizer in takers and getattr(options, option_name) is None:
            options._set(option_name, COMPENSATED[optimizer].__dataclass_fields__[option_name].default)


def check_momentum(where: str, momentum: float, optimizer: str) -> None:
    """ConfigError if an optimizer of the list has no momentum; one that is not listed complains when it is made."""
    if momentum and optimizer in NAMES and optimizer not in WITH_MOMENTUM:
        raise ConfigError(f"{where}: optimizer `{optimizer}` takes no momentum; leave it out")
