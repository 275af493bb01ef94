"""Between a model's tensors and a bucket's flat array: gradients there, weights back, one copy each way.

A flat array is MXNet's memory. A tensor on the same memory (no copy) is what PyTorch writes to and reads from, on the
thread of the script: nothing of PyTorch's is touched while the script computes. Before that the engine is waited for:
until nothing uses the flat array any more, or until it has been written.
"""
from typing import Dict, List, Optional, Sequence, Tuple

import torch

from kvstore.engine import engine
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import ConfigError
from kvstore.messages.buckets import Bucket, Segment

FLATS = 8  # whose views are kept
LOOKED_AT = 64
"""Elements of a bucket's largest parameter that are compared, since what is written through `.data` has no version."""
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


class Trained:
    """One parameter that a store trains."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.tensor = name, tensor
        self.flat_grad: Optional[torch.Tensor] = None  # while a gradient is gathered that several buckets share
        self.staged: Optional[torch.Tensor] = None     # weights that several buckets bring, where memory is not flat
        self._sent: Optional[Tuple[torch.Tensor, int]] = None  # the gradient, and how often it had been written
        self._version: Optional[int] = None  # how often the weights had been written when the store last did so

    def gradient(self) -> Optional[torch.Tensor]:
        """What is in `.grad`."""
        grad = self.tensor.grad
        if grad is not None and grad.layout is not torch.strided:
            raise ConfigError(f"the gradient of {self.name} is sparse, and a store keeps whole arrays; make its module "
                              "with sparse=False")
        return grad

    def leave(self) -> Optional[torch.Tensor]:
        """The gradient as it leaves."""
        grad = self.gradient()
        self._sent = None if grad is None else (grad, grad._version)
        return grad

    @property
    def changed(self) -> bool:
        """Whether the gradient is another one now than that which left."""
        return self._sent is not None and (self.tensor.grad is not self._sent[0]
                                           or self._sent[0]._version != self._sent[1])

    def hold(self) -> None:
        """The weights are the store's now."""
        self._version = self.tensor._version

    @property
    def written(self) -> bool:
        """Whether something else has written the weights since."""
        return self.tensor._version != self._version

    def forget(self) -> None:
        """The gradient will be another one."""
        self.flat_grad = self._sent = None


class TensorLane:
    """The way of one bucket between tensors and flat arrays."""

    context = mx.cpu()

    def __init__(self, bucket: Bucket, trained: Dict[str, Trained]) -> None:
        self.bucket = bucket
        self.parts = [(segment, trained[segment.parameter.key]) for segment in bucket.segments]
        flat = [part for part in self.parts if part[1].tensor.is_contiguous()]
        self._largest = max(flat, key=lambda part: part[0].stop - part[0].start, default=None)
        self._sample: Optional[torch.Tensor] = None
        self.w: Optional[NDArray] = None
        """The weights of the next iteration, once they are asked for."""
        self.due: Optional[NDArray] = None
        """The same from the end of the iteration until the parameters hold them."""
        self._own: List[NDArray] = []  # flat gradients, in turn, where they have no better place
        self._views = engine.ById(self._tensors, FLATS)

    def weights(self) -> NDArray:
        """A new flat array of what the parameters hold now."""
        flat = mx.nd.zeros(self.bucket.size)
        engine.wait_to_write(flat)
        for view, (segment, one) in zip(self._views.of(flat), self.parts):
            view.copy_(_part(one.tensor.detach(), segment))
        return flat

    def gather(self, room: Optional[NDArray], scale: float = 1.0) -> NDArray:
        """The gradients times `scale` (0: no gradient at all), in `room` if there is one. Waits for what has used the
        array before.
        """
        flat = self._next() if room is None else room
        engine.wait_to_write(flat)
        with torch.inference_mode(False), torch.no_grad():
            for view, (segment, one) in zip(self._views.of(flat), self.parts):
                grad = one.leave()
                if grad is None or not scale:
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
            for view, (segment, one) in zip(self._views.of(flat), self.parts):
                if _whole(segment):
                    one.tensor.copy_(view)
                elif one.tensor.is_contiguous():
                    one.tensor.view(-1)[segment.start:segment.stop].copy_(view)
                else:
                    self._stage(one, segment, view)
        self.hold()

    def hold(self) -> None:
        """The parameters hold the store's weights now."""
        for _, one in self.parts:
            one.hold()
        sample = self._look()
        self._sample = None if sample is None else sample.clone()

    def written(self) -> Optional[str]:
        """The name of a parameter that something else has written since."""
        for _, one in self.parts:
            if one.written:
                return one.name
        sample = self._look()
        if self._largest is None or sample is None or self._sample is None or torch.equal(sample, self._sample):
            return None
        return self._largest[1].name

    def holds(self, flat: NDArray) -> bool:
        """Whether the parameters hold `flat`, whoever has written them."""
        flat.wait_to_read()
        return all(torch.equal(_part(one.tensor.detach(), segment), view.to(one.tensor))
                   for view, (segment, one) in zip(self._views.of(flat), self.parts))

    def _look(self) -> Optional[torch.Tensor]:
        """A few elements of the largest parameter, as bits: what is not a number equals itself."""
        if self._largest is None:
            return None
        segment, one = self._largest
        step = -(-(segment.stop - segment.start) // LOOKED_AT)
        whole = one.tensor.detach().view(BITS[one.tensor.element_size()])
        return whole.view(-1)[segment.start:segment.stop:step] if whole.is_contiguous() else None

    def _stage(self, one: Trained, segment: Segment, view: torch.Tensor) -> None:
        """A part of a parameter whose elements lie in another order (channels_last)."""
        if one.staged is None:
            one.staged = one.tensor.detach().reshape(-1).clone()
        one.staged[segment.start:segment.stop].copy_(view)
        one.tensor.copy_(one.staged.view(one.tensor.shape))

    def _next(self) -> NDArray:
        """The own flat array that has not been used for longer: the last one may still be on its way."""
        self._own.append(mx.nd.zeros(self.bucket.size) if len(self._own) < 2 else self._own.pop(0))
        return self._own[-1]

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
