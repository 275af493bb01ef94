"""Python functions as operations of MXNet's dependency engine.

The engine runs an operation once every array it reads has been written, and knows of no other kind of waiting. A
Python function pushed here takes part in that: it is called, on a thread of the engine, when its arrays are
ready, and whoever pushed it does not wait.
"""
import ctypes
import itertools
from typing import Callable, Dict, List, Sequence

import numpy as np

from ._mxnet import NDArray, mx

_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class _Context(ctypes.Structure):
    """MXNet's Context as C sees it: device type 1 is the CPU."""

    _fields_ = [("device_type", ctypes.c_int), ("device_id", ctypes.c_int)]


_CPU = _Context(1, 0)
_waiting: Dict[int, Callable[[], None]] = {}  # pushed and not yet run; keeps them alive
_numbers = itertools.count(1)
_failures: List[BaseException] = []  # what pushed functions raised


def _run(_run_context: int, number: int) -> None:
    try:
        _waiting.pop(number)()
    except BaseException as error:  # noqa: B902  the engine is C++: nothing may pass through it
        _failures.append(error)


_RUN = _SIGNATURE(_run)  # at module level: C holds no reference to it


def when_ready(arrays: Sequence[NDArray], function: Callable[[], None]) -> None:
    """Call `function` once every operation already pushed that writes one of `arrays` has run.

    Returns at once. The function runs on a thread of the engine, which runs little else meanwhile: it must
    be short and must not touch MXNet. What it raises is raised by the next `check`.
    """
    number = next(_numbers)
    _waiting[number] = function
    handles = (ctypes.c_void_p * len(arrays))(*[array.handle.value for array in arrays])
    mx.base.check_call(mx.base._LIB.MXEnginePushSyncND(
        _RUN, ctypes.c_void_p(number), None, ctypes.byref(_CPU), handles, len(arrays), None, 0, None, 0,
        b"kvstore.when_ready"))


def check() -> None:
    """Raise what a function pushed earlier has raised."""
    if _failures:
        raise _failures.pop(0)


def memory(array: NDArray) -> np.ndarray:
    """A flat single-precision CPU array as a NumPy array, in place and past the engine; waits until it is written.

    For servers, which run one thing at a time: NumPy is several times faster than MXNet's own operators there.
    Nobody else may use `array` until the caller has done with it.
    """
    array.wait_to_read()
    return np.ctypeslib.as_array(floats(array, 0, array.size))


def floats(array: NDArray, start: int, stop: int) -> "ctypes.Array[ctypes.c_float]":
    """Elements [start, stop) of a flat single-precision CPU array, in place and past the engine.

    For a few numbers that no operation under way reads or writes; an operation of its own for each would cost more
    than all the rest.
    """
    address = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    assert address.value is not None
    return (ctypes.c_float * (stop - start)).from_address(address.value + 4 * start)
