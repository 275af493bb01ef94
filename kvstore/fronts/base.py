"""What the stores of all front ends have in common: a session, this worker's place in the job, global weights, the end
of the data, saving. Arrays here are NumPy's; a front end turns them into its framework's.
"""
import atexit
import contextlib
import functools
import os
import sys
import zlib
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Type

import numpy as np

from kvstore.engine.engine import NDArray
from kvstore.errors import ConfigError, ProtocolError, StoreClosedError, shown
from kvstore.fronts import sums
from kvstore.job import ending, environment
from kvstore.messages.buckets import TRAINABLE_DTYPES
from kvstore.messages.seam import Export, Saved, Transport
from kvstore.methods.common import Options, lr_local
from kvstore.methods.contract import Method
from kvstore.methods.quorum import log_in
from kvstore.options import convert
from kvstore.session import saving
from kvstore.session.session import Session
from kvstore.session.staleness import Staleness

LR_LOCAL = lr_local()


class Snapshot(NamedTuple):
    """The weights of a moment, by bucket, and what else a network holds, by name and device."""

    weights: List[NDArray]
    aux: Dict[str, List[Any]]


class FrontEnd:
    """A store of one model. A subclass adds what depends on the script's framework: what raises NotImplementedError
    here. The first call of its `begin` lays out the buckets and calls `_open`; later calls do nothing.

    Not thread-safe: one thread of a worker uses it. Methods said to be collective are called by all workers, in the
    same order.
    """

    def __init__(self, method: Type[Method], options: Options, transport: Transport) -> None:
        self.session: Session = (transport.session_class or Session)(method, options, transport)
        self._lr_local: Optional[float] = getattr(options, "lr_local", None)
        self._handled_before = id(sys.exc_info()[1])  # by an `except` around the script's main part
        self.lanes: List[Any] = []
        """Every bucket's way between the parameters and flat arrays, from the first step on."""
        self._saved: Optional[Saved] = None  # this worker's state, until the first step takes it up
        self._saved_servers: Optional[Saved] = None
        self._shown: List[Snapshot] = []  # this worker's own, then what is shown in its place; else empty
        self._told_unsent, self._closed, self._pid = False, False, os.getpid()

    def __repr__(self) -> str:
        return f"<kvstore {self.name}: worker {self.rank} of {self.num_workers}, iteration {self.iteration}>"

    # -- this worker's place -----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.session.method.name

    @property
    def options(self) -> Any:
        return self.session.method.options

    @property
    def rank(self) -> int:
        """This worker's rank: the launcher's, the same on every run."""
        return self.session.transport.worker_rank

    @property
    def leads(self) -> bool:
        """Whether this worker does what one worker does for all: worker 0, or the lowest rank that is not lost."""
        return self.session.leads

    @property
    def num_workers(self) -> int:
        return self.session.transport.num_workers

    @property
    def iteration(self) -> int:
        """Iterations done; with Gluon, including the ones that a loss scale has left out."""
        return self.session.iteration

    @property
    def lr_local(self) -> Optional[float]:
        """The rate of local steps; None: the optimizer's. It may be set at any time."""
        return self._lr_local

    @lr_local.setter
    def lr_local(self, rate: Optional[float]) -> None:
        self._lr_local = convert(LR_LOCAL, rate, "store.lr_local")

    # -- for a script ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Lay out the buckets and give the servers their weights. Collective; waits. The first step does it, too."""
        raise NotImplementedError

    def barrier(self) -> None:
        """Wait until every worker is here with nothing in flight. Collective."""
        self._check_usable()
        self._meet()
        self.wait()
        self.session.weights_holder.rest()
        self.session.transport.total(np.zeros(1))

    def wait(self) -> None:
        """Wait until all that this worker has asked for has arrived."""
        self.session.wait()

    def join(self) -> None:
        """This worker's data have ended. Take part in the other workers' iterations without a gradient, and return when
        all workers have called `join`. Collective; waits.

        With A workers left, an iteration takes the mean of A gradients. For stores made with ``uneven="join"``; there
        every other collective call joins first, and so does the end of the process.
        """
        self._check_usable()
        if self.session.method.asynchronous:
            raise ConfigError(f"join: workers of an asynchronous store, as `{self.name}`, do not wait for each other; "
                              "leave it out")
        if self.options.uneven != "join":
            raise ConfigError("join: every worker has to know that others may end before it; make the store with "
                              "uneven=\"join\"")
        self.begin()
        self._check_between("join")
        self.session.joined = True
        while self._iterate():
            self.session.wait()
        self.session.joined = False
        self.wait()

    @contextlib.contextmanager
    def global_weights(self) -> Iterator[None]:
        """Inside, the parameters hold the global weights, the same on every worker. Collective; waits.

        Untrained arrays of trainable types (the statistics of BatchNorm) hold their mean over devices and workers.
        Afterwards the parameters hold this worker's own values again.
        """
        with self._show(self._global_snapshot()):
            yield

    def _global_snapshot(self) -> Snapshot:
        """What `global_weights` shows. Collective; waits."""
        self.begin()
        self._check_between("global_weights")
        self._meet()
        self._idle()
        self.session.weights_holder.check()
        self._tell_unsent()
        own = {name: [self._numbers(one) for one in arrays] for name, arrays in self._aux().items()}
        means = sums.over_workers(
            {name: mine[0].size for name, mine in own.items() if mine[0].dtype.name in TRAINABLE_DTYPES},
            lambda name: np.mean(own[name], axis=0), self.session.mean)
        shared = {name: [mean.reshape(own[name][0].shape)] * len(own[name]) for name, mean in means}
        weights = [self.session.global_weights(lane.bucket) for lane in self.lanes]
        for flat in weights:
            flat.wait_to_read()
        self._idle()  # a worker that went on at once would push before others have fetched
        return Snapshot(weights, {**own, **shared})

    def snapshot(self) -> Snapshot:
        """The global weights of an asynchronous job as they are now, for `showing`. Not collective; waits for nothing.

        Untrained arrays (the statistics of BatchNorm) are this worker's own.
        """
        self._check_begun("snapshot")
        if not self.session.method.asynchronous:
            raise ConfigError(f"snapshot is for asynchronous stores, and `{self.name}` is synchronous; use "
                              "global_weights")
        return Snapshot([self.session.global_weights(lane.bucket).copy() for lane in self.lanes], self._aux())

    @contextlib.contextmanager
    def showing(self, snapshot: Snapshot) -> Iterator[None]:
        """Inside, this worker's parameters hold what a `snapshot` has. Not collective; waits for nobody else."""
        with self._show(snapshot):
            yield

    def _show(self, snapshot: Snapshot) -> contextlib.ExitStack:
        """Let the parameters hold a snapshot, until what is returned is closed."""
        before = self._shown[-1].weights if self._shown else self._own_weights()
        held = Snapshot(before, self._aux())
        with contextlib.ExitStack() as way_back:
            way_back.callback(self._show_again, held, self._shown)
            self._shown = [*(self._shown or [held]), snapshot]
            self._place(snapshot)
            return way_back.pop_all()

    def _show_again(self, held: Snapshot, shown: List[Snapshot]) -> None:
        self._shown = shown
        self._place(held)

    def _place(self, snapshot: Snapshot) -> None:
        self._set_aux(snapshot.aux)  # before the weights, in whose memory a buffer may lie
        for lane, flat in zip(self.lanes, snapshot.weights):
            lane.show(flat)

    def _own_weights(self) -> List[NDArray]:
        """This worker's own weights, by bucket. The session has them, too."""
        return [self.session.w_local[lane.bucket.id] for lane in self.lanes]

    @property
    def shows_own(self) -> bool:
        """Whether parameters may hold this worker's own weights now, and not the global ones."""
        return bool(self.lanes) and not self._shown and self._keeps_own

    @property
    def _keeps_own(self) -> bool:
        method, options = self.session.method, self.options
        return not method.waits or max(method.intervals(options)) > 1 or getattr(options, "mix", 0) > 0

    def statistics(self) -> Staleness:
        """What the servers of an asynchronous job have counted so far. Waits for them alone; any worker may ask."""
        self._check_begun("statistics")
        return self.session.statistics()

    def memory(self) -> Dict[str, int]:
        """Bytes of what the method keeps on this worker, by ``NAME: MEANING``; no wire buffers, no parameters."""
        self._check_begun("memory")
        return self.session.memory()

    def close(self) -> None:
        """Leave the job. Collective; waits. With ``uneven="join"``, while the script handles an error, the process
        leaves at its end instead: the error may end the script, and a worker that has failed does not join.
        """
        if self.options.uneven == "join" and id(sys.exc_info()[1]) != self._handled_before and ending.handled():
            return
        if not self._closed:
            self._meet()
            self.wait()
            self._tell_unsent()
            self.session.weights_holder.rest()
            self._closed = True
            atexit.unregister(self._join_at_exit)
            self.session.transport.close()

    # -- to save it --------------------------------------------------------------------------------------------

    def worker_state(self) -> Saved:
        """What this worker knows: `saving.worker_state`, and ``aux/DEVICE/NAME``. Collective; waits."""
        self._check_begun("worker_state")
        self._meet()
        self._idle()
        self._own_weights()
        arrays, meta = saving.worker_state(self.session)
        aux = self._shown[0].aux if self._shown else self._aux()
        arrays.update({f"aux/{device}/{name}": self._numbers(array) for name, mine in aux.items()
                       for device, array in enumerate(mine)})
        return arrays, meta

    def server_state(self) -> Saved:
        """The global optimizer's state: `saving.server_state`. Waits; any one worker may call it.

        Collective where `state_is_shared`.
        """
        self._check_begun("server_state")
        return saving.server_state(self.session, self.exporting().read())

    def rounds(self) -> Dict[str, Any]:
        """By bucket, which workers were in each round and whom it answered, where a method has rounds of some workers
        (`replay`). Waits; any one worker may call it.
        """
        self._check_begun("rounds")
        return {str(key): log_in(facts["rule"] or {}) for key, (_, facts) in self.exporting().read().items()}

    def exporting(self) -> Export:
        """The global optimizer's state as it is now, in pieces to fetch between later steps, for `saving.server_state`.
        Waits; collective where `state_is_shared`.
        """
        self._check_begun("exporting")
        if self.state_is_shared:
            self._meet()
        self.wait()
        return self.session.weights_holder.exporting()

    def go_on_after(self, export: Export) -> None:
        """Wait until no later push can be in `export`. Collective, after one or all workers have called `exporting`.

        In a synchronous job none can: its round needs the worker that asks.
        """
        if self.session.method.asynchronous:
            export.settle()
            self.session.transport.total(np.zeros(1))

    @property
    def state_is_shared(self) -> bool:
        """Whether each worker keeps a part of the global optimizer's state, so that all have to call `server_state`."""
        return self.session.weights_holder.state_is_shared

    def load_state(self, worker: Saved, server: Optional[Saved] = None) -> None:
        """Go on from a saved state; takes effect with the first step. `server` counts on worker 0.

        With Gluon the caller sets its parameters itself (``local/NAME``, ``aux/DEVICE/NAME``), since it computes on
        them before that step.
        """
        self._check_not_begun("load_state")
        saving.check_worker(worker)
        if worker[1]["store"] != self.name:
            raise ConfigError(f"the saved state is of a `{shown(str(worker[1]['store']))}` store, this one is "
                              f"`{self.name}`")
        if server is not None:
            saving.check_servers(server)
        self._saved, self._saved_servers = worker, server
        meta = worker[1]
        self.session.resume(meta["iteration"], meta["lr"], meta["lr_local"], meta.get("left_out", 0),
                            meta.get("since", 0))

    def load_shared(self, iteration: int, server: Optional[Saved] = None, left_out: int = 0, since: int = 0) -> None:
        """Go on after `iteration` with other workers than the ones that saved, from their common state.

        This is the global weights, which the caller's parameters hold on every worker, and the global optimizer's
        state; `server` counts on worker 0. State of single workers begins anew. Numbers are those of a `worker_state`.
        """
        self._check_not_begun("load_shared")
        if server is not None:
            saving.check_servers(server)
        self._saved_servers = None if server is None else saving.optimizer_alone(server)
        self.session.resume(iteration, left_out=left_out, since=since)

    # -- for front ends ----------------------------------------------------------------------------------------

    def _iterate(self) -> bool:
        """One iteration; in it this worker has no gradient if it has joined. Returns whether any worker has one."""
        raise NotImplementedError

    @property
    def under_way(self) -> bool:
        """Whether an iteration has begun and not ended."""
        raise NotImplementedError

    def _aux(self) -> Dict[str, List[Any]]:
        """Copies of the model's untrained arrays, by name, one for each device."""
        raise NotImplementedError

    def _set_aux(self, values: Mapping[str, Sequence[Any]]) -> None:
        """Let the model hold these, or NumPy's."""
        raise NotImplementedError

    @staticmethod
    def _numbers(array: Any) -> np.ndarray:
        """One of the framework's arrays as NumPy's."""
        raise NotImplementedError

    def _open(self, lanes: List[Any]) -> None:
        """Train by these lanes: begin at their weights, or at the loaded state. Collective; waits."""
        if self._saved is None:
            by_id = {lane.bucket.id: lane for lane in lanes}
            self.session.begin(lambda bucket: by_id[bucket.id].weights())
        else:
            weights = [saving.weights_of(self._saved, prefix, lanes[0].context) for prefix in ("global/", "local/")]
            self.session.begin(*weights)
            saving.load_worker(self.session, self._saved)
        servers = self._saved_servers if self.leads else None
        updates = saving.send(self.session, *((None, 0) if servers is None else
                                              saving.for_servers(self.session, servers)))
        if self._saved is None and not self.session.iteration:  # schedules go on after the loaded updates
            self.session.resume(updates)
        self._saved = self._saved_servers = None
        self.lanes = lanes
        if environment.joined():  # its parameters still hold weights of its own
            for lane in lanes:
                lane.show(self.session.w_local[lane.bucket.id])
        self._advise()
        if self.options.uneven == "join":
            ending.follow()
            atexit.register(self._join_at_exit)

    def _moment(self) -> List[str]:
        """Lines that are the same in all workers' saved states of one moment; none without a saved state."""
        if self._saved is None:
            return []
        if self.session.method.asynchronous:  # workers are not at one iteration, nor at one version
            return ["a saved state"]
        return [f"iteration {self.iteration}", *(f"{name} {zlib.crc32(array.tobytes()):08x}"
                                                 for name, array in self._saved[0].items()
                                                 if name.startswith("global/"))]

    def _advise(self) -> None:
        self._warn(self.session.advice() if self.lr_local is None else None)

    def _tell_unsent(self) -> None:
        """Warn once of the steps that the global weights lack."""
        unsent, every = self.session.unsent() if self.lanes else (0, 1)
        if unsent and not self._told_unsent:
            self._told_unsent = True
            self._warn(f"the global weights lack {unsent} step{'s' * (unsent > 1)} since the last exchange (iteration "
                       f"{self.iteration - unsent}); take them after a multiple of {every} steps")

    def _warn(self, said: Optional[str]) -> None:
        """Worker 0 prints it."""
        if said is not None and self.rank == 0:
            warn(said)

    def _sum(self, array: np.ndarray) -> np.ndarray:
        """Over the workers, in single precision. Collective; waits."""
        self._check_usable()
        self._meet()
        return self.session.transport.total(array)

    def _counts(self, *rates: float) -> Tuple[float, Sequence[float]]:
        """Weight of one gradient in the coming iteration, and its learning rates. Waits, where data may be uneven.

        The weights add up to M over all workers: 1 each, M / A if only A workers still have data, 0 if none has.
        """
        if self.options.uneven != "join":
            return 1.0, rates
        active, (floats, *theirs) = self._announce(0, *rates)
        while floats:  # the others make a sum before the iteration, to which this worker adds nothing
            self.session.transport.total(np.zeros(int(floats)))
            active, (floats, *theirs) = self._announce(0, *rates)
        if not active or self.options.reduction == "sum":
            return float(active > 0), theirs
        return self.num_workers / active, theirs

    def _announce(self, *numbers: float) -> Tuple[int, Sequence[float]]:
        """How many workers have not joined, and their `numbers`, which must be the same. Collective; waits.

        The first number: how many floats they are about to sum, 0 where an iteration begins. The others: learning
        rates. They travel as bytes, since sums of bytes are exact.
        """
        mine = np.frombuffer(np.array(numbers, float).tobytes(), np.uint8)
        active, *added = self.session.transport.total(np.array([1, *mine]) * (not self.session.joined))
        theirs = np.array(added) / max(active, 1)
        if not self.session.joined and (theirs != mine).any():
            raise ProtocolError(f"iteration {self.iteration + 1}: the workers differ in their learning rates (here, "
                                f"without multipliers, {', '.join(f'{rate:g}' for rate in numbers[1:])}), or one takes "
                                "another step; let schedules depend on the iteration alone, not on a worker's batches")
        return int(active), np.frombuffer(theirs.astype(np.uint8).tobytes()).tolist()

    def _meet(self) -> None:
        """Collective calls begin here: with ``uneven="join"`` this worker joins, until the data of all have ended."""
        error = ending.handled() if id(sys.exc_info()[1]) != self._handled_before and self.num_workers > 1 else ""
        if error:
            warn_once(f"{error}; while the script handles it, it makes a call that is for all workers (global_weights, "
                      "state_dict, close and the like), and waits for the others there")
        if self.options.uneven == "join" and self.lanes and not self._shown:
            self.join()

    def _join_at_exit(self) -> None:
        """At its end a worker joins the others; a worker that has failed does not."""
        if self._closed or os.getpid() != self._pid:  # a child of this process does not take part
            return
        failed = ending.failed()
        what = "does not join: its script ended by an error, or by an exit status other than 0" if failed \
            else "joins until the others have ended"
        print(f"{environment.who()} ends after iteration {self.iteration}, and {what}", file=sys.stderr, flush=True)
        if failed:
            return
        try:
            self.join()
        except BaseException as error:  # Python itself would print it and go on
            sys.excepthook(type(error), error, error.__traceback__)

    def _idle(self) -> None:
        """Have nothing in flight; in an asynchronous job no worker has, so that all see the same global weights."""
        self.wait()
        if self.session.method.asynchronous:
            self.barrier()

    def _check_usable(self) -> None:
        if self._closed:
            raise StoreClosedError(f"the `{self.name}` store of worker {self.rank} is closed")

    def _check_may_step(self, else_: str = "") -> None:
        self._check_usable()
        if self._shown:
            raise ProtocolError("a step inside `with store.global_weights():`, or `showing`; take it after the block"
                                + else_)

    def _check_begun(self, what: str) -> None:
        self._check_usable()
        if not self.lanes:
            raise ConfigError(f"{what} before the first step: there is no state yet")

    def _check_between(self, call: str) -> None:
        if self.under_way:
            raise ProtocolError(f"{call} in the middle of an iteration, when gradients of it have been handed in; end "
                                "it first")

    def _check_not_begun(self, what: str) -> None:
        if self.lanes:
            raise ConfigError(f"{what} after the first step; make a new store and a new trainer or optimizer for it")


def warn(said: str) -> None:
    print(f"{environment.who()}: warning: {said}", file=sys.stderr, flush=True)


warn_once = functools.lru_cache(maxsize=None)(warn)


def warn_of_own(store: str, other_ways: str = "") -> None:
    """Warn a script that saves this worker's own weights."""
    warn_once(f"what is saved are this worker's own weights, and not the global ones of `{store}`; to save those, save "
              f"inside `with store.global_weights():`, on all workers{other_ways}")
