"""Between the devices' arrays and a bucket's flat one: gather gradients, scatter weights.

One call of an MXNet operator per bucket and device, whatever the number of parameters. That operator is
`amp_multicast`, which copies a list of arrays into a list of arrays; `concat` and `split` do the same some twenty times
slower on a CPU. It also understands arrays that oneDNN keeps in a layout of its own, which a plain memory copy would
scramble.
"""
from typing import Dict, List, Sequence

from . import trace
from ._mxnet import NDArray, mx
from .buckets import WIRE_DTYPE, Bucket, Segment


def wire_context(devices: Sequence[mx.Context]) -> mx.Context:
    """Where flat arrays live: CPU memory, page-locked if GPUs copy from and to it."""
    return mx.cpu_pinned() if any(device.device_type == "gpu" for device in devices) else mx.cpu()


def _copy_together(sources: List[NDArray], targets: List[NDArray]) -> None:
    """Copy each source to its target; all in single precision."""
    mx.nd.amp_multicast(*sources, num_outputs=len(sources), out=targets)


def _copy_one_by_one(sources: List[NDArray], targets: List[NDArray]) -> None:
    """Copy each source to its target, converting half precision, which `amp_multicast` does not know on a CPU."""
    for source, target in zip(sources, targets):
        source.copyto(target)


class Lanes:
    """The devices' side of one bucket.

    `grads` and `weights` come from `views`: one list per device, in the bucket's order. A device that is not the flat
    arrays' own CPU context gets a flat array of its own, so that one transfer crosses between them.
    """

    def __init__(self, bucket: Bucket, devices: Sequence[mx.Context]) -> None:
        self.bucket, self.devices = bucket, list(devices)
        self._copy = _copy_together if bucket.first.dtype == WIRE_DTYPE else _copy_one_by_one
        self.context = wire_context(devices)
        self._on_device = {device: mx.nd.zeros(bucket.size, ctx=device) for device in devices if device != self.context}
        self._staged = [mx.nd.zeros(bucket.size, ctx=self.context) for device in self.devices[1:]]
        self.grad = mx.nd.zeros(bucket.size, ctx=self.context)
        self._views: Dict[int, List[NDArray]] = {}
        self._viewed: List[NDArray] = []  # keeps the arrays of `_views` alive, so that an id means one array

    def gather(self, grads: List[List[NDArray]], scale: float) -> NDArray:
        """The sum over devices, times `scale`, in `self.grad`."""
        for device, sources, target in zip(self.devices, grads, [self.grad, *self._staged]):
            if device in self._on_device:
                self._copy(sources, self._parts(self._on_device[device]))
                self._on_device[device].copyto(target)
            else:
                self._copy(sources, self._parts(target))
        for staged in self._staged:
            mx.nd.elemwise_add(self.grad, staged, out=self.grad)
        if scale != 1:
            mx.nd._internal._mul_scalar(self.grad, scalar=scale, out=self.grad)
        if trace.on is not None:
            trace.on.span("gather", self.bucket, reads=sum(grads, []), writes=[self.grad])
        return self.grad

    def scatter(self, flat: NDArray, weights: List[List[NDArray]]) -> None:
        """Copy `flat` into every device's weights."""
        for device, targets in zip(self.devices, weights):
            source = flat
            if device in self._on_device:
                source = self._on_device[device]
                flat.copyto(source)
            self._copy(self._parts(source), targets)
        if trace.on is not None:
            trace.on.span("scatter", self.bucket, reads=[flat], writes=sum(weights, []))

    def _parts(self, flat: NDArray) -> List[NDArray]:
        """Views of the bucket's segments in `flat`, made once per array."""
        if id(flat) not in self._views:
            self._viewed.append(flat)
            self._views[id(flat)] = [flat[segment.offset:segment.end] for segment in self.bucket.segments]
        return self._views[id(flat)]


def part(array: NDArray, segment: Segment) -> NDArray:
    """A segment of a parameter's array, as a flat view of it."""
    return array.reshape(-1)[segment.start:segment.stop]
