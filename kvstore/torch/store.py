"""The store as a PyTorch script sees it. `Optimizer` gives it a model, and the gradients of each iteration.

    gradients of a bucket  →  TensorLane.gather → Session.iterate            while the backward pass runs
    its weights            →  TensorLane.show                                before a module computes on them
"""
import contextlib
import json
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Type, Union

import numpy as np
import torch

from kvstore import algorithms, factory, saving
from kvstore.algorithms.method import Method, Options, Step
from kvstore.buckets import Parameter
from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError, ProtocolError, StoreClosedError
from kvstore.job import agreement, control
from kvstore.saving import Saved
from kvstore.session import Session
from kvstore.staleness import Staleness
from kvstore.torch import ring
from kvstore.torch.lanes import TensorLane, Trained
from kvstore.wire.interfaces import Transport

AT_ONCE = 4 * 1024 * 1024
"""Numbers in one sum over the workers."""

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "float16"}
"""What can be trained, as buckets have it: half precision of either kind travels in single."""


def create(name: str, transport: Union[str, Transport, None] = None, **options: Any) -> "TorchStore":
    """Make a store for `odsgd.torch.Optimizer`; arguments as those of `kvstore.create`.

    Under torchrun, or in a process group of torch.distributed's, the store's sums are that group's.
    Collective and waiting, the first time in a process: all workers of the job meet here.
    """
    if transport in (None, "ring") and name != "local" and ring.there():
        method = algorithms.find(name)
        if "ring" not in method.transports:
            able = ", ".join(one for one, other in algorithms.METHODS.items() if "ring" in other.transports)
            raise ConfigError(f"store {name} does not run as a ring, and torchrun offers nothing else; expected "
                              f"one of {able}, or a job of `odsgd launch`")
        transport = ring.GroupRing(options.get("timeout_s", control.DEFAULT_TIMEOUT_S))
    return TorchStore(*factory.checked(name, transport, options))


class TorchStore:
    """A store that trains one model of PyTorch's.

    Not thread-safe: one thread of a worker uses it. Methods said to be collective are called by all workers, in the
    same order.
    """

    def __init__(self, method: Type[Method], options: Options, transport: Transport) -> None:
        if options.uneven == "join":
            raise ConfigError("uneven `join` is for stores of Gluon; give all workers of a PyTorch script as many "
                              "batches")
        self.session = Session(method, options, transport)
        self.options = self.session.method.options
        self.lr_local: Optional[float] = getattr(options, "lr_local", None)
        """The rate of local steps; None: as the optimizer's. It may be set at any time."""
        self.lanes: List[TensorLane] = []
        self._tensors: Dict[str, torch.Tensor] = {}
        self._trained: Dict[str, Trained] = {}
        self._parameters: Dict[str, Parameter] = {}
        self._saved: Optional[Saved] = None  # this worker's state, until the first step takes it up
        self._saved_servers: Optional[Saved] = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<odsgd.torch store {self.type}: worker {self.rank} of {self.num_workers}, iteration {self.iteration}>"

    # -- for a script ------------------------------------------------------------------------------------------

    @property
    def type(self) -> str:
        """The name of the method."""
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
        """How many workers the job has."""
        return self.session.transport.num_workers

    @property
    def iteration(self) -> int:
        """Iterations done."""
        return self.session.iteration

    def allreduce(self, array: Any) -> torch.Tensor:
        """The sum over workers, in single precision, on the CPU. Collective; waits."""
        self.check_usable()
        mine = array.detach().cpu().float().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)
        return torch.from_numpy(np.asarray(self.session.transport.total(mine)))

    def barrier(self) -> None:
        """Wait until every worker is here with nothing in flight. Collective."""
        self.wait()
        self.allreduce(np.zeros(1))

    def wait(self) -> None:
        """Wait until all that this worker has asked for has arrived, and let the model hold it."""
        self.session.wait()
        self.show(self.lanes)

    @contextlib.contextmanager
    def global_weights(self) -> Iterator[None]:
        """Inside, the model holds the global weights, the same on every worker. Collective; waits.

        Buffers of real numbers (the statistics of BatchNorm) hold their mean over the workers inside. Afterwards this
        worker's own are back.
        """
        self.check_usable()
        self._idle()
        self.session.wire.check()
        own = {name: buffer.detach().clone() for name, buffer in self._statistics()}
        for name, mine in own.items():
            self._set(name, torch.from_numpy(self.session.mean(mine.float().cpu().numpy())))
        for lane in self.lanes:
            lane.show(self.session.global_weights(lane.bucket))
        try:
            yield
        finally:
            for lane in self.lanes:
                lane.show(self.session.w_local[lane.bucket.id])
            for name, mine in own.items():
                self._set(name, mine)

    def statistics(self) -> Staleness:
        """What the servers of an asynchronous job have counted so far. Waits for them alone; any worker may ask."""
        self._check_begun("statistics")
        return self.session.statistics()

    def memory(self) -> Dict[str, int]:
        """Bytes of what the method keeps on this worker, by ``NAME: MEANING``; no wire buffers."""
        self._check_begun("memory")
        return self.session.memory()

    def close(self) -> None:
        """Leave the job. Collective; waits."""
        if not self._closed:
            self.wait()
            self._closed = True
            self.session.transport.close()

    # -- before the first step ---------------------------------------------------------------------------------

    def take(self, tensors: Mapping[str, torch.Tensor], parameters: Sequence[Parameter],
             optimizer: mx.optimizer.Optimizer) -> None:
        """Train these of a model's tensors by `optimizer`. All of them become worker 0's. Collective; waits."""
        self.check_usable()
        if self._tensors:
            raise ConfigError(f"this `{self.type}` store trains another model; make one for each model")
        self.session.use(optimizer)
        trained = {one.name: f"lr_mult {one.lr_mult:g} wd_mult {one.wd_mult:g} group {one.group}" for one in parameters}
        agreement.check(self.session.transport, "the model and its settings", [*self.session.model(), *(
            f"{name} shape {tuple(tensor.shape)} {tensor.dtype} {trained.get(name, 'not trained')}"
            for name, tensor in tensors.items())])
        self._tensors = dict(tensors)
        self._parameters = {one.name: one for one in parameters}
        self._trained = {name: Trained(name, tensors[name]) for name in self._parameters}
        self._share()

    def _share(self) -> None:
        """Worker 0's values on all: real numbers in a few sums to which it alone adds, all else as bytes."""
        exact = {name: one for name, one in self._tensors.items() if one.dtype in DTYPES}
        for names in _together({name: one.numel() for name, one in exact.items()}):
            mine = torch.cat([exact[name].detach().reshape(-1).float().cpu() for name in names])
            shared = self.allreduce(mine if self.rank == 0 else torch.zeros_like(mine))
            self._split(names, shared)
        for name in [name for name in self._tensors if name not in exact]:  # in the same order on all workers
            tensor = self._tensors[name].detach().cpu().contiguous()
            flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.zeros(0, dtype=torch.uint8)
            data = agreement.from_worker_0(self.session.transport, flat.numpy().tobytes())
            if data:
                self._set(name, torch.frombuffer(bytearray(data), dtype=tensor.dtype).view(tensor.shape))

    def _split(self, names: Sequence[str], flat: torch.Tensor) -> None:
        parts = flat.split([self._tensors[name].numel() for name in names])
        for name, part in zip(names, parts):
            self._set(name, part.view(self._tensors[name].shape))

    def _set(self, name: str, value: torch.Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._tensors[name].copy_(value)

    def begin(self, order: Iterable[str]) -> None:
        """Lay out the buckets, and give the servers their weights. Collective; waits.

        `order`: the parameters in the order in which their gradients appeared; worker 0's counts.
        """
        mine = [*order, *reversed([name for name in self._parameters if name not in set(order)])]
        theirs = json.loads(agreement.from_worker_0(self.session.transport, json.dumps(mine).encode()))
        buckets = self.session.plan([self._parameters[name] for name in reversed(theirs)])
        lanes = [TensorLane(bucket, self._trained) for bucket in buckets]
        if self._saved is None:
            by_id = {lane.bucket.id: lane for lane in lanes}
            self.session.begin(lambda bucket: by_id[bucket.id].weights())
        else:
            self.session.begin(*(saving.weights_of(self._saved, prefix, mx.cpu()) for prefix in ("global/", "local/")))
            saving.load_worker(self.session, self._saved)
        saving.load_servers(self.session, self._saved_servers)
        self._saved = self._saved_servers = None
        self.lanes = lanes

    # -- every step --------------------------------------------------------------------------------------------

    def send(self, lane: TensorLane, step: Step) -> None:
        """Hand in one bucket's gradients: all buckets, in their order."""
        with self.session.deadline():
            flat = lane.gather(self.session.room(lane.bucket))
            lane.w = self.session.iterate(lane.bucket, flat, step)

    def end_step(self) -> None:
        """All buckets have been sent: the parameters are to hold what comes of it."""
        changed = next((one.name for one in self._trained.values() if one.changed), None)
        if changed is not None:
            raise ProtocolError(f"the gradient of {changed} was changed after it had left; to clip gradients, or "
                                "to add them up, run backward() under `with optimizer.no_sync():` (docs/pytorch.md)")
        for lane in self.lanes:
            lane.due = lane.w
        for one in self._trained.values():
            one.forget()

    def show(self, lanes: Iterable[TensorLane]) -> None:
        """Let the parameters of these buckets hold the weights of the next iteration. Waits for them."""
        for lane in lanes:
            if lane.due is not None:
                with self.session.deadline():
                    lane.show(lane.due)
                lane.due = None

    def mean_gradients(self) -> None:
        """Let every ``.grad`` hold its mean over the workers. Collective; waits."""
        self.check_usable()
        tensors = {name: one.tensor for name, one in self._trained.items()}
        for names in _together({name: tensor.numel() for name, tensor in tensors.items()}):
            grads = [(torch.zeros_like(tensors[name]) if (grad := self._trained[name].gradient()) is None else grad)
                     for name in names]
            mean = self.allreduce(torch.cat([grad.reshape(-1).float().cpu() for grad in grads])) / self.num_workers
            for name, grad, part in zip(names, grads, mean.split([grad.numel() for grad in grads])):
                tensors[name].grad = grad.copy_(part.view(grad.shape))

    # -- to save it --------------------------------------------------------------------------------------------

    def state(self) -> Dict[str, Optional[Saved]]:
        """What this worker and, on worker 0, the servers know: arrays by name, and JSON. Collective; waits."""
        self._check_begun("state")
        self._idle()
        arrays, meta = saving.worker_state(self.session)
        arrays.update({f"aux/{name}": _array(buffer) for name, buffer in self._statistics()})
        asks = self.rank == 0 or self.session.wire.state_is_shared
        servers = saving.server_state(self.session, self.session.wire.export_state()) if asks else None
        return {"worker": (arrays, meta), "servers": servers}

    def load_state(self, worker: Saved, servers: Optional[Saved]) -> None:
        """Go on from what `state` gave: the model now, all else with the first step. `servers` count on worker 0."""
        if self.lanes:
            raise ConfigError("load_state_dict after the first step; make a new store and a new optimizer to go back")
        if worker[1]["store"] != self.type:
            raise ConfigError(f"the saved state is of a `{worker[1]['store']}` store, this one is `{self.type}`")
        saving.check_form(worker, "lr_local")
        self._saved, self._saved_servers = worker, servers
        self.session.resume(worker[1]["iteration"], worker[1]["lr"], worker[1]["lr_local"])
        for prefix, names in (("local", self._parameters), ("aux", dict(self._statistics()))):
            for name in names:
                if f"{prefix}/{name}" not in worker[0]:
                    raise ConfigError(f"no array `{prefix}/{name}` in the saved state; it belongs to another model")
                self._set(name, torch.from_numpy(worker[0][f"{prefix}/{name}"]))

    # -- parts of the above ------------------------------------------------------------------------------------

    def _statistics(self) -> List[Tuple[str, torch.Tensor]]:
        """Buffers of real numbers."""
        return [(name, tensor) for name, tensor in self._tensors.items()
                if not isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point()]

    def _idle(self) -> None:
        """Have nothing in flight; in an asynchronous job no worker has, so that all see the same global weights."""
        self.wait()
        if self.session.method.asynchronous:
            self.barrier()

    def check_usable(self) -> None:
        """StoreClosedError after `close`."""
        if self._closed:
            raise StoreClosedError(f"the `{self.type}` store of worker {self.rank} is closed")

    def _check_begun(self, what: str) -> None:
        self.check_usable()
        if not self.lanes:
            raise ConfigError(f"{what} before the first step: there is no state yet")


def _array(tensor: torch.Tensor) -> np.ndarray:
    """A copy, in single precision where NumPy does not know the type."""
    known = tensor.detach().float() if tensor.dtype is torch.bfloat16 else tensor.detach()
    return np.array(known.cpu().numpy())


def _together(sizes: Mapping[str, int]) -> Iterator[List[str]]:
    """Names whose tensors travel in one sum."""
    names: List[str] = []
    floats = 0
    for name, size in sizes.items():
        if names and floats + size > AT_ONCE:
            yield names
            names, floats = [], 0
        names.append(name)
        floats += size
    if names:
        yield names
