"""MXNet's engine, with Python functions as operations.

`fork()` waits for the engine while it holds Python's lock, which our operations need: a deadlock. So the first push
installs a hook that waits before every fork without the lock, where a deadline can fire. The same happens at exit.
"""
import atexit
import ctypes
import functools
import itertools
import operator
import os
import sys
import threading
import traceback
from typing import Any, Callable, Dict, Sequence

import numpy as np

from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import EXIT_FAILURE
from kvstore.job import ending, environment

_SYNC = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_ASYNC = _COMPLETE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_CPU = (ctypes.c_int * 2)(1, 0)  # struct Context: device type, device id
# FnProperty::kCPUPrioritized: threads of their own, so that what computes on the CPU is not in the way.
_PRIORITIZED = ctypes.c_int(3)

_pushed: Dict[int, Callable[..., None]] = {}  # until they have run
_numbers = itertools.count(1)


class _OnComplete(ctypes.Structure):
    """MXNet's engine::CallbackOnComplete."""

    _fields_ = [("callback", ctypes.c_void_p), ("engine", ctypes.c_void_p), ("param", ctypes.c_void_p)]


def push(function: Callable[[], None], reads: Sequence[NDArray], writes: Sequence[NDArray]) -> None:
    """On one of MXNET_CPU_PRIORITY_NTHREADS (4) threads. An exception ends the process: nobody could catch it."""
    _push(mx.base._LIB.MXEnginePushSyncND, _run, function, reads, writes)


def push_async(start: Callable[..., None], reads: Sequence[NDArray], writes: Sequence[NDArray], _: bool) -> None:
    _push(mx.base._LIB.MXEnginePushAsyncND, _start, start, reads, writes)


def _push(call: Any, trampoline: Any, function: Any, reads: Sequence[NDArray], writes: Sequence[NDArray]) -> None:
    prepare()
    number = next(_numbers)
    _pushed[number] = function
    arguments = [trampoline, ctypes.c_void_p(number), None, _CPU, _handles(reads), len(reads), _handles(writes),
                 len(writes), ctypes.byref(_PRIORITIZED), 0, b"python"]
    mx.base.check_call(call(*arguments, *([False] if trampoline is _start else [])))


_handle = operator.attrgetter("handle")


def _handles(arrays: Sequence[NDArray]) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(arrays))(*map(_handle, arrays))


_threads = threading.local()


def _guarded(number: int, *arguments: Any) -> None:
    if not hasattr(_threads, "kept"):
        _threads.kept = True  # Python's state of this thread: to make it again costs more than most functions do
        ctypes.pythonapi.PyGILState_Ensure()
    try:
        _pushed.pop(number)(*arguments)
    except BaseException:
        ending.die(traceback.format_exc(), EXIT_FAILURE)


def _begin(_: int, on_complete: int, number: int) -> None:
    over = _OnComplete.from_address(on_complete)
    _guarded(number, functools.partial(_COMPLETE(over.callback), over.engine, over.param, None))


_run, _start = _SYNC(lambda _, number: _guarded(number)), _ASYNC(_begin)


@functools.lru_cache(maxsize=None)
def prepare() -> None:
    """Before the first push: threads get Python's lock soon; a fork first waits for the engine, without the lock."""
    environment.shorten_switch_interval()
    os.register_at_fork(before=mx.nd.waitall)
    if sys.version_info < (3, 10):  # there subprocess forks and calls no hook; later it does not fork
        sys.addaudithook(lambda event, _: mx.nd.waitall() if event == "subprocess.Popen" else None)


atexit.register(mx.nd.waitall)  # registered first, so it runs last: by then the process has left its job


class PreparedCopy:
    """A prepared call of `amp_multicast` on arrays that stay the same, in a fifth of the time of MXNet's front end."""

    def __init__(self, sources: Sequence[NDArray], targets: Sequence[NDArray]) -> None:
        self._arrays = *sources, *targets  # alive as long as their handles are used
        operator = ctypes.c_void_p()
        mx.base.check_call(mx.base._LIB.NNGetOpHandle(b"amp_multicast", ctypes.byref(operator)))
        self._targets = ctypes.cast(_handles(targets), ctypes.POINTER(ctypes.c_void_p))
        self._number, self._kinds = ctypes.c_int(len(targets)), ctypes.POINTER(ctypes.c_int)()
        self._arguments = (operator, len(sources), _handles(sources), ctypes.byref(self._number),
                           ctypes.byref(self._targets), 1, mx.base.c_str_array(["num_outputs"]),
                           mx.base.c_str_array([str(len(sources))]), ctypes.byref(self._kinds))

    def __call__(self) -> None:
        mx.base.check_call(mx.base._LIB.MXImperativeInvokeEx(*self._arguments))


def view(array: NDArray) -> np.ndarray:
    address = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    assert address.value is not None
    return np.frombuffer((ctypes.c_float * array.size).from_address(address.value), np.float32)


def wait_to_write(array: NDArray) -> None:
    mx.base.check_call(mx.base._LIB.MXNDArrayWaitToWrite(array.handle))
