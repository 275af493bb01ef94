"""Optimizers that MXNet lacks, as classes of MXNet's: with delay compensation, and AdamW.

`dcasgd_c` and `dcasgd_a` are ordinary MXNet optimizers (``gluon.Trainer(params, "dcasgd_c", {"lamda": 0.04})``), made
of the equations in `kvstore.methods.dcasgd`; w_read is what their last step left in w. Weight decay is added beside g
and is not part of g⊙g, momentum is applied to the compensated gradient, both as in MXNet's own DCASGD. If nothing else
writes w between two updates, w - w_read is 0, and both are plain SGD.
"""
from types import SimpleNamespace
from typing import Any

from kvstore.engine._mxnet import NDArray, mx
from kvstore.methods.dcasgd import DCASGDA, DCASGDC, compensated_a, compensated_c
from kvstore.optimizers import torch_formulas


@mx.optimizer.register
class DCASGD_C(mx.optimizer.Optimizer):
    """DC-ASGD with a constant lamda, Eq. 4: SGD on a compensated gradient."""

    def __init__(self, learning_rate: float = 0.01, momentum: float = 0.0, lamda: float = DCASGDC.Options.lamda,
                 **options: Any) -> None:
        super().__init__(learning_rate=learning_rate, **options)
        self.momentum, self.lamda = momentum, lamda

    def create_state(self, index: Any, weight: NDArray) -> SimpleNamespace:
        momentum = mx.nd.zeros_like(weight) if self.momentum else None
        return SimpleNamespace(w_read=weight.copy(), momentum=momentum)

    def compensate(self, grad: NDArray, moved: NDArray, state: Any) -> NDArray:
        """The gradient at w = w_read + `moved`, from the gradient at w_read."""
        return compensated_c(grad, moved, self.lamda)

    def update(self, index: Any, weight: NDArray, grad: NDArray, state: Any) -> None:
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
class DCASGD_A(DCASGD_C):
    """DC-ASGD with an adaptive lamda, Eq. 5 and 6."""

    def __init__(self, learning_rate: float = 0.01, momentum: float = 0.0, lamda: float = DCASGDA.Options.lamda,
                 m: float = DCASGDA.Options.m, epsilon: float = DCASGDA.Options.epsilon, **options: Any) -> None:
        super().__init__(learning_rate, momentum, lamda, **options)
        self.m, self.epsilon = m, epsilon

    def create_state(self, index: Any, weight: NDArray) -> SimpleNamespace:
        state = super().create_state(index, weight)
        state.mean_square = mx.nd.zeros_like(weight)
        return state

    def compensate(self, grad: NDArray, moved: NDArray, state: Any) -> NDArray:
        return compensated_a(grad, moved, state.mean_square, self.lamda, self.m, self.epsilon, mx.nd.sqrt)


@mx.optimizer.register
class AdamW(mx.optimizer.Optimizer, torch_formulas.AdamW):
    """PyTorch's formula, for flat arrays of a store alone."""

    create_state, update = torch_formulas.AdamW.create_state, torch_formulas.AdamW.update

    def __init__(self, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, **options: Any) -> None:
        super().__init__(**options)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
