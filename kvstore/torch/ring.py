"""A ring of workers over torch.distributed: under ``torchrun``, or in a process group that is there already.

For scripts beside which nothing of ours is started. A bucket's sum is an allreduce of gloo's. All workers begin them in
the order in which their scripts asked for them, whatever the order in which gradients are there.
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

from kvstore.buckets import Bucket, Keys, Parameter
from kvstore.engine import engine
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import EXIT_FAILURE, ConfigError, DivergedError
from kvstore.job import control, software
from kvstore.transports.rounds import on_ring
from kvstore.wire.finite import Look
from kvstore.wire.interfaces import Pending, Ring, Traffic


def there() -> bool:
    """Whether this process is one of a group of torch.distributed's, and of no job of ours."""
    foreign = "TORCHELASTIC_RUN_ID" in os.environ or torch.distributed.is_initialized()
    return foreign and not control.launched() and "DMLC_ROLE" not in os.environ


class GroupRing(Ring):
    """One session on the process group."""

    def __init__(self, timeout_s: float) -> None:
        self._group = _group(timeout_s)
        self.worker_rank, self.num_workers = self._group.worker_rank, self._group.num_workers

    def plan(self, parameters: Sequence[Parameter], traffic: Traffic) -> List[Bucket]:
        if traffic.coded:
            raise ConfigError(f"codec `{traffic.codec}` under torchrun, where floats are summed as they are; leave it "
                              "out, or start the job by `odsgd launch -s 0`")
        return on_ring(parameters, traffic, self._group.keys, self.num_workers)

    def allreduce(self, bucket: Bucket, array: NDArray, out: NDArray) -> Pending:
        begin = partial(self._group.begin, self._group.ask(), self.look(bucket), array, out)
        engine.push_async(begin, [array], [out])
        return Pending(out)

    def total(self, array: np.ndarray) -> np.ndarray:
        return self._group.total(array)


class _Group:
    """What the stores of a process share: one order of sums, and two threads that carry them out."""

    def __init__(self, timeout_s: float) -> None:
        dist = self._dist = torch.distributed
        self._ours = not dist.is_initialized()
        if self._ours:
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        self._sums, self._totals = (dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
                                    for _ in range(2))
        self.worker_rank, self.num_workers = dist.get_rank(), dist.get_world_size()
        self.keys = Keys(1)
        self._numbers = itertools.count()
        self._given: Dict[int, Tuple[NDArray, NDArray, engine.Done]] = {}
        self._news = threading.Condition()
        self._under_way: Any = queue.Queue()  # sums and what is to be told when they are over
        control.share_python()
        for run in (self._begin_all, self._end_all):
            threading.Thread(target=_guarded, args=(run,), name="kvstore-group", daemon=True).start()
        control.end_well(self._leave)
        software.compare(self)

    def ask(self) -> int:
        """The number of the next sum, in the same order on every worker."""
        return next(self._numbers)

    def begin(self, number: int, look: Optional[Look], own: NDArray, total: NDArray, done: engine.Done) -> None:
        """The arrays of a sum are there."""
        if look is not None:
            with control.dying_of(DivergedError):
                look(engine.view(own))
        with self._news:
            self._given[number] = own, total, done
            self._news.notify()

    def _begin_all(self) -> None:
        for number in itertools.count():
            with self._news:
                self._news.wait_for(lambda number=number: number in self._given)  # type: ignore[misc]
                own, total, done = self._given.pop(number)
            sums = engine.view(total)
            np.copyto(sums, engine.view(own))
            work = self._dist.all_reduce(torch.from_numpy(sums), group=self._sums, async_op=True)
            self._under_way.put((work, done))

    def _end_all(self) -> None:
        while True:
            work, done = self._under_way.get()
            work.wait()
            done()

    def total(self, array: np.ndarray) -> np.ndarray:
        """The sum of every worker's `array` (float32). Collective; waits, as long as the group does."""
        total = torch.tensor(np.asarray(array, np.float32))
        self._dist.all_reduce(total, group=self._totals)
        return np.asarray(total.numpy())

    def _leave(self) -> None:
        mx.nd.waitall()
        self._dist.barrier(group=self._totals)  # a worker that went would take its end of the others' sums with it
        if self._ours:
            self._dist.destroy_process_group()


def _guarded(run: Any) -> None:
    """Nobody could catch an error here. Most are another worker's, which has died."""
    try:
        run()
    except RuntimeError as error:
        control.die(f"a sum of torch.distributed failed: {error}; has another worker died, or taken other steps than "
                    "this one?", EXIT_FAILURE, consequence=True)
    except BaseException:
        control.die(traceback.format_exc(), EXIT_FAILURE)


_shared: Optional[_Group] = None


def _group(timeout_s: float) -> _Group:
    """Made on first use; the group is left in good order when the process ends."""
    global _shared
    if _shared is None:
        _shared = _Group(timeout_s)
    return _shared
