"""`odsgd.torch.Optimizer` where the method takes weights: the script's own optimizer steps, of any kind, on any device.

    loss.backward()     PyTorch's alone
    optimizer.step()    the script's optimizer takes its step, and an iteration is counted; every H of them the store
                        exchanges what the parameters hold, and they hold the result when the call returns
"""
import contextlib
import json
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import torch

from kvstore.errors import ConfigError
from kvstore.fronts.base import warn_once
from kvstore.fronts.torch import models
from kvstore.fronts.torch.lanes import held
from kvstore.fronts.torch.optimizer import Optimizer
from kvstore.fronts.torch.store import TorchStore
from kvstore.messages.finite import skips


class Stepping(Optimizer):
    """The arguments of `Optimizer`; groups and state belong to `optimizer`, the script's."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, store: TorchStore) -> None:
        super().__init__(optimizer, model, store)
        self._share_state()

    def _own_step(self) -> Dict[str, Any]:
        settings = [{name: json.dumps(value, default=float) for name, value in group.items()  # which may hold tensors
                     if name != "lr" and isinstance(value, (float, tuple))} for group in self.param_groups]
        return {"optimizer": type(self._given).__name__, "lr": self._rates_now(), "settings": settings}

    def _share_state(self) -> None:
        self.param_groups, self.state = self._given.param_groups, self._given.state

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """The step of the script's optimizer, and every H of them an exchange. The first waits for the others."""
        self._check_trained()
        self.store.begin()
        loss = None
        stale = self.store.session.first_of_joiner(self.store.iteration + 1)
        if not self._overflowed() and not stale:  # else it takes part without a step
            if closure is not None and self.store.options.on_nan == "skip":
                loss, closure = _evaluated(closure)
            if not self._skips():
                with self._given_steps():
                    loss = self._given.step() if closure is None else self._given.step(closure)
        self.store.stepped()
        return loss

    @contextlib.contextmanager
    def _given_steps(self) -> Iterator[None]:
        self._steps_given = True
        try:
            yield
        finally:
            self._steps_given = False

    def _overflowed(self) -> bool:
        """Whether a GradScaler has found this worker's gradients infinite; else they are unscaled now."""
        scale = getattr(self, "grad_scale", None)
        if getattr(self, "found_inf", None) is not None and self.found_inf.item():
            return True
        if scale is not None:
            for group in self.param_groups:
                for tensor in group["params"]:
                    if tensor.grad is not None:
                        tensor.grad.div_(scale)
        return False

    def _skips(self) -> bool:
        """With on_nan `skip`: whether a gradient is not finite, which would stay in the optimizer's state for good. A
        GradScaler has looked already. Collective in an island (the ranks of one FSDP2 model), which steps together.
        """
        if self.store.options.on_nan != "skip" or getattr(self, "found_inf", None) is not None:
            return False
        wrong = next(self._not_finite(), None)
        if wrong is not None:
            name, floats = wrong
            skips(f"worker {self.store.rank}, iteration {self.store.iteration + 1}", [(name, floats.numel())],
                  self.store._numbers(floats).reshape(-1))
        return self._in_island(wrong is not None)

    def _not_finite(self) -> Iterator[Tuple[str, torch.Tensor]]:
        for name, one in self.store._trained.items():
            grad = one.parameter.grad
            if grad is not None:
                floats = held(grad.coalesce().values() if grad.is_sparse else grad)
                if not torch.isfinite(floats).all():
                    yield name, floats

    def _in_island(self, found: bool) -> bool:
        """Whether any rank of this island has found it."""
        parameters = (one.parameter for one in self.store._trained.values())
        for mesh in dict.fromkeys(one.device_mesh for one in parameters if hasattr(one, "device_mesh")):
            for group in mesh.get_all_groups():
                flag = torch.tensor(float(found), device=mesh.device_type)
                torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group)
                found = bool(flag)
        return found

    @staticmethod
    def _translated(optimizer: torch.optim.Optimizer) -> Any:
        if any(state and float(state.get("step", 1)) for state in optimizer.state.values()):
            raise ConfigError(f"this {type(optimizer).__name__} has a state already, and other workers' "
                              "optimizers have none; give a new one, and load a state by "
                              "odsgd.torch.Optimizer.load_state_dict")
        return None

    def state_dict(self) -> Dict[str, Any]:
        own = {name: part for name, part in self._given.state_dict().items() if name != "store"}
        return {**super().state_dict(), **own}  # its own may have more than PyTorch's

    def _load_own(self, saved: Dict[str, Any]) -> None:
        with self._given_steps():
            self._given.load_state_dict(saved)
        self._share_state()

    def _watch(self) -> None:
        self._watch_saving()
        self._watch_shards()
        self._watch_loading()

    def _watch_loading(self) -> None:
        """Warn when weights are loaded into the model after the first step. The hook is as in `_watch_modules`."""
        root, store = getattr(self._model, "_orig_mod", self._model), self.store

        def loaded(module: torch.nn.Module, *_: Any) -> None:
            if module is root and store.lanes and not store._shown:
                warn_once(f"weights were loaded into the model after the first step; `{store.name}` takes the "
                          "difference for steps of this worker, and its outer momentum goes on: to go back, make a "
                          "new store and a new od.Optimizer")

        self._hooks += [one.register_load_state_dict_post_hook(loaded) for one in models.with_hooks([root])]


def _evaluated(closure: Callable[[], Any]) -> Tuple[Any, Callable[[], Any]]:
    """What a closure returns now, and a closure whose first call returns the same."""
    with torch.enable_grad():
        loss = closure()
    first = [loss]
    return loss, lambda: first.pop() if first else closure()
