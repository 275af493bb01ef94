"""Our own engine: operations on NumPy's buffers, run by a few threads once what they read is written.

Each buffer has a queue of the operations that use it, in the order of the calls: those that read it run side by side,
one that writes it runs alone. An error in an operation is kept with what it should have written; what reads that does
not run, and whoever waits for it gets the error.
"""
import atexit
import collections
import os
import queue
import threading
import traceback
from typing import Any, Callable, Deque, List, Optional, Sequence, Tuple

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from kvstore.errors import EXIT_FAILURE
from kvstore.job import ending, environment

THREADS = 4
AT_ONCE = 512
"""Up to so many floats an array's own operators run on the caller's thread, if they can run now: to ask another thread
takes longer."""


class _Buffer:
    """The operations that use an array's memory, and those that wait for it."""

    __slots__ = ("failure", "readers", "waiting", "writing")

    def __init__(self) -> None:
        self.waiting: Deque[Tuple[_Operation, bool]] = collections.deque()
        self.readers, self.writing = 0, False
        self.failure: Optional[BaseException] = None


class _Operation:
    """Runs once nothing is `missing`; `begins`: it is over when its `done` is called. One with a `gate` only waits."""

    __slots__ = ("begins", "function", "gate", "missing", "reads", "writes")

    def __init__(self, function: Any, reads: Sequence[_Buffer], writes: Sequence[_Buffer],
                 begins: bool = False) -> None:
        self.function, self.reads, self.writes, self.begins = function, reads, writes, begins
        self.missing, self.gate = 0, None  # type: int, Any


class _Engine:
    """All operations of this process. Invariant: under the lock, a buffer has one writer, or readers, or neither."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._under_way = 0
        self._ready: queue.SimpleQueue[_Operation] = queue.SimpleQueue()
        self._threads: List[threading.Thread] = []
        self.untold: Optional[BaseException] = None  # the last error, until somebody gets it

    def push(self, function: Any, reads: Sequence[_Buffer], writes: Sequence[_Buffer], begins: bool,
             here: bool = False) -> None:
        """`here`: run it on this thread if nothing stands in the way."""
        operation = _Operation(function, reads, writes, begins)
        if not self._threads:
            self._start()
        with self._lock:
            self._under_way += 1
            free = self._enter(operation)
        if free:
            self._hand_out(self._run(operation) if here else [operation])

    def _start(self) -> None:
        environment.shorten_switch_interval()
        with self._lock:
            if not self._threads:
                self._threads = [threading.Thread(target=self._serve, name="kvstore-engine", daemon=True)
                                 for _ in range(THREADS)]
                for thread in self._threads:
                    thread.start()

    def _enter(self, operation: _Operation) -> bool:
        """Stand in the queues of its buffers; whether it may run at once."""
        for buffers, writes in ((operation.reads, False), (operation.writes, True)):
            for one in buffers:
                if one.writing or one.waiting or (writes and one.readers):
                    one.waiting.append((operation, writes))
                    operation.missing += 1
                elif writes:
                    one.writing = True
                else:
                    one.readers += 1
        return not operation.missing

    def _serve(self) -> None:
        while True:
            free = [self._ready.get()]
            while free:  # its thread goes on with what it has freed: to wake another takes longer
                operation = free.pop()
                self._hand_out(free)
                free = self._run(operation)

    def _hand_out(self, free: Sequence[_Operation]) -> None:
        for operation in free:
            self._ready.put(operation)

    def _run(self, operation: _Operation) -> List[_Operation]:
        """The operations that may run now."""
        failure = next((one.failure for one in (*operation.reads, *operation.writes) if one.failure), None)
        if failure is None:
            try:
                if operation.begins:
                    operation.function(lambda: self._hand_out(self._end(operation)))
                    return []
                operation.function()
            except BaseException as error:
                failure = self.untold = error
        return self._end(operation, failure)

    def _end(self, operation: _Operation, failure: Optional[BaseException] = None) -> List[_Operation]:
        with self._lock:
            for one in operation.writes:
                one.failure = failure or one.failure
            free = self._leave(operation)
            self._under_way -= 1
            if not self._under_way:
                self._idle.notify_all()
        return free

    def _leave(self, operation: _Operation) -> List[_Operation]:
        """Make room; the operations that may run now."""
        free: List[_Operation] = []
        for one in operation.writes:
            one.writing = False
            self._let_in(one, free)
        for one in operation.reads:
            one.readers -= 1
            self._let_in(one, free)
        return free

    def _let_in(self, buffer: _Buffer, free: List[_Operation]) -> None:
        while buffer.waiting and not buffer.writing:
            operation, writes = buffer.waiting[0]
            if writes and buffer.readers:
                return
            buffer.waiting.popleft()
            buffer.writing, buffer.readers = writes, buffer.readers + (not writes)
            operation.missing -= 1
            if operation.gate is not None:  # the waiting thread goes on, and the operation is over
                operation.gate.release()
                free += self._leave(operation)
            elif not operation.missing:
                free.append(operation)

    def wait(self, buffer: _Buffer, writes: bool) -> None:
        """Wait until `buffer` is written; `writes`: until nothing uses it any more."""
        with self._lock:
            busy = buffer.writing or buffer.waiting or (writes and buffer.readers)
            if busy:
                operation = _Operation(None, [] if writes else [buffer], [buffer] if writes else [])
                operation.gate = threading.Lock()
                operation.gate.acquire()
                self._enter(operation)
        if busy:
            operation.gate.acquire()
        if buffer.failure is not None:
            if self.untold is buffer.failure:
                self.untold = None
            raise buffer.failure

    def wait_all(self) -> None:
        with self._lock:
            self._idle.wait_for(lambda: not self._under_way)
        failure, self.untold = self.untold, None
        if failure is not None:
            raise failure


_engine = _Engine()
# A child has no threads of its parent's, and goes on without what was under way.
os.register_at_fork(after_in_child=lambda: _Engine.__init__(_engine))


@atexit.register  # registered early, so that it runs late
def wait_at_end() -> None:
    """`wait_all` as this process ends, which dies of an error that nobody has waited for."""
    try:
        wait_all()
    except BaseException:  # atexit would print it, and let the process end well
        ending.die(traceback.format_exc(), EXIT_FAILURE)


def _copy(value: Any, out: np.ndarray) -> None:
    np.copyto(out, value)


class Array(NDArrayOperatorsMixin):
    """A flat array in single precision, as MXNet's: its operators begin operations, and its slices are views."""

    __slots__ = ("_buffer", "floats")
    context = None
    dtype = np.float32
    __eq__, __ne__, __hash__ = object.__eq__, object.__ne__, object.__hash__

    def __init__(self, floats: np.ndarray, buffer: Optional[_Buffer] = None) -> None:
        self.floats, self._buffer = floats, _Buffer() if buffer is None else buffer

    @property
    def size(self) -> int:
        return self.floats.size

    @property
    def shape(self) -> Tuple[int, ...]:
        return self.floats.shape

    def __repr__(self) -> str:
        return f"<Array of {self.size} floats>"

    def __getitem__(self, key: slice) -> "Array":
        return Array(self.floats[key], self._buffer)

    def __setitem__(self, key: slice, value: Any) -> None:
        value = np.array(value, np.float32) if isinstance(value, np.ndarray) else value  # the caller's may change
        self[key]._become(_copy, value)

    def wait_to_read(self) -> None:
        _engine.wait(self._buffer, writes=False)

    def asnumpy(self) -> np.ndarray:
        self.wait_to_read()
        return self.floats.copy()

    def asscalar(self) -> float:
        return float(self.asnumpy()[0])

    def copy(self) -> "Array":
        return self._new(_copy, self)

    def zeros_like(self) -> "Array":
        return Array(np.zeros_like(self.floats))

    def copyto(self, other: "Array") -> "Array":
        return other._become(_copy, self)

    def __array_ufunc__(self, operator: Callable[..., Any], method: str, *operands: Any, out: Any = None) -> "Array":
        """What an operator of Python calls: for `+=` with this array as `out`."""
        return self._new(operator, *operands) if out is None else out[0]._become(operator, *operands)

    def _new(self, operator: Callable[..., Any], *operands: Any) -> "Array":
        return Array(np.empty_like(self.floats))._become(operator, *operands)

    def _become(self, operator: Callable[..., Any], *operands: Any) -> "Array":
        """Queue: be what a NumPy operator makes of arrays and numbers."""
        out = self.floats
        parts = [one.floats if isinstance(one, Array) else one if isinstance(one, np.ndarray) else np.float32(one)
                 for one in operands]
        reads = {id(one._buffer): one._buffer for one in operands if isinstance(one, Array)}
        reads.pop(id(self._buffer), None)

        def run() -> None:
            with np.errstate(all="ignore"):  # a run may diverge
                operator(*parts, out=out)

        _engine.push(run, list(reads.values()), [self._buffer], begins=False, here=out.size <= AT_ONCE)
        return self


def push(function: Callable[[], None], reads: Sequence[Array], writes: Sequence[Array]) -> None:
    _engine.push(function, _buffers(reads), _buffers(writes), begins=False)


def push_async(start: Callable[..., None], reads: Sequence[Array], writes: Sequence[Array], here: bool) -> None:
    _engine.push(start, _buffers(reads), _buffers(writes), begins=True, here=here)


def _buffers(arrays: Sequence[Array]) -> List[_Buffer]:
    return [one._buffer for one in arrays]


def view(array: Array) -> np.ndarray:
    return array.floats


def wait_to_write(array: Array) -> None:
    _engine.wait(array._buffer, writes=True)


def wait_all() -> None:
    _engine.wait_all()
