"""PyTorch's optimizers: its settings and its formulas, in NumPy on flat arrays.

A server or a worker applies them without PyTorch. Every formula has the operations of `torch.optim` in their order, so
the weights are PyTorch's to rounding. MXNet's own optimizers of the same names differ: its momentum holds the learning
rate of the step it was made in, its Adam corrects the rate and not the moments, its AdaGrad decays the weight outside.
"""
import math
from typing import Any, Sequence

import numpy as np

from kvstore.engine.engine import NDArray
from kvstore.optimizers.formulas import Formula, State


def move_to(mean: np.ndarray, g: np.ndarray, share: float) -> None:
    """mean <- mean + share (g - mean), as `torch.lerp`: from the nearer end, so that nothing large cancels."""
    if share < 0.5:
        mean += share * (g - mean)
    else:
        np.subtract(g, (1 - share) * (g - mean), out=mean)


class TorchFormula(Formula):
    """g <- g + wd w;  w <- w - `move`: the step of all of them but AdamW."""

    def step(self, w: np.ndarray, g: np.ndarray, state: State, lr: float, wd: float, t: int, out: np.ndarray) -> None:
        if wd:
            g += wd * w
        np.subtract(w, self.move(g, state, lr, t), out=out)

    def move(self, g: np.ndarray, state: State, lr: float, t: int) -> np.ndarray:
        """What is subtracted from the weights; brings `state` to that of step `t`."""
        raise NotImplementedError


class HeavyBall(TorchFormula):
    """``torch.optim.SGD``.

        g <- g + wd w;    v <- momentum v + g;    w <- w - lr v        nesterov: w <- w - lr (g + momentum v)
    """

    remembers = ("momentum_buffer",)

    def __init__(self, momentum: float = 0.0, nesterov: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.momentum, self.nesterov = momentum, nesterov

    def move(self, g: np.ndarray, state: State, lr: float, t: int) -> np.ndarray:
        v = state["momentum_buffer"]
        v *= self.momentum
        v += g
        np.multiply(g + self.momentum * v if self.nesterov else v, lr, out=g)
        return g


class Adam(TorchFormula):
    """``torch.optim.Adam``.

        g <- g + wd w
        m <- m + (1 - beta1) (g - m);    v <- beta2 v + (1 - beta2) g^2
        w <- w - lr / (1 - beta1^t)  m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    """

    remembers = ("exp_avg", "exp_avg_sq")

    def __init__(self, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, **options: Any) -> None:
        super().__init__(**options)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps

    def move(self, g: np.ndarray, state: State, lr: float, t: int) -> np.ndarray:
        m, v = state["exp_avg"], state["exp_avg_sq"]
        move_to(m, g, 1 - self.beta1)
        v *= self.beta2
        v += (1 - self.beta2) * g * g
        norm = np.sqrt(v)
        norm /= math.sqrt(1 - self.beta2 ** t)
        norm += self.eps
        return lr / (1 - self.beta1 ** t) * (m / norm)


class AdamW(Adam):
    """``torch.optim.AdamW``: Adam with w <- (1 - lr wd) w before it, in place of the decay in g."""

    def step(self, w: np.ndarray, g: np.ndarray, state: State, lr: float, wd: float, t: int, out: np.ndarray) -> None:
        np.subtract((1 - lr * wd) * w, self.move(g, state, lr, t), out=out)


class RMSprop(TorchFormula):
    """``torch.optim.RMSprop``.

        g <- g + wd w;    s <- alpha s + (1 - alpha) g^2
        d = g / (sqrt(s) + eps)                    centered: s - a^2 for s, where a <- a + (1 - alpha) (g - a)
        w <- w - lr d                              momentum: b <- momentum b + d;  w <- w - lr b
    """

    def __init__(self, alpha: float = 0.99, eps: float = 1e-8, momentum: float = 0.0, centered: bool = False,
                 **options: Any) -> None:
        super().__init__(**options)
        self.alpha, self.eps, self.momentum, self.centered = alpha, eps, momentum, centered

    def names(self) -> Sequence[str]:
        return ["square_avg", *["grad_avg"] * bool(self.centered), *["momentum_buffer"] * bool(self.momentum)]

    def move(self, g: np.ndarray, state: State, lr: float, t: int) -> np.ndarray:
        s = state["square_avg"]
        s *= self.alpha
        s += (1 - self.alpha) * g * g
        if self.centered:
            a = state["grad_avg"]
            move_to(a, g, 1 - self.alpha)
            s = s - a * a
        d = g / (np.sqrt(s) + np.float32(self.eps))
        if self.momentum:
            b = state["momentum_buffer"]
            b *= self.momentum
            b += d
            d = b
        return lr * d


class Adagrad(TorchFormula):
    """``torch.optim.Adagrad``.

        g <- g + wd w;    s <- s + g^2;    w <- w - lr / (1 + (t - 1) lr_decay)  g / (sqrt(s) + eps)
    """

    remembers = ("sum",)

    def __init__(self, lr_decay: float = 0.0, eps: float = 1e-10, first: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.lr_decay, self.eps, self.first = lr_decay, eps, first  # s begins at `first`

    def create_state(self, index: Any, weight: NDArray) -> Any:
        state = super().create_state(index, weight)
        state.sum[:] = self.first
        return state

    def move(self, g: np.ndarray, state: State, lr: float, t: int) -> np.ndarray:
        s = state["sum"]
        s += g * g
        return lr / (1 + (t - 1) * self.lr_decay) * (g / (np.sqrt(s) + np.float32(self.eps)))


class Adadelta(TorchFormula):
    """``torch.optim.Adadelta``.

        g <- g + wd w;    s <- rho s + (1 - rho) g^2
        d = g sqrt(a + eps) / sqrt(s + eps);    a <- rho a + (1 - rho) d^2;    w <- w - lr d
    """

    remembers = ("square_avg", "acc_delta")

    def __init__(self, rho: float = 0.9, eps: float = 1e-6, **options: Any) -> None:
        super().__init__(**options)
        self.rho, self.eps = rho, eps

    def move(self, g: np.ndarray, state: State, lr: float, t: int) -> np.ndarray:
        s, a, eps = state["square_avg"], state["acc_delta"], np.float32(self.eps)
        s *= self.rho
        s += (1 - self.rho) * g * g
        d = g * (np.sqrt(a + eps) / np.sqrt(s + eps))
        a *= self.rho
        a += (1 - self.rho) * d * d
        return lr * d
