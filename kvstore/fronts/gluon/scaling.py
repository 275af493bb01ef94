"""MXNet's dynamic loss scale (``mxnet.contrib.amp``), agreed by all workers.

A script multiplies its loss by a scale, so that small gradients do not vanish in half precision, and divides the
gradients by it. Where one is infinite or not a number, the step is left out and the scale halved; after 2000 steps in
which none was, it is doubled. MXNet looks when the store has been given the gradients, and each worker for itself.

With our stores all look before anything is sent. Where one worker of a synchronous job has such a gradient, nobody has
an iteration, so the scales stay equal. Workers of an asynchronous job look, and scale, each for itself.
"""
import math
import types
from typing import Any, Callable, Dict, Iterable, List, Optional

import numpy as np

from kvstore.engine import engine
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import DivergedError
from kvstore.fronts.gluon import by_name
from kvstore.messages import finite

AT_A_TIME = 200
"""Arrays that one call of the operator looks at."""

SCALER = "_amp_loss_scaler"
"""Where ``amp.init_trainer`` leaves it."""

SMALLEST = 2.0 ** -10
"""Loss scale below which overflows have another cause."""

KEPT = ("_loss_scale", "_next_loss_scale", "_unskipped")
"""What a checkpoint keeps of a scaler of MXNet's."""


def teach(trainer: Any, ours: type) -> None:
    """Let the class `trainer`, which is Gluon's, tell stores of the class `ours` of a scale that it is given."""
    def store(of: Any) -> Any:
        asked = of._kvstore_params["kvstore"]
        return asked if isinstance(asked, ours) else None

    def set_scaler(of: Any, scaler: Any) -> None:
        if store(of) is not None:
            store(of).scale_by(scaler)
        vars(of)[SCALER] = scaler

    def rescale(original: Callable[..., None], of: Any, scale: float) -> None:
        """MXNet refuses another batch size or scale where the store's name has ``dist`` in it."""
        if store(of) is None:
            original(of, scale)
        else:
            of._optimizer.rescale_grad = scale

    by_name.wrap(trainer, "_check_and_rescale_grad", rescale)
    setattr(trainer, SCALER, property(lambda of: vars(of).get(SCALER), set_scaler))


def overflowed(grads: Iterable[NDArray]) -> bool:
    """Whether any element of these gradients is infinite or NaN. Waits for them.

    NumPy inspects those on a CPU, which takes a hundredth of the time of MXNet's operator there.
    """
    here: List[NDArray] = []
    elsewhere: Dict[Any, List[NDArray]] = {}  # by device and type
    for grad in grads:
        if grad.context.device_type == "cpu" and grad.dtype is np.float32:
            here.append(grad)
        else:
            elsewhere.setdefault((grad.context, grad.dtype), []).append(grad)
    found = [mx.nd.multi_all_finite(*part, num_arrays=len(part)) for arrays in elsewhere.values()
             for part in (arrays[at:at + AT_A_TIME] for at in range(0, len(arrays), AT_A_TIME))]
    return not (all(map(_finite, here)) and all(bool(one.asscalar()) for one in found))


def _finite(grad: NDArray) -> bool:
    flat = grad.reshape(-1)  # kept until NumPy has looked: it may be a copy
    return finite.finite(engine.memory(flat))


def take_over(scaler: Any) -> Callable[[bool], None]:
    """Returns what tells the scaler, and the Trainer that asks it, whether there was an overflow."""
    looks = scaler.has_overflow

    def tell(overflow: bool) -> None:
        scaler.has_overflow = lambda parameters: overflow
        looks([types.SimpleNamespace(_grad=[mx.nd.array([math.inf if overflow else 0.0])])])

    return tell


def of_gradients(scaler: Any, trainer: Any) -> float:
    """The loss scale that this step's gradients have: 1 after ``amp.unscale``. The scaler's may be the next step's."""
    if hasattr(trainer, "_amp_original_scale"):
        return float(trainer._amp_original_scale / trainer._scale)
    return float(scaler.loss_scale)


def check(scaler: Any, iteration: int, on_nan: str) -> None:
    """DivergedError where it is not the scale that makes gradients overflow."""
    if scaler.loss_scale < SMALLEST and on_nan in ("stop", "find"):
        raise DivergedError(f"iteration {iteration}: gradients are infinite or not a number even with a loss scale of "
                            f"{scaler.loss_scale:g}. Lower the learning rate, look at the data, or let on_nan be "
                            "`skip`")


def saved(scaler: Any) -> Dict[str, float]:
    """The scale and its history, as JSON."""
    return {name: getattr(scaler, name) for name in KEPT}


def restore(scaler: Any, state: Optional[Dict[str, float]]) -> None:
    """The inverse of `saved`; None: nothing was."""
    if state is not None:
        for name in KEPT:
            setattr(scaler, name, state[name])
