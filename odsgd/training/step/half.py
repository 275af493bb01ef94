"""Half precision (``--dtype float16``): weights, gradients, and what the network computes with them.

The store has the same weights in single precision, and updates those. Gradients are divided by loss scale and batch
size in single precision, too. The loss is computed in it, since its sum over the classes needs the range.
"""
import contextlib
import functools
import importlib
from typing import Any, ContextManager, List

from kvstore.engine._mxnet import mx

amp: Any = importlib.import_module(f"{mx.__name__}.contrib.amp")

FLOAT16 = "float16"


def cast(net: Any, contexts: List[Any]) -> None:
    """Put the weights of `net` in half precision, except BatchNorm's, whose sums need the range."""
    net.cast(FLOAT16)
    if contexts[0].device_type == "cpu":
        _products_in_single()


@functools.lru_cache(maxsize=None)  # of the process
def _products_in_single() -> None:
    """MXNet has no products of matrices in half precision on a CPU: let those operators compute in single."""
    amp.init(FLOAT16, target_precision_ops=[], conditional_fp32_ops=[], fp32_ops=amp.list_lp16_ops(FLOAT16))


def outputs(net: Any, x: Any) -> Any:
    """What the network makes of single precision, in single precision."""
    return net(x.astype(FLOAT16)).astype("float32")


def scale_by_itself(trainer: Any) -> None:
    """Have a dynamic loss scale, as `amp.init_trainer` makes it."""
    trainer._amp_original_scale = trainer._scale
    trainer._amp_loss_scaler = amp.loss_scaler.LossScaler()


def scaled(losses: List[Any], trainer: Any) -> ContextManager[List[Any]]:
    """The losses times the trainer's scale, if it has one."""
    if trainer._amp_loss_scaler is None:
        return contextlib.nullcontext(losses)
    return amp.scale_loss(losses, trainer)
