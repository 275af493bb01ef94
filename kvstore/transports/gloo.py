"""A ring of workers over torch.distributed: under ``torchrun``, or in a process group that is there already.

For scripts that run without our launcher. A bucket's sum is an allreduce of gloo's. All workers begin the sums in the
order of their scripts' calls, whatever the order in which gradients appear.
"""
import itertools
import os
import queue
import threading
import traceback
from datetime import timedelta
from functools import partial
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
import torch.distributed

from kvstore.engine import engine
from kvstore.engine.engine import NDArray
from kvstore.errors import EXIT_FAILURE, ConfigError, DivergedError
from kvstore.job import ending, environment, software
from kvstore.job.deadlines import deadlines
from kvstore.messages.buckets import Bucket, Keys, Parameter
from kvstore.messages.finite import Check
from kvstore.messages.seam import Pending, Ring, TrafficSettings
from kvstore.transports.rounds import on_ring

ENDLESS = timedelta(days=365)
"""gloo's own timeout: each store has its own deadline."""
LATER = timedelta(minutes=1)
"""By which torch.distributed waits longer than a store, so that it is the store that says what is late."""
LATE = ("another worker is late, stopped or unreachable, or has taken fewer steps and left. Check that all are alive, "
        "or raise `timeout_s`")
NOTHING = (0, 0.0)
"""Number and longest time of the awaited sum where no sum is awaited."""


def there() -> bool:
    """Whether this process belongs to a group of torch.distributed, and not to a job of odsgd."""
    foreign = "TORCHELASTIC_RUN_ID" in os.environ or torch.distributed.is_initialized()
    return foreign and not environment.launched() and "DMLC_ROLE" not in os.environ


class GroupRing(Ring):
    """One session on the process group."""

    def __init__(self, timeout_s: float, group: Any = None) -> None:
        self._group, self._timeout_s = _group(timeout_s, group), timeout_s
        self._group.follow(timeout_s)
        self.worker_rank, self.num_workers = self._group.worker_rank, self._group.num_workers

    def plan(self, parameters: Sequence[Parameter], traffic: TrafficSettings) -> List[Bucket]:
        if traffic.has_codec:
            raise ConfigError(f"codec `{traffic.codec}` under torchrun, where floats are summed as they are; leave it "
                              "out, or start the job by `odsgd launch -s 0`")
        return on_ring(parameters, traffic, self._group.keys, self.num_workers)

    def allreduce(self, bucket: Bucket, array: NDArray, out: NDArray) -> Pending:
        begin = partial(self._group.begin, self._group.ask(), self._timeout_s, self.finite_check(bucket), array, out)
        engine.push_async(begin, [array], [out])
        return Pending(out)

    def total(self, array: np.ndarray) -> np.ndarray:
        return self._group.total(array, self._timeout_s)


class _Group:
    """What the stores of a process share that are in one process group: one order of sums, and two threads that carry
    them out.
    """

    def __init__(self, timeout_s: float, group: Any) -> None:
        dist, self._timeout_s = torch.distributed, timeout_s
        self._dist = dist
        self._ours = not dist.is_initialized()
        with deadlines.within(timeout_s, f"not all workers made a store within {timeout_s:g} s; check that all are "
                              "alive and run the same script"):
            if self._ours:
                dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s) + LATER)
            ranks = None if group is None else dist.get_process_group_ranks(group)
            self._sums, self._totals = (dist.new_group(ranks, ENDLESS, "gloo", use_local_synchronization=bool(ranks))
                                        for _ in range(2))
        self.worker_rank, self.num_workers = dist.get_rank(group), dist.get_world_size(group)
        self.keys = Keys(1)
        self._numbers = itertools.count()
        self._given: Dict[int, Tuple[float, NDArray, NDArray, engine.Done]] = {}
        self._news = threading.Condition()
        self._under_way: Any = queue.Queue()  # number, timeout, work and `done` of each sum
        self._awaited = NOTHING
        environment.share_python()
        for run in (self._begin_all, self._end_all):
            threading.Thread(target=_guarded, args=(run,), name="kvstore-group", daemon=True).start()
        ending.end_well(self._leave)
        software.compare(self)

    def follow(self, timeout_s: float) -> None:
        """Watch for sums that may last this long."""
        deadlines.follow((self, timeout_s), timeout_s, partial(self._awaits, timeout_s),
                         lambda: f"a bucket's sum was not over within {timeout_s:g} s: {LATE}")

    def _awaits(self, timeout_s: float) -> Optional[int]:
        number, longest_s = self._awaited
        return number if longest_s == timeout_s else None

    def ask(self) -> int:
        """The number of the next sum, in the same order on every worker."""
        return next(self._numbers)

    def begin(self, number: int, timeout_s: float, check: Optional[Check], own: NDArray, total: NDArray,
              done: engine.Done) -> None:
        """The arrays of a sum are there."""
        if check is not None:
            with ending.dying_of(DivergedError):
                check(engine.view(own))
        with self._news:
            self._given[number] = timeout_s, own, total, done
            self._news.notify()

    def _begin_all(self) -> None:
        for number in itertools.count():
            with self._news:
                self._news.wait_for(lambda number=number: number in self._given)  # type: ignore[misc]
                timeout_s, own, total, done = self._given.pop(number)
            sums = engine.view(total)
            np.copyto(sums, engine.view(own))
            work = self._dist.all_reduce(torch.from_numpy(sums), group=self._sums, async_op=True)
            self._under_way.put((number, timeout_s, work, done))

    def _end_all(self) -> None:
        while True:
            number, timeout_s, work, done = self._under_way.get()
            self._awaited = number, timeout_s
            work.wait()
            self._awaited = NOTHING
            done()

    def total(self, array: np.ndarray, timeout_s: Optional[float] = None) -> np.ndarray:
        """The sum of every worker's `array` (float32). Collective; waits."""
        longest_s = timeout_s or self._timeout_s
        total = torch.tensor(np.asarray(array, np.float32))
        with deadlines.within(longest_s, f"a sum over the workers was not over within {longest_s:g} s: {LATE}"):
            try:
                self._dist.all_reduce(total, group=self._totals)
            except RuntimeError as error:
                _die_of(error)
        return np.asarray(total.numpy())

    def _leave(self) -> None:
        engine.wait_all()
        self.total(np.zeros(1))  # a worker that went would take its end of the others' sums with it
        if self._ours:
            self._dist.destroy_process_group()


def _guarded(run: Any) -> None:
    """Die of an error, which nobody could catch here. Usually another worker has died."""
    try:
        run()
    except RuntimeError as error:
        _die_of(error)
    except BaseException:
        ending.die(traceback.format_exc(), EXIT_FAILURE)


def _die_of(error: RuntimeError) -> None:
    said = str(error).split(". ")[0]
    ending.die(f"a sum of torch.distributed failed: {said}; another worker has died, or taken other steps than this "
               "one: see what it ended with", EXIT_FAILURE, consequence=True)


_shared: Dict[Any, _Group] = {}


def _group(timeout_s: float, group: Any) -> _Group:
    """Made on first use; the group is left in good order when the process ends."""
    if group not in _shared:
        _shared[group] = _Group(timeout_s, group)
    return _shared[group]
