"""Workers as threads of one process. One runs at a time.

A thread yields only when it must wait, to the longest-waiting thread that can go on. MXNet's front end is not made for
several threads, and a run is repeatable. If no thread can go on, that is an error at once.
"""
import os
import threading
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, Callable, List, Optional

from kvstore.engine.engine import NDArray
from kvstore.errors import ConfigError, RoundTimeoutError, WorkerLostError
from kvstore.messages.finite import Check
from kvstore.messages.seam import Pending

LOOKS = 60
"""Parts that a wait is cut into: while the process stands still (SIGSTOP, a laptop that sleeps), one part passes."""

_idle: List["SimpleQueue[Callable[[], None]]"] = []
"""The queues from which the idle threads of all stages get calls. Threads are reused, since MXNet keeps 5 MB for each
that ever computed. Python's own pool does not suit calls that wait for each other: since 3.12 it may count a busy
thread as idle."""
os.register_at_fork(after_in_child=_idle.clear)


def _serve(calls: "SimpleQueue[Callable[[], None]]") -> None:
    while True:
        calls.get()()


def _begin(function: Callable[[int], Any], worker_rank: int) -> "Future[Any]":
    """Call `function`, which raises nothing, in a thread."""
    called: Future[Any] = Future()
    try:
        calls = _idle.pop()
    except IndexError:
        calls = SimpleQueue()
        threading.Thread(target=_serve, args=(calls,), name="kvstore-worker", daemon=True).start()

    def call() -> None:
        result = function(worker_rank)
        _idle.append(calls)
        called.set_result(result)

    calls.put(call)
    return called


class _Waiter:
    """A thread that waits until `ready`, and for its turn: a lock that another thread opens, once."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self.ready, self.turn = ready, threading.Lock()
        self.turn.acquire()


class Turns:
    """Whose turn it is. The parameters are those of `Stage` (`in_process`)."""

    def __init__(self, num_workers: int, timeout_s: float) -> None:
        self.num_workers, self.timeout_s = num_workers, timeout_s
        self._waiting: List[_Waiter] = []
        self._failure: Optional[BaseException] = None
        self._interrupted = False

    def worker(self, worker_rank: int) -> Any:
        """A worker's transport."""
        raise NotImplementedError

    def run(self, function: Callable[[Any], Any], make: Optional[Callable[[int], Any]] = None) -> List[Any]:
        """Call `function` on every worker's transport, each in a thread; their results.

        `make` gives a worker's transport by its rank; None: `worker`. Raises what the first failure raised.
        """
        make = make or self.worker
        first = [_Waiter(lambda: True) for _ in range(self.num_workers)]

        def body(worker_rank: int) -> Any:
            first[worker_rank].turn.acquire()
            result = None if self._failure else self._guarded(lambda: function(make(worker_rank)))
            self._guarded(lambda: self.rest(worker_rank))
            self._hand_over()
            return result

        self._waiting += first
        called = []
        try:
            for worker_rank in range(self.num_workers):
                called.append(_begin(body, worker_rank))
        except RuntimeError as error:  # the threads that wait for their turn end without having begun
            self._failure = ConfigError(f"{self.num_workers} workers in one process: this machine has begun "
                                        f"{len(called)} threads, and no more ({error}); take fewer workers")
        try:
            self._hand_over()
            results = [one.result() for one in called]
        except BaseException as error:  # an interruption (Ctrl-C) ends each thread at its next wait
            self._failure, self._interrupted = error, True
            wait(called)
            raise
        if self._failure is not None:
            raise self._failure
        return results

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """What `call` returns; None if it fails, which ends all workers, and `run` raises the first failure."""
        try:
            return call()
        except BaseException as error:
            self._failure = self._failure or error
            return None

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Let other workers run until `ready`."""
        if self._interrupted:
            raise WorkerLostError("interrupted")
        if ready():
            return
        waiter = _Waiter(ready)
        self._waiting.append(waiter)
        self._hand_over()
        if not any(waiter.turn.acquire(timeout=self.timeout_s / LOOKS) for _ in range(LOOKS)):
            raise RoundTimeoutError(f"{what} did not come within {self.timeout_s:g} s: another worker computes so long")
        if not ready():
            if self._failure is not None:
                raise WorkerLostError(f"another worker failed first: {self._failure}")
            raise RoundTimeoutError(f"{what} will not come: the other workers wait, too, or have ended")

    def _hand_over(self) -> None:
        """Let the longest-waiting thread run that can go on; if no thread can, the first one gets the error."""
        while self._waiting:
            waiter = next((one for one in self._waiting if one.ready()), None)
            if waiter is None and self._failure is None and self._guarded(self.idle):
                continue
            waiter = waiter or self._waiting[0]
            self._waiting.remove(waiter)
            waiter.turn.release()
            return

    def idle(self) -> bool:
        """Called when no worker can go on. Returns whether one may be able to now."""
        return False

    def rest(self, worker_rank: int) -> None:
        """A worker waits for an answer before it begins anything new, or has ended."""


class LateAnswer(Pending):
    """An answer that is there once the pushes that it waits for are; `result` lets other workers run until then."""

    def __init__(self, stage: Turns, worker_rank: int, what: str, array: NDArray,
                 check: Optional[Check] = None) -> None:
        super().__init__(array)
        self.check = check  # for what was sent, called before the answer is made
        self._stage, self._worker_rank, self._what = stage, worker_rank, f"worker {worker_rank}, {what}"
        self.arrived = False

    def result(self) -> NDArray:
        self._stage.wait_until(lambda: self.arrived, self._what)
        return super().result()

    def wait(self) -> None:
        self._stage.rest(self._worker_rank)
        self.result().wait_to_read()

    def then(self, function: Callable[[NDArray], NDArray]) -> Pending:
        return _MadeOfLateAnswer(self, function)


class _MadeOfLateAnswer(Pending):
    """What a function makes of a late answer, as soon as somebody asks."""

    def __init__(self, late: LateAnswer, function: Callable[[NDArray], NDArray]) -> None:
        super().__init__(None)
        self._late, self._function = late, function
        self._made: Optional[NDArray] = None

    def result(self) -> NDArray:
        if self._made is None:
            self._made = self._function(self._late.result())
        return self._made

    untaken = result

    def wait(self) -> None:
        self._late.wait()
        self.result().wait_to_read()
