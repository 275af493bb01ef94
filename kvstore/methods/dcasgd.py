"""DC-ASGD, asynchronous SGD with delay compensation, with a constant (c) and with an adaptive lambda (a).

Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017; Eq. 4-6 of Xu et al.,
"OD-SGD", arXiv:2005.06728.

A gradient g was taken at w_read and is applied to w = w_read + `moved`; the first term of a Taylor expansion, with g⊙g
for the Hessian, turns it into the gradient at w. The worker is ASGD's. The server keeps a backup for each worker:

    W <- U(W, g + lambda(·) g⊙g⊙(W - bak_m)),    bak_m <- W

    papers          code           meaning
    W, bak(m)       w, backups[m]  global weights of one bucket; what worker m was last sent, where its g was taken
    lambda_0        lamda          strength of the compensation
    MeanSquare      mean_square    running mean of g⊙g; one for all workers
    m, epsilon      m, epsilon     the decay of MeanSquare; what keeps its root away from zero

How the loop is cut: the worker's as in `asgd`. The server's, Algorithm 2:

    receive g_m                                    MXNet's server loop calls `receive` → `push`
    w <- w - eta (g_m + lambda g_m⊙g_m⊙(w - bak))  `compensate`, then U
    pull request of m: bak(m) <- w, send w         `push`; the transport sends: one round trip for push and pull

Deviation: with `codec_weights` bak(m) is W, not what the codec has made of it for worker m.
Both are also optimizers, made of the two functions below: MXNet's (`optimizers.compensated`), ours (`formulas`).
Other workers after a restart (``-n MIN:MAX``): every backup begins as W, MeanSquare as 0, as in a new run.
"""
from dataclasses import dataclass
from typing import Any, List

import numpy as np

from kvstore.messages.header import Header
from kvstore.methods import common
from kvstore.methods.asgd import ASGD, AsyncRule
from kvstore.options import option, real


def compensated_c(grad: Any, moved: Any, lamda: float) -> Any:
    """Eq. 4: the gradient at w_read + `moved`, from the one at w_read. Arrays of MXNet or NumPy."""
    return grad + lamda * grad * grad * moved


def compensated_a(grad: Any, moved: Any, mean_square: Any, lamda: float, m: float, epsilon: float, sqrt: Any) -> Any:
    """Eq. 5, after Eq. 6 has brought `mean_square` up to date in place."""
    square = grad * grad
    mean_square[:] = m * mean_square + (1 - m) * square                    # Eq. 6
    return grad + lamda / sqrt(mean_square + epsilon) * square * moved     # Eq. 5


class CompensatedC(AsyncRule):
    """The server, for one bucket, with a constant lambda."""

    arrays = {"backups": "what each worker was last sent"}

    def start(self, w: np.ndarray) -> None:
        self.backups: List[np.ndarray] = [w.copy() for _ in range(self.num_workers)]  # all began with W_0

    def push(self, header: Header, tau: int, grad: np.ndarray, w: np.ndarray) -> float:
        bak = self.backups[header.worker_rank]
        grad[:] = self.compensate(grad, w - bak)
        self.step(w, grad, header.lr)
        bak[:] = w
        return 1.0

    def skip(self, header: Header, w: np.ndarray) -> None:
        self.backups[header.worker_rank][:] = w  # w is the answer all the same

    def compensate(self, g: np.ndarray, moved: np.ndarray) -> np.ndarray:
        return np.asarray(compensated_c(g, moved, self.options.lamda))


class CompensatedA(CompensatedC):
    """The same with an adaptive lambda."""

    arrays = {**CompensatedC.arrays, "mean_square": "MeanSquare"}

    def start(self, w: np.ndarray) -> None:
        super().start(w)
        self.mean_square = np.zeros_like(w)

    def compensate(self, g: np.ndarray, moved: np.ndarray) -> np.ndarray:
        o = self.options
        return np.asarray(compensated_a(g, moved, self.mean_square, o.lamda, o.m, o.epsilon, np.sqrt))


class DCASGDC(ASGD):
    name = "dcasgd_c"
    rule = CompensatedC

    @dataclass(frozen=True)
    class Options(common.CodedOptions):
        lamda: float = option(0.04, real(at_least=0), "strength of the delay compensation", tunable=True,
                              method_specific=True)


class DCASGDA(ASGD):
    name = "dcasgd_a"
    rule = CompensatedA

    @dataclass(frozen=True)
    class Options(common.CodedOptions):
        lamda: float = option(2.0, real(at_least=0), "strength of the delay compensation", tunable=True,
                              method_specific=True)
        m: float = option(0.95, real(at_least=0, at_most=1), "decay of the mean square", method_specific=True)
        epsilon: float = option(1e-7, real(above=0), "small term under the square root", method_specific=True)
