"""What the methods' files meet here, on PyTorch's tensors: the weights, who holds them, and the optimizers."""
from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, Sequence

import torch

from kvstore.errors import ConfigError
from kvstore.messages.buckets import Bucket
from kvstore.messages.header import SYNC_MODULUS, Header
from kvstore.messages.seam import GlobalWeights, Pending
from kvstore.methods.contract import Update
from kvstore.methods.dcasgd import compensated_a, compensated_c


class Flat(torch.Tensor):
    """All weights of a model, with the calls that the methods' files make of arrays."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def copy(self) -> Flat:
        return self.clone().as_subclass(Flat)


class Server(GlobalWeights):
    """A server beside its workers. Its answers lie in two places in turn, and are there when all have pushed."""

    def __init__(self, rule: Any, w: Flat, grads: Any) -> None:
        self.rule, self.w, self.answers, self._grads, self._pushed = rule, w, [w.copy(), w.copy()], grads, 0
        self.turn = 0

    def exchange(self, bucket: Bucket, grad: Any, lr: Any) -> Pending:
        self._pushed += 1
        workers = len(self._grads)
        if self._pushed == workers:
            self._pushed = 0
            header = Header(workers * (self.rule.version % SYNC_MODULUS), lr, workers * (workers - 1) // 2)
            self.rule.receive(header, self._grads.sum(0), self.w)
            self.answers[self.turn].copy_(self.w)
        return Pending(self.answers[self.turn])


# --- optimizers: out <- w after a step along g ------------------------------------------------------------------------

def sgd(out: Any, w: Any, g: Any, state: Any, lr: Any, wd: float, **_: Any) -> None:
    out.copy_(w - lr * (g + wd * w))


def momentum_sgd(out: Any, w: Any, g: Any, state: Any, lr: Any, wd: float, momentum: float, **_: Any) -> None:
    v, = state
    v.copy_(momentum * v - lr * (g + wd * w))
    out.copy_(w + v)


def compensating_c(out: Any, w: Any, g: Any, state: Any, lr: Any, wd: float, lamda: float, **_: Any) -> None:
    w_read, = state
    out.copy_(w - lr * (compensated_c(g, w - w_read, lamda) + wd * w))
    w_read.copy_(out)


def compensating_a(out: Any, w: Any, g: Any, state: Any, lr: Any, wd: float, lamda: float, m: float, epsilon: float,
                   **_: Any) -> None:
    w_read, mean_square = state
    out.copy_(w - lr * (compensated_a(g, w - w_read, mean_square, lamda, m, epsilon, torch.sqrt) + wd * w))
    w_read.copy_(out)


BEGINS: Dict[Any, Sequence[Callable[[Any], Any]]] = {
    sgd: (), momentum_sgd: (torch.zeros_like,), compensating_c: (torch.clone,),
    compensating_a: (torch.clone, torch.zeros_like)}
"""What the state of each is made of, from the weights that it begins at."""

FORMULAS: Dict[str, Any] = {"sgd": sgd, "dcasgd_c": compensating_c, "dcasgd_a": compensating_a}


class Applied(Update):
    """One of them, on the weights of a whole model; on a GPU it is one kernel."""

    def __init__(self, name: str, momentum: float, **settings: Any) -> None:
        if name not in FORMULAS or (momentum and name != "sgd"):
            raise ConfigError(f"optimizer `{name}` with momentum {momentum:g} is not there on a GPU; there are "
                              f"{', '.join(FORMULAS)}, of which sgd takes momentum")
        self._formula: Any = momentum_sgd if momentum else FORMULAS[name]
        self._settings = {"momentum": momentum, **{key: value for key, value in settings.items() if value is not None}}
        self.state: List[Any] = []

    def start(self, w: Any) -> None:
        self.state = [begin(w.as_subclass(torch.Tensor)) for begin in BEGINS[self._formula]]

    def __call__(self, w: Any, grad: Any, lr: Any, gradient_weight: float = 1.0, out: Any = None) -> Any:
        step = compiled(self._formula) if w.is_cuda else self._formula
        before = w.as_subclass(torch.Tensor)
        after = before if out is None or out is w else out.as_subclass(torch.Tensor)
        step(after, before, grad if gradient_weight == 1 else gradient_weight * grad, self.state, lr, **self._settings)
        return w if out is None else out


@functools.lru_cache(maxsize=None)
def compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False)
