"""The store as Gluon sees it: gradients in, an algorithm's weights out.

``gluon.Trainer`` calls `set_optimizer` once, `broadcast` once per parameter, and on every step `pushpull` per
parameter. When all have been handed in, which is long before they are computed, every bucket goes through its
algorithm; the last layer's go first, since its gradients appear first:

    pushpull(key, grads, out)  →  gather → Session.iterate → scatter     per bucket, all queued to MXNet's engine
"""
import atexit
import contextlib
import functools
import itertools
import operator
import sys
import types
import weakref
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple, Type

import numpy as np

from kvstore import saving
from kvstore.algorithms.method import Method, Options
from kvstore.buckets import Parameter, by_layer
from kvstore.engine import optimizers
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import ConfigError, ProtocolError, StoreClosedError, unknown
from kvstore.gluon import scaling
from kvstore.gluon.lanes import Keyed, Lane
from kvstore.gluon.waits import Waits
from kvstore.job import agreement, control
from kvstore.saving import Saved
from kvstore.session import Session
from kvstore.staleness import Staleness
from kvstore.tracing import wraps
from kvstore.wire.codecs import THRESHOLD
from kvstore.wire.interfaces import Export, Transport
from kvstore.wire.saved import read_npz, write_npz

begun: "weakref.WeakSet[Store]" = weakref.WeakSet()
"""The stores that train."""

SHARED_TOGETHER = 4 * 1024 * 1024
"""Numbers of initial weights in one sum over the workers."""


class Store(mx.kvstore.KVStoreBase):
    """A store for ``gluon.Trainer(…, kvstore=store)``; made by ``kvstore.create``.

    Not thread-safe: one thread of a worker uses it. Methods said to be collective are called by all workers, in the
    same order.
    """

    def __init__(self, method: Type[Method], options: Options, transport: Transport) -> None:
        self.session = Session(method, options, transport)
        self.options = self.session.method.options
        self.lr_local: Optional[float] = getattr(options, "lr_local", None)
        self._keyed: Dict[Any, Keyed] = {}
        self._lanes: List[Lane] = []
        self._joined = False  # this worker's data have ended, and not all others'
        self._lanes_of: Dict[Any, List[Lane]] = {}
        self._unshared: Dict[Any, NDArray] = {}  # initial weights, by key, until they are sent
        self._handed: Set[Any] = set()  # keys handed in in this iteration
        self._saved: Optional[Saved] = None  # this worker's state, until the first step takes it up
        self._saved_servers: Optional[Saved] = None
        self._shows_shared = False  # the parameters hold the global weights
        self._factor = 1.0  # of all gradients
        self._scaler: Any = None  # of the loss, MXNet's
        self._tell_scaler: Callable[[bool], None] = lambda overflow: None
        self._saved_scale: Optional[Dict[str, float]] = None
        self._overflowed = False  # a gradient of this iteration, so that there was none
        self.stands_for: Optional[str] = None
        """The store of MXNet's that the script has asked for, and thinks it has (`odsgd launch --store`)."""
        self._closed = False
        self._waits = Waits()

    def __repr__(self) -> str:
        return f"<kvstore {self.name}: worker {self.rank} of {self.num_workers}, iteration {self.iteration}>"

    # -- what Gluon asks ---------------------------------------------------------------------------------------

    @property
    def type(self) -> str:
        return self.stands_for or self.name

    @property
    def name(self) -> str:
        """The method's."""
        return self.session.method.name

    @property
    def rank(self) -> int:
        """This worker's rank: the launcher's, the same on every run."""
        return self.session.transport.worker_rank

    @property
    def leads(self) -> bool:
        """Whether this worker does what one alone does: worker 0, or the lowest rank that the job has not lost."""
        return self.session.leads

    @property
    def num_workers(self) -> int:
        return self.session.transport.num_workers

    @property
    def iteration(self) -> int:
        """Iterations done, with those that a loss scale has left out."""
        return self.session.iteration

    @staticmethod
    def is_capable(capability: str) -> bool:
        return capability.lower() == "optimizer"

    def set_optimizer(self, optimizer: mx.optimizer.Optimizer) -> None:
        """The global optimizer. Its settings travel to the servers, if there are any, with the first step."""
        if self._lanes:
            raise ConfigError("set_optimizer after the first step: the global weights keep the optimizer they have. "
                              "Make a new store")
        self._updater = types.SimpleNamespace(optimizer=optimizer)  # where Trainer.load_states looks for it
        self.session.use(optimizer)

    def set_gradient_compression(self, compression_params: Dict[str, Any]) -> None:
        """The codec by MXNet's names; ``gluon.Trainer(…, compression_params={"type": "2bit", "threshold": 0.5})``."""
        params = dict(compression_params)
        try:
            codecs = {"codec": params.pop("type"), "codec_threshold": params.pop("threshold", THRESHOLD)}
        except KeyError:
            raise ConfigError("compression_params has no `type`; expected e.g. {'type': '2bit', 'threshold': 0.5}"
                              ) from None
        if params:
            raise unknown("entry of compression_params", next(iter(params)), ["type", "threshold"])
        given = {name: value for name, value in codecs.items() if value != THRESHOLD}  # not all have a threshold
        self._change(given)

    def _change(self, options: Dict[str, Any]) -> None:
        self.session.change(options)
        self.options = self.session.method.options

    def _multiply_back(self, mean: bool) -> None:
        """The script divides gradients by the number of workers, for servers that add up: make them again what a method
        is written for, each worker's own mean. `mean`: of which the global step then takes the mean.
        """
        self._factor = float(self.num_workers)
        if mean and self.session.method.reduces:
            self._change({"reduction": "mean"})

    def scale_by(self, scaler: Any) -> None:
        """Leave out iterations in which a gradient of some worker overflows, and tell this scaler of MXNet's.

        ``amp.init_trainer`` does it. In a synchronous job all workers do so, and agree before they send. From then on
        an iteration waits for its gradients.
        """
        if self._scaler is not None:
            raise ConfigError("this trainer has a loss scale already; call amp.init_trainer once")
        self._scaler = scaler
        self._tell_scaler = scaling.take_over(scaler, lambda: self._overflowed)
        if self._saved_scale is not None:
            scaling.put_back(scaler, self._saved_scale)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Give `out` on every worker what `value` is on worker 0: the initial weights of `key`. Collective; waits.

        The parameters of a ``gluon.Trainer`` travel together, with the last of them, or with the first step. Other
        arrays hold worker 0's values when the call returns; where there are many, give lists of keys, values and outs.

        After `load_state` the arrays keep what they hold: a resumed worker has its own weights.
        """
        self._check_usable()
        if self._lanes:
            raise ConfigError(f"parameter {key} appears after the first step; initialize all parameters before it "
                              "(where shapes are deferred, one forward pass does)")
        if not self._keyed:
            self._agree_on_model()
        for one, its, outs in _each(key, value, out):
            its, outs = _as_list(its)[0], _as_list(outs)
            self._keyed[one] = Keyed(self._describe(one, its), outs)
            self._unshared[one] = its
        if len(self._keyed) >= len(self._named()):  # a trainer's all; there are none without one
            self._share()

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Hand in the gradients of `key`, one array per device; `out` will hold the weights of the next iteration.

        Several keys at a time are lists of keys, gradients and outs.

        Returns at once: what reads `out` waits in MXNet's engine, for as much as the algorithm asks. The next backward
        pass may overwrite the gradients; it waits likewise.
        """
        self._check_usable()
        self.begin()
        for one, grads, outs in _each(key, value, value if out is None else out):
            self._hand_in(one, _as_list(grads), _as_list(outs))
            if len(self._handed) == len(self._lanes_of):
                self._iterate()
                self._handed.clear()

    # The same in MXNet's older calls, with weights that the store keeps in arrays of its own.

    def init(self, key: Any, value: Any) -> None:
        """The initial weights of `key`: worker 0's. Collective; waits."""
        values = [_as_list(its)[0].tostype("default") for _, its in _each(key, value)]
        keys = [one for one, _ in _each(key, value)]
        self.broadcast(keys, values, out=[its.copy() for its in values])

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Hand in the gradients of `key`, one array per device. With those of all keys an iteration begins."""
        for one, grads in _each(key, value):
            known = self._known(one)
            grads = _as_list(grads)
            if [array.context for array in known.weights] != [array.context for array in grads] and not self._lanes:
                known.weights = [known.weights[0].copyto(array.context) for array in grads]
            self.pushpull(one, grads, out=known.weights)

    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """`out`, one array or one per device, will hold the weights of `key` after the last whole iteration."""
        self._check_usable()
        self._share()
        for one, outs in _each(key, out):
            weight = self._known(one).weights[0]
            for array in _as_list(outs):
                if array is not weight and not (ignore_sparse and array.stype != "default"):
                    weight.copyto(array)

    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        """The rows `row_ids` of `key` after the last whole iteration, in `out`, row-sparse arrays."""
        if row_ids is None:
            raise ConfigError(f"row_sparse_pull of {key} without row_ids; say which rows, or use pull")
        self._check_usable()
        self._share()
        for one, outs, rows in _each(key, out, row_ids):
            weight, arrays = self._known(one).weights[0], _as_list(outs)
            ids = _as_list(rows)
            for array, wanted in zip(arrays, ids if len(ids) == len(arrays) else ids * len(arrays)):
                unique = mx.nd.array(np.unique(wanted.asnumpy()), dtype=np.int64)
                mx.nd.sparse.row_sparse_array((weight.take(unique), unique), weight.shape,
                                              dtype=weight.dtype).copyto(array)

    def _barrier(self) -> None:
        """MXNet's name of `barrier`."""
        self.barrier()

    @property
    def num_dead_node(self) -> int:
        """How many workers the launcher has given up (``--on-worker-loss continue``); else a job ends as a whole."""
        return len(control.lost_workers())

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the global optimizer's state: arrays and JSON, no pickle. Waits; any one worker may call it.

        Where `state_is_shared`, all call it, and each writes its file.
        """
        arrays, meta = self.server_state()
        with open(fname, "wb") as file:
            write_npz(file, arrays, meta)

    def load_optimizer_states(self, fname: str) -> None:
        """Read what `save_optimizer_states` wrote; before the first step. Worker 0's file counts, if it has one."""
        if not self.session.method.resumes_from_optimizer:
            raise ConfigError(f"optimizer states alone do not continue a `{self.name}` run, which keeps more than "
                              "them (versions and backups, unfinished intervals, sums in flight); use load_state "
                              "(`odsgd train --resume`)")
        if getattr(self.options, "codec_weights", "none") != "none":
            raise ConfigError("optimizer states alone do not continue a run with codec_weights, whose servers keep the "
                              "weights that travelled, too; use load_state (`odsgd train --resume`)")
        if self._lanes:
            raise ConfigError("load_optimizer_states after the first step; make a new store and trainer to go back")
        self._saved_servers = read_npz(fname)
        saving.check_form(self._saved_servers, "arrays")

    # -- beyond Gluon ------------------------------------------------------------------------------------------

    def allreduce(self, array: Any) -> np.ndarray:
        """The sum over workers, in single precision. Collective; waits."""
        self._check_usable()
        self._meet()
        return self.session.transport.total(array.asnumpy() if isinstance(array, mx.nd.NDArray) else np.asarray(array))

    def barrier(self) -> None:
        """Wait until every worker is here with nothing in flight. Collective."""
        self._check_usable()
        self._meet()
        self.wait()
        self.session.transport.total(np.zeros(1))

    def join(self) -> None:
        """This worker's data have ended. Take part in the iterations of those whose data have not, without a gradient,
        and return when all have come to a `join`. Collective; waits.

        With A workers left, an iteration takes the mean of A gradients. For stores made with ``uneven="join"``; there
        every other collective call joins first, and so does the end of the process.
        """
        self._check_usable()
        if self.options.uneven != "join":
            raise ConfigError("join: every worker has to know that others may end before it; make the store with "
                              "uneven=\"join\"")
        self.begin()
        if self._handed:
            raise ProtocolError(f"join in the middle of iteration {self.iteration}, while "
                                f"{len(self._lanes_of) - len(self._handed)} parameters are still missing")
        self._joined = True
        while self._iterate():
            self.session.wait()
        self._joined = False

    def _join_at_exit(self) -> None:
        """A worker that ends does not leave the others alone; one that has failed does."""
        if not self._closed and not hasattr(sys, "last_type"):
            print(f"{control.who()} ends after iteration {self.iteration}, and joins until the others have ended",
                  file=sys.stderr, flush=True)
            self.join()

    def _meet(self) -> None:
        """All workers come here: those whose data have ended go on without, until all have."""
        if self.options.uneven == "join" and self._lanes and not self._shows_shared:
            self.join()

    def begin(self) -> None:
        """Lay out the buckets and give the servers their weights, after all `broadcast`s. Collective; waits.

        The first `pushpull` does it, too.
        """
        if self._lanes:
            return
        self._global_optimizer()
        self._share()
        self._lanes = [Lane(bucket, [self._keyed[segment.parameter.key] for segment in bucket.segments])
                       for bucket in self.session.plan(by_layer(self._trainable()))]
        for lane in self._lanes:
            if self.session.on is not None:
                wraps.lane(self.session.on, lane)
            for key in lane.keys():
                self._lanes_of.setdefault(key, []).append(lane)
        if self._saved is None:
            lanes = {lane.bucket.id: lane for lane in self._lanes}
            self.session.begin(lambda bucket: lanes[bucket.id].weights())
        else:
            weights = [saving.weights_of(self._saved, prefix, self._lanes[0].context)
                       for prefix in ("global/", "local/")]
            self.session.begin(*weights)
            saving.load_worker(self.session, self._saved)
        updates = saving.load_servers(self.session, self._saved_servers)
        if not self.session.step.t:  # optimizer states alone: schedules and the warm-up go on with them
            self.session.resume(updates)
        self._saved = self._saved_servers = None
        begun.add(self)
        if self.options.uneven == "join":
            atexit.register(self._join_at_exit)
        control.pulse.more["waited_s"] = self._waits.told

    def wait(self) -> None:
        """Wait until all that this worker has asked for has arrived."""
        self.session.wait()
        with self.session.deadline():
            for keyed in self._keyed.values():
                for array in keyed.weights:
                    array.wait_to_read()

    @contextlib.contextmanager
    def global_weights(self) -> Iterator[None]:
        """Inside, the parameters hold the global weights, the same on every worker. Collective; waits.

        Parameters without a gradient (the statistics of BatchNorm) hold their mean over devices and workers
        inside. Afterwards this worker's own are back.
        """
        self._check_usable()
        self._meet()
        self._idle()
        self.session.wire.check()
        own = self._statistics()
        for key, mine in own.items():
            mean = self.session.mean(np.mean(mine, axis=0))
            self._set(key, [mean] * len(mine))
        try:
            with self.showing([self.session.global_weights(lane.bucket) for lane in self._lanes]):
                yield
        finally:
            for key, mine in own.items():
                self._set(key, mine)

    def snapshot(self) -> List[NDArray]:
        """The global weights of an asynchronous job as they are now, for `showing`. Not collective; waits for nothing.

        Parameters without a gradient are not among them.
        """
        self._check_begun("snapshot")
        if not self.session.method.asynchronous:
            raise ConfigError(f"snapshot of a `{self.name}` store, whose workers have the global weights together; "
                              "use global_weights")
        return [self.session.global_weights(lane.bucket).copy() for lane in self._lanes]

    @contextlib.contextmanager
    def showing(self, snapshot: Sequence[NDArray]) -> Iterator[None]:
        """Inside, this worker's parameters hold the weights of a `snapshot`. Not collective; waits for nothing."""
        for lane, flat in zip(self._lanes, snapshot):
            lane.show(flat)
        self._shows_shared = True
        try:
            yield
        finally:
            self._shows_shared = False
            for lane in self._lanes:
                lane.show(self.session.w_local[lane.bucket.id])

    def worker_state(self) -> Saved:
        """What this worker knows: `saving.worker_state`, and ``aux/DEVICE/NAME``. Collective; waits."""
        self._check_begun("worker_state")
        self._meet()
        self._idle()
        arrays, meta = saving.worker_state(self.session)
        arrays.update({f"aux/{device}/{self._keyed[key].parameter.name}": array
                       for key, mine in self._statistics().items() for device, array in enumerate(mine)})
        meta["loss_scale"] = None if self._scaler is None else scaling.saved(self._scaler)
        return arrays, meta

    def statistics(self) -> Staleness:
        """What the servers of an asynchronous job have counted so far. Waits for them alone; any worker may ask."""
        self._check_begun("statistics")
        return self.session.statistics()

    @property
    def waited_s(self) -> float:
        """Seconds that this worker's devices have waited for weights so far, by a sample of the iterations."""
        return self._waits.seconds

    def memory(self) -> Dict[str, int]:
        """Bytes of what the method keeps on this worker, by ``NAME: MEANING``; no wire buffers, nothing of Gluon's."""
        self._check_begun("memory")
        return self.session.memory()

    def server_state(self) -> Saved:
        """The global optimizer's state: `saving.server_state`. Waits; any one worker may call it.

        Collective where `state_is_shared`.
        """
        self._check_begun("server_state")
        self.wait()
        return saving.server_state(self.session, self.session.wire.export_state())

    def exporting(self) -> Export:
        """The same state, as it is now, in pieces to be fetched between the steps that follow (`saving.server_state`
        makes of it what `server_state` returns). Waits; collective where `state_is_shared`.
        """
        self._check_begun("exporting")
        self.wait()
        return self.session.wire.exporting()

    @property
    def state_is_shared(self) -> bool:
        """Whether each worker keeps a part of the global optimizer's state, so that all have to call `server_state`."""
        return self.session.wire.state_is_shared

    def load_state(self, worker: Saved, server: Optional[Saved] = None) -> None:
        """Go on from a saved state; takes effect with the first step. `server` counts on worker 0.

        The caller sets its parameters itself (``local/NAME``, ``aux/DEVICE/NAME``), since it computes on them before
        that step.
        """
        if self._lanes:
            raise ConfigError("load_state after the first step; make a new store and a new trainer to go back")
        if worker[1]["store"] != self.name:
            raise ConfigError(f"the saved state is of a `{worker[1]['store']}` store, this one is `{self.name}`")
        self._saved, self._saved_servers = worker, server
        saving.check_form(worker, "lr_local")
        meta = worker[1]
        self.session.resume(meta["iteration"], meta["lr"], meta["lr_local"], meta.get("left_out", 0))
        self._saved_scale = meta.get("loss_scale")
        if self._scaler is not None and self._saved_scale is not None:
            scaling.put_back(self._scaler, self._saved_scale)

    def load_shared(self, iteration: int, server: Optional[Saved] = None) -> None:
        """Go on after `iteration` with other workers than those that saved, from what all of them have in common.

        That are the global weights, which the caller's parameters hold on every worker, and the global optimizer's
        state; `server` counts on worker 0. What workers, and servers for each of them, keep begins anew.
        """
        if self._lanes:
            raise ConfigError("load_shared after the first step; make a new store and a new trainer to go back")
        self._saved_servers = None if server is None else saving.optimizer_alone(server)
        self.session.resume(iteration)

    def holds_own(self, names: Iterable[str]) -> bool:
        """Whether parameters with these names may hold this worker's own weights now, and not the global ones."""
        mine = {known.parameter.name for known in self._keyed.values()}
        return not (self._closed or self._shows_shared or self.session.method.waits) and not mine.isdisjoint(names)

    def close(self) -> None:
        """Leave the job. Collective; waits."""
        if not self._closed:
            self._meet()
            self.wait()
            self._closed = True
            atexit.unregister(self._join_at_exit)
            self.session.transport.close()

    # -- the first step ------------------------------------------------------------------------------------------

    def _describe(self, key: Any, value: NDArray) -> Parameter:
        parameter = self._gluon_parameter(key)
        name = str(key) if parameter is None else parameter.name
        lr_mult, wd_mult = 1.0, 1.0
        if self.session.optimizer is not None:
            lr_mult, wd_mult = optimizers.multipliers(self.session.optimizer, key, parameter)
        return Parameter(key, name, tuple(value.shape), _dtype(value), lr_mult, wd_mult)

    def _named(self) -> Dict[Any, Any]:
        """A trainer's parameters."""
        named: Dict[Any, Any] = {} if self.session.optimizer is None else self.session.optimizer.param_dict
        return named

    def _gluon_parameter(self, key: Any) -> Any:
        return self._named().get(key)

    def _share(self) -> None:
        """Send what `broadcast` was given, in as few messages as can be. Collective; waits."""
        arriving, self._unshared = self._unshared, {}
        if not arriving:
            return
        what = f"parameter {next(iter(arriving))}" if len(arriving) == 1 else "their parameters"
        parameters = {key: self._keyed[key].parameter for key in arriving}
        agreement.check(self.session.transport, what, [f"parameter {key} shape {one.shape} {one.dtype}"
                                                       for key, one in parameters.items()])
        if self._saved is not None:
            return
        together: Dict[Any, NDArray] = {}
        floats = 0
        for key, value in arriving.items():
            if together and floats + parameters[key].size > SHARED_TOGETHER:
                self._share_together(together)
                together, floats = {}, 0
            together[key] = value
            floats += parameters[key].size
        self._share_together(together)

    def _share_together(self, values: Dict[Any, NDArray]) -> None:
        """One sum, to which only worker 0 adds anything."""
        keyed = [self._keyed[key] for key in values]
        ends = list(itertools.accumulate(one.parameter.size for one in keyed))
        mine = np.zeros(ends[-1], np.float32)
        for value, start, end in zip(values.values() if self.rank == 0 else (), [0, *ends], ends):
            mine[start:end] = value.asnumpy().reshape(-1)
        shared = mx.nd.array(self.session.transport.total(mine))
        for one, start, end in zip(keyed, [0, *ends], ends):
            part = shared[start:end].reshape(one.parameter.shape)
            for array in one.weights:
                part.copyto(array)

    def _agree_on_model(self) -> None:
        """Compare with the other workers all that must be the same, while a difference can still be named."""
        parameters = [f"parameter {key} {p.name} shape {p.shape} {np.dtype(p.dtype).name} grad_req {p.grad_req} "
                      f"lr_mult {p.lr_mult} wd_mult {p.wd_mult}" for key, p in self._named().items()]
        agreement.check(self.session.transport, "the model and its settings", [*self.session.model(), *parameters])

    def _global_optimizer(self) -> mx.optimizer.Optimizer:
        if self.session.optimizer is None:
            raise ConfigError("no optimizer: call set_optimizer before the first pushpull; gluon.Trainer does, unless "
                              "it is made with update_on_kvstore=False, which these stores have no use for")
        return self.session.optimizer

    def _trainable(self) -> List[Parameter]:
        def has_gradient(key: Any) -> bool:
            parameter = self._gluon_parameter(key)
            return parameter is None or parameter.grad_req != "null"
        return [known.parameter for key, known in self._keyed.items() if has_gradient(key)]

    # -- every step --------------------------------------------------------------------------------------------

    def _iterate(self) -> bool:
        """All gradients have been handed in, or this worker has none. Returns whether any worker has."""
        active, overflows = self._agreed()
        if not active:
            return False
        self._overflowed = overflows > 0
        self._tell_scaler(self._overflowed)
        if self._overflowed:
            self.session.leave_out()
            scaling.check(self._scaler, self.iteration, self.options.on_nan)
            return True
        counts = 1.0 if self.options.reduction == "sum" else self.num_workers / active
        self.session.multiplied(counts)
        optimizer = self._global_optimizer()
        optimizer.num_update = optimizer.begin_num_update + self.session.step.t + 1
        step = self.session.next_step(optimizers.learning_rate(optimizer, optimizer.num_update), self.lr_local)
        # In the order of the buckets, whatever the caller's (Trainer's begins with the first layer): what is asked for
        # first leaves first, on all workers alike.
        with self._waits.around(self._keyed[key] for key in self._lanes_of):
            for lane in self._lanes:
                room = self.session.room(lane.bucket)
                grad = lane.nothing(room) if self._joined else \
                    lane.take(counts * self._factor * optimizer.rescale_grad, room)
                lane.show(self.session.iterate(lane.bucket, grad, step))
        return True

    def _agreed(self) -> Tuple[float, float]:
        """How many workers have a gradient in this iteration, and how many of them one that is infinite or not a
        number, where somebody looks. Waits, where data may be uneven, and with a loss scale.

        With A workers of M a gradient counts M / A, so that all workers' are M together.
        """
        uneven = self.options.uneven == "join"
        if not uneven and self._scaler is None:
            return self.num_workers, 0.0
        overflow = self._scaler is not None and not self._joined and self._overflows()
        if self.session.method.asynchronous:
            return self.num_workers, float(overflow)
        active, overflows = self.session.transport.total(np.array([not self._joined, overflow], np.float32))
        return float(active), float(overflows)

    def _overflows(self) -> bool:
        with self.session.deadline():  # gradients wait for weights, and these for others
            return scaling.overflowed(grad for key in self._lanes_of for grad in self._keyed[key].grads)

    def _known(self, key: Any) -> Keyed:
        if key not in self._keyed:
            raise ConfigError(f"key {key} was not broadcast, nor initialized by `init`")
        return self._keyed[key]

    def _hand_in(self, key: Any, grads: List[NDArray], weights: List[NDArray]) -> None:
        known, lanes = self._known(key), self._lanes_of.get(key)
        if lanes is None:
            raise ConfigError(f"pushpull of {key}, which has no gradient (grad_req `null`)")
        if key in self._handed:
            raise ProtocolError(f"parameter {known.parameter.name} was handed in twice in iteration {self.iteration}, "
                                f"while {len(self._lanes_of) - len(self._handed)} others are still missing; every "
                                "parameter takes part in every step")
        self._handed.add(key)
        if grads[0].stype != "default":
            grads = known.dense(grads)
        if not _same(known.grads, grads) or not _same(known.weights, weights):
            known.grads, known.weights = list(grads), list(weights)
            for lane in lanes:
                lane.forget()

    def _idle(self) -> None:
        """Have nothing in flight; in an asynchronous job no worker has, so that all see the same global weights."""
        self.wait()
        if self.session.method.asynchronous:
            self.barrier()

    def _statistics(self) -> Dict[Any, List[np.ndarray]]:
        """What parameters without gradient hold, by key and device."""
        return {key: [array.asnumpy() for array in known.weights]
                for key, known in self._keyed.items() if key not in self._lanes_of}

    def _set(self, key: Any, values: Sequence[np.ndarray]) -> None:
        for array, value in zip(self._keyed[key].weights, values):
            # Not array[:] = value: that fails where oneDNN keeps a weight in a layout of its own.
            mx.nd.array(value, dtype=array.dtype).copyto(array)

    def _check_usable(self) -> None:
        if self._closed:
            raise StoreClosedError(f"the `{self.name}` store of worker {self.rank} is closed")

    def _check_begun(self, what: str) -> None:
        self._check_usable()
        if not self._lanes:
            raise ConfigError(f"{what} before the first step: there is no state yet")


def _each(key: Any, *values: Any) -> Iterator[Tuple[Any, ...]]:
    """One key with its values, or lists of them, one by one."""
    if not isinstance(key, (list, tuple)):
        yield (key, *values)
        return
    if any(not isinstance(one, (list, tuple)) or len(one) != len(key) for one in values):
        raise ConfigError(f"{len(key)} keys, and not as many values: give a list of each, of one length")
    yield from zip(key, *values)


def _as_list(value: Any) -> List[NDArray]:
    return [value] if isinstance(value, mx.nd.NDArray) else value


def _same(ours: List[NDArray], theirs: List[NDArray]) -> bool:
    return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))


def _dtype(array: NDArray) -> str:
    return _dtype_name(array.dtype)


@functools.lru_cache(maxsize=None)
def _dtype_name(dtype: Any) -> str:
    return np.dtype(dtype).name


scaling.teach(mx.gluon.Trainer, Store)
