"""Warns of gradients that are divided by the number of workers twice: by a script that was written for MXNet's servers,
which add up, and by a store that takes the mean. No store sees a batch. But before the first step the arrays of which a
script calls `backward` have a row for each example, and a Module knows its batch.
"""
import math
import threading
from typing import TYPE_CHECKING, Any, Callable, Optional

if TYPE_CHECKING:
    from kvstore.methods.contract import Method


class _Here(threading.local):
    rows: Optional[int] = 0
    """Rows that this worker's thread has seen before the first step of its first store; None from then on."""


_here = _Here()


def backward(original: Callable[..., None], heads: Any, *arguments: Any, **options: Any) -> None:
    """``NDArray.backward`` or ``autograd.backward``, with its rows counted."""
    if _here.rows is not None:
        several = heads if isinstance(heads, (list, tuple)) else [heads]
        _seen(sum(head.shape[0] if head.shape else 1 for head in several))
    original(heads, *arguments, **options)


def init_optimizer(original: Callable[..., None], module: Any, *arguments: Any, **options: Any) -> None:
    """``Module.init_optimizer``, which tells its batch, and a store of ours which parameters are fixed."""
    original(module, *arguments, **options)
    group, store = module._exec_group, module._kvstore
    _seen(group.batch_size)
    if type(store).__module__.startswith("kvstore."):
        store._fixed.update(name for name, grads in zip(group.param_names, group.grad_arrays) if grads[0] is None)


def _seen(rows: int) -> None:
    if _here.rows is not None:
        _here.rows += rows


def counted_rows() -> Optional[int]:
    """The rows so far, as the first store takes its first step, and None ever after."""
    rows, _here.rows = _here.rows, None
    return rows


def advice(rows: Optional[int], method: "Method", scale: float) -> Optional[str]:
    """A line if gradients, multiplied by this `scale`, have been divided by all workers' `rows`; else None."""
    workers = method.num_workers
    if workers == 1 or not rows or rows == 1 or not math.isclose(scale * rows * workers, 1, rel_tol=1e-6):
        return None
    instead = ", or make the store with reduction=\"sum\", as MXNet's servers have it"
    return (f"gradients are divided by {rows * workers}, which is {workers} workers times {rows} examples, and "
            f"`{method.name}` takes the mean over the workers: they are divided by {workers} twice. Divide by the "
            f"worker's own examples (trainer.step({rows}), or Module's default)"
            f"{instead if method.takes == 'gradients' else ''}")
