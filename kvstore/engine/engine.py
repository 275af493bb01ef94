"""Operations that run when what they read is written: on MXNet's arrays by its own engine, on NumPy's by ours.

An operation runs once every array it reads has been written and every array it writes has been read. All its arrays are
of one kind, which decides whose engine runs it. New arrays are made for a context: one of MXNet's, or None for NumPy's.
Nothing here imports MXNet before it is given an array or a context of MXNet's.

`memory` and `view` look at arrays in place without asking the engine, and are right only where their docstrings say so.
"""
import sys
from typing import Any, Callable, Dict, Sequence, Tuple

import numpy as np

from kvstore.engine import on_numpy

NDArray = Any
"""One of either kind: flat, in single precision, on the CPU."""
Done = Callable[[], None]
"""Called once, by any thread: the operation is over."""


def _mxnet_engine() -> Any:
    from kvstore.engine import on_mxnet
    return on_mxnet


def _engine_of(array: NDArray) -> Any:
    return on_numpy if isinstance(array, on_numpy.Array) else _mxnet_engine()


def is_array(value: Any) -> bool:
    mxnet: Any = sys.modules.get("mxnet")
    return isinstance(value, on_numpy.Array) or (mxnet is not None and isinstance(value, mxnet.nd.NDArray))


def push(function: Callable[[], None], reads: Sequence[NDArray], writes: Sequence[NDArray]) -> None:
    """Run `function` as an operation that reads and writes these arrays; no array is there twice.

    It runs on one of four threads and may block it. An exception ends the process, or comes to whoever waits.
    """
    _engine_of((writes or reads)[0]).push(function, reads, writes)


def push_async(start: Callable[[Done], None], reads: Sequence[NDArray], writes: Sequence[NDArray],
               here: bool = False) -> None:
    """The same for an operation that `start` only begins; it is over when somebody calls `done`.

    `here`: `start` takes hardly any time, so NumPy's engine may call it on this thread.
    """
    _engine_of((writes or reads)[0]).push_async(start, reads, writes, here)


def zeros(size: int, context: Any = None) -> NDArray:
    return on_numpy.Array(np.zeros(size, np.float32)) if context is None else _mxnet_engine().mx.nd.zeros(size, context)


def array(values: Any, context: Any = None) -> NDArray:
    if context is None:
        return on_numpy.Array(np.array(values, np.float32))
    return _mxnet_engine().mx.nd.array(values, context)


def memory(array: NDArray) -> np.ndarray:
    """A flat array as a NumPy array, in place and without the engine; waits until it is written.

    For servers, which run one thing at a time: NumPy is several times faster than MXNet's own operators there.
    Nobody else may use `array` until the caller has done with it.
    """
    array.wait_to_read()
    return view(array)


def view(array: NDArray) -> np.ndarray:
    """A flat array as a NumPy array, in place; does not wait.

    For functions given to `push`, on arrays they declare, and for a few numbers that no running operation reads or
    writes. `array` must stay alive as long as the view.
    """
    return _engine_of(array).view(array)


def wait_to_write(array: NDArray) -> None:
    """Wait until nothing that has been queued reads or writes `array` any more, or what it is a view of."""
    _engine_of(array).wait_to_write(array)


def wait_all() -> None:
    on_numpy.wait_all()
    if "mxnet" in sys.modules:
        _mxnet_engine().mx.nd.waitall()


def wait_at_end() -> None:
    """`wait_all` for what runs at exit: this process dies of an error that nobody has waited for."""
    on_numpy.wait_at_end()
    wait_all()


ALONE = next(sys.getrefcount(array) for _, (array, _) in [(0, (object(), 0))])
"""References to an array that only a `CachedById` has, counted as `put` counts them."""


class CachedById:
    """Keeps what was made of at most `most` arrays, and the arrays, so that an id means one array. A new array removes
    those that nobody else has any more.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: Dict[int, Tuple[NDArray, Any]] = {}

    def of(self, array: NDArray, make: Callable[..., Any], *more: Any) -> Any:
        """What `make(array, …)` makes, now or before. It gets `more` as well; only `array` is the key."""
        kept = self._kept.get(id(array))
        return self.put(array, make(array, *more)) if kept is None else kept[1]

    def get(self, array: NDArray) -> Any:
        """What was made of `array` before, or None."""
        return self._kept.get(id(array), (array, None))[1]

    def put(self, array: NDArray, made: Any) -> Any:
        """Keep `made`, in place of an older one. Returns it."""
        if id(array) not in self._kept:
            for dead in [key for key, (one, _) in list(self._kept.items()) if sys.getrefcount(one) <= ALONE]:
                self._kept.pop(dead, None)
            if len(self._kept) >= self._most:
                self._kept.clear()
        self._kept[id(array)] = array, made
        return made


class InTurn:
    """`number` flat arrays used in turn; `first` come first, the others are made when needed."""

    def __init__(self, size: int, context: Any, number: int, first: Sequence[NDArray] = ()) -> None:
        self._size, self._context, self._number = size, context, number
        self._arrays = list(first)

    def next(self) -> NDArray:
        """The array that has been unused for longest. The caller overwrites all of it."""
        new = len(self._arrays) < self._number
        self._arrays.append(zeros(self._size, self._context) if new else self._arrays.pop(0))
        return self._arrays[-1]
