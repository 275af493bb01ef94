"""The store as a PyTorch script sees it. `Optimizer` gives it a model, and the gradients of each iteration.

    gradients of a bucket  →  TensorLane.gather → Session.iterate            while the backward pass runs
    its weights            →  TensorLane.show                                before a module computes on them
"""
import contextlib
import functools
import io
import json
import os
import weakref
from dataclasses import replace
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Type, Union

import numpy as np
import torch

from kvstore import methods
from kvstore.engine.engine import NDArray
from kvstore.errors import ConfigError, ProtocolError, shown
from kvstore.fronts import choice, sums
from kvstore.fronts.base import FrontEnd, Snapshot, warn_once
from kvstore.fronts.torch import models
from kvstore.fronts.torch.lanes import TensorLane, Trained, held, waited_s, waiting
from kvstore.job import agreement, environment
from kvstore.job.pulse import pulse
from kvstore.messages import buckets as layout
from kvstore.messages.seam import Export, Saved, Transport
from kvstore.methods import fit
from kvstore.methods.common import Options
from kvstore.methods.contract import Method, Step
from kvstore.optimizers.formulas import Formula
from kvstore.options import DEFAULT_TIMEOUT_S
from kvstore.state.npz import below
from kvstore.transports import gloo

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "float16"}
"""What can be trained, by the names that buckets have: either kind of half precision travels in single."""

_stores: "weakref.WeakValueDictionary[int, TorchStore]" = weakref.WeakValueDictionary()
"""The store that trains a parameter, by the parameter's id; a store keeps its parameters alive."""


def has_store(parameter: torch.Tensor) -> bool:
    return id(parameter) in _stores


def create(name: str, transport: Union[str, Transport, None] = None, group: Any = None, **options: Any) -> "TorchStore":
    """Make a store for `odsgd.torch.Optimizer`; arguments as for `kvstore.create`.

    Under torchrun, or in a process group of torch.distributed's, the store sums over that group. With `group` it sums
    over this one, whose processes alone are the workers.
    Collective and waiting, the first time in a process: all workers of the job meet here.
    """
    return TorchStore(*choice.checked(name, transport, options, functools.partial(connect, group=group)))


def connect(name: str, transport: Optional[str] = None, timeout_s: float = DEFAULT_TIMEOUT_S,
            group: Any = None) -> Transport:
    """The transport of this process, in its job or in its process group."""
    method, outside = methods.find(name), group is not None or gloo.in_foreign_group()
    if outside and transport is None and name != "local":
        transport = next((one for one in gloo.TRANSPORTS if one in method.transports), None)
        if transport is None:
            able = ", ".join(one for one, other in methods.METHODS.items() if {*gloo.TRANSPORTS} & {*other.transports})
            raise ConfigError(f"store {name} needs servers, and a process group has none; expected one of {able}, or "
                              "a job of `odsgd launch` (without `group`)")
    kind = fit.transport_of(method, transport)
    if kind in gloo.TRANSPORTS and (outside or gloo.instead_of_mpi()):
        return gloo.TRANSPORTS[kind](timeout_s, group)
    if group is not None:
        raise ConfigError(f"store {name} with a `group` and transport {kind}, which has no process group; leave "
                          f"`group` out, or take a store that runs as {' or '.join(gloo.TRANSPORTS)}")
    return choice.connect(name, transport, timeout_s)


class TorchStore(FrontEnd):
    """A store that trains one model of PyTorch's."""

    def __init__(self, method: Type[Method], options: Options, transport: Transport) -> None:
        super().__init__(method, options, transport)
        self.optimizer: Any = None  # the one that trains by it, once made
        self._showing_global = contextlib.ExitStack()  # which `show_own` closes
        self._tensors: Dict[str, torch.Tensor] = {}  # when they were given
        self._now: Callable[[], Mapping[str, torch.Tensor]] = dict
        self._trained: Dict[str, Trained] = {}
        self._groups = 1  # of parameters, each with a learning rate
        self._steps: List[Step] = []  # of the iteration that has begun, by group
        self._noting = False  # whether a gradient has appeared that the script may not change

    def allreduce(self, array: Any) -> torch.Tensor:
        """The sum over workers, in single precision, on the CPU. Collective; waits."""
        mine = array.detach().cpu().float().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)
        return torch.from_numpy(self._sum(mine))

    def wait(self) -> None:
        """Wait until all that this worker has asked for has arrived, and let the model hold it."""
        self._refuse_child(self.lanes)
        super().wait()
        self.show(self.lanes)

    def close(self) -> None:
        if not (self._closed or self._tensors) and self.num_workers > 1:
            self._warn(f"this `{self.name}` store was given no model, so that each worker has trained its own: no "
                       "od.Optimizer was made of it")
        super().close()
        if self._closed:
            self._leave_model()

    def _leave_model(self) -> None:
        """From here on another store trains it, or none."""
        for lane in (one for one in self.lanes if one.due is not None and one.written()):
            lane.due = None  # what the script has put there stays
        self.show(self.lanes)
        if self.optimizer is not None:
            self.optimizer.leave_model()

    def _show(self, snapshot: Snapshot) -> contextlib.ExitStack:
        self.show(self.lanes)  # else the first module that is called would show them
        self._check_weights()
        return super()._show(snapshot)

    def show_global(self) -> None:
        """Let the model hold the global weights until `show_own`, for a trainer's callback. Collective; waits."""
        self.show_own()
        self._showing_global = self._show(self._global_snapshot())

    def show_own(self) -> None:
        """Let the model hold this worker's own weights again."""
        self._showing_global.close()

    # -- before the first step ---------------------------------------------------------------------------------

    @property
    def takes_weights(self) -> bool:
        """Whether the script's own optimizer steps, and the store sees what comes of it."""
        return self.session.method.takes == "weights"

    def take(self, now: Callable[[], Mapping[str, torch.Tensor]], parameters: Sequence[layout.Parameter],
             optimizer: Optional[Formula]) -> None:
        """Train these parameters of a model by `optimizer`. `now()` gives all of the model's tensors, which become
        worker 0's. Collective; waits.
        """
        self._check_usable()
        if self._tensors:
            raise ConfigError(f"this `{self.name}` store has its od.Optimizer already; make a new store for another")
        tensors = now()
        self._refuse_shards(tensors)
        models.refuse_expanded(tensors)
        if not self.takes_weights:
            models.refuse_shared_memory({one.name: tensors[one.name] for one in parameters})
        self.session.use(optimizer)
        trained = {one.name: f"lr_mult {one.lr_mult:g} wd_mult {one.wd_mult:g} group {one.group}" for one in parameters}
        agreement.check(self.session.transport, "the model and its settings", [*self.session.model(), *(
            f"{name} shape {tuple(held(tensor).shape)} {tensor.dtype} {trained.get(name, 'not trained')}"
            for name, tensor in tensors.items())])
        self._tensors, self._now = dict(tensors), now
        self._trained = {one.name: Trained(one, tensors[one.name]) for one in parameters}
        self._groups = 1 + max(one.group for one in parameters)
        for parameter in (one.parameter for one in self._trained.values()):
            before = _stores.get(id(parameter))
            if before is not None:
                before._tell_unsent()
                before._leave_model()
            _stores[id(parameter)] = self
        self._share()

    def _refuse_shards(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """ConfigError if several workers have shards of one tensor: they would be taken for copies of it."""
        transport = self.session.transport
        for name, tensor in tensors.items():
            mesh: Any = getattr(tensor, "device_mesh", None)
            if mesh is not None and self.num_workers > 1:
                ranks = mesh.mesh.flatten().tolist()
                workers = transport.ranks if isinstance(transport, gloo.GroupTransport) else ranks
                if len({*ranks} & {*workers}) > 1:
                    raise ConfigError(f"{name} is on the mesh of ranks {ranks}, which are one worker, and several of "
                                      "them are workers of this store; let it exchange between islands alone: "
                                      'od.create(..., group=mesh["island"].get_group()) (docs/how-to/pytorch.md)')

    def _share(self) -> None:
        """Worker 0's values on all: real numbers in a few sums, all else as bytes."""
        real = {name: held(one).numel() for name, one in self._tensors.items() if one.dtype in DTYPES}
        rest = {name: one for name, one in self._tensors.items() if name not in real}
        for name, got in sums.from_worker_0(
                self.session.transport, real, lambda name: self._numbers(self._tensors[name]),
                {name: models.as_bytes(one) for name, one in rest.items() if held(one).numel()}):
            _set(self._tensors[name], got if name in real else torch.frombuffer(bytearray(got), dtype=rest[name].dtype))

    def begin(self, order: Iterable[str] = ()) -> None:
        """Lay out the buckets, and give the servers their weights. Collective; waits. The first step does it, too.

        `order`: the parameters in the order in which their gradients appeared; worker 0's counts.
        """
        self._check_usable()
        if self.lanes:
            return
        if not self._tensors:
            raise ConfigError(f"this `{self.name}` store has no model; make od.Optimizer(optimizer, model, store)")
        for name, one in self._trained.items():
            if one.parameter.dtype not in DTYPES:
                raise ConfigError(f"parameter {name} has become {one.parameter.dtype} since od.Optimizer was made, and "
                                  f"what can be trained is {', '.join(map(str, DTYPES))}: leave out what converts the "
                                  "model (`double()`)")
        if self._saved is not None and not self.takes_weights:  # buckets as they were: each finds what it had
            order = [name for name in below("global/", self._saved[0]) if name in self._trained]
        mine: Dict[str, Any] = {
            "order": [*order, *reversed([name for name in self._trained if name not in set(order)])],
            "frozen": {} if self._saved is not None else models.checksums(models.frozen(self._tensors))}
        if not environment.joined():  # a worker that joins gets the others' weights
            agreement.check(self.session.transport, "the weights at the first step, which od.Optimizer had made the "
                            "same; load a checkpoint before it is made, or on all workers; if the forward pass sets "
                            "weights, call store.begin() before the first", self._weights_as_text())
        theirs = json.loads(agreement.from_worker_0(self.session.transport, json.dumps(mine).encode()))
        others = [name for name, said in mine["frozen"].items() if theirs["frozen"].get(name, said) != said]
        if others:
            warn_once(f"{shown(', '.join(others))} of the model, which no store trains, is not what it is on worker 0: "
                      "load a checkpoint before od.Optimizer is made, or on all workers")
        loaded = self._saved is not None
        buckets = self.session.plan([self._trained[name].described for name in reversed(theirs["order"])])
        self._open([TensorLane(bucket, self._trained, self.session.transport.context) for bucket in buckets])
        for lane in self.lanes:
            other = lane.other_than(self.session.w_local[lane.bucket.id]) if loaded and not self.takes_weights else None
            if other:
                raise ProtocolError(f"the weights of {other} are others than the saved state's at the first step; load "
                                    "the model's state before the optimizer's, which sets the weights that this "
                                    "worker goes on from")
            lane.hold()

    def _weights_as_text(self) -> List[str]:
        """A checksum of each parameter; nothing where a saved state brings each worker its own."""
        trained = {} if self._saved is not None else {name: one.parameter for name, one in self._trained.items()}
        return [f"{name} {checksum}" for name, checksum in models.checksums(trained).items()]

    # -- every step --------------------------------------------------------------------------------------------

    def appeared(self, name: str, leaves: bool) -> None:
        """A gradient is there; `leaves`: as soon as it may."""
        self._noting |= leaves
        self._trained[name].note(leaves)

    def let_change(self) -> None:
        """The script may change gradients that have not left."""
        for one in self._trained.values() if self._noting else ():
            one.note(False)
        self._noting = False

    def begin_iteration(self, rates: Sequence[float]) -> bool:
        """At these learning rates of the groups. Returns whether any worker has a gradient."""
        self._check_usable()
        self._check_weights()
        counts, rates = self._counts(*rates[:self._groups])
        if counts:
            self._steps = self._by_group(self.session.next_step(rates[0], self.lr_local, counts), rates)
        return bool(counts)

    def _by_group(self, step: Step, rates: Sequence[float]) -> List[Step]:
        """The step of each group of parameters, at its rate; with the rate 0 a group stands still."""
        return [replace(step, lr=lr, lr_local=lr if self.lr_local is None or not lr else self.lr_local) for lr in rates]

    def send(self, lane: TensorLane) -> None:
        """Hand in one bucket's gradients: all buckets, in their order."""
        step = self._steps[lane.bucket.first.group]
        with self.session.deadline():
            flat = lane.gather(self.session.room(lane.bucket), 0.0 if step.joined else step.counts)
            self.session.iterate(lane.bucket, flat, step)

    def end_step(self) -> None:
        """All buckets have been sent: the parameters become due."""
        for one in self._trained.values():
            one.end()
        self._steps, self._noting = [], False
        for lane in self.lanes:
            lane.due = self.session.w_local[lane.bucket.id]

    def show(self, lanes: Iterable[TensorLane]) -> None:
        """Let the parameters of these buckets hold the weights of the next iteration. Waits for them."""
        self._refuse_child(lanes)
        for lane in lanes:
            if lane.due is not None:
                if torch.jit.is_tracing():
                    raise ProtocolError("the model is traced while its next weights are on their way, which the trace "
                                        "would keep for good; call optimizer.synchronize() first")
                self._refuse(lane.written())
                with self.session.deadline(), waiting():
                    lane.show(lane.due)
                lane.due = None

    def _refuse_child(self, lanes: Iterable[TensorLane]) -> None:
        """ProtocolError in a child of this process, which will never get weights that were on their way."""
        if os.getpid() != self._pid and any(lane.due is not None for lane in lanes):
            raise ProtocolError("this process was forked while the next weights were on their way to its parent; call "
                                "optimizer.synchronize() before the fork, or start the child anew (`spawn`)")

    def _check_weights(self) -> None:
        """ProtocolError if the script has changed weights: the store's next weights would silently replace them.

        A script may put other weights in place for a while and then put the store's back.
        """
        if not self._shown and not self.takes_weights:
            written = [lane for lane in self.lanes if lane.due is None and lane.written()]
            for lane in written:
                self._refuse(lane.other_than(self.session.w_local[lane.bucket.id]))
            for lane in written:
                lane.hold()

    @staticmethod
    def _refuse(name: Optional[str]) -> None:
        if name is not None:
            raise ProtocolError(f"the weights of {name} were changed by the script, and the store's would take their "
                                "place in silence; to constrain weights, do so in the forward pass; to put an average "
                                "in place, do so inside `with store.global_weights():`; to go on from other weights, "
                                "load them, then make a new store and od.Optimizer (docs/how-to/pytorch.md)")

    def mean_gradients(self) -> None:
        """Let every ``.grad`` hold its mean over the workers. Collective; waits."""
        def mean(flat: np.ndarray) -> np.ndarray:
            counted = self.sum_within(np.append(flat, np.float32(1)))
            return np.asarray(counted[:-1] / counted[-1])

        self.let_change()
        for one in self._trained.values():
            if one.gradient() is None:
                one.parameter.grad = torch.zeros_like(one.parameter)
        sizes = {name: one.tensor.numel() for name, one in self._trained.items()}
        grads = {name: one.parameter.grad for name, one in self._trained.items()}
        for name, flat in sums.over_workers(sizes, lambda name: self._numbers(grads[name]), mean):
            _set(grads[name], flat)

    def sum_within(self, mine: np.ndarray) -> np.ndarray:
        """A sum over the workers in the middle of an iteration, to which those that have joined add nothing.
        Collective; waits.
        """
        self._check_usable()
        if self.options.uneven == "join":
            self.begin()  # as those that have joined do first
            self._announce(mine.size, *([] if self.takes_weights else [0.0] * self._groups))
        return self.session.transport.total(mine)

    def stepped(self) -> bool:
        """The script's optimizer has taken a step; if an exchange is due, the method makes new weights of the result.
        Returns whether any worker has taken a step. Collective, and may wait, if one is due or `uneven` is join.
        """
        self._check_usable()
        counts = self._counts()[0]
        if not counts:
            return False
        step = self.session.next_step(0.0, None, counts)
        due = self.session.due()
        if due:
            with self.session.deadline(), waiting():
                self._exchange([lane for lane in self.lanes if lane.bucket.first.fragment in due], step)
        return True

    def _exchange(self, lanes: Sequence[TensorLane], step: Step) -> None:
        steps = self._by_group(step, self.optimizer._rates_now())
        before = [lane.weights(anew=False) for lane in lanes]
        for lane, x in zip(lanes, before):
            lane.add_rest(x)
        after = [self.session.iterate_weights(one.bucket, x, steps[one.bucket.first.group])
                 for one, x in zip(lanes, before)]
        for lane, x, w in zip(lanes, before, after):
            if w is not x:  # else the fragment was sent, and its answer is applied later
                lane.show(w)
                lane.keep_rest(w)

    def worker_state(self) -> Saved:
        arrays, meta = super().worker_state()
        for lane in self.lanes:
            if lane.rest is not None:
                layout.split(lane.bucket, lane.rest, arrays, "rest/")
        return arrays, {**meta, "rank": self.rank, "num_workers": self.num_workers}

    def _open(self, lanes: List[TensorLane]) -> None:
        agreement.check(self.session.transport, "the saved state that they go on from", self._moment())
        arrays = {} if self._saved is None else self._saved[0]
        for lane in lanes:
            if f"rest/{lane.bucket.first.name}" in arrays:
                lane.rest = layout.join(lane.bucket, arrays, "rest/")
        super()._open(lanes)
        pulse.more["waited_s"] = waited_s
        if environment.joined() and self.takes_weights:
            for lane in lanes:
                lane.keep_rest(self.session.w_local[lane.bucket.id])

    def _own_weights(self) -> List[NDArray]:
        if self.takes_weights and not self._shown:  # else they were taken before others were shown
            self.session.w_local.update((lane.bucket.id, lane.weights(anew=False)) for lane in self.lanes)
        return super()._own_weights()

    def _iterate(self) -> bool:
        """An iteration without a gradient of this worker; if there is one, the Optimizer sends it."""
        if self.takes_weights:
            return self.stepped()
        if not self.begin_iteration([0.0] * self._groups):
            return False
        for lane in self.lanes:
            self.send(lane)
        self.end_step()
        return True

    @property
    def under_way(self) -> bool:
        return bool(self._steps)

    # -- to save it --------------------------------------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        return bool(self.lanes) or self._saved is not None

    def state(self) -> Dict[str, Optional[Saved]]:
        """What this worker and, on worker 0, the servers know: arrays by name, and JSON. Collective; waits.

        Before the first step it is what was loaded.
        """
        if self._saved is not None:
            return {"worker": self._saved, "servers": self._saved_servers}
        self._check_begun("state")
        self._check_between("saving")
        self._meet()
        at = [] if self.session.method.asynchronous else [f"iteration {self.iteration}"]
        agreement.check(self.session.transport, "what they call now (state_dict)", ["state_dict", *at])
        worker = self.worker_state()
        servers = self.server_state() if self.rank == 0 or self.state_is_shared else None
        self.go_on_after(Export({}))
        return {"worker": worker, "servers": servers}

    def load_state(self, worker: Saved, server: Optional[Saved] = None) -> None:
        """Go on from what `state` gave: the model now, all else with the first step. `server` counts on worker 0."""
        if worker[1].get("rank", self.rank) != self.rank:
            raise ConfigError(f"the saved state is worker {worker[1]['rank']}'s, and this is worker {self.rank}, which "
                              "has one of its own: let every worker save, and load what it saved")
        saved_by = worker[1].get("num_workers", self.num_workers)
        if saved_by != self.num_workers:
            warn_once(f"the saved state is of {saved_by} workers, and here are {self.num_workers}: what each of the "
                      "others kept for itself is lost")
        mine = {**{f"local/{name}": one.parameter for name, one in self._trained.items()},
                **{f"aux/0/{name}": tensor for name, tensor in self._buffers().items()}}
        for saved, tensor in mine.items():
            theirs, shape = worker[0].get(saved), tuple(held(tensor).shape)
            if theirs is None or theirs.shape != shape:
                has = "no such array" if theirs is None else f"one of shape {theirs.shape}"
                raise ConfigError(f"the model has `{saved}` of shape {shape} and the saved state {has}; it belongs to "
                                  "another model, or to another division of it (FSDP)")
        super().load_state(worker, server)
        for saved, tensor in mine.items():
            _set(tensor, worker[0][saved])

    def state_dict(self) -> Dict[str, bytes]:
        """What the Optimizer's `state_dict` says, under a name of this worker's, for torch.distributed.checkpoint: each
        worker writes its own, worker 0 the servers' as well. A copy, which nothing changes later. Collective; waits.
        """
        file = io.BytesIO()
        if self.has_state:
            self._check_usable()
            torch.save(self.optimizer.state_dict(), file)
        return {self._saved_as: file.getvalue()}

    def load_state_dict(self, state_dict: Mapping[str, bytes]) -> None:
        """Go on from what `state_dict` gave on a worker of this rank; od.Optimizer is made, and has taken no step."""
        if self.optimizer is None:
            raise ConfigError("a store is loaded after od.Optimizer is made, since the state is that optimizer's")
        if not state_dict.get(self._saved_as):
            raise ConfigError(f"the saved state has nothing of {self._saved_as}; load it with as many workers as saved "
                              "it, and save after the first step")
        self.optimizer.load_state_dict(torch.load(io.BytesIO(state_dict[self._saved_as]), weights_only=True))

    @property
    def _saved_as(self) -> str:
        return f"worker {torch.distributed.get_rank() if torch.distributed.is_initialized() else self.rank}"

    def _buffers(self) -> Dict[str, torch.Tensor]:
        """The model's buffers of floats (float8 has no mean), or what a module has put in place of one, as large."""
        now = self._now()
        return {name: now[name] if name in now and now[name].shape == tensor.shape else tensor
                for name, tensor in self._tensors.items()
                if not isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point()
                and tensor.element_size() > 1}

    def _aux(self) -> Dict[str, List[torch.Tensor]]:
        return {name: [tensor.detach().clone()] for name, tensor in self._buffers().items()}

    @staticmethod
    def _numbers(array: torch.Tensor) -> np.ndarray:
        """A copy, in single precision where NumPy does not know the type."""
        mine = held(array).detach()
        known = mine.float() if mine.dtype is torch.bfloat16 else mine
        return np.array(known.cpu().numpy())

    def _set_aux(self, values: Mapping[str, Sequence[Any]]) -> None:
        buffers = self._buffers()
        for name, (value,) in values.items():
            _set(buffers[name], value)


def _set(tensor: torch.Tensor, value: Any) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        mine = held(tensor)
        mine.copy_(torch.as_tensor(value).view(mine.shape))
