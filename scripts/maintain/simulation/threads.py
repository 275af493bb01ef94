"""`threading`, `queue` and `concurrent.futures` over the simulated system: threads are tasks of a process."""
import collections
import queue as real_queue
import types
from concurrent.futures import Future
from typing import Any, Callable, Deque, Iterable, Iterator, List, Optional

from scripts.maintain.simulation import stdlib
from scripts.maintain.simulation.files import File


def _until(timeout: Optional[float]) -> Optional[float]:
    return None if timeout is None or timeout < 0 else stdlib.world.now + timeout


class _Waited:
    """Something that tasks wait for."""

    def __init__(self) -> None:
        self._file = File()

    def _wait(self, ready: Callable[[], bool], timeout: Optional[float]) -> bool:
        stdlib.world.call()
        if ready():
            return True
        until = _until(timeout)
        while not ready():
            if until is not None and stdlib.world.now >= until:
                return False
            stdlib.world.wait([self._file], until)
        return True


class Lock(_Waited):
    def __init__(self) -> None:
        super().__init__()
        self._held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self._wait(lambda: not self._held, timeout if blocking else 0.0):
            return False
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        self._file.changed()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class RLock(Lock):
    def __init__(self) -> None:
        super().__init__()
        self._owner: Any = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._held and self._owner is stdlib.world.current:
            self._depth += 1
            return True
        taken = super().acquire(blocking, timeout)
        if taken:
            self._owner, self._depth = stdlib.world.current, 1
        return taken

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            super().release()


class Condition(_Waited):
    def __init__(self, lock: Optional[Lock] = None) -> None:
        super().__init__()
        self._lock = lock or RLock()
        self._told = 0

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def acquire(self, *given: Any) -> bool:
        return self._lock.acquire(*given)

    def release(self) -> None:
        self._lock.release()

    def wait(self, timeout: Optional[float] = None) -> bool:
        before = self._told
        self._lock.release()
        try:
            return self._wait(lambda: self._told != before, timeout)
        finally:
            self._lock.acquire()

    def wait_for(self, predicate: Callable[[], Any], timeout: Optional[float] = None) -> Any:
        until = _until(timeout)
        while not predicate():
            left = None if until is None else until - stdlib.world.now
            if left is not None and left <= 0:
                return predicate()
            self.wait(left)
        return True

    def notify_all(self) -> None:
        self._told += 1
        self._file.changed()


class Event(_Waited):
    def __init__(self) -> None:
        super().__init__()
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._file.changed()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: Optional[float] = None) -> bool:
        return self._wait(lambda: self._set, timeout)


class Thread(_Waited):
    def __init__(self, group: None = None, target: Optional[Callable[..., object]] = None, name: str = "",
                 args: Iterable[Any] = (), kwargs: Any = None, daemon: Optional[bool] = None) -> None:
        super().__init__()
        self._target, self._args, self._kwargs = target, tuple(args), dict(kwargs or {})
        self.name, self.daemon, self._over = name, daemon, False
        self.ident: Optional[int] = None

    def start(self) -> None:
        task = stdlib.world.call().thread(self._run)
        self.ident = id(task)

    def _run(self) -> None:
        try:
            if self._target:
                self._target(*self._args, **self._kwargs)
        finally:
            self._over = True
            self._file.changed()

    def is_alive(self) -> bool:
        return self.ident is not None and not self._over

    def join(self, timeout: Optional[float] = None) -> None:
        self._wait(lambda: self._over, timeout)


class Timer(Thread):
    def __init__(self, interval: float, function: Callable[..., object], args: Iterable[Any] = ()) -> None:
        def later() -> None:
            stdlib.sleep(interval)
            function(*args)

        super().__init__(target=later)


_main = types.SimpleNamespace(name="MainThread", ident=0)


def current_thread() -> Any:
    task = stdlib.world.current
    return _main if task and task is task.process.tasks[0] else types.SimpleNamespace(name="Thread", ident=id(task))


class Queue(_Waited):
    def __class_getitem__(cls, item: object) -> "type[Queue]":
        return cls

    def __init__(self, maxsize: int = 0) -> None:
        super().__init__()
        self.maxsize = maxsize
        self._items: Deque[Any] = collections.deque()

    def empty(self) -> bool:
        return not self._items

    def put(self, item: Any, block: bool = True, timeout: Optional[float] = None) -> None:
        if not self._wait(lambda: not 0 < self.maxsize <= len(self._items), timeout if block else 0.0):
            raise real_queue.Full
        self._items.append(item)
        self._file.changed()

    def get(self, block: bool = True, timeout: Optional[float] = None) -> Any:
        if not self._wait(lambda: bool(self._items), timeout if block else 0.0):
            raise real_queue.Empty
        self._file.changed()
        return self._items.popleft()


class Pool:
    """`ThreadPoolExecutor`: `map` runs all at once."""

    def __init__(self, most: int) -> None:
        self._threads: List[Thread] = []

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        results: List[Any] = []
        for index, item in enumerate(items):
            results.append(None)
            thread = Thread(target=self._do, args=(results, index, function, item))
            thread.start()
            self._threads.append(thread)  # not one that a signal kept from starting: nobody could join it
        for thread in self._threads:
            thread.join()
        return iter(results)

    @staticmethod
    def _do(results: List[Any], index: int, function: Callable[[Any], Any], item: Any) -> None:
        results[index] = function(item)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *error: object) -> None:
        for thread in self._threads:
            thread.join()


threading = types.SimpleNamespace(Lock=Lock, RLock=RLock, Condition=Condition, Event=Event, Thread=Thread, Timer=Timer,
                                  main_thread=lambda: _main, current_thread=current_thread)
queue = types.SimpleNamespace(Queue=Queue, SimpleQueue=Queue, Full=real_queue.Full, Empty=real_queue.Empty)
concurrent = types.SimpleNamespace(futures=types.SimpleNamespace(ThreadPoolExecutor=Pool, Future=Future))
