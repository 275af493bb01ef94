"""Between a model's tensors and a bucket's flat array: gradients there, weights back, one copy each way.

PyTorch reads and writes a flat array through a tensor on the same memory, only on the script's thread. Before that the
script waits for the engine: until nothing uses the flat array any more, or until it is written.
"""
import contextlib
import time
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import numpy as np
import torch

from kvstore.engine import engine
from kvstore.engine.engine import NDArray
from kvstore.errors import ConfigError, ProtocolError
from kvstore.messages.buckets import Bucket, Parameter, Segment

FLATS = 8  # flat arrays of a bucket whose views are kept
SAMPLED = 16
"""Elements of each parameter that are compared: PyTorch counts no version where `.data` is written."""
FLOAT_NBYTES = 4
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}

_waited_s = 0.0


def waited_s() -> float:
    """Seconds that this process has waited for weights. On any thread."""
    return round(_waited_s, 3)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Inside, the script has no weights to compute on."""
    global _waited_s
    began = time.monotonic()
    yield
    _waited_s += time.monotonic() - began


def held(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor: its shard, where ``fully_shard`` has divided it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Trained:
    """One parameter that a store trains, or this process's shard of it."""

    def __init__(self, described: Parameter, parameter: torch.Tensor) -> None:
        self.described, self.name, self.parameter = described, described.name, parameter
        self.flat_grad: Optional[torch.Tensor] = None  # while a gradient is gathered that several buckets share
        self.staged: Optional[torch.Tensor] = None     # weights that several buckets bring, where memory is not flat
        self._noted: Optional[Tuple[torch.Tensor, int]] = None  # the gradient, and how often it had been written
        self._sent: Optional[Tuple[torch.Tensor, int]] = None  # the same when it left
        self._version: Optional[int] = None  # how often the weights had been written when the store last did so

    @property
    def tensor(self) -> torch.Tensor:
        return held(self.parameter)

    def gradient(self) -> Optional[torch.Tensor]:
        grad = self.parameter.grad
        if grad is not None and grad.layout is not torch.strided:
            raise ConfigError(f"the gradient of {self.name} is sparse, and a store keeps whole arrays; make its module "
                              "with sparse=False")
        return grad

    def note(self, leaves: bool) -> None:
        """The gradient has appeared. `leaves`: as soon as it may, so nobody may change it from now on."""
        grad = self.parameter.grad
        self._noted = (grad, grad._version) if leaves and grad is not None else None

    def leave(self) -> Optional[torch.Tensor]:
        self._check(self._noted)
        grad = self.gradient()
        self._sent = None if grad is None else (grad, grad._version)
        return None if grad is None else held(grad)

    def end(self) -> None:
        """The iteration ends; ProtocolError if the gradient has changed since it left."""
        self._check(self._sent)
        self.flat_grad = self._sent = self._noted = None

    def _check(self, before: Optional[Tuple[torch.Tensor, int]]) -> None:
        if before is not None and (self.parameter.grad is not before[0] or before[0]._version != before[1]):
            raise ProtocolError(f"the gradient of {self.name} was changed between backward() and step(), when it may "
                                "have left already; to add gradients up, run backward() under `with "
                                "optimizer.no_sync():`; to clip them, do so, too, then call "
                                "optimizer.synchronize_grads(), and clip then; if DistributedDataParallel is around "
                                "the model, give od.Optimizer that (docs/how-to/pytorch.md)")

    def hold(self) -> None:
        """The weights are the store's now."""
        self._version = self._writes()

    @property
    def written(self) -> bool:
        """Whether something else has written the weights since."""
        return self._writes() != self._version

    def _writes(self) -> int:
        return int(self.parameter._version + self.tensor._version)  # a DTensor and its shard count apart


class Sample:
    """A few elements of every parameter of a bucket, as bits: what is not a number equals itself."""

    def __init__(self, parts: Sequence[Tuple[Segment, Trained]]) -> None:
        self._parts = parts
        self._addresses: List[int] = []            # of the tensors' memory when `_views` were made
        self._strides: List[Tuple[int, ...]] = []  # and in what order it was
        self._views: List[List[torch.Tensor]] = []  # on that memory, by device
        self._names: List[List[str]] = []           # of the parameter that each element belongs to, by device
        self._taken: List[torch.Tensor] = []

    def take(self) -> None:
        self._taken = self._look()

    def changed(self) -> Optional[str]:
        """The name of a parameter that has changed since the sample was taken."""
        there = self._look()
        for names, taken, now in zip(self._names, self._taken, there):
            if not torch.equal(taken, now):
                return names[int(torch.nonzero(taken != now)[0])]
        return None

    def _look(self) -> List[torch.Tensor]:
        addresses = [one.tensor.data_ptr() for _, one in self._parts]
        if addresses != self._addresses:
            strides = [one.tensor.stride() for _, one in self._parts]
            if strides != self._strides:
                self._taken = []  # other elements than those of the new views
            self._addresses, self._strides = addresses, strides
            self._make_views()
        return [torch.cat(views) for views in self._views]

    def _make_views(self) -> None:
        views: Dict[torch.device, List[torch.Tensor]] = {}
        names: Dict[torch.device, List[str]] = {}
        with torch.inference_mode(False):
            for segment, one in self._parts:
                view = _elements(one.tensor.detach(), segment)
                views.setdefault(view.device, []).append(view)
                names.setdefault(view.device, []).extend([one.name] * len(view))
        self._views, self._names = list(views.values()), list(names.values())


class TensorLane:
    """The way of one bucket between tensors and flat arrays."""

    def __init__(self, bucket: Bucket, trained: Dict[str, Trained], context: Any) -> None:
        self.bucket, self.context = bucket, context
        self.parts = [(segment, trained[segment.parameter.key]) for segment in bucket.segments]
        self._sample = Sample(self.parts)
        self.rest: Optional[np.ndarray] = None
        """Where the method takes weights: what parameters in half precision rounded off those shown last."""
        self.due: Optional[NDArray] = None
        """The weights of the next iteration, from the end of this one until the parameters hold them."""
        self._own = engine.InTurn(bucket.size, context, 2)
        """Flat gradients, if the transport gives no room: the last one may still be on its way."""
        self._views = engine.CachedById(FLATS)

    def weights(self, anew: bool = True) -> NDArray:
        """A flat array of what the parameters hold now; `anew`: one that nobody writes again."""
        flat = engine.zeros(self.bucket.size, self.context) if anew else self._own.next()
        engine.wait_to_write(flat)
        for view, (segment, one) in zip(self._views.of(flat, self._tensors), self.parts):
            view.copy_(_part(one.tensor.detach(), segment))
        return flat

    def gather(self, room: Optional[NDArray], scale: float = 1.0) -> NDArray:
        """The gradients times `scale` (0: no gradient at all), in `room` if there is one. Waits for what has used the
        array before.
        """
        flat = self._own.next() if room is None else room
        engine.wait_to_write(flat)
        with torch.inference_mode(False), torch.no_grad():
            for view, (segment, one) in zip(self._views.of(flat, self._tensors), self.parts):
                grad = one.leave() if scale else None
                if grad is None:
                    view.zero_()
                    continue
                if _whole(segment):
                    view.copy_(grad)
                else:
                    one.flat_grad = grad.reshape(-1) if one.flat_grad is None else one.flat_grad
                    view.copy_(one.flat_grad[segment.start:segment.stop])
                if scale != 1:
                    view.mul_(scale)
        return flat

    def show(self, flat: NDArray) -> None:
        """Let the parameters hold `flat`. Waits until it is written."""
        flat.wait_to_read()
        with torch.inference_mode(False), torch.no_grad():
            for view, (segment, one) in zip(self._views.of(flat, self._tensors), self.parts):
                if _whole(segment):
                    one.tensor.copy_(view)
                elif one.tensor.is_contiguous():
                    one.tensor.view(-1)[segment.start:segment.stop].copy_(view)
                else:
                    self._stage(one, segment, view)
        self.hold()

    def keep_rest(self, flat: NDArray) -> None:
        """After `show`: keep what parameters in half precision round off `flat`, which is no step of the worker."""
        half = any(one.tensor.element_size() < FLOAT_NBYTES for _, one in self.parts)
        self.rest = engine.memory(flat) - engine.memory(self.weights(anew=False)) if half else None

    def add_rest(self, flat: NDArray) -> None:
        if self.rest is not None:
            engine.memory(flat)[:] += self.rest

    def hold(self) -> None:
        for _, one in self.parts:
            one.hold()
        self._sample.take()

    def written(self) -> Optional[str]:
        """The name of a parameter that something else has written since."""
        for _, one in self.parts:
            if one.written:
                return one.name
        return self._sample.changed()

    def other_than(self, flat: NDArray) -> Optional[str]:
        """The name of a parameter that does not hold its part of `flat`, no matter who has written it."""
        flat.wait_to_read()
        return next((one.name for view, (segment, one) in zip(self._views.of(flat, self._tensors), self.parts)
                     if not torch.allclose(_part(one.tensor.detach(), segment), view.to(one.tensor), 0, 0, True)), None)

    def _stage(self, one: Trained, segment: Segment, view: torch.Tensor) -> None:
        """A part of a parameter whose elements lie in another order (channels_last)."""
        if one.staged is None:
            one.staged = one.tensor.detach().reshape(-1).clone()
        one.staged[segment.start:segment.stop].copy_(view)
        one.tensor.copy_(one.staged.view(one.tensor.shape))

    def _tensors(self, flat: NDArray) -> Sequence[torch.Tensor]:
        """Tensors on the memory of `flat`, one for each segment."""
        with torch.inference_mode(False):
            whole = torch.from_numpy(engine.view(flat))
            return [_shaped(whole[segment.offset:segment.end], segment) for segment in self.bucket.segments]


def _whole(segment: Segment) -> bool:
    return segment.stop - segment.start == segment.parameter.size


def _shaped(flat: torch.Tensor, segment: Segment) -> torch.Tensor:
    return flat.view(segment.parameter.shape) if _whole(segment) else flat


def _part(tensor: torch.Tensor, segment: Segment) -> torch.Tensor:
    return tensor if _whole(segment) else tensor.reshape(-1)[segment.start:segment.stop]


def _elements(tensor: torch.Tensor, segment: Segment) -> torch.Tensor:
    """At most `SAMPLED` elements of a segment in place, as integers; none of a tensor whose memory has gaps."""
    bits, step = tensor.view(BITS[tensor.element_size()]), -(-(segment.stop - segment.start) // SAMPLED)
    if bits.is_contiguous():
        return bits.view(-1)[segment.start:segment.stop:step]
    dense = 1 + sum((size - 1) * stride for size, stride in zip(bits.shape, bits.stride())) == bits.numel()
    return bits.as_strided((bits.numel(),), (1,))[::step] if dense and _whole(segment) else bits.new_empty(0)


class Arrivals:
    """Which buckets may leave: those whose gradients are all there, each after all buckets before it."""

    def __init__(self, lanes: Sequence[TensorLane]) -> None:
        self._lanes = lanes
        self.lanes_of: Dict[str, List[TensorLane]] = {}  # by parameter
        for lane in lanes:
            for segment in lane.bucket.segments:
                self.lanes_of.setdefault(segment.parameter.name, []).append(lane)
        self.begin()

    def begin(self) -> None:
        """An iteration begins: nothing is there."""
        self._missing = {lane: len(lane.parts) for lane in self._lanes}
        self._there: Set[str] = set()
        self.left = 0
        """How many buckets have left."""

    def note(self, name: str) -> Iterator[TensorLane]:
        """A gradient is there; the buckets that may leave now. ProtocolError if it was there before."""
        if name in self._there:
            raise ProtocolError(f"a second gradient of {name} appeared before optimizer.step(), when the first may "
                                "have left already; let all backward passes of an iteration but the last run under "
                                "`with optimizer.no_sync():`. After a backward pass that failed call zero_grad(); if "
                                "gradients had left by then, only a new store can go on")
        self._there.add(name)
        for lane in self.lanes_of[name]:
            self._missing[lane] -= 1
        for lane in self.rest():
            if self._missing[lane]:
                break
            yield lane

    def rest(self) -> Iterator[TensorLane]:
        while self.left < len(self._lanes):
            yield self._lanes[self.left]
            self.left += 1  # only once it has been sent
