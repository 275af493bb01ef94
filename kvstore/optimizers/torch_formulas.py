"""PyTorch's optimizers as MXNet optimizers: its settings and its formulas, in NumPy on flat arrays.

A server or a worker applies them without PyTorch. Every formula has the operations of `torch.optim` in their order, so
the weights are PyTorch's to rounding. MXNet's own optimizers of the same names differ: its momentum holds the learning
rate of the step it was made in, its Adam corrects the rate and not the moments, its AdaGrad decays the weight outside.

    w, g    weights; gradient, mean over the workers
    lr, wd  learning rate and weight decay of this step
    t       steps done, this one included: 1 in the first
"""
import types
from typing import Any, ClassVar, Dict, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from kvstore.engine._mxnet import NDArray, mx

State = Dict[str, np.ndarray]


class Now(NamedTuple):
    """What one step is taken at: a factor on the gradient, learning rate and weight decay of the array, steps done."""

    scale: np.float32
    lr: float
    wd: float
    t: int


class Formula(mx.optimizer.Optimizer):
    """An optimizer that looks at each element alone. Subclasses say what it remembers, and what a step is."""

    remembers: ClassVar[Tuple[str, ...]] = ()
    """Arrays of its state, which begin at 0, by PyTorch's names."""

    def names(self) -> Sequence[str]:
        """Those of `remembers` that the settings ask for."""
        return self.remembers

    def create_state(self, index: Any, weight: NDArray) -> types.SimpleNamespace:
        return types.SimpleNamespace(**{name: mx.nd.zeros_like(weight) for name in self.names()})

    def apply(self, now: Now, w: np.ndarray, g: np.ndarray, state: Sequence[np.ndarray], out: np.ndarray,
              room: Optional[np.ndarray]) -> None:
        """One step, as `kvstore.optimizers.apply` has them."""
        with np.errstate(all="ignore"):  # a run may diverge
            self.step(w, np.multiply(g, now.scale, out=room), dict(zip(self.names(), state)), now.lr, now.wd, now.t,
                      out)

    def step(self, w: np.ndarray, g: np.ndarray, state: State, lr: float, wd: float, t: int, out: np.ndarray) -> None:
        """One step. `g` may be written, and may lie where `out` does, which is written last."""
        raise NotImplementedError

    def update(self, index: Any, weight: NDArray, grad: NDArray, state: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} is applied to flat arrays (kvstore.optimizers.apply)")


class HeavyBall(Formula):
    """``torch.optim.SGD``.

        g <- g + wd w;    v <- momentum v + g;    w <- w - lr v        nesterov: w <- w - lr (g + momentum v)
    """

    remembers = ("momentum_buffer",)

    def __init__(self, momentum: float = 0.0, nesterov: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.momentum, self.nesterov = momentum, nesterov

    def step(self, w: np.ndarray, g: np.ndarray, state: State, lr: float, wd: float, t: int, out: np.ndarray) -> None:
        if wd:
            g += wd * w
        v = state["momentum_buffer"]
        v *= self.momentum
        v += g
        np.subtract(w, lr * (g + self.momentum * v if self.nesterov else v), out=out)


class Adam(Formula):
    """``torch.optim.Adam``.

        g <- g + wd w
        m <- m + (1 - beta1) (g - m);    v <- beta2 v + (1 - beta2) g^2
        w <- w - lr / (1 - beta1^t)  m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    """

    remembers = ("exp_avg", "exp_avg_sq")

    def __init__(self, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, **options: Any) -> None:
        super().__init__(**options)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps

    def step(self, w: np.ndarray, g: np.ndarray, state: State, lr: float, wd: float, t: int, out: np.ndarray) -> None:
        if wd:
            g += wd * w
        np.subtract(w, self._move(g, state, lr, t), out=out)

    def _move(self, g: np.ndarray, state: State, lr: float, t: int) -> np.ndarray:
        m, v = state["exp_avg"], state["exp_avg_sq"]
        m += (1 - self.beta1) * (g - m)
        v *= self.beta2
        v += (1 - self.beta2) * g * g
        norm = np.sqrt(v)
        norm /= np.sqrt(1 - self.beta2 ** t)
        norm += self.eps
        return lr / (1 - self.beta1 ** t) * (m / norm)


@mx.optimizer.register
class AdamW(Adam):
    """``torch.optim.AdamW``: Adam with w <- (1 - lr wd) w before it, in place of the decay in g."""

    def step(self, w: np.ndarray, g: np.ndarray, state: State, lr: float, wd: float, t: int, out: np.ndarray) -> None:
        np.subtract((1 - lr * wd) * w, self._move(g, state, lr, t), out=out)


class RMSprop(Formula):
    """``torch.optim.RMSprop``.

        g <- g + wd w;    s <- alpha s + (1 - alpha) g^2
        d = g / (sqrt(s) + eps)                    centered: s - a^2 for s, where a <- a + (1 - alpha) (g - a)
        w <- w - lr d                              momentum: b <- momentum b + d;  w <- w - lr b
    """

    remembers = ("square_avg", "grad_avg", "momentum_buffer")

    def __init__(self, alpha: float = 0.99, eps: float = 1e-8, momentum: float = 0.0, centered: bool = False,
                 **options: Any) -> None:
        super().__init__(**options)
        self.alpha, self.eps, self.momentum, self.centered = alpha, eps, momentum, centered

    def names(self) -> Sequence[str]:
        return ["square_avg", *["grad_avg"] * bool(self.centered), *["momentum_buffer"] * bool(self.momentum)]

    def step(self, w: np.ndarray, g: np.ndarray, state: State, lr: float, wd: float, t: int, out: np.ndarray) -> None:
        if wd:
            g += wd * w
        s = state["square_avg"]
        s *= self.alpha
        s += (1 - self.alpha) * g * g
        if self.centered:
            a = state["grad_avg"]
            a += (1 - self.alpha) * (g - a)
            s = s - a * a
        d = g / (np.sqrt(s) + np.float32(self.eps))
        if self.momentum:
            b = state["momentum_buffer"]
            b *= self.momentum
            b += d
            d = b
        np.subtract(w, lr * d, out=out)


class Adagrad(Formula):
    """``torch.optim.Adagrad``.

        g <- g + wd w;    s <- s + g^2;    w <- w - lr / (1 + (t - 1) lr_decay)  g / (sqrt(s) + eps)
    """

    remembers = ("sum",)

    def __init__(self, lr_decay: float = 0.0, eps: float = 1e-10, first: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.lr_decay, self.eps, self.first = lr_decay, eps, first  # s begins at `first`

    def create_state(self, index: Any, weight: NDArray) -> types.SimpleNamespace:
        return types.SimpleNamespace(sum=mx.nd.full(weight.shape, self.first, ctx=weight.context))

    def step(self, w: np.ndarray, g: np.ndarray, state: State, lr: float, wd: float, t: int, out: np.ndarray) -> None:
        if wd:
            g += wd * w
        s = state["sum"]
        s += g * g
        np.subtract(w, lr / (1 + (t - 1) * self.lr_decay) * (g / (np.sqrt(s) + np.float32(self.eps))), out=out)
