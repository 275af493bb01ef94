"""Optimizers with delay compensation, and how any optimizer is carried to a server or applied by a worker.

`dcasgd_c` and `dcasgd_a` are ordinary MXNet optimizers (``gluon.Trainer(params, "dcasgd_c", {"lamda": 0.04})``).
Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017; Eq. 4-6 of the
OD-SGD paper. A gradient g was taken at w_read and is applied to w, which has moved on; the first term of a Taylor
expansion, with g⊙g for the Hessian, moves it along:

    dcasgd_c    w <- w - lr (g + lamda g⊙g⊙(w - w_read))                                         Eq. 4
    dcasgd_a    w <- w - lr (g + lamda / sqrt(MS + epsilon) g⊙g⊙(w - w_read))                    Eq. 5
                MS <- m MS + (1 - m) g⊙g     (before it is used)                                 Eq. 6

    w_read      what this optimizer last left in w: the next gradient is taken there

Weight decay is added beside g and is not part of g⊙g, momentum is applied to the compensated gradient, both as in
MXNet's own DCASGD. On one machine w never moves between two updates, w - w_read is 0, and both are plain SGD.
"""
import importlib
import inspect
import json
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from kvstore.buckets import Bucket
from kvstore.engine import engine
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import ConfigError, unknown
from kvstore.tracing import recorder as trace

# -- delay compensation --------------------------------------------------------------------------------------------

def compensated_c(grad: Any, moved: Any, lamda: float) -> Any:
    """Eq. 4: the gradient at w_read + `moved`, from the one at w_read. Arrays of MXNet or NumPy."""
    return grad + lamda * grad * grad * moved


def compensated_a(grad: Any, moved: Any, mean_square: Any, lamda: float, m: float, epsilon: float, sqrt: Any) -> Any:
    """Eq. 5, after Eq. 6 has brought `mean_square` up to date in place."""
    square = grad * grad
    mean_square[:] = m * mean_square + (1 - m) * square
    return grad + lamda / sqrt(mean_square + epsilon) * square * moved


class _State:
    """What one array's compensation remembers; an entry that is not needed is None."""

    def __init__(self, w_read: NDArray, momentum: Optional[NDArray], mean_square: Optional[NDArray]) -> None:
        self.w_read, self.momentum, self.mean_square = w_read, momentum, mean_square


class _DelayCompensated(mx.optimizer.Optimizer):
    """SGD on a compensated gradient; the subclasses say how it is compensated."""

    def __init__(self, learning_rate: float = 0.01, momentum: float = 0.0, lamda: float = 0.04, **options: Any) -> None:
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

    def compensate(self, grad: NDArray, moved: NDArray, state: _State) -> NDArray:
        return compensated_c(grad, moved, self.lamda)


@mx.optimizer.register
class DCASGD_A(_DelayCompensated):
    """DC-ASGD with an adaptive lamda, Eq. 5 and 6."""

    def __init__(self, learning_rate: float = 0.01, momentum: float = 0.0, lamda: float = 2.0,
                 m: float = 0.95, epsilon: float = 1e-7, **options: Any) -> None:
        super().__init__(learning_rate, momentum, lamda, **options)
        self.m, self.epsilon = m, epsilon

    def create_mean_square(self, weight: NDArray) -> NDArray:
        return mx.nd.zeros_like(weight)

    def compensate(self, grad: NDArray, moved: NDArray, state: _State) -> NDArray:
        assert state.mean_square is not None
        return compensated_a(grad, moved, state.mean_square, self.lamda, self.m, self.epsilon, mx.nd.sqrt)


# -- the local update of OD-SGD ------------------------------------------------------------------------------------

class LocalUpdate:
    """L(W_t, g_t; w_t): a worker's own step from the global weights it has, for one bucket.

    The result lies in `w_bak`, the paper's comm_bak_; it is valid until the next call. For the compensated optimizers
    w_t is what the previous call left; at the first call, where the warm-up ends, it is W_t itself.
    """

    def __init__(self, bucket: Bucket, optimizer: mx.optimizer.Optimizer) -> None:
        self.bucket, self.optimizer = bucket, optimizer
        self._shape = None if elementwise(optimizer) else bucket.shape
        self.w_bak: Optional[NDArray] = None
        self.state: Any = None

    def __call__(self, w_global: NDArray, grad: NDArray) -> NDArray:
        if self.w_bak is None:
            self.start(w_global)
        begin = w_global
        if not is_plain_sgd(self.optimizer):  # works in place
            begin = self.w_bak
            w_global.copyto(begin)
            if trace.on is not None:
                trace.on.span("copy", self.bucket, reads=[w_global], writes=[self.w_bak])
        queue(self.optimizer, self.bucket.id, begin, grad, self.state, self._shape, self.w_bak)
        if trace.on is not None:
            trace.on.span("local update", self.bucket, reads=[w_global, grad], writes=[self.w_bak])
        return self.w_bak

    def memory(self) -> List[NDArray]:
        """The optimizer's state; empty before the first call."""
        return state_arrays(self.state)

    def resume(self, w_global: NDArray, memory: List[NDArray]) -> None:
        """Go on with a state that `memory` gave."""
        self.start(w_global)
        for mine, saved in zip(self.memory(), memory):
            saved.copyto(mine)

    def start(self, w_global: NDArray) -> None:
        """Begin at `w_global`, with an optimizer that has seen nothing yet."""
        self.w_bak = w_global.copy()
        self.state = self.optimizer.create_state_multi_precision(self.bucket.id, shaped(self.w_bak, self._shape))


def create_local(name: str, options: Dict[str, Any]) -> Optional[mx.optimizer.Optimizer]:
    """The optimizer of the local update by name, or None for ``none``.

    Left out are `options` that are None, and a momentum of 0 where the optimizer has none.
    """
    name = str(name).lower()
    if name == "none":
        return None
    if name not in mx.optimizer.Optimizer.opt_registry:
        raise unknown("optimizer_local", name, ["none", *mx.optimizer.Optimizer.opt_registry])
    given = {key: value for key, value in options.items() if value is not None}
    takes = inspect.signature(mx.optimizer.Optimizer.opt_registry[name]).parameters
    if given.get("momentum") == 0 and "momentum" not in takes:
        del given["momentum"]
    try:
        return mx.optimizer.create(name, **given)
    except TypeError as error:
        raise ConfigError(f"optimizer_local `{name}` does not take these options: {error}") from None


# -- any optimizer, on flat arrays -----------------------------------------------------------------------------------

# Their update of an element depends on that element alone (and on counters), so parameters can share an array.
ELEMENTWISE = {"SGD", "NAG", "Adam", "AdaGrad", "AdaDelta", "RMSProp", "Ftrl", "FTML", "Signum", "Adamax", "DCASGD",
               "DCASGD_C", "DCASGD_A", "Test"}


def elementwise(optimizer: Optional[mx.optimizer.Optimizer]) -> bool:
    """Whether `optimizer` may be applied to a bucket of several parameters, or of a part of one."""
    kind = type(optimizer)
    ours = kind.__module__.startswith(("mxnet.", "kvstore."))
    return optimizer is None or (ours and kind.__name__ in ELEMENTWISE)


def shaped(flat: NDArray, shape: Optional[Sequence[int]]) -> NDArray:
    """A view of `flat` in the shape of the one parameter it holds, where it holds one."""
    return flat if shape is None else flat.reshape(tuple(shape))


def apply(optimizer: mx.optimizer.Optimizer, index: Any, weight: NDArray, grad: NDArray, state: Any,
          shape: Optional[Sequence[int]]) -> None:
    """One update of `weight` in place."""
    optimizer.update_multi_precision(index, shaped(weight, shape), shaped(grad, shape), state)


def apply_at_once(optimizer: mx.optimizer.Optimizer, index: Any, weight: NDArray, grad: NDArray, state: Any,
                  shape: Optional[Sequence[int]]) -> None:
    """`apply` for servers, whose one thread would wait for it anyway. May overwrite `grad`."""
    if is_plain_sgd(optimizer):
        w, g = engine.memory(weight), engine.memory(grad)
        _SGD(optimizer, index)(w, g, None if state is None else engine.memory(state), out=w, room=g)
    else:
        apply(optimizer, index, weight, grad, state, shape)


def queue(optimizer: mx.optimizer.Optimizer, index: Any, weight: NDArray, grad: NDArray, state: Any,
          shape: Optional[Sequence[int]], out: NDArray) -> None:
    """`apply` to `weight`, the result in `out`, which may be the same, as operations of the engine."""
    if is_plain_sgd(optimizer):
        step = _SGD(optimizer, index)

        def update() -> None:
            w, g, after = engine.view(weight), engine.view(grad), engine.view(out)
            step(w, g, None if state is None else engine.view(state), out=after, room=None if out is weight else after)

        reads = [grad] if out is weight else [weight, grad]
        engine.push(update, reads, [out] if state is None else [out, state])
    else:
        if out is not weight:
            weight.copyto(out)
        apply(optimizer, index, out, grad, state, shape)


def is_plain_sgd(optimizer: mx.optimizer.Optimizer) -> bool:
    """Whether NumPy does what `optimizer` does."""
    return type(optimizer) is mx.optimizer.SGD and not optimizer.clip_gradient


class _SGD:
    """One update by MXNet's SGD in NumPy: its operations in its order, hence its bits, in a sixth of its time.

        v <- momentum v - lr wd w - lr g,    out <- w + v        v: None without momentum
    """

    def __init__(self, optimizer: mx.optimizer.SGD, index: Any) -> None:
        optimizer._update_count(index)
        self._lr, self._wd = np.float32(optimizer._get_lr(index)), np.float32(optimizer._get_wd(index))
        self._scale, self._momentum = self._lr * np.float32(optimizer.rescale_grad), np.float32(optimizer.momentum)

    def __call__(self, w: np.ndarray, g: np.ndarray, v: Optional[np.ndarray], out: np.ndarray,
                 room: Optional[np.ndarray]) -> None:
        """`out` may be `w`. `room` is for what is computed on the way: `g`, or `out` where that is not `w`."""
        with np.errstate(all="ignore"):  # a run may diverge; MXNet says nothing either
            step = np.multiply(g, self._scale, out=room)
            if v is None:
                if self._wd:
                    step += self._lr * self._wd * w
                np.subtract(w, step, out=out)
            else:
                v *= self._momentum
                if self._wd:
                    v -= self._lr * self._wd * w
                v -= step
                np.add(w, v, out=out)


def state_arrays(state: Any) -> List[NDArray]:
    """All arrays of an optimizer's state, in an order that depends on the optimizer alone."""
    if isinstance(state, mx.nd.NDArray):
        return [state]
    if isinstance(state, (tuple, list)):
        return [array for part in state for array in state_arrays(part)]
    if state is not None and hasattr(state, "__dict__"):
        return [array for part in vars(state).values() for array in state_arrays(part)]
    return []


# -- optimizers as text ------------------------------------------------------------------------------------------------

# Set on the server from what it is told apart from this, or of no use there.
_NOT_CARRIED = {"lr_scheduler", "param_dict", "sym_info", "idx2name", "lr_mult", "wd_mult", "rescale_grad",
                "_all_index_update_counts", "_index_update_count"}


def describe(optimizer: mx.optimizer.Optimizer) -> Dict[str, Any]:
    """`optimizer` as JSON: its class by import path, and its settings."""
    kind = type(optimizer)
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
    return {"count": optimizer._index_update_count.get(index, optimizer.begin_num_update),
            "settings": describe(optimizer)["settings"]}


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
