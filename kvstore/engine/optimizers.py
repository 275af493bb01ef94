"""Optimizers as MXNet has them: those with delay compensation, and how any optimizer is carried as text.

`dcasgd_c` and `dcasgd_a` are ordinary MXNet optimizers (``gluon.Trainer(params, "dcasgd_c", {"lamda": 0.04})``), made
of the equations in `kvstore.algorithms.dcasgd`; w_read is what they last left in w. Weight decay is added beside g and
is not part of g⊙g, momentum is applied to the compensated gradient, both as in MXNet's own DCASGD. On one machine w
never moves between two updates, w - w_read is 0, and both are plain SGD.
"""
import importlib
import inspect
import json
from typing import Any, Dict, List, Optional

from kvstore.algorithms.dcasgd import DCASGDA, DCASGDC, compensated_a, compensated_c
from kvstore.engine._mxnet import NDArray, mx
from kvstore.engine.formulas import Formula
from kvstore.errors import ConfigError, unknown


class _State:
    """What one array's compensation remembers; an entry that is not needed is None."""

    def __init__(self, w_read: NDArray, momentum: Optional[NDArray], mean_square: Optional[NDArray]) -> None:
        self.w_read, self.momentum, self.mean_square = w_read, momentum, mean_square


class _DelayCompensated(mx.optimizer.Optimizer):
    """SGD on a compensated gradient; the subclasses say how it is compensated."""

    def __init__(self, learning_rate: float, momentum: float, lamda: float, **options: Any) -> None:
        super().__init__(learning_rate=learning_rate, **options)
        self.momentum, self.lamda = momentum, lamda

    def create_state(self, index: Any, weight: NDArray) -> _State:
        momentum = mx.nd.zeros_like(weight) if self.momentum else None
        return _State(weight.copy(), momentum, self.create_mean_square(weight))

    def create_mean_square(self, weight: NDArray) -> Optional[NDArray]:
        return None

    def compensate(self, grad: NDArray, moved: NDArray, state: _State) -> NDArray:
        """The gradient at w = w_read + `moved`, from the gradient at w_read."""
        raise NotImplementedError

    def update(self, index: Any, weight: NDArray, grad: NDArray, state: _State) -> None:
        self._update_count(index)
        grad = grad * self.rescale_grad
        if self.clip_gradient is not None:
            grad = mx.nd.clip(grad, -self.clip_gradient, self.clip_gradient)
        grad = self.compensate(grad, weight - state.w_read, state)
        # The operators that MXNet's own SGD uses, so that lamda = 0 gives its bits.
        rates = dict(lrs=[self._get_lr(index)], wds=[self._get_wd(index)], num_weights=1, out=weight)
        if state.momentum is None:
            mx.nd.multi_sgd_update(weight, grad, **rates)
        else:
            mx.nd.multi_sgd_mom_update(weight, grad, state.momentum, momentum=self.momentum, **rates)
        weight.copyto(state.w_read)


@mx.optimizer.register
class DCASGD_C(_DelayCompensated):
    """DC-ASGD with a constant lamda, Eq. 4."""

    def __init__(self, learning_rate: float = 0.01, momentum: float = 0.0, lamda: float = DCASGDC.Options.lamda,
                 **options: Any) -> None:
        super().__init__(learning_rate, momentum, lamda, **options)

    def compensate(self, grad: NDArray, moved: NDArray, state: _State) -> NDArray:
        return compensated_c(grad, moved, self.lamda)


@mx.optimizer.register
class DCASGD_A(_DelayCompensated):
    """DC-ASGD with an adaptive lamda, Eq. 5 and 6."""

    def __init__(self, learning_rate: float = 0.01, momentum: float = 0.0, lamda: float = DCASGDA.Options.lamda,
                 m: float = DCASGDA.Options.m, epsilon: float = DCASGDA.Options.epsilon, **options: Any) -> None:
        super().__init__(learning_rate, momentum, lamda, **options)
        self.m, self.epsilon = m, epsilon

    def create_mean_square(self, weight: NDArray) -> NDArray:
        return mx.nd.zeros_like(weight)

    def compensate(self, grad: NDArray, moved: NDArray, state: _State) -> NDArray:
        assert state.mean_square is not None
        return compensated_a(grad, moved, state.mean_square, self.lamda, self.m, self.epsilon, mx.nd.sqrt)


def create_local(name: str, options: Dict[str, Any]) -> mx.optimizer.Optimizer:
    """The optimizer of a worker's own steps, by name.

    Left out are `options` that are None, and a momentum of 0 where the optimizer has none.
    """
    name = str(name).lower()
    if name not in mx.optimizer.Optimizer.opt_registry:
        raise unknown("optimizer_local", name, mx.optimizer.Optimizer.opt_registry)
    given = {key: value for key, value in options.items() if value is not None}
    takes = inspect.signature(mx.optimizer.Optimizer.opt_registry[name]).parameters
    if given.get("momentum") == 0 and "momentum" not in takes:
        del given["momentum"]
    try:
        optimizer = mx.optimizer.create(name, **given)
    except TypeError as error:
        raise ConfigError(f"optimizer_local `{name}` does not take these options: {error}") from None
    _check_works(optimizer)
    return optimizer


def _check_works(optimizer: mx.optimizer.Optimizer) -> None:
    if type(optimizer) is mx.optimizer.DCASGD and optimizer.momentum:  # it asks whether an array is true
        raise ConfigError("optimizer `dcasgd` of MXNet 1.9.1 fails with momentum; set that to 0, or take `dcasgd_c`, "
                          "which compensates from the weights after its last update and not before it")


# -- any optimizer, on flat arrays -----------------------------------------------------------------------------------

# Their update of an element depends on that element alone (and on counters), so parameters can share an array.
ELEMENTWISE = {"SGD", "NAG", "Adam", "AdaGrad", "AdaDelta", "RMSProp", "Ftrl", "FTML", "Signum", "Adamax", "DCASGD",
               "DCASGD_C", "DCASGD_A", "Test"}


def elementwise(optimizer: Optional[mx.optimizer.Optimizer]) -> bool:
    """Whether `optimizer` may be applied to a bucket of several parameters, or of a part of one."""
    return optimizer is None or isinstance(optimizer, Formula) or (
        known(optimizer) and type(optimizer).__name__ in ELEMENTWISE)


def known(optimizer: mx.optimizer.Optimizer) -> bool:
    """Whether it is MXNet's or ours, whose ways are known."""
    return type(optimizer).__module__.startswith(("mxnet.", "kvstore."))


def state_arrays(state: Any, name: str = "state") -> Dict[str, NDArray]:
    """All arrays of an optimizer's state, by names that depend on the optimizer alone."""
    if isinstance(state, mx.nd.NDArray):
        return {name: state}
    parts = enumerate(state) if isinstance(state, (tuple, list)) else getattr(state, "__dict__", {}).items()
    return {found: array for key, part in parts for found, array in state_arrays(part, f"{name}/{key}").items()}


def state_names(optimizer: mx.optimizer.Optimizer) -> List[str]:
    """The names of those of `optimizer`, sorted."""
    return sorted(state_arrays(optimizer.create_state_multi_precision(0, mx.nd.zeros(1))))


# -- optimizers as text ------------------------------------------------------------------------------------------------

# Set on the server from what it is told apart from this, or of no use there.
_NOT_CARRIED = {"lr_scheduler", "param_dict", "sym_info", "idx2name", "lr_mult", "wd_mult", "rescale_grad",
                "_all_index_update_counts", "_index_update_count"}


def describe(optimizer: mx.optimizer.Optimizer) -> Dict[str, Any]:
    """`optimizer` as JSON: its class by import path, and its settings."""
    kind = type(optimizer)
    _check_works(optimizer)
    if kind.__module__ == "__main__":
        raise ConfigError(f"optimizer {kind.__name__} is defined in the script itself, which servers cannot import; "
                          "move it to a module of its own")
    settings = {name: value for name, value in vars(optimizer).items() if name not in _NOT_CARRIED}
    for name, value in settings.items():
        try:
            json.dumps(value)
        except TypeError:
            raise ConfigError(f"optimizer {kind.__name__}: `{name}` is a {type(value).__name__}, which cannot be sent "
                              "to the servers; numbers, strings, lists and dicts can") from None
    return {"class": f"{kind.__module__}:{kind.__name__}", "settings": settings}


def build(description: Dict[str, Any], trusted: bool) -> mx.optimizer.Optimizer:
    """The inverse of `describe`. Who trusts the sender takes optimizers from any module."""
    module, _, name = description["class"].partition(":")
    if not trusted and not module.startswith(("mxnet.", "kvstore.")):
        raise ConfigError(f"optimizer {module}.{name} is not MXNet's, and this job has no secret (ODSGD_SECRET) by "
                          "which a server could trust the request; start it with `odsgd launch`")
    kind = getattr(importlib.import_module(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, mx.optimizer.Optimizer)):
        raise ConfigError(f"{module}.{name} is not an optimizer; expected a subclass of mx.optimizer.Optimizer")
    optimizer: Any = object.__new__(kind)
    mx.optimizer.Optimizer.__init__(optimizer)
    vars(optimizer).update(description["settings"])
    return optimizer


def progress(optimizer: mx.optimizer.Optimizer, index: Any) -> Dict[str, Any]:
    """What an optimizer remembers beside arrays: its count of updates to `index`, and settings it changes itself."""
    return {"count": optimizer._index_update_count.get(index, optimizer.begin_num_update), **describe(optimizer)}


def set_progress(optimizer: mx.optimizer.Optimizer, index: Any, saved: Dict[str, Any]) -> None:
    """Put back what `progress` gave."""
    vars(optimizer).update(saved["settings"])
    optimizer._index_update_count[index] = saved["count"]


def multipliers(optimizer: mx.optimizer.Optimizer, key: Any, parameter: Any = None) -> List[float]:
    """(lr_mult, wd_mult) of a parameter, looked up as MXNet does it."""
    if parameter is not None:
        return [float(parameter.lr_mult), float(parameter.wd_mult)]
    name = optimizer.idx2name.get(key)
    return [float(table.get(key, table.get(name, 1.0))) for table in (optimizer.lr_mult, optimizer.wd_mult)]


def learning_rate(optimizer: mx.optimizer.Optimizer, num_update: int) -> float:
    """The rate of update number `num_update` (1 is the first), by the schedule if there is one."""
    return float(optimizer.lr_scheduler(num_update) if optimizer.lr_scheduler else optimizer.lr)
