"""Between the devices' arrays and a bucket's flat one: gather gradients, scatter weights.

One call of an MXNet operator per bucket and device, whatever the number of parameters. That operator is
`amp_multicast`, which copies a list of arrays into a list of arrays; `concat` and `split` do the same some twenty times
slower on a CPU. It also understands arrays that oneDNN keeps in a layout of its own, which a plain memory copy would
scramble.
"""
from typing import Callable, Dict, List, Sequence, Tuple

import numpy as np

from kvstore.buckets import WIRE_DTYPE, Bucket, Segment
from kvstore.engine import engine
from kvstore.engine._mxnet import NDArray, mx
from kvstore.tracing import recorder as trace


def wire_context(devices: Sequence[mx.Context]) -> mx.Context:
    """Where flat arrays live: CPU memory, page-locked if GPUs copy from and to it."""
    return mx.cpu_pinned() if any(device.device_type == "gpu" for device in devices) else mx.cpu()


def _copy(sources: List[NDArray], targets: List[NDArray]) -> Callable[[], None]:
    """What copies each source to its target, in single precision."""
    return engine.Prepared("amp_multicast", sources, targets, num_outputs=len(sources))


def _convert(sources: List[NDArray], targets: List[NDArray]) -> Callable[[], None]:
    """The same to or from half precision, which `amp_multicast` does not know on a CPU."""
    def one_by_one() -> None:
        for source, target in zip(sources, targets):
            source.copyto(target)
    return one_by_one


class Lanes:
    """The devices' side of one bucket.

    `grads` and `weights` are the bucket's parts of the caller's arrays, one list per device; `forget` when there are
    others. A device that is not the flat arrays' own CPU context gets a flat array of its own, so that one transfer
    crosses between them.
    """

    def __init__(self, bucket: Bucket, devices: Sequence[mx.Context]) -> None:
        self.bucket, self.devices = bucket, list(devices)
        self._make = _copy if bucket.first.dtype == WIRE_DTYPE else _convert
        self.context = wire_context(devices)
        self._on_device = {device: mx.nd.zeros(bucket.size, ctx=device) for device in devices if device != self.context}
        self._staged = [mx.nd.zeros(bucket.size, ctx=self.context) for device in self.devices[1:]]
        self.grad = mx.nd.zeros(bucket.size, ctx=self.context)
        self._gathering: Dict[int, Callable[[], None]] = {}               # by device
        self._scattering: Dict[Tuple[int, int], Callable[[], None]] = {}  # by device and flat array
        self._flats: List[NDArray] = []  # keeps those arrays alive, so that an id means one array

    def forget(self) -> None:
        """The caller's arrays are others from now on."""
        self._gathering.clear()
        self._scattering.clear()
        self._flats.clear()

    def gather(self, grads: List[List[NDArray]], scale: float) -> NDArray:
        """The sum over devices, times `scale`, in `self.grad`."""
        for number, (device, target) in enumerate(zip(self.devices, [self.grad, *self._staged])):
            flat = self._on_device.get(device, target)
            if number not in self._gathering:
                self._gathering[number] = self._make(grads[number], self._parts(flat))
            self._gathering[number]()
            if flat is not target:
                flat.copyto(target)
        if self._staged or scale != 1:
            self._sum_up(scale)
        if trace.on is not None:
            trace.on.span("gather", self.bucket, reads=sum(grads, []), writes=[self.grad])
        return self.grad

    def _sum_up(self, scale: float) -> None:
        def add() -> None:
            total = engine.view(self.grad)
            with np.errstate(all="ignore"):  # a run may diverge
                for staged in self._staged:
                    total += engine.view(staged)
                if scale != 1:
                    total *= np.float32(scale)

        engine.push(add, self._staged, [self.grad])

    def flat(self, parts: List[NDArray]) -> NDArray:
        """A flat array of what one device's `parts` hold now."""
        flat = mx.nd.zeros(self.bucket.size, ctx=parts[0].context)
        self._make(parts, self._parts(flat))()
        return flat.as_in_context(self.context)

    def scatter(self, flat: NDArray, weights: List[List[NDArray]]) -> None:
        """Copy `flat` into every device's weights."""
        for number, device in enumerate(self.devices):
            source = self._on_device.get(device, flat)
            if source is not flat:
                flat.copyto(source)
            if (number, id(source)) not in self._scattering:
                self._flats.append(source)
                self._scattering[number, id(source)] = self._make(self._parts(source), weights[number])
            self._scattering[number, id(source)]()
        if trace.on is not None:
            trace.on.span("scatter", self.bucket, reads=[flat], writes=sum(weights, []))

    def _parts(self, flat: NDArray) -> List[NDArray]:
        """Views of the bucket's segments in `flat`."""
        return [flat[segment.offset:segment.end] for segment in self.bucket.segments]


def part(array: NDArray, segment: Segment) -> NDArray:
    """A segment of a parameter's array, as a flat view of it."""
    return array.reshape(-1)[segment.start:segment.stop]
