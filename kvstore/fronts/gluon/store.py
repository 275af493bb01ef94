"""The store as Gluon sees it: gradients in, an algorithm's weights out.

``gluon.Trainer`` calls `set_optimizer` once, `broadcast` once per parameter, and on every step `pushpull` per
parameter. When all have been handed in, which is long before they are computed, every bucket goes through its
algorithm; the last layer's go first, since its gradients appear first:

    pushpull(key, grads, out)  →  gather → Session.iterate → show        per bucket, all queued to MXNet's engine
"""
import functools
import json
import types
import weakref
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, Type

import numpy as np

from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import ConfigError, ProtocolError, unknown
from kvstore.fronts import sums
from kvstore.fronts.base import FrontEnd
from kvstore.fronts.gluon import batch, scaling, waits
from kvstore.fronts.gluon.lanes import Keyed, Lane, put
from kvstore.fronts.gluon.waits import Waits
from kvstore.job import agreement
from kvstore.job.pulse import pulse
from kvstore.messages.buckets import TRAINABLE_DTYPES, Parameter, by_layer
from kvstore.messages.seam import Saved, Transport
from kvstore.methods.common import Options
from kvstore.methods.contract import Method, Step
from kvstore.optimizers import compensated  # noqa: F401  registers its own
from kvstore.optimizers import described as optimizers
from kvstore.tracing import wraps

made: "weakref.WeakSet[Store]" = weakref.WeakSet()
"""The stores of this process."""

_trained: "weakref.WeakValueDictionary[int, Store]" = weakref.WeakValueDictionary()
"""The store that trained an array last, by the array's id, which a newer array may have by now."""


class Store(FrontEnd, mx.kvstore.KVStoreBase):
    """A store for ``gluon.Trainer(…, kvstore=store)``; made by ``kvstore.create``."""

    def __init__(self, method: Type[Method], options: Options, transport: Transport) -> None:
        super().__init__(method, options, transport)
        self._keyed: Dict[Any, Keyed] = {}
        self._lanes_of: Dict[Any, List[Lane]] = {}
        self._unshared: Dict[Any, NDArray] = {}  # initial weights, by key, until they are sent
        self._fixed: Set[Any] = set()  # keys that a Module gives no gradients, though no trainer says so
        self._handed: Set[Any] = set()  # keys handed in in this iteration
        self._factor = 1.0  # by which all gradients are multiplied
        self._scaler: Any = None  # MXNet's scaler of the loss
        self._saved_scale: Optional[Dict[str, float]] = None
        self._waits = Waits()
        self._settings: Dict[str, Any] = {}  # of the optimizer and of each parameter, in the first step
        self._has_trainer = False  # a trainer hands in its parameters with its first step
        self._named: Dict[Any, Any] = {}  # these parameters, by key
        self._passed_on: Set[str] = set()  # names of parameters that a later store trains
        made.add(self)

    # -- what Gluon asks ---------------------------------------------------------------------------------------

    @staticmethod
    def is_capable(capability: str) -> bool:
        return capability.lower() == "optimizer"

    def set_optimizer(self, optimizer: mx.optimizer.Optimizer) -> None:
        """The global optimizer. Its settings travel to the servers, if there are any, with the first step.

        After that step it takes the place of the one in use, as a new one: every worker calls, between the same two
        iterations, and waits until all have. What was sent before has been applied by the old one.
        """
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            raise ConfigError(f"set_optimizer of a {type(optimizer).__name__}; expected an optimizer of MXNet's, as "
                              "mx.optimizer.SGD(learning_rate=0.1)")
        if self.lanes:
            self._replace(optimizer)
        else:
            if self._keyed and optimizer.param_dict and self._named not in ({}, optimizer.param_dict):
                raise ConfigError("set_optimizer for other parameters: this store has those of another trainer; make a "
                                  "store for each")
            self.session.use(optimizer)
            self._named = optimizer.param_dict or self._named
        self._settings = {}
        self._updater = types.SimpleNamespace(optimizer=optimizer)  # where Trainer.load_states looks for it

    def set_gradient_compression(self, compression_params: Dict[str, Any]) -> None:
        """The codec by MXNet's names; ``gluon.Trainer(…, compression_params={"type": "2bit", "threshold": 0.5})``.

        Before the first step.
        """
        self._check_not_begun("set_gradient_compression")
        ours = {"type": "codec", "threshold": "codec_threshold"}
        if "type" not in compression_params:
            raise ConfigError("compression_params has no `type`; expected e.g. {'type': '2bit', 'threshold': 0.5}")
        for name in compression_params:
            if name not in ours:
                raise unknown("entry of compression_params", name, ours)
        self.session.change({ours[name]: value for name, value in compression_params.items()})

    def scale_by(self, scaler: Any) -> None:
        """Leave out iterations in which a gradient of some worker overflows, and tell this scaler of MXNet's.

        ``amp.init_trainer`` does it. In a synchronous job all workers do so, and agree before they send. From then on
        an iteration waits for its gradients.
        """
        if self._scaler is not None:
            raise ConfigError("this trainer has a loss scale already; call amp.init_trainer once")
        if self.options.uneven == "join":
            raise ConfigError("a loss scale and uneven=\"join\" do not go together: a worker that has joined would not "
                              "hear of overflows; leave one of them out")
        self._tell_scaler = scaling.take_over(scaler)
        self._scaler = scaler
        scaling.restore(scaler, self._saved_scale)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Give `out` on every worker what `value` is on worker 0: the initial weights of `key`. Collective; waits.

        The parameters of a ``gluon.Trainer`` travel together, with the last of them, or with the first step. Other
        arrays hold worker 0's values when the call returns; where there are many, give lists of keys, values and outs.

        After `load_state` the arrays keep what they hold: a resumed worker has its own weights.
        """
        self._check_usable()
        if self.lanes:
            raise ConfigError(f"parameter {key} appears after the first step; initialize all parameters before it "
                              "(where shapes are deferred, one forward pass does)")
        if not self._keyed:
            self._agree_on_model()
        for one, its, outs in each(key, value, out):
            its, outs = as_list(its)[0], as_list(outs)
            if isinstance(its, mx.np.ndarray):
                raise ConfigError(f"parameter {one} is one of MXNet's NumPy arrays (npx.set_np()), which these stores "
                                  "do not train; leave set_np out")
            self._keyed[one] = Keyed(self._describe(one, its), outs)
            self._unshared[one] = its
        if len(self._keyed) >= len(self._named):  # a trainer's all; there are none without one
            self._share()

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Hand in the gradients of `key`, one array per device; `out` will hold the weights of the next iteration.

        Several keys at a time are lists of keys, gradients and outs.

        Returns at once: what reads `out` waits in MXNet's engine, for as much as the algorithm asks. The next backward
        pass may overwrite the gradients; it waits likewise.
        """
        self._check_may_step()
        self.begin()
        for one, grads, outs in each(key, value, value if out is None else out):
            self._hand_in(one, as_list(grads), as_list(outs))
            if len(self._handed) == len(self._lanes_of):
                self._handed.clear()
                self._iterate()

    # -- beyond Gluon ------------------------------------------------------------------------------------------

    def allreduce(self, array: Any) -> np.ndarray:
        """The sum over workers, in single precision. Collective; waits."""
        return self._sum(array.asnumpy() if isinstance(array, mx.nd.NDArray) else np.asarray(array))

    def begin(self) -> None:
        self._check_usable()
        if self.lanes:
            return
        optimizer = self._global_optimizer()
        self.session.use(optimizer)  # with the settings that it has by now
        rows = batch.counted_rows()
        if self.session.method.reduces and self.options.reduction == "mean":
            self._warn(batch.advice(rows, self.session.method, self._share_of_an_example(optimizer)))
        self._share()
        self._take_over()
        for key, known in self._keyed.items():  # an optimizer may have come after its key
            known.parameter = self._describe(key, known.parameter)
        lanes = [Lane(bucket, [self._keyed[segment.parameter.key] for segment in bucket.segments])
                 for bucket in self.session.plan(by_layer(self._trainable()))]
        for lane in lanes:
            if self.session.recorder is not None:
                wraps.lane(self.session.recorder, lane)
            for key in {one.parameter.key for one in lane.keyed}:
                self._lanes_of.setdefault(key, []).append(lane)
        loaded = self._saved is not None
        self._open(lanes)
        if loaded and not (self._left_own() or any(one.own is not None for one in self._keyed.values())):
            raise ConfigError("at the first step the network does not hold this worker's saved weights: call "
                              "load_state before broadcast, and set parameters from `local/NAME`")
        self._check_settings(optimizer)
        pulse.more["waited_s"] = waits.seconds_waited

    def wait(self) -> None:
        super().wait()
        with self.session.deadline():
            for keyed in self._keyed.values():
                for array in keyed.weights:
                    array.wait_to_read()

    @property
    def waited_s(self) -> float:
        """Seconds that this worker's devices have waited for weights so far, by a sample of the iterations."""
        return self._waits.seconds

    @property
    def _awaits_model(self) -> bool:
        """Whether workers that train now do so each by itself, since nobody has given this store parameters."""
        return not (self._closed or self._keyed or self._has_trainer) and self.num_workers > 1

    def holds_own(self, names: Iterable[str]) -> bool:
        """Whether parameters with these names may hold this worker's own weights now, and not the global ones."""
        mine = {known.parameter.name for known in self._keyed.values()} - self._passed_on
        return self.shows_own and not mine.isdisjoint(names) and not self._was_set()

    # -- the first step ------------------------------------------------------------------------------------------

    def _describe(self, key: Any, value: NDArray) -> Parameter:
        parameter = self._named.get(key)
        name = str(key) if parameter is None else parameter.name
        optimizer = self.session.optimizer
        lr_mult, wd_mult = (1.0, 1.0) if optimizer is None else optimizers.multipliers(optimizer, key, parameter)
        return Parameter(key, name, tuple(value.shape), np.dtype(value.dtype).name, lr_mult, wd_mult)

    def _share(self) -> None:
        """Send what `broadcast` was given, in as few messages as can be. Collective; waits."""
        values = self._unshared
        if not values:
            return
        names = [known.parameter.name for known in self._keyed.values()]
        if len(set(names)) < len(names):
            name = max(names, key=names.count)
            raise ConfigError(f"{names.count(name)} keys of this `{self.name}` store have the name {name}, and what is "
                              "saved goes by names; take other keys (3 and \"3\" are one name)")
        self._unshared = {}
        mx.nd.waitall()  # a static graph may write BatchNorm's statistics after MXNet calls the arrays written
        what = f"parameter {next(iter(values))}" if len(values) == 1 else "their parameters"
        parameters = {key: self._keyed[key].parameter for key in values}
        agreement.check(self.session.transport, what, [*(f"parameter {key} shape {one.shape} {one.dtype}"
                                                         for key, one in parameters.items()), *self._moment()])
        if self._saved is not None:
            return
        sizes = {key: one.size for key, one in parameters.items() if one.dtype in TRAINABLE_DTYPES}
        rest = {key: values[key].asnumpy() for key in values if key not in sizes}
        for key, flat in sums.from_worker_0(self.session.transport, sizes, lambda key: values[key].asnumpy(), rest):
            put(self._keyed[key].weights, [flat.reshape(parameters[key].shape)] * len(self._keyed[key].weights))

    def _take_over(self) -> None:
        """Train these arrays from here on, in place of a store that has trained them before."""
        others = set()
        for mine in self._keyed.values():
            for array in mine.weights:
                other = _trained.get(id(array))
                _trained[id(array)] = self
                if other and other.lanes and any(array is one for its in other._keyed.values() for one in its.weights):
                    other._passed_on.add(mine.parameter.name)
                    others.add(other)
        for other in others:
            if other._keeps_own and other._left_own():
                self._warn(f"another store, `{other.name}`, has trained this network, and left in it weights of each "
                           "worker's own; this store begins with worker 0's. To keep what all have learned, save the "
                           "network inside `with store.global_weights():` of the other, and load that before the first "
                           "step of this one")

    def _left_own(self) -> bool:
        """Whether the network still holds the weights that this worker came to: nothing was loaded since."""
        lane = self.lanes[0]
        segment, flat = lane.bucket.segments[0], self.session.w_local[lane.bucket.id].asnumpy()
        held = self._keyed[segment.parameter.key].weights[0].asnumpy().reshape(-1)[segment.start:segment.stop]
        return np.array_equal(held, flat[segment.offset:segment.end].astype(held.dtype), equal_nan=True)

    def _agree_on_model(self) -> None:
        """Compare with the other workers all that must be the same, while a difference can still be named."""
        parameters = [f"parameter {key} {p.name} shape {p.shape} {np.dtype(p.dtype).name} grad_req {p.grad_req} "
                      f"lr_mult {p.lr_mult} wd_mult {p.wd_mult}" for key, p in self._named.items()]
        agreement.check(self.session.transport, "the model and its settings", [*self.session.model(), *parameters])

    # -- between two steps ---------------------------------------------------------------------------------------

    def _replace(self, optimizer: mx.optimizer.Optimizer) -> None:
        trainer = self._trainer()
        self._check_not_set()
        if trainer is not None and not trainer._kv_initialized:
            raise ConfigError("a second trainer was made with this store for the same network; go on with the first "
                              "(set_learning_rate, or store.set_optimizer), or make a new store with a new trainer")
        self._check_parameters(optimizer)
        self.session.check_successor(optimizer)
        described = optimizers.describe(optimizer)
        if self.session.method.asynchronous:  # whose workers may have come to other iterations
            del described["settings"]["num_update"]
        self._settle("set_optimizer", [json.dumps(described, sort_keys=True)])
        optimizer.param_dict = self._named
        self.session.replace(optimizer)
        self._advise()
        if trainer is not None:  # it sets the rate and the batch size on its own optimizer
            trainer._optimizer = optimizer

    def _own_weights(self) -> List[NDArray]:
        self._check_not_set()
        if self._passed_on:
            raise ConfigError(f"the global weights of this `{self.name}` store are old: another store has trained "
                              f"{min(self._passed_on)} since; ask that one, or ask this one before the other's first "
                              "step")
        for key, its in self._named.items():  # reset_ctx and others give a network new arrays
            if key in self._lanes_of and its._stype == "default":
                self._use(key, self._keyed[key].grads, its.list_data())
        return super()._own_weights()

    def _was_set(self) -> bool:
        """Whether the script has written other weights into the network."""
        trainer = self._trainer()
        return trainer is not None and not trainer._kv_initialized and trainer._optimizer is self.session.optimizer

    def _check_not_set(self) -> None:
        if self._was_set():
            raise ConfigError("a trainer's parameters were set after the first step (set_data, load_parameters); the "
                              "global weights cannot be: make a new store and a new trainer")

    def _settle(self, call: str, settings: List[str]) -> None:
        """All workers make this call now, with these settings, and nothing is in flight. Collective; waits."""
        self._check_between(call)
        self.barrier()
        agreement.check(self.session.transport, f"what they call now ({call})", [call, *settings])

    def _trainer(self) -> Any:
        """The Gluon trainer of this store, or None."""
        trainers = (parameter._trainer for parameter in self._named.values())
        return next((one for one in trainers if one and one._kvstore_params["kvstore"] is self), None)

    def _check_parameters(self, optimizer: mx.optimizer.Optimizer) -> None:
        """ConfigError if an optimizer has other parameters, or gives them other multipliers, than in the first step."""
        if optimizer.param_dict:
            if optimizer.param_dict != self._named:
                raise ConfigError("set_optimizer after the first step, for other parameters: this store trains those "
                                  "it began with; make a store for each trainer")
            return
        if not (optimizer.lr_mult or optimizer.wd_mult):
            return
        for key, known in self._keyed.items():
            had, now = [known.parameter.lr_mult, known.parameter.wd_mult], optimizers.multipliers(optimizer, key)
            if now != had:
                raise ConfigError(f"set_optimizer after the first step, with other multipliers: lr_mult and wd_mult of "
                                  f"{known.parameter.name} were {had} and are {now}. They stay as they were in the "
                                  "first step; leave them out, or make a new store")

    def _check_settings(self, optimizer: mx.optimizer.Optimizer) -> None:
        """ConfigError if the script has changed what the servers got before the first step."""
        now = {**optimizers.settings(optimizer),
               **{one.name: (one.lr_mult, one.wd_mult) for one in self._named.values()}}
        had = self._settings = self._settings or now
        if had != now:
            what = next(name for name in now if had.get(name) != now[name])
            raise ConfigError(f"iteration {self.iteration + 1} has not taken place: the optimizer's settings have "
                              f"changed, {what} from {had.get(what)} to {now[what]}. The store keeps those of the "
                              "first step: give a new optimizer to store.set_optimizer, or, for multipliers of "
                              "parameters, make a new store and a new trainer")

    def _global_optimizer(self) -> mx.optimizer.Optimizer:
        if self.session.optimizer is None or not self._keyed:
            raise ConfigError(f"nothing has been trained with this `{self.name}` store yet, and it lacks an optimizer "
                              "or parameters. A gluon.Trainer has to be given kvstore=store, and takes it up with its "
                              "first step; before that the network holds the initial weights. Without a trainer: "
                              "set_optimizer, and init or broadcast")
        return self.session.optimizer

    def _trainable(self) -> List[Parameter]:
        named = self._named
        return [known.parameter for key, known in self._keyed.items()
                if key not in self._fixed and (key not in named or named[key].grad_req != "null")]

    # -- every step --------------------------------------------------------------------------------------------

    def _iterate(self) -> bool:
        """One iteration: all gradients have been handed in, or this worker has none. Whether any worker has."""
        if self._scaler is not None and self._leaves_out():
            return True
        optimizer = self._global_optimizer()
        self._check_settings(optimizer)
        optimizer.num_update = optimizer.begin_num_update + self.session.step.t - self.session.since + 1
        counts, (lr,) = self._counts(optimizers.learning_rate(optimizer, optimizer.num_update))
        if not counts:
            return False
        self.session.samples = 1 / (self._share_of_an_example(optimizer) or 1.0)
        step = self.session.next_step(lr, self.lr_local, counts)
        # In the order of the buckets, whatever the caller's (Trainer's begins with the first layer): what is asked for
        # first leaves first, on all workers alike.
        self._handed.update(self._lanes_of)  # an error from here on breaks the iteration off
        with self._waits.around(self._keyed[key] for key in self._lanes_of):
            scale = counts * self._factor * optimizer.rescale_grad
            self.session.each(functools.partial(self._iterate_bucket, step, scale), self.lanes)
        self._handed.clear()
        return True

    def _share_of_an_example(self, optimizer: Any) -> float:
        """What one example's gradient counts in this worker's gradient."""
        loss_scale = 1.0 if self._scaler is None else scaling.of_gradients(self._scaler, self._trainer())
        return float(self._factor * loss_scale * optimizer.rescale_grad)

    def _iterate_bucket(self, step: Step, scale: float, lane: Lane) -> None:
        room = self.session.room(lane.bucket)
        grad = lane.grad if room is None else room
        if self.session.joined:
            grad[:] = 0
        else:
            lane.gather(scale, grad)
        lane.show(self.session.iterate(lane.bucket, grad, step))

    def _leaves_out(self) -> bool:
        """Whether this iteration has overflowed, and is left out. Waits for its gradients, and in a synchronous job for
        what all workers find.
        """
        with self.session.deadline():  # gradients wait for weights, and these for others
            overflow = scaling.overflowed(grad for key in self._lanes_of for grad in self._keyed[key].grads)
        if not self.session.method.asynchronous:
            overflow = bool(self.session.transport.total(np.array([overflow], np.float32))[0])
        self._tell_scaler(overflow)
        if overflow:
            self.session.leave_out()
            scaling.check(self._scaler, self.iteration, self.options.on_nan)
        return overflow

    def worker_state(self) -> Saved:
        arrays, meta = super().worker_state()
        meta["loss_scale"] = None if self._scaler is None else scaling.saved(self._scaler)
        return arrays, meta

    def load_state(self, worker: Saved, server: Optional[Saved] = None) -> None:
        super().load_state(worker, server)
        self._saved_scale = worker[1].get("loss_scale")
        if self._scaler is not None:
            scaling.restore(self._scaler, self._saved_scale)

    def _known(self, key: Any) -> Keyed:
        if key not in self._keyed:
            raise ConfigError(f"key {key} was not broadcast, nor initialized by `init`")
        return self._keyed[key]

    def _hand_in(self, key: Any, grads: List[NDArray], weights: List[NDArray]) -> None:
        known = self._known(key)
        if key not in self._lanes_of:
            raise ConfigError(f"pushpull of {known.parameter.name}, which had no gradient in the first step (grad_req "
                              "`null`); to train it from now on, make a new store and a new trainer")
        if key in self._handed:
            raise self._twice(known.parameter.name)
        self._handed.add(key)
        if grads[0].stype != "default":
            grads = known.dense(grads)
        self._use(key, grads, weights)

    def _use(self, key: Any, grads: List[NDArray], weights: List[NDArray]) -> None:
        if self._keyed[key].use(grads, weights):
            for lane in self._lanes_of[key]:
                lane.forget()

    def _twice(self, name: str) -> Exception:
        missing = self._lanes_of.keys() - self._handed
        frozen = [one.name for key, one in self._named.items() if key in missing and one.grad_req == "null"]
        if frozen:
            return ConfigError(f"iteration {self.iteration + 1} has not taken place: {frozen[0]} had a gradient in the "
                               "first step and has none now (grad_req `null`); after you freeze parameters, load what "
                               "you save inside `with store.global_weights():`, and make a new store and a new trainer")
        if not missing:
            return ProtocolError(f"iteration {self.iteration} was broken off by an error; make a new store and trainer")
        return ProtocolError(f"parameter {name} was handed in twice in iteration {self.iteration + 1}, with others "
                             f"still missing ({len(missing)}); every parameter takes part in every step")

    @property
    def under_way(self) -> bool:
        return bool(self._handed)

    def _untrained(self) -> Dict[str, List[NDArray]]:
        """Arrays of parameters without a gradient, by name. A network that was cast has other arrays than before."""
        named = self._named
        return {known.parameter.name: named[key].list_data() if key in named and named[key]._stype == "default" else
                known.weights for key, known in self._keyed.items() if key not in self._lanes_of}

    def _aux(self) -> Dict[str, List[NDArray]]:
        return {name: [array.copy() for array in arrays] for name, arrays in self._untrained().items()}

    @staticmethod
    def _numbers(array: NDArray) -> np.ndarray:
        return array.asnumpy()

    def _set_aux(self, values: Mapping[str, Sequence[Any]]) -> None:
        for name, arrays in self._untrained().items():
            put(arrays, values[name])


def each(key: Any, *values: Any) -> Iterator[Tuple[Any, ...]]:
    """One key with its values, or lists of them, one by one."""
    if not isinstance(key, (list, tuple)):
        yield (key, *values)
        return
    if any(not isinstance(one, (list, tuple)) or len(one) != len(key) for one in values):
        raise ConfigError(f"{len(key)} keys, and not as many values: give a list of each, of one length")
    yield from zip(key, *values)


def as_list(value: Any) -> List[NDArray]:
    return [value] if isinstance(value, mx.nd.NDArray) else value


scaling.teach(mx.gluon.Trainer, Store)
mx.gluon.trainer.KVStore = (mx.gluon.trainer.KVStore, Store)  # which a Trainer takes row-sparse gradients to
