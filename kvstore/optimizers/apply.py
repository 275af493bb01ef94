"""An optimizer applied to a bucket: at once on a server, or queued on a worker."""
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import numpy as np

from kvstore.engine import engine
from kvstore.engine.engine import NDArray
from kvstore.methods.contract import Update
from kvstore.optimizers import described
from kvstore.optimizers.described import Optimizer
from kvstore.optimizers.formulas import SGD, Formula, Now
from kvstore.state import declared

Apply = Callable[[np.ndarray, np.ndarray, Sequence[np.ndarray], np.ndarray, Optional[np.ndarray]], None]
"""One step in NumPy, of (w, g, state, out, room). `out` may be `w`. `room` is scratch: `g`, `out` or None."""


LARS_RATES = ("cur_lr", "last_lr")
"""What MXNet's LARS scales its momentum by: the rates of this step and of the last one, which each call sets."""


class Applied(Update):
    """One optimizer for one bucket: its state, and what a checkpoint keeps of both."""

    def __init__(self, optimizer: Optimizer, index: int, shape: Optional[Sequence[int]]) -> None:
        self.index, self._shape_of_one = index, shape
        self.use(optimizer)

    def use(self, optimizer: Optimizer) -> None:
        """Apply this optimizer from here on; `start` makes its state."""
        self.optimizer = optimizer
        self.shape = None if described.elementwise(optimizer) else self._shape_of_one
        self.state: Any = None
        self._rates = {name: getattr(optimizer, name) for name in LARS_RATES if "LARS" in described.kinds(optimizer)}

    def start(self, w: NDArray) -> None:
        self.state, self._size = self.optimizer.create_state_multi_precision(self.index, self._shaped(w)), w.size
        self._constants = described.constants(self.state)

    def arrays(self) -> Dict[str, NDArray]:
        return described.state_arrays(self.state)

    def facts(self) -> Dict[str, Any]:
        """What the optimizer remembers beside arrays, as JSON: its count of updates, and settings it changes itself."""
        described.check_state(self.optimizer, self.state, self._size, self._constants)
        return self._remembered()

    def _remembered(self) -> Dict[str, Any]:
        count = self.optimizer._index_update_count.get(self.index, self.optimizer.begin_num_update)
        description = described.describe(self.optimizer)
        return {**description, "count": count, "settings": {**description["settings"], **self._rates}}

    def restore(self, arrays: Dict[str, np.ndarray], facts: Dict[str, Any]) -> None:
        """The inverse of `arrays` and `facts`, after `start`."""
        self._set_facts(facts)
        declared.fill(self.arrays(), arrays)

    def _set_facts(self, facts: Dict[str, Any]) -> None:
        self.optimizer.__dict__.update(facts["settings"])
        self._rates = {name: facts["settings"][name] for name in self._rates}
        self.optimizer._index_update_count[self.index] = facts["count"]

    def _shaped(self, flat: NDArray) -> NDArray:
        """A view of `flat` in the shape of the one parameter it holds, where the optimizer wants to see one."""
        return flat if self.shape is None else flat.reshape(tuple(self.shape))

    def _in_numpy(self, lr: float, gradient_weight: float) -> Optional[Apply]:
        """The next step, which counts when it is taken; None: MXNet's operators take it (`_by_mxnet`)."""
        formula, optimizer, index = formula_of(self.optimizer), self.optimizer, self.index
        if formula is None:
            return None
        lr, wd = lr * optimizer.lr_mult.get(index, 1.0), optimizer._get_wd(index)

        def step(*arrays: Any) -> None:
            optimizer._update_count(index)
            formula(Now(np.float32(gradient_weight), lr, wd, optimizer._index_update_count[index]), *arrays)

        return step

    def _by_mxnet(self, w: NDArray, grad: NDArray, lr: float, gradient_weight: float) -> None:
        self.optimizer.lr, self.optimizer.rescale_grad = lr, gradient_weight
        self.optimizer.__dict__.update(self._rates)  # of this bucket
        self.optimizer.update_multi_precision(self.index, self._shaped(w), self._shaped(grad), self.state)
        self._rates = {name: getattr(self.optimizer, name) for name in self._rates}


class ImmediateOptimizer(Applied):
    """U on a server, whose one thread would wait for the update anyway."""

    def bind(self, w: NDArray, grad: NDArray, size: Optional[int] = None) -> Tuple[np.ndarray, np.ndarray]:
        """Take weights and gradient of the push that is handled now; a rule sees their first `size` floats."""
        self._bound, self._seen = (w, grad, size), (engine.memory(w)[:size], engine.memory(grad)[:size])
        return self._seen

    def __call__(self, w: np.ndarray, grad: np.ndarray, lr: float, gradient_weight: float = 1.0,
                 out: Any = None) -> np.ndarray:
        assert w is self._seen[0] and out is None, "a rule updates the weights that `receive` gave it, in place"
        step = self._in_numpy(lr, gradient_weight)
        if step is not None:
            step(w, grad, [engine.memory(array) for array in self.arrays().values()], w, grad)
        else:
            if grad is not self._seen[1]:
                self._seen[1][:] = grad
            bound_w, bound_grad, size = self._bound
            kept = not described.known(self.optimizer)  # it may be: the message's memory is used again
            self._by_mxnet(bound_w[:size], bound_grad[:size].copy() if kept else bound_grad[:size], lr, gradient_weight)
            bound_w.wait_to_read()  # a rule may look at it
        return w


class QueuedOptimizer(Applied):
    """L, or U on a ring: operations of the engine."""

    factor = 1.0
    """By which gradients are multiplied."""
    skips: Optional[Callable[[np.ndarray], bool]] = None
    """Whether to leave out the step along this gradient, which then does not count; formulas in NumPy only."""
    reporting_skips: Callable[[], Callable[[np.ndarray], bool]]
    """Makes a `skips` that prints which iteration left out a step; a local step has it beside `skips`."""
    _written: Optional[NDArray] = None

    def __call__(self, w: NDArray, grad: NDArray, lr: float, gradient_weight: float = 1.0,
                 out: Optional[NDArray] = None) -> NDArray:
        out = self._written = w if out is None else out
        gradient_weight *= self.factor
        step = self._in_numpy(lr, gradient_weight)
        if step is not None:
            self._queue(step, w, grad, out)
        else:  # MXNet's operators work in place
            if out is not w:
                self.copy(w, out)
            # One of a script's own may write to `grad`, which is still to be sent or read; AdaDelta scales it.
            writes = not described.known(self.optimizer) or (
                type(self.optimizer).__name__ == "AdaDelta" and gradient_weight != 1)
            self._by_mxnet(out, grad.copy() if writes else grad, lr, gradient_weight)
        return out

    def facts(self) -> Dict[str, Any]:
        self._settle()
        return super().facts()

    def _settle(self) -> None:
        if self._written is not None:
            self._written.wait_to_read()  # a step counts when it is taken

    def accrue(self, total: NDArray, grad: NDArray) -> None:
        if self.skips is None:
            super().accrue(total, grad)
            return
        skips = self.reporting_skips()

        def add() -> None:
            if not skips(engine.view(grad)):
                np.add(engine.view(total), engine.view(grad), out=engine.view(total))

        engine.push(add, [grad], [total])

    def trial(self, w: NDArray, grad: NDArray, lr: float, gradient_weight: float, out: NDArray) -> NDArray:
        self._settle()
        facts, arrays = self._remembered(), [(array, array.copy()) for array in self.arrays().values()]
        self(w, grad, lr, gradient_weight, out).wait_to_read()
        self._set_facts(facts)
        for array, before in arrays:
            before.copyto(array)
        return out

    def copy(self, w: NDArray, out: NDArray) -> None:
        w.copyto(out)

    def _queue(self, step: Apply, w: NDArray, grad: NDArray, out: NDArray) -> None:
        state, skips = list(self.arrays().values()), self.skips

        def update() -> None:
            before, g, after = engine.view(w), engine.view(grad), engine.view(out)
            if skips is not None and skips(g):
                if out is not w:
                    after[:] = before
                if isinstance(self.optimizer, Formula):
                    self.optimizer.stay(after, [engine.view(array) for array in state])
                return
            step(before, g, [engine.view(array) for array in state], after, None if out is w else after)

        engine.push(update, [grad] if out is w else [w, grad], [out, *state])


def formula_of(optimizer: Optimizer) -> Optional[Callable[..., None]]:
    """The function that takes its steps in NumPy, of a `Now` and the arguments of `Apply`; None: MXNet takes them."""
    if isinstance(optimizer, Formula):
        return optimizer.apply
    plain = described.known(optimizer) and type(optimizer).__name__ == "SGD" and not optimizer.clip_gradient
    return SGD(optimizer.momentum).apply if plain else None
