"""The store as Gluon sees it: gradients in, an algorithm's weights out.

``gluon.Trainer`` calls `set_optimizer` once, `broadcast` once per parameter, and on every step `pushpull` per
parameter. When all have been handed in, which is long before they are computed, every bucket goes through its
algorithm; the last layer's go first, since its gradients appear first:

    pushpull(key, grads, out)  →  gather → Worker.iterate → scatter     per bucket, all queued to MXNet's engine

Nothing here waits for the network in a training step. Methods that do say so.
"""
import contextlib
import json
import operator
import types
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple, Type

import numpy as np

from kvstore import buckets as layout
from kvstore.algorithms.program import Program, Worker
from kvstore.buckets import Bucket, Parameter
from kvstore.engine import updaters
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import ConfigError, ProtocolError, StoreClosedError
from kvstore.gluon.lanes import Lanes, part
from kvstore.job import agreement
from kvstore.job.control import watch
from kvstore.server.shard import array_text, text_array
from kvstore.staleness import Staleness
from kvstore.tracing import recorder as trace
from kvstore.wire.interfaces import Opening, Transport

State = Tuple[Dict[str, np.ndarray], Dict[str, Any]]  # arrays by name, and JSON


class _Known:
    """One key as the caller knows it: its arrays, one per device."""

    def __init__(self, parameter: Parameter, weights: List[NDArray]) -> None:
        self.parameter, self.weights = parameter, weights
        self.grads: List[NDArray] = []


class _Lane:
    """One bucket at run time: its devices and its worker."""

    def __init__(self, bucket: Bucket, known: Sequence[_Known]) -> None:
        self.bucket, self.known = bucket, known
        self.devices = Lanes(bucket, [array.context for array in known[0].weights])
        self.worker: Worker
        self.w_local: NDArray
        self._weights: Optional[List[List[NDArray]]] = None
        self._grads: Optional[List[List[NDArray]]] = None

    def keys(self) -> Set[Any]:
        return {one.parameter.key for one in self.known}

    def forget_views(self) -> None:
        """The caller's arrays are not those of the last iteration."""
        self._weights = self._grads = None
        self.devices.forget()

    def gather_weights(self) -> NDArray:
        """What the first device's parameters hold."""
        return self.devices.flat(self._views([one.weights for one in self.known])[0])

    def iterate(self, scale: float) -> None:
        """Gather, let the algorithm decide, scatter. Returns at once."""
        if self._grads is None:
            self._grads = self._views([one.grads for one in self.known])
        self.w_local = self.worker.iterate(self.devices.gather(self._grads, scale))
        self.show(self.w_local)

    def show(self, flat: NDArray) -> None:
        """Let the parameters hold `flat`."""
        if self._weights is None:
            self._weights = self._views([one.weights for one in self.known])
        self.devices.scatter(flat, self._weights)

    def _views(self, arrays: Sequence[List[NDArray]]) -> List[List[NDArray]]:
        """Per device, the bucket's part of each array."""
        return [[part(one[device], segment) for one, segment in zip(arrays, self.bucket.segments)]
                for device in range(len(self.devices.devices))]


class Store(mx.kvstore.KVStoreBase):
    """A store for ``gluon.Trainer(…, kvstore=store)``; made by ``kvstore.create``.

    Not thread-safe: one thread of a worker uses it. Methods said to be collective are called by all workers, in the
    same order.
    """

    def __init__(self, name: str, program: Type[Program], transport: Transport, options: Any) -> None:
        self._name, self._program_type, self._transport, self.options = name, program, transport, options
        trace.begin("worker", transport.worker_rank)
        self.iteration = 0
        self.lr_local: Optional[float] = getattr(options, "lr_local", None)
        self._optimizer: Optional[mx.optimizer.Optimizer] = None
        self._program: Program
        self._known: Dict[Any, _Known] = {}
        self._lanes: List[_Lane] = []
        self._lanes_of: Dict[Any, List[_Lane]] = {}
        self._handed: Set[Any] = set()  # keys handed in in this iteration
        self._scale = 1.0
        self._saved: Optional[State] = None  # this worker's state, until the first step takes it up
        self._saved_servers: Optional[State] = None
        self._resuming = False
        self._closed = False

    def __repr__(self) -> str:
        return f"<kvstore {self._name}: worker {self.rank} of {self.num_workers}, iteration {self.iteration}>"

    # -- what Gluon asks ---------------------------------------------------------------------------------------

    @property
    def type(self) -> str:
        return self._name

    @property
    def rank(self) -> int:
        """This worker's rank: the launcher's, the same on every run."""
        return self._transport.worker_rank

    @property
    def num_workers(self) -> int:
        return self._transport.num_workers

    @staticmethod
    def is_capable(capability: str) -> bool:
        return capability.lower() == "optimizer"

    def set_optimizer(self, optimizer: mx.optimizer.Optimizer) -> None:
        """The global optimizer. Its settings travel to the servers, if there are any, with the first step."""
        if self._lanes:
            raise ConfigError("set_optimizer after the first step: the global weights keep the optimizer they have. "
                              "Make a new store")
        self._optimizer = optimizer
        self._updater = types.SimpleNamespace(optimizer=optimizer)  # where Trainer.load_states looks for it
        self._program = self._program_type(self.options, optimizer)
        updaters.describe(optimizer)  # complains here, before anything has started, if it cannot travel

    def set_gradient_compression(self, compression_params: Dict[str, Any]) -> None:
        """There is none; ``gluon.Trainer(…, compression_params=…)`` asks for it."""
        raise ConfigError(f"store `{self.type}` does not compress gradients; leave compression_params out")

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Give `out` on every worker what `value` is on worker 0: the initial weights of `key`. Collective; waits.

        After `load_state` the arrays keep what they hold: a resumed worker has its own weights.
        """
        self._check_usable()
        if self._lanes:
            raise ConfigError(f"parameter {key} appears after the first step; initialize all parameters before it "
                              "(where shapes are deferred, one forward pass does)")
        value, out = _as_list(value)[0], _as_list(out)
        if not self._known:
            self._agree_on_model()
        self._known[key] = _Known(self._describe(key, value), out)
        if self._optimizer is None or not self._optimizer.param_dict:
            agreement.check(self._transport, f"parameter {key}", [str(key), value.shape, _dtype(value)])
        if self._resuming:
            return
        mine = value.asnumpy() if self.rank == 0 else np.zeros(value.shape)
        shared = mx.nd.array(self._transport.total(mine), dtype=value.dtype)
        for array in out:
            shared.copyto(array)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Hand in the gradients of `key`, one array per device; `out` will hold the weights of the next iteration.

        Returns at once: what reads `out` waits in MXNet's engine, for as much as the algorithm asks. The next backward
        pass may overwrite the gradients; it waits likewise.
        """
        self._check_usable()
        self.begin()
        if not self._handed:
            self._begin_iteration()
        self._hand_in(key, _as_list(value), _as_list(value if out is None else out))
        if len(self._handed) == len(self._lanes_of):
            # In the order of the buckets, whatever the caller's (Trainer's begins with the first layer): what is asked
            # for first leaves first, on all workers alike.
            for lane in self._lanes:
                lane.iterate(self._scale)
            self._handed.clear()
            self.iteration += 1

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the global optimizer's state: arrays and JSON, no pickle. Waits; any one worker may call it."""
        arrays, meta = self.server_state()
        with open(fname, "wb") as file:
            np.savez(file, **arrays, **{"meta": text_array(meta)})

    def load_optimizer_states(self, fname: str) -> None:
        """Read what `save_optimizer_states` wrote; before the first step. Worker 0's file counts, if it has one."""
        if not self._program_type.resumes_from_optimizer:
            raise ConfigError(f"optimizer states alone do not continue a `{self.type}` run, which keeps more than "
                              "them (versions and backups, unfinished intervals, sums under way); use load_state "
                              "(`odsgd train --resume`)")
        if self._lanes:
            raise ConfigError("load_optimizer_states after the first step; make a new store and trainer to go back")
        with np.load(fname, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        meta = array_text(arrays.pop("meta"))
        self._saved_servers = arrays, meta

    # -- beyond Gluon ------------------------------------------------------------------------------------------

    def allreduce(self, array: Any) -> np.ndarray:
        """The sum over workers, in single precision. Collective; waits."""
        self._check_usable()
        return self._transport.total(array.asnumpy() if isinstance(array, mx.nd.NDArray) else np.asarray(array))

    def barrier(self) -> None:
        """Wait until every worker is here with nothing under way. Collective."""
        self.wait()
        self.allreduce(np.zeros(1))

    def begin(self) -> None:
        """Lay out the buckets and give the servers their weights, after all `broadcast`s. Collective; waits.

        The first `pushpull` does it, too.
        """
        if not self._lanes:
            self._begin()

    def wait(self) -> None:
        """Wait until all that this worker has asked for has arrived."""
        message = (f"the answers of iteration {self.iteration} did not arrive within {self.options.timeout_s:g} s: "
                   "another worker or a server is late, stopped or unreachable. Check that all are alive, or raise "
                   "`timeout_s`")
        with watch.deadline(self.options.timeout_s, message):
            for lane in self._lanes:
                lane.worker.wait()
            for known in self._known.values():
                for array in known.weights:
                    array.wait_to_read()

    @contextlib.contextmanager
    def global_weights(self) -> Iterator[None]:
        """Inside, the parameters hold the global weights, the same on every worker. Collective; waits.

        Parameters without a gradient (the statistics of BatchNorm) hold their mean over devices and workers
        inside. Afterwards this worker's own are back.
        """
        self._check_usable()
        self._idle()
        self._transport.check()
        own = self._statistics()
        for key, mine in own.items():
            mean = self._mean(np.mean(mine, axis=0))
            self._set(key, [mean] * len(mine))
        for lane in self._lanes:
            lane.show(lane.worker.global_weights())
        try:
            yield
        finally:
            for lane in self._lanes:
                lane.show(lane.w_local)
            for key, mine in own.items():
                self._set(key, mine)

    def worker_state(self) -> State:
        """What this worker knows: arrays ``global/NAME``, ``local/NAME``, ``aux/DEVICE/NAME``, ``memory/i/NAME``; JSON.

        Collective; waits.
        """
        self._check_begun("worker_state")
        self._idle()
        arrays = {f"aux/{device}/{self._known[key].parameter.name}": array
                  for key, mine in self._statistics().items() for device, array in enumerate(mine)}
        for lane in self._lanes:
            flats = {"global": lane.worker.global_weights(), "local": lane.w_local}
            flats.update({f"memory/{i}": array for i, array in enumerate(lane.worker.memory())})
            for prefix, flat in flats.items():
                layout.split(lane.bucket, flat.asnumpy(), arrays, prefix + "/")
        versions = self._transport.versions()
        return arrays, {"store": self.type, "iteration": self.iteration, "progress": self._program.progress(),
                        "versions": {lane.bucket.label: versions[lane.bucket.id] for lane in self._lanes if versions}}

    def statistics(self) -> "Staleness":
        """What the servers of an asynchronous job have counted so far. Waits for them alone; any worker may ask."""
        self._check_begun("statistics")
        counted = self._transport.statistics()
        return Staleness.of([counted[lane.bucket.id] for lane in self._lanes])

    def server_state(self) -> State:
        """The global optimizer's state: arrays ``i/NAME``, and JSON. Waits; any one worker may call it."""
        self._check_begun("server_state")
        self.wait()
        arrays: Dict[str, np.ndarray] = {}
        meta: Dict[str, Any] = {}
        exported = self._transport.export_state()
        for lane in self._lanes:
            for name, flat in exported[lane.bucket.id].items():
                if name == "meta":
                    meta[lane.bucket.label] = array_text(flat)
                else:
                    layout.split(lane.bucket, flat, arrays, name + "/")
        return arrays, meta

    def load_state(self, worker: State, server: Optional[State] = None) -> None:
        """Go on from a saved state; takes effect with the first step. `server` counts on worker 0.

        The caller sets its parameters itself (``local/NAME``, ``aux/DEVICE/NAME``), since it computes on them before
        that step.
        """
        if self._lanes:
            raise ConfigError("load_state after the first step; make a new store and a new trainer to go back")
        if worker[1]["store"] != self.type:
            raise ConfigError(f"the saved state is of a `{worker[1]['store']}` store, this one is `{self.type}`")
        self._saved, self._saved_servers = worker, server
        self.iteration = worker[1]["iteration"]
        self._resuming = True

    def close(self) -> None:
        """Leave the job. Collective; waits."""
        if not self._closed:
            self.wait()
            self._closed = True
            self._transport.close()

    # -- the first step ------------------------------------------------------------------------------------------

    def _describe(self, key: Any, value: NDArray) -> Parameter:
        parameter = self._gluon_parameter(key)
        name = str(key) if parameter is None else parameter.name
        lr_mult, wd_mult = 1.0, 1.0
        if self._optimizer is not None:
            lr_mult, wd_mult = updaters.multipliers(self._optimizer, key, parameter)
        return Parameter(key, name, tuple(value.shape), _dtype(value), lr_mult, wd_mult)

    def _gluon_parameter(self, key: Any) -> Any:
        return None if self._optimizer is None else self._optimizer.param_dict.get(key)

    def _agree_on_model(self) -> None:
        """Compare with the other workers all that must be the same, while a difference can still be named."""
        model: List[Any] = [f"store {self.type} {self.options}"]
        if self._optimizer is not None:
            model.append(f"optimizer {json.dumps(updaters.describe(self._optimizer), sort_keys=True)}")
            model += [f"parameter {key} {p.name} shape {p.shape} {np.dtype(p.dtype).name} grad_req {p.grad_req} "
                      f"lr_mult {p.lr_mult} wd_mult {p.wd_mult}" for key, p in self._optimizer.param_dict.items()]
        agreement.check(self._transport, "the model and its settings", model)

    def _begin(self) -> None:
        """Lay out the buckets and give the servers their weights."""
        optimizer = self._global_optimizer()
        whole = not all(updaters.elementwise(one) for one in self._program.optimizers)
        planned = self._transport.plan(layout.by_layer(self._trainable()), self.options.bucket_nbytes, whole,
                                       self._program.waits)
        self._lanes = [_Lane(bucket, [self._known[segment.parameter.key] for segment in bucket.segments])
                       for bucket in planned]
        for lane in self._lanes:
            for key in lane.keys():
                self._lanes_of.setdefault(key, []).append(lane)
        arriving = self._transport.open(
            Opening(self.type, updaters.describe(optimizer), self._program.rule_options(self.num_workers), planned,
                    self._program.synchronous, self._program.waits, self._program.depth), self._initial_weights())
        for lane in self._lanes:
            lane.worker = self._program.worker(lane.bucket, self._transport, arriving[lane.bucket.id])
            lane.w_local = lane.worker.arriving.result()
        if self._saved is not None:
            self._resume(*self._saved)
        self._resume_servers()
        self._saved = self._saved_servers = None

    def _global_optimizer(self) -> mx.optimizer.Optimizer:
        if self._optimizer is None:
            raise ConfigError("no optimizer: call set_optimizer before the first pushpull; gluon.Trainer does, unless "
                              "it is made with update_on_kvstore=False, which these stores have no use for")
        return self._optimizer

    def _trainable(self) -> List[Parameter]:
        def has_gradient(key: Any) -> bool:
            parameter = self._gluon_parameter(key)
            return parameter is None or parameter.grad_req != "null"
        return [known.parameter for key, known in self._known.items() if has_gradient(key)]

    def _initial_weights(self) -> Any:
        """Function from a bucket to the global weights to begin with."""
        lanes = {lane.bucket.id: lane for lane in self._lanes}

        def weights(bucket: Bucket) -> NDArray:
            lane = lanes[bucket.id]
            if self._saved is None:
                return lane.gather_weights()
            return mx.nd.array(layout.join(bucket, self._saved[0], "global/"), ctx=lane.devices.context)
        return weights

    def _resume(self, arrays: Dict[str, np.ndarray], meta: Dict[str, Any]) -> None:
        self._program.resume(meta["progress"])
        memories = sorted({int(name.split("/")[1]) for name in arrays if name.startswith("memory/")})

        def saved(lane: _Lane, prefix: str) -> NDArray:
            return mx.nd.array(layout.join(lane.bucket, arrays, prefix), ctx=lane.devices.context)

        for lane in self._lanes:
            lane.w_local = saved(lane, "local/")
            lane.worker.resume(self.iteration, lane.w_local, [saved(lane, f"memory/{i}/") for i in memories])
        if meta["versions"]:
            self._transport.set_versions({lane.bucket.id: self._of(lane, meta["versions"]) for lane in self._lanes})

    def _resume_servers(self) -> None:
        """Worker 0's saved state of the global optimizer goes to where that lives, if it has one."""
        mine = self._saved_servers if self.rank == 0 else None
        state: Optional[Dict[int, Dict[str, np.ndarray]]] = None
        updates = 0
        if mine is not None:
            arrays, meta = mine
            updates = _any(meta)["count"] - self._global_optimizer().begin_num_update
            parts = sorted({name.split("/")[0] for name in arrays}, key=int)
            state = {lane.bucket.id: {i: layout.join(lane.bucket, arrays, i + "/") for i in parts}
                     for lane in self._lanes}
            for lane in self._lanes:
                state[lane.bucket.id]["meta"] = text_array(self._of(lane, meta))
        self._transport.import_state(state, [lane.bucket for lane in self._lanes])
        updates = int(self._transport.total(np.array([updates]))[0])
        if self._saved is None:  # optimizer states alone: schedules and the warm-up go on with them
            self.iteration = updates
            for lane in self._lanes:
                lane.worker.t = updates

    def _of(self, lane: _Lane, saved: Dict[str, Any]) -> Any:
        """What was saved of a bucket. In a synchronous job all buckets are alike, so they may be cut anew."""
        if self._program.synchronous:
            return saved.get(lane.bucket.label, _any(saved))
        if set(saved) != {each.bucket.label for each in self._lanes}:
            raise ConfigError(f"the saved state has {len(saved)} buckets that begin elsewhere than the "
                              f"{len(self._lanes)} of this run; an asynchronous run is resumed with the "
                              "`bucket_nbytes` it was saved with")
        return saved[lane.bucket.label]

    # -- every step --------------------------------------------------------------------------------------------

    def _begin_iteration(self) -> None:
        optimizer = self._global_optimizer()
        optimizer.num_update = optimizer.begin_num_update + self.iteration + 1
        lr = updaters.learning_rate(optimizer, optimizer.num_update)
        lr_local = lr if self.lr_local is None else self.lr_local
        self._transport.lr = self._program.global_rate(lr, lr_local)
        self._program.begin_iteration(lr, lr_local)
        self._scale = optimizer.rescale_grad

    def _hand_in(self, key: Any, grads: List[NDArray], weights: List[NDArray]) -> None:
        known = self._known.get(key)
        lanes = self._lanes_of.get(key)
        if known is None or lanes is None:
            raise ConfigError(f"pushpull of {key}, which was not broadcast or has no gradient (grad_req `null`)")
        if key in self._handed:
            raise ProtocolError(f"parameter {known.parameter.name} was handed in twice in iteration {self.iteration}, "
                                f"while {len(self._lanes_of) - len(self._handed)} others are still missing; every "
                                "parameter takes part in every step")
        self._handed.add(key)
        if not _same(known.grads, grads) or not _same(known.weights, weights):
            known.grads, known.weights = list(grads), list(weights)
            for lane in lanes:
                lane.forget_views()

    def _mean(self, array: np.ndarray) -> np.ndarray:
        """The mean over the workers that take part; one may be lost between two sums, not within one."""
        counted = self._transport.total(np.append(array.reshape(-1), 1))
        return np.asarray(counted[:-1] / counted[-1]).reshape(array.shape)

    def _idle(self) -> None:
        """Have nothing under way; in an asynchronous job no worker has, so that all see the same global weights."""
        self.wait()
        if not self._program_type.synchronous:
            self.barrier()

    def _statistics(self) -> Dict[Any, List[np.ndarray]]:
        """What parameters without gradient hold, by key and device."""
        return {key: [array.asnumpy() for array in known.weights]
                for key, known in self._known.items() if key not in self._lanes_of}

    def _set(self, key: Any, values: Sequence[np.ndarray]) -> None:
        for array, value in zip(self._known[key].weights, values):
            # Not array[:] = value: that fails where oneDNN keeps a weight in a layout of its own.
            mx.nd.array(value, dtype=array.dtype).copyto(array)

    def _check_usable(self) -> None:
        if self._closed:
            raise StoreClosedError(f"the `{self.type}` store of worker {self.rank} is closed")

    def _check_begun(self, what: str) -> None:
        self._check_usable()
        if not self._lanes:
            raise ConfigError(f"{what} before the first step: there is no state yet")


def _as_list(value: Any) -> List[NDArray]:
    return [value] if isinstance(value, mx.nd.NDArray) else value


def _same(ours: List[NDArray], theirs: List[NDArray]) -> bool:
    return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))


def _dtype(array: NDArray) -> str:
    return np.dtype(array.dtype).name


def _any(by_bucket: Dict[str, Any]) -> Any:
    return next(iter(by_bucket.values()))
