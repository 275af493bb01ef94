"""Workers without servers over torch.distributed, with gloo: under ``torchrun``, in a process group that is there
already, and under ``odsgd launch`` where there is no MPI.

On a ring a bucket's sum is an allreduce of gloo's. Where workers own parts, each worker sends each other worker the
block which that worker owns, adds the blocks that it gets in the order of an MPI ring, and later sends its updated part
to all. All workers begin a session's sums in the order of its calls, whatever the order in which gradients appear; each
session has process groups of its own for them.
"""
import collections
import contextlib
import dataclasses
import importlib.util
import itertools
import os
import queue
import socket
import threading
import traceback
from datetime import timedelta
from functools import partial
from typing import Any, Callable, Counter, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import distributed as dist

from kvstore.engine import engine
from kvstore.engine.engine import NDArray
from kvstore.errors import EXIT_FAILURE, ConfigError, ProtocolError
from kvstore.job import agreement, ending, environment
from kvstore.job.deadlines import CALLS, deadlines
from kvstore.job.pulse import connecting, pulse
from kvstore.job.report import report
from kvstore.messages.buckets import Bucket, Keys, Parameter
from kvstore.messages.finite import Check
from kvstore.messages.seam import Pending, Ring, TrafficSettings, Transport
from kvstore.transports.mpi import check_job, check_place
from kvstore.transports.ring import Cuts, Halves, Owner, part
from kvstore.transports.rounds import on_ring

ENDLESS = timedelta(days=365)
"""gloo's own timeout: each store has its own deadline."""
LATER = timedelta(minutes=1)
"""How much longer than a store torch.distributed waits, so that the store says what is late."""
LATE = f"another worker is late, stopped or unreachable, has taken fewer steps and left, or {CALLS}"
MOST_TAGS = 2 ** 30

Pair = Tuple[int, np.ndarray, np.ndarray]
"""Another worker's rank, the array to send to it, and the array to receive into; empty arrays are not sent."""


def in_foreign_group() -> bool:
    """Whether this process belongs to a group of torch.distributed, and not to a job of odsgd."""
    foreign = environment.by_torchrun() or dist.is_initialized()
    return foreign and not environment.launched() and "DMLC_ROLE" not in os.environ


def instead_of_mpi() -> bool:
    """Whether workers of this job exchange over gloo and not MPI: the script has begun a process group, or the job's
    environment describes one and mpi4py is not installed. Never with `--secure`, which protects MPI's messages alone.
    """
    begun = dist.is_initialized()
    return not environment.secure() and (begun or ("MASTER_ADDR" in os.environ
                                                   and importlib.util.find_spec("mpi4py") is None))


class GroupTransport(Transport):
    """One session on a process group."""

    def __init__(self, timeout_s: float, group: Any = None) -> None:
        self._group, self._timeout_s = _group(timeout_s, group), timeout_s
        self._lines: List[_Line] = []
        self.worker_rank, self.num_workers = self._group.worker_rank, self._group.num_workers
        self.ranks = self._group.ranks
        """The workers' ranks in torch.distributed."""
        self._group.open += 1

    def close(self) -> None:
        self._group.open -= 1
        self._group.free += self._lines

    def _line(self, what: str) -> "_Line":
        line = self._group.line(what, self._timeout_s)
        self._lines.append(line)
        return line

    def plan(self, parameters: Sequence[Parameter], traffic: TrafficSettings) -> List[Bucket]:
        if traffic.has_codec:
            instead = "make the store before `init_process_group`" if environment.launched() and not self._group.ours \
                else "start the job by `odsgd launch -s 0`"
            raise ConfigError(f"codec `{traffic.codec}` over torch.distributed, where floats are summed as they are; "
                              f"leave it out, or {instead} where mpi4py is installed")
        patient = dataclasses.replace(traffic, waits=False)  # gloo cuts messages itself, and a call of it costs more
        return on_ring(parameters, patient, self._group.keys, self.num_workers)

    def total(self, array: np.ndarray) -> np.ndarray:
        return self._group.total(array, self._timeout_s)


class GroupRing(GroupTransport, Ring):
    in_place = True

    def plan(self, parameters: Sequence[Parameter], traffic: TrafficSettings) -> List[Bucket]:
        self._sums = self._line("sums")
        return super().plan(parameters, traffic)

    def allreduce(self, bucket: Bucket, array: NDArray, out: NDArray) -> Pending:
        begin = partial(self._begin, self._sums.ask(), self.finite_check(bucket), array, out)
        engine.push_async(begin, [] if array is out else [array], [out], here=array is out)
        return Pending(out)

    def _begin(self, number: int, check: Optional[Check], array: NDArray, out: NDArray, done: engine.Done) -> None:
        sums, own = engine.view(out), _checked(array, check)
        if own is not sums:
            np.copyto(sums, own)
        pulse.nbytes += 2 * sums.nbytes * (self.num_workers - 1) // self.num_workers
        self._sums.give(number, self._timeout_s, partial(self._sums.allreduce, sums), done)


class GroupSharded(Owner, GroupTransport):
    def plan(self, parameters: Sequence[Parameter], traffic: TrafficSettings) -> List[Bucket]:
        self._collects, self._spreads = map(self._line, ("parts of sums", "updated parts"))
        ring = range(self.worker_rank + 1, self.worker_rank + self.num_workers)
        self._others = [rank % self.num_workers for rank in ring]
        return super().plan(parameters, traffic)

    def _ask(self, bucket: Bucket) -> Halves:
        at = self._cuts[bucket.id]
        return (partial(self._collect, self._collects.ask(), at, self.finite_check(bucket)),
                partial(self._spread, self._spreads.ask(), at))

    def _collect(self, number: int, at: Cuts, check: Optional[Check], array: NDArray, total: NDArray,
                 done: engine.Done) -> None:
        """Add the others' blocks in the order of `_others`, and this worker's own last: the bits of a ring."""
        ours = self._by_owner(_checked(array, check), at)
        own = ours[self.worker_rank]
        sums = engine.view(total)[:own.size]
        come = [sums, *(np.empty_like(own) for _ in self._others[1:])]

        def add() -> None:
            for part_of_sum in [*come[1:], own]:
                np.add(sums, part_of_sum, out=sums)
            done()

        if not self._others:
            sums[:] = 0
        self._give(self._collects, number, [(rank, ours[rank], into) for rank, into in zip(self._others, come)], add)

    def _spread(self, number: int, at: Cuts, out: NDArray, done: engine.Done) -> None:
        parts = self._by_owner(engine.view(out), at)
        mine = parts[self.worker_rank]
        self._give(self._spreads, number, [(rank, mine, parts[rank]) for rank in self._others], done)

    def _by_owner(self, array: np.ndarray, at: Cuts) -> List[np.ndarray]:
        return [array[part(at, rank)] for rank in range(self.num_workers)]

    def _give(self, line: "_Line", number: int, pairs: Sequence[Pair], done: engine.Done) -> None:
        pulse.nbytes += sum(out.nbytes for _, out, _ in pairs)
        line.give(number, self._timeout_s, partial(line.swap, number, pairs), done)


TRANSPORTS = {"ring": GroupRing, "sharded": GroupSharded}


class _Line:
    """A session's exchanges in a process group of their own. They begin and end in the order of `ask`."""

    def __init__(self, what: str, place: int, group: Any) -> None:
        self.what, self.place, self._group = what, place, group
        self._ranks = dist.get_process_group_ranks(group)
        self._numbers, self._next, self._beginning = itertools.count(), 0, threading.Lock()
        self._given: Dict[int, Tuple[float, Callable[[], List[Any]], engine.Done]] = {}  # not begun yet
        self._under_way: Any = queue.SimpleQueue()  # timeout, works and `done` of each
        threading.Thread(target=_guarded, args=(self._end_all,), name="kvstore-group", daemon=True).start()

    def ask(self) -> int:
        """The number of the next exchange, in the same order on every worker."""
        return next(self._numbers)

    def give(self, number: int, timeout_s: float, begin: Callable[[], List[Any]], done: engine.Done) -> None:
        """The arrays of an exchange are there; `begin`, which does not wait, returns what has to be waited for."""
        with self._beginning:
            self._given[number] = timeout_s, begin, done
            _guarded(self._begin_all)

    def allreduce(self, sums: np.ndarray) -> List[Any]:
        return [dist.all_reduce(torch.from_numpy(sums), group=self._group, async_op=True)]

    def swap(self, number: int, pairs: Sequence[Pair]) -> List[Any]:
        """Begin to receive before sending, so that no message comes unexpected."""
        tag = number % MOST_TAGS
        receives = [dist.irecv(torch.from_numpy(into), self._ranks[rank], self._group, tag)
                    for rank, _, into in pairs if into.size]
        return receives + [dist.isend(torch.from_numpy(out), self._ranks[rank], self._group, tag)
                           for rank, out, _ in pairs if out.size]

    def _begin_all(self) -> None:
        while self._next in self._given:
            timeout_s, begin, done = self._given.pop(self._next)
            self._under_way.put((timeout_s, begin(), done))
            self._next += 1

    def _end_all(self) -> None:
        with np.errstate(all="ignore"):  # gradients may diverge; their reader will say so
            while True:
                timeout_s, works, done = self._under_way.get()
                with deadlines.within(timeout_s, f"{self.what} were not over within {timeout_s:g} s: {LATE}. Check "
                                      "that all are alive, or raise `timeout_s`"):
                    for work in works:
                        work.wait()
                done()


class _Group:
    """What all stores of this process that use one process group share."""

    def __init__(self, timeout_s: float, group: Any) -> None:
        self.timeout_s = timeout_s
        self.ours = not dist.is_initialized()
        check_job()
        if environment.secure():
            raise ConfigError("--secure protects no messages of torch.distributed; leave out `group`, or --secure")
        connecting()
        with self._meeting():
            if self.ours:
                _begin_group(timedelta(seconds=timeout_s) + LATER)
            if group is not None and dist.get_rank(group) < 0:
                raise ConfigError(f"rank {dist.get_rank()} is not in the group that the store is made of; make it on "
                                  "the ranks of the group alone")
            self._ranks = None if group is None else dist.get_process_group_ranks(group)
            self._totals = self._new()
        self.world = dist.group.WORLD
        self.ranks = dist.get_process_group_ranks(self._totals)
        self.worker_rank, self.num_workers = dist.get_rank(group), dist.get_world_size(group)
        self.keys, self.open = Keys(1), 0  # sessions that have not closed
        self._made: Counter[str] = collections.Counter()  # lines, by what they carry
        self.free: List[_Line] = []  # of closed sessions
        environment.shorten_switch_interval()
        report("joined")
        ending.end_well(self._leave, waits=lambda: self.open > 0)
        if group is None and environment.launched():
            check_place("the process group's rank", self.worker_rank, self.num_workers, os.environ["DMLC_NUM_WORKER"],
                        'begin the group by `init_process_group("gloo")` alone, which takes both from the job, or '
                        "make the store before it")
        agreement.compare_versions(self)

    def _new(self) -> Any:
        """A group of the same processes, whose messages meet no others."""
        return dist.new_group(self._ranks, ENDLESS, "gloo", use_local_synchronization=bool(self._ranks))

    def _meeting(self) -> Any:
        return deadlines.within(self.timeout_s, f"not all workers made a store within {self.timeout_s:g} s; check "
                                "that all are alive and run the same script")

    def line(self, what: str, timeout_s: float) -> _Line:
        """A line that no open session has. Collective; waits."""
        there = min((line for line in self.free if line.what == what), key=lambda line: line.place, default=None)
        place = there.place if there else self._made[what]
        if self.total(np.array(place), timeout_s) != place * self.num_workers:
            raise ProtocolError("the workers have not closed the same stores; close them in the same order on all")
        if there:
            self.free.remove(there)
            return there
        self._made[what] += 1
        with self._meeting():
            return _Line(what, place, self._new())

    def total(self, array: np.ndarray, timeout_s: Optional[float] = None) -> np.ndarray:
        """The sum of every worker's `array` (float32). Collective; waits."""
        total = torch.from_numpy(np.array(array, np.float32, order="C"))  # on the CPU, whatever the default device is
        with deadlines.waiting_for("a sum over the workers", timeout_s or self.timeout_s, LATE):
            try:
                dist.all_reduce(total, group=self._totals)
            except RuntimeError as error:
                _die_of(error)
        self._last = total  # if gloo's thread let go of it last, at Python's end, the process would abort
        return np.asarray(total.numpy())

    def _leave(self) -> None:
        engine.wait_all()
        if self.open:  # the others' sums would fail if this worker went
            self._last = torch.from_numpy(np.zeros(1, np.float32))
            with deadlines.waiting_for("the end of the job", self.timeout_s, LATE), contextlib.suppress(RuntimeError):
                dist.all_reduce(self._last, group=self._totals)  # fails if another has closed its stores and gone
        if self.ours and dist.is_initialized():  # else the script has ended it
            dist.destroy_process_group()
        report("done", at=pulse.at)


def _begin_group(timeout: timedelta) -> None:
    meeting_place = _meeting_place()
    dist.init_process_group("gloo", timeout=timeout)
    del meeting_place  # the group has it, too


def _meeting_place() -> Any:
    """On rank 0, the TCPStore of the process group, which listens at MASTER_ADDR alone; PyTorch's own listens on all
    interfaces. None: this is another rank, or MASTER_ADDR is a name, or no address of this machine.
    """
    with contextlib.suppress(OSError, ValueError, KeyError):
        at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if environment.launched() and os.environ["RANK"] == "0" and socket.inet_aton(at[0]):
            return dist.TCPStore(*at, is_master=True, wait_for_workers=False, multi_tenant=True,
                                 master_listen_fd=socket.create_server(at).detach(), use_libuv=False)
    return None


def _checked(array: NDArray, check: Optional[Check]) -> np.ndarray:
    """The floats of `array`, to be sent; a check that fails ends the process."""
    floats = engine.view(array)
    ending.check_or_die(check, floats)
    return floats


def _guarded(run: Any) -> None:
    """Run; an error ends the process, since nobody could catch it here. Usually another worker has died."""
    try:
        run()
    except RuntimeError as error:
        _die_of(error)
    except BaseException as error:
        ended = isinstance(error, ValueError) and "is not registered" in str(error)
        ending.die("the script has ended the process group, which the store still used; call store.close() before "
                   "destroy_process_group()" if ended else traceback.format_exc(), EXIT_FAILURE)


def _die_of(error: RuntimeError) -> None:
    said = str(error).split(". ")[0]
    ending.die(f"an exchange of torch.distributed failed: {said}; another worker has died, or taken other steps than "
               "this one: see what it ended with", EXIT_FAILURE, consequence=True)


_shared: Dict[Any, _Group] = {}


def _group(timeout_s: float, group: Any) -> _Group:
    """What stores share, made on first use; the process leaves the group in good order at its end."""
    if group not in _shared or _shared[group].world is not dist.group.WORLD:  # the script has begun another
        _shared[group] = _Group(timeout_s, group)
    _shared[group].timeout_s = max(_shared[group].timeout_s, timeout_s)
    return _shared[group]
