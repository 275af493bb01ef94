"""Arrays in place, past MXNet's dependency engine.

The engine runs an operation once every array it reads has been written. What is here looks at memory without asking
it, and is right only where its docstring says so. Nothing Python is ever pushed to the engine: `fork` waits for all
that is pushed while it holds Python's lock, and a callback needs that lock.
"""
import ctypes

import numpy as np

from ._mxnet import NDArray, mx


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
