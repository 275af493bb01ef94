"""Optimizers without MXNet: NumPy on flat arrays, applied by `kvstore.optimizers.apply`. SGD gives MXNet's bits.

    w, g    weights; gradient, mean over the workers
    lr, wd  learning rate and weight decay of this step
    t       steps done, this one included: 1 in the first

PyTorch's are in `torch_formulas`, MXNet's own in MXNet; those of MXNet with delay compensation in `compensated`.
"""
import types
from typing import Any, ClassVar, Dict, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from kvstore.engine.engine import NDArray
from kvstore.methods.dcasgd import DCASGDA, DCASGDC, compensated_a, compensated_c

State = Dict[str, np.ndarray]


class Now(NamedTuple):
    """What one step is taken at: a factor on the gradient, learning rate and weight decay of the array, steps done."""

    scale: np.float32
    lr: float
    wd: float
    t: int


class Formula:
    """An optimizer that looks at each element alone. Subclasses say what it remembers, and what a step is.

    Sessions and servers use the attributes with MXNet's names. Keys of the multipliers are buckets.
    """

    remembers: ClassVar[Tuple[str, ...]] = ()
    """Names of the arrays of its state, which begin at 0."""
    clip_gradient: Optional[float] = None
    lr_scheduler: Any = None
    begin_num_update = num_update = 0
    rescale_grad = 1.0

    def __init__(self, learning_rate: float = 0.01, wd: float = 0.0) -> None:
        self.lr, self.wd = learning_rate, wd
        self.lr_mult: Dict[Any, float] = {}
        self.wd_mult: Dict[Any, float] = {}
        self._index_update_count: Dict[Any, int] = {}

    def set_lr_mult(self, multipliers: Dict[Any, float]) -> None:
        self.lr_mult = dict(multipliers)

    def set_wd_mult(self, multipliers: Dict[Any, float]) -> None:
        self.wd_mult = dict(multipliers)

    def _update_count(self, index: Any) -> None:
        self._index_update_count[index] = self._index_update_count.get(index, self.begin_num_update) + 1

    def _get_wd(self, index: Any) -> float:
        return self.wd * self.wd_mult.get(index, 1.0)

    def names(self) -> Sequence[str]:
        """Those of `remembers` that the settings ask for."""
        return self.remembers

    def create_state(self, index: Any, weight: NDArray) -> types.SimpleNamespace:
        return types.SimpleNamespace(**{name: weight.zeros_like() for name in self.names()})

    def create_state_multi_precision(self, index: Any, weight: NDArray) -> types.SimpleNamespace:
        return self.create_state(index, weight)

    def apply(self, now: Now, w: np.ndarray, g: np.ndarray, state: Sequence[np.ndarray], out: np.ndarray,
              room: Optional[np.ndarray]) -> None:
        """One step, with the arguments of `optimizers.apply.Apply`."""
        with np.errstate(all="ignore"):  # a run may diverge
            g = np.multiply(g, now.scale, out=room)
            if self.clip_gradient is not None:
                np.clip(g, -self.clip_gradient, self.clip_gradient, out=g)
            self.step(w, g, dict(zip(self.names(), state)), now.lr, now.wd, now.t, out)

    def stay(self, w: np.ndarray, state: Sequence[np.ndarray]) -> None:
        """A step has been left out; the next gradient is taken at `w`."""

    def step(self, w: np.ndarray, g: np.ndarray, state: State, lr: float, wd: float, t: int, out: np.ndarray) -> None:
        """One step. `g` may be written, and may lie where `out` does, which is written last."""
        raise NotImplementedError

    def update(self, index: Any, weight: NDArray, grad: NDArray, state: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} is applied to flat arrays (kvstore.optimizers.apply)")


class SGD(Formula):
    """MXNet's SGD: its operations in its order, hence its bits, in a sixth of its time.

        v <- momentum v - lr wd w - lr g,    out <- w + v        v: the state; none without momentum
    """

    def __init__(self, momentum: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.momentum = momentum

    def names(self) -> Sequence[str]:
        return ["momentum"] * bool(self.momentum)

    def apply(self, now: Now, w: np.ndarray, g: np.ndarray, state: Sequence[np.ndarray], out: np.ndarray,
              room: Optional[np.ndarray]) -> None:
        lr, wd = np.float32(now.lr), np.float32(now.wd)
        with np.errstate(all="ignore"):  # a run may diverge; MXNet says nothing either
            step = np.multiply(g, lr * now.scale, out=room)
            if not state:
                if wd:
                    step += lr * wd * w
                np.subtract(w, step, out=out)
            else:
                v = state[0]
                v *= np.float32(self.momentum)
                if wd:
                    v -= lr * wd * w
                v -= step
                np.add(w, v, out=out)


class DCASGD_C(SGD):
    """SGD with delay compensation, Eq. 4 of `kvstore.methods.dcasgd`; w_read is what its last step left in w."""

    def __init__(self, momentum: float = 0.0, lamda: float = DCASGDC.Options.lamda, **options: Any) -> None:
        super().__init__(momentum, **options)
        self.lamda = lamda

    def names(self) -> Sequence[str]:
        return ["w_read", *super().names()]

    def create_state(self, index: Any, weight: NDArray) -> types.SimpleNamespace:
        state = super().create_state(index, weight)
        state.w_read = weight.copy()
        return state

    def apply(self, now: Now, w: np.ndarray, g: np.ndarray, state: Sequence[np.ndarray], out: np.ndarray,
              room: Optional[np.ndarray]) -> None:
        its = dict(zip(self.names(), state))
        with np.errstate(all="ignore"):
            g = self.compensate(g * now.scale, w - its["w_read"], its)
            super().apply(now._replace(scale=np.float32(1)), w, g, [its["momentum"]] if self.momentum else [], out,
                          None)
            its["w_read"][:] = out

    def stay(self, w: np.ndarray, state: Sequence[np.ndarray]) -> None:
        state[0][:] = w  # w_read

    def compensate(self, g: np.ndarray, moved: np.ndarray, state: State) -> np.ndarray:
        return np.asarray(compensated_c(g, moved, self.lamda))


class DCASGD_A(DCASGD_C):
    """The same with an adaptive lamda, Eq. 5 and 6."""

    def __init__(self, momentum: float = 0.0, lamda: float = DCASGDA.Options.lamda, m: float = DCASGDA.Options.m,
                 epsilon: float = DCASGDA.Options.epsilon, **options: Any) -> None:
        super().__init__(momentum, lamda, **options)
        self.m, self.epsilon = m, epsilon

    def names(self) -> Sequence[str]:
        return [*super().names(), "mean_square"]

    def compensate(self, g: np.ndarray, moved: np.ndarray, state: State) -> np.ndarray:
        return np.asarray(compensated_a(g, moved, state["mean_square"], self.lamda, self.m, self.epsilon, np.sqrt))
