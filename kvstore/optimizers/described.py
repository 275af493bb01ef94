"""Any optimizer, ours or MXNet's: by name, on flat arrays, and as text to send and save."""
import importlib
import inspect
import json
import sys
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

import numpy as np

from kvstore.engine import engine
from kvstore.engine.engine import NDArray
from kvstore.errors import ConfigError, unknown
from kvstore.job import environment
from kvstore.optimizers import formulas, torch_formulas
from kvstore.optimizers.formulas import Formula

Optimizer = Any
"""MXNet's, or one of ours (`formulas.Formula`)."""

OURS = {"sgd": formulas.SGD, "dcasgd_c": formulas.DCASGD_C, "dcasgd_a": formulas.DCASGD_A,
        "adam": torch_formulas.Adam, "adamw": torch_formulas.AdamW, "rmsprop": torch_formulas.RMSprop,
        "adagrad": torch_formulas.Adagrad}
"""Optimizers of a worker's own steps, by name, where the trainer's is ours."""


def is_mxnets(optimizer: Optimizer) -> bool:
    mxnet: Any = sys.modules.get("mxnet")
    return mxnet is not None and isinstance(optimizer, mxnet.optimizer.Optimizer)


def context_of(optimizer: Optimizer) -> Any:
    """The context of the arrays that a server applies it to."""
    return sys.modules["mxnet"].cpu() if is_mxnets(optimizer) else None


def _registered() -> Dict[str, Any]:
    from kvstore.engine._mxnet import mx
    from kvstore.optimizers import compensated  # noqa: F401  registers its own
    return mx.optimizer.Optimizer.opt_registry


def create_local(name: str, options: Dict[str, Any], like: Optimizer) -> Optimizer:
    """The optimizer of a worker's own steps, by name: MXNet's where the trainer's, `like`, is.

    Left out are `options` that are None, and a momentum of 0 where the optimizer has none.
    """
    name, kinds = str(name).lower(), _registered() if is_mxnets(like) else OURS
    if name not in kinds:
        raise unknown("optimizer_local", name, kinds)
    given = {key: value for key, value in options.items() if value is not None}
    takes = inspect.signature(kinds[name]).parameters
    if given.get("momentum") == 0 and "momentum" not in takes:
        del given["momentum"]
    try:
        optimizer = kinds[name](**given)
    except TypeError as error:
        raise ConfigError(f"optimizer_local `{name}` does not take these options: {error}") from None
    _check_works(optimizer)
    return optimizer


def outer_sgd(lr: float, momentum: float) -> Optimizer:
    """The optimizer of a method that has one of its own: SGD with Nesterov's momentum."""
    return torch_formulas.HeavyBall(momentum, nesterov=True, learning_rate=lr) if momentum \
        else formulas.SGD(learning_rate=lr)


def _check_works(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__ if known(optimizer) else ""
    if name == "DCASGD" and optimizer.momentum:  # MXNet tests an array for truth
        raise ConfigError("optimizer `dcasgd` of MXNet 1.9.1 fails with momentum; set that to 0, or take `dcasgd_c`, "
                          "which compensates from the weights after its last update and not before it")
    if name == "LBSGD" and optimizer.batch_scale > 1:
        raise ConfigError("optimizer `lbsgd` with batch_scale above 1 keeps gradients where no checkpoint finds them; "
                          "set it to 1")
    if name == "LBSGD" and optimizer.warmup_strategy == "lars":
        raise ConfigError("optimizer `lbsgd` with warmup_strategy `lars` compares weights with gradients that are not "
                          "scaled yet, so that steps depend on the number of workers; take `lars`, or another strategy")


# -- any optimizer, on flat arrays -----------------------------------------------------------------------------------

# Their update of an element depends on that element alone (and on counters), so parameters can share an array.
ELEMENTWISE = {"SGD", "NAG", "Adam", "AdaGrad", "AdaDelta", "RMSProp", "Ftrl", "FTML", "Signum", "Adamax", "DCASGD",
               "DCASGD_C", "DCASGD_A", "Test"}


def elementwise(optimizer: Optional[Optimizer]) -> bool:
    """Whether `optimizer` may be applied to a bucket of several parameters, or of a part of one."""
    return optimizer is None or isinstance(optimizer, Formula) or (
        known(optimizer) and type(optimizer).__name__ in ELEMENTWISE)


DECAYS_APART = {"AdaDelta", "AdaGrad", "AdamW", "DCASGD", "Ftrl", "LAMB", "LARS"}


def decays_apart(optimizer: Optimizer) -> bool:
    """Whether its weight decay differs from that of a gradient g + wd w."""
    return bool(kinds(optimizer) & DECAYS_APART) or ("Signum" in kinds(optimizer) and not optimizer.momentum)


def kinds(optimizer: Optimizer) -> Set[str]:
    """The names of those of its classes that are MXNet's or ours."""
    return {kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.startswith(("mxnet.", "kvstore."))}


def known(optimizer: Optimizer) -> bool:
    """Whether it is MXNet's or ours, whose ways are known."""
    return type(optimizer).__module__.startswith(("mxnet.", "kvstore."))


def state_arrays(state: Any) -> Dict[str, NDArray]:
    """All arrays of an optimizer's state, by names that depend on the optimizer alone."""
    return {name: part for name, part in _parts(state) if engine.is_array(part)}


def _parts(state: Any, name: str = "state") -> Iterator[Tuple[str, Any]]:
    inner = dict(enumerate(state)) if isinstance(state, (tuple, list)) else getattr(state, "__dict__", None)
    if inner is None or engine.is_array(state):
        yield name, state
        return
    for key, part in inner.items():
        yield from _parts(part, f"{name}/{key}")


def constants(state: Any) -> List[str]:
    """The values in an optimizer's state that are no arrays, as text."""
    return [f"{name}: {type(part).__name__} {part}" for name, part in _parts(state) if not engine.is_array(part)]


def check_state(optimizer: Optimizer, state: Any, size: int, begun: List[str]) -> None:
    """ConfigError if a saved state would lack a part of this one. `begun`: its constants when it was made."""
    sizes = {array.size for array in state_arrays(state).values()}
    if sizes - {size} or constants(state) != begun:
        what = f"an array of {max(sizes - {size})} floats" if sizes - {size} else "more than arrays that changes"
        raise ConfigError(f"the state of optimizer {type(optimizer).__name__} has {what}, which cannot be saved beside "
                          f"{size} weights; let what changes be arrays of the weights' shape")


def state_names(optimizer: Optimizer) -> List[str]:
    return sorted(state_arrays(optimizer.create_state_multi_precision(0, engine.zeros(1, context_of(optimizer)))))


# -- optimizers as text ------------------------------------------------------------------------------------------------

# Settings that the server gets in another way, or has no use for.
_NOT_CARRIED = {"lr_scheduler", "param_dict", "sym_info", "idx2name", "lr_mult", "wd_mult", "rescale_grad",
                "_all_index_update_counts", "_index_update_count"}
_FOLLOWED = {"lr", "lr_scheduler", "rescale_grad", "num_update", "begin_num_update"}


def describe(optimizer: Optimizer) -> Dict[str, Any]:
    """`optimizer` as JSON: its class by import path, and its settings."""
    kind = type(optimizer)
    _check_works(optimizer)
    if kind.__module__ == "__main__":
        raise ConfigError(f"optimizer {kind.__name__} is defined in the script itself, which servers cannot import; "
                          "move it to a module of its own")
    settings = {name: value.item() if isinstance(value, np.generic) else value  # NumPy's numbers as Python's
                for name, value in vars(optimizer).items() if name not in _NOT_CARRIED}
    for name, value in settings.items():
        try:
            json.dumps(value)
        except TypeError:
            raise ConfigError(f"optimizer {kind.__name__}: `{name}` is a {type(value).__name__}, which cannot be sent "
                              "to the servers; numbers, strings, lists and dicts can") from None
    return {"class": f"{kind.__module__}:{kind.__name__}", "settings": settings}


def settings(optimizer: Optimizer) -> Dict[str, Any]:
    """The settings of a trainer's optimizer that a script must not change, so all but rates (`_FOLLOWED`)."""
    plain = {name: value for name, value in vars(optimizer).items()
             if isinstance(value, (int, float, str, type(None), np.generic))
             and name not in _FOLLOWED and not name.startswith("_")}
    return {**plain, "lr_mult": dict(optimizer.lr_mult), "wd_mult": dict(optimizer.wd_mult)}


def check_settings(optimizer: Optimizer, saved: Dict[str, Any], whose: str) -> None:
    """ConfigError if its settings, but for rates, differ from those of a saved state, which would replace them."""
    mine, given = vars(optimizer), {"wd", "clip_gradient", *inspect.signature(type(optimizer)).parameters}
    for name in sorted(given & {*mine} & {*saved}):
        if mine[name] != saved[name]:
            raise ConfigError(f"the saved state is of {whose} with {name} {saved[name]}, and this store's has "
                              f"{mine[name]}; make it as it was when the state was saved")


def kind_of(path: str) -> str:
    """An import path without the name of our module, which may differ from version to version."""
    return "kvstore:" + path.partition(":")[2] if path.startswith("kvstore.") else path


def build(description: Dict[str, Any], trusted: bool) -> Optimizer:
    """The inverse of `describe`, with names and multipliers of rate and decay by bucket if they stand beside.
    `trusted`: optimizers may come from any module.
    """
    module, _, name = description["class"].partition(":")
    if not trusted and not module.startswith(("mxnet.", "kvstore.")):
        raise ConfigError(f"optimizer {module}.{name} is not MXNet's, and this job has no secret (ODSGD_SECRET) by "
                          "which a server could trust the request; start it with `odsgd launch`")
    if not module.startswith("kvstore."):
        from kvstore.engine import _mxnet  # noqa: F401  in a server no other import of MXNet would return
    with environment.job_folder_first():
        kind: Any = getattr(importlib.import_module(module), name, None)
    mxnet: Any = sys.modules.get("mxnet")
    bases = [*([mxnet.optimizer.Optimizer] if mxnet else []), Formula]
    base = next((one for one in bases if isinstance(kind, type) and issubclass(kind, one)), None)
    if base is None:
        raise ConfigError(f"{module}.{name} is not an optimizer; expected a subclass of mx.optimizer.Optimizer")
    optimizer: Any = object.__new__(kind)
    base.__init__(optimizer)
    optimizer.__dict__.update(description["settings"])
    for bucket, known_as in description.get("names", {}).items():
        optimizer.idx2name[int(bucket)] = known_as
    optimizer.set_lr_mult({int(bucket): factor for bucket, factor in description.get("lr_mult", {}).items()})
    optimizer.set_wd_mult({int(bucket): factor for bucket, factor in description.get("wd_mult", {}).items()})
    return optimizer


def names(optimizer: Optimizer, keys: Dict[int, Any]) -> Dict[int, str]:
    """By bucket, the name by which MXNet's optimizer knows its parameter: LARS leaves out those that end in bias. A
    Module's keys are names; a Gluon Trainer's are numbers, without names.
    """
    given = getattr(optimizer, "idx2name", {})  # a formula of ours has none
    return {bucket: given.get(key, key) for bucket, key in keys.items() if key in given or isinstance(key, str)}


def multipliers(optimizer: Optimizer, key: Any, parameter: Any = None) -> List[float]:
    """(lr_mult, wd_mult) of a parameter, looked up as MXNet does it."""
    if parameter is not None:
        return [float(parameter.lr_mult), float(parameter.wd_mult)]
    name = optimizer.idx2name.get(key)
    return [float(table.get(key, table.get(name, 1.0))) for table in (optimizer.lr_mult, optimizer.wd_mult)]


def learning_rate(optimizer: Optimizer, num_update: int) -> float:
    """The rate of update number `num_update` (1 is the first), by the schedule if there is one.

    MXNet's schedules with an end keep their last rate, but a new schedule, after a resume, has not computed it.
    """
    scheduler = optimizer.lr_scheduler
    if scheduler is None:
        return float(optimizer.lr)
    ends = getattr(scheduler, "max_update", None) if type(scheduler).__module__ == "mxnet.lr_scheduler" else None
    return float(scheduler(num_update if ends is None else min(num_update, ends)))
