"""Calls of the data path, wrapped so that each leaves a bar on the timeline. Made only where a `Recorder` is on."""
import functools
import time
from typing import Any, Callable

from kvstore.engine.engine import NDArray
from kvstore.job.aside import guarded
from kvstore.messages.buckets import WIRE_DTYPE, Bucket
from kvstore.messages.header import HEADER
from kvstore.messages.seam import Pending
from kvstore.optimizers.apply import QueuedOptimizer
from kvstore.tracing.recorder import Recorder


def _wrap(owner: Any, name: str, after: Callable[..., None]) -> None:
    """Let `after(result, *arguments)` follow each call of a method of `owner`."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        result = call(*arguments, **keywords)
        with guarded("the trace"):
            after(result, *arguments, **keywords)
        return result
    setattr(owner, name, wrapped)


def messages(on: Recorder, transport: Any, numbered: bool) -> None:
    """Bars from what a message waits for until its answer is there."""
    def sent(pending: Pending, bucket: Bucket, array: NDArray, *_: Any, **__: Any) -> None:
        reads = {id(one): one for one in [array, *pending.behind]}
        on.span("exchange", bucket, list(reads.values()), [pending.untaken()], numbered)

    for name in {"exchange", "fetch", "allreduce"} & set(dir(transport)):
        _wrap(transport, name, sent)


def iterations(on: Recorder, session: Any) -> None:
    """Exchanges that an iteration asks for have its number, as its `compute` has; those of an evaluation have none."""
    for name in ("iterate", "iterate_weights"):
        setattr(session, name, on.iterating()(getattr(session, name)))


def update(on: Recorder, queued: QueuedOptimizer, bucket: Bucket, stage: str) -> QueuedOptimizer:
    """Bars of an optimizer's steps on a worker."""
    class Traced(type(queued)):  # type: ignore[misc]
        def __call__(self, w: NDArray, grad: NDArray, lr: float, gradient_weight: float = 1.0,
                     out: Any = None) -> NDArray:
            after = super().__call__(w, grad, lr, gradient_weight, out)
            on.span(stage, bucket, [grad] if after is w else [w, grad], [after])
            return after

        def copy(self, w: NDArray, out: NDArray) -> None:
            super().copy(w, out)
            on.span("copy", bucket, [w], [out])

    queued.__class__ = Traced
    return queued


def lane(on: Recorder, one: Any) -> None:
    """Bars of the way between devices and flat arrays."""
    def gathered(_: None, scale: float, out: NDArray) -> None:
        on.span("gather", one.bucket, [array for layer in one.grads for _, array in layer], [out])

    def shown(_: None, flat: NDArray) -> None:
        on.span("scatter", one.bucket, [flat], [array for layer in one.shown_in for _, array in layer])

    _wrap(one, "gather", gathered)
    _wrap(one, "show", shown)


# -- a server ------------------------------------------------------------------------------------------------------

def server_update(on: Recorder, call: Callable[..., None], synchronous: bool) -> Callable[..., None]:
    """A bar while the pushes are added up, and one of the update."""
    def traced(key: int, pushed: NDArray, stored: NDArray) -> None:
        began_s = time.monotonic()
        pushed.wait_to_read()
        merged_s = time.monotonic()
        call(key, pushed, stored)
        args = {"bucket": key, "bytes": (pushed.size - HEADER) * WIRE_DTYPE.itemsize}
        if synchronous:
            args["round"] = on.round("update", key)
        on.add("merge", "merge", began_s, merged_s, **args)
        on.add("update", "update", merged_s, time.monotonic(), **args)
    return traced
