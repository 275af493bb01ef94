"""Between the devices' arrays and a bucket's flat one: gather gradients, scatter weights.

One call of an MXNet operator per bucket and device, whatever the number of parameters. That operator is
`amp_multicast`, which copies a list of arrays into a list of arrays; `concat` and `split` do the same some twenty times
slower on a CPU. It also understands arrays that oneDNN keeps in a layout of its own, which a plain memory copy would
scramble.
"""
import functools
from typing import Any, Callable, List, Optional, Sequence, Set

import numpy as np

from kvstore.engine import engine, on_mxnet
from kvstore.engine._mxnet import NDArray, mx
from kvstore.messages.buckets import WIRE_DTYPE, Bucket, Parameter

FLATS = 8  # flat arrays of a bucket whose copies from or to a device are prepared


def _copy(sources: List[NDArray], targets: List[NDArray]) -> Callable[[], None]:
    """What copies each source to its target, in single precision."""
    return on_mxnet.PreparedOperator("amp_multicast", sources, targets, num_outputs=len(sources))


def _convert(sources: List[NDArray], targets: List[NDArray]) -> Callable[[], None]:
    """The same to or from half precision, which `amp_multicast` does not know on a CPU."""
    def one_by_one() -> None:
        for source, target in zip(sources, targets):
            source.copyto(target)
    return one_by_one


class Keyed:
    """One key as the caller knows it: its arrays, one per device."""

    def __init__(self, parameter: Parameter, weights: List[NDArray]) -> None:
        self.parameter, self.weights = parameter, weights
        self.grads: List[NDArray] = []
        self._dense: List[NDArray] = []

    def dense(self, grads: Sequence[NDArray]) -> List[NDArray]:
        """Row-sparse gradients, with all rows: always in the same arrays."""
        self._dense = self._dense or [mx.nd.zeros(grad.shape, grad.context, grad.dtype) for grad in grads]
        for grad, whole in zip(grads, self._dense):
            grad.tostype("default").copyto(whole)
        return self._dense


class Lane:
    """The way of one bucket between the caller's arrays and the flat ones.

    A device other than the flat arrays' CPU context has a flat array of its own, so that one transfer crosses between
    them. Call `forget` when the caller's arrays are others than in the last iteration.
    """

    def __init__(self, bucket: Bucket, keyed: Sequence[Keyed]) -> None:
        self.bucket, self.keyed = bucket, keyed
        self.devices = [array.context for array in keyed[0].weights]
        self._make = _copy if bucket.first.dtype == WIRE_DTYPE else _convert
        with_gpus = any(device.device_type == "gpu" for device in self.devices)
        self.context = mx.cpu_pinned() if with_gpus else mx.cpu()  # of flat arrays; page-locked if GPUs copy
        self._on_device = {device: mx.nd.zeros(bucket.size, ctx=device) for device in self.devices
                           if device != self.context}
        self._staged = [mx.nd.zeros(bucket.size, ctx=self.context) for _ in self.devices[1:]]
        self.forget()

    @functools.cached_property
    def grad(self) -> NDArray:
        """The flat gradient, where it has no better place."""
        return mx.nd.zeros(self.bucket.size, ctx=self.context)

    def forget(self) -> None:
        self._weights: Optional[List[List[NDArray]]] = None
        self._grads: Optional[List[List[NDArray]]] = None
        self._gathering = [engine.CachedById(lambda flat, grads: self._make(grads, self._parts(flat)), FLATS)
                           for _ in self.devices]
        self._scattering = [engine.CachedById(lambda flat, weights: self._make(self._parts(flat), weights), FLATS)
                            for _ in self.devices]

    def keys(self) -> Set[Any]:
        return {one.parameter.key for one in self.keyed}

    def weights(self) -> NDArray:
        """A flat array of what the first device's parameters hold now."""
        parts = self._views([one.weights for one in self.keyed])[0]
        flat = mx.nd.zeros(self.bucket.size, ctx=parts[0].context)
        self._make(parts, self._parts(flat))()
        return flat.as_in_context(self.context)

    def take(self, scale: float, room: Optional[NDArray] = None) -> NDArray:
        """The gradients that were handed in, in `room` if there is one."""
        if self._grads is None:
            self._grads = self._views([one.grads for one in self.keyed])
        return self.gather(self._grads, scale, self.grad if room is None else room)

    def nothing(self, room: Optional[NDArray] = None) -> NDArray:
        """No gradient at all, in `room` if there is one."""
        out = self.grad if room is None else room
        out[:] = 0
        return out

    def show(self, flat: NDArray) -> None:
        if self._weights is None:
            self._weights = self._views([one.weights for one in self.keyed])
        self.scatter(flat, self._weights)

    def gather(self, grads: List[List[NDArray]], scale: float, out: NDArray) -> NDArray:
        """The sum over devices, times `scale`, in `out`, which the caller keeps alive."""
        for number, (device, target) in enumerate(zip(self.devices, [out, *self._staged])):
            flat = self._on_device.get(device, target)
            self._gathering[number].of(flat, grads[number])()
            if flat is not target:
                flat.copyto(target)
        if self._staged or scale != 1:
            self._sum_up(scale, out)
        return out

    def _sum_up(self, scale: float, out: NDArray) -> None:
        def add() -> None:
            total = engine.view(out)
            with np.errstate(all="ignore"):  # a run may diverge
                for staged in self._staged:
                    total += engine.view(staged)
                if scale != 1:
                    total *= np.float32(scale)

        engine.push(add, self._staged, [out])

    def scatter(self, flat: NDArray, weights: List[List[NDArray]]) -> None:
        for number, device in enumerate(self.devices):
            source = self._on_device.get(device, flat)
            if source is not flat:
                flat.copyto(source)
            self._scattering[number].of(source, weights[number])()

    def _parts(self, flat: NDArray) -> List[NDArray]:
        return [flat[segment.offset:segment.end] for segment in self.bucket.segments]

    def _views(self, arrays: Sequence[List[NDArray]]) -> List[List[NDArray]]:
        """Per device, the bucket's part of each array, as flat views."""
        return [[one[device].reshape(-1)[segment.start:segment.stop]
                 for one, segment in zip(arrays, self.bucket.segments)] for device in range(len(self.devices))]
