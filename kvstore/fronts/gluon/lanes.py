"""Between the devices' arrays and a bucket's flat one: gather gradients, scatter weights.

One call of an MXNet operator per bucket and device, whatever the number of parameters. That operator is
`amp_multicast`, which copies a list of arrays into a list of arrays; `concat` and `split` do the same some twenty times
slower on a CPU. It also understands arrays that oneDNN keeps in a layout of its own, which a plain memory copy would
scramble.
"""
import functools
import operator
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from kvstore.engine import engine, on_mxnet
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import ConfigError
from kvstore.messages.buckets import WIRE_DTYPE, Bucket, Parameter, Segment

FLATS = 8  # flat arrays of a bucket whose copies from or to a device are prepared

Layer = List[Tuple[Segment, NDArray]]
"""A bucket's part of an array of each key, as flat views; one device's, as a rule."""


def _copy_each(sources: List[NDArray], targets: List[NDArray]) -> None:
    """For another device, or half precision, which `amp_multicast` does not know on a CPU."""
    for source, target in zip(sources, targets):
        source.copyto(target)


def _same(ours: Sequence[NDArray], theirs: Sequence[NDArray]) -> bool:
    return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))


class Keyed:
    """One key as the caller knows it: its arrays, one per device."""

    def __init__(self, parameter: Parameter, weights: List[NDArray]) -> None:
        self.parameter, self.weights = parameter, weights
        self.own: Optional[NDArray] = None  # the one of `weights` that no script can write
        self.grads: List[NDArray] = []
        self._dense: List[NDArray] = []

    def use(self, grads: Sequence[NDArray], weights: Sequence[NDArray]) -> bool:
        """Take the caller's arrays; whether they have changed. ConfigError if they cannot be this parameter's."""
        if _same(self.grads, grads) and _same(self.weights, weights):
            return False
        for one, what in [*((one, "gradient") for one in grads), *((one, "array for the weights") for one in weights)]:
            if one.stype != "default":
                raise ConfigError(f"the {what} of {self.parameter.name} is {one.stype}; give pushpull a dense `out`")
            if one.size != self.parameter.size:
                raise ConfigError(f"the {what} of {self.parameter.name} has the shape {one.shape}, expected "
                                  f"{self.weights[0].shape}")
            if self.parameter.dtype == WIRE_DTYPE != one.dtype:
                raise ConfigError(f"the {what} of {self.parameter.name} is {np.dtype(one.dtype)}, and was "
                                  f"{WIRE_DTYPE} before; after you cast a network, make a new store and a new trainer")
        self.grads, self.weights = list(grads), list(weights)
        return True

    @property
    def row_sparse(self) -> bool:
        """Whether its last gradients were."""
        return bool(self._dense) and _same(self.grads, self._dense)

    def dense(self, grads: Sequence[NDArray]) -> List[NDArray]:
        """Row-sparse gradients, with all rows: always in the same arrays."""
        if [whole.context for whole in self._dense] != [grad.context for grad in grads]:
            self._dense = [mx.nd.zeros(grad.shape, grad.context, grad.dtype) for grad in grads]
        for grad, whole in zip(grads, self._dense):
            grad.tostype("default").copyto(whole)
        return self._dense


class Lane:
    """The way of one bucket between the caller's arrays and the flat ones.

    A device other than the flat arrays' CPU context has a flat array of its own, so that one transfer crosses between
    them. Call `forget` when the caller's arrays are others than in the last iteration; they may lie anywhere.
    """

    def __init__(self, bucket: Bucket, keyed: Sequence[Keyed]) -> None:
        self.bucket, self.keyed = bucket, keyed
        with_gpus = any(array.context.device_type == "gpu" for array in keyed[0].weights)
        self.context = mx.cpu_pinned() if with_gpus else mx.cpu()  # of flat arrays; page-locked if GPUs copy
        self._on_device: Dict[Any, NDArray] = {}
        self.forget()

    @functools.cached_property
    def grad(self) -> NDArray:
        """The flat gradient, where it has no better place."""
        return mx.nd.zeros(self.bucket.size, ctx=self.context)

    def forget(self) -> None:
        self.grads: List[Layer] = []  # that were handed in, by device, once they are gathered
        self.shown_in: List[Layer] = []  # the weights likewise

    def weights(self) -> NDArray:
        """A flat array of what the first device's parameters hold now."""
        flat = mx.nd.zeros(self.bucket.size, ctx=self.context)
        self._gatherer(flat, self._layers([one.weights for one in self.keyed])[0])()
        return flat

    def gather(self, scale: float, out: NDArray) -> None:
        """The gradients that were handed in, their sum over devices, times `scale`, in `out`."""
        if not self.grads:
            self.grads = self._layers([one.grads for one in self.keyed])
            self._gathering = [engine.CachedById(FLATS) for _ in self.grads]
            self._staged = [mx.nd.zeros(self.bucket.size, ctx=self.context) for _ in self.grads[1:]]
        for gathering, layer, target in zip(self._gathering, self.grads, [out, *self._staged]):
            gathering.of(target, self._gatherer, layer)()
        if self._staged or scale != 1:
            self._sum_up(scale, out)

    def show(self, flat: NDArray) -> None:
        """Let the parameters hold `flat`."""
        if not self.shown_in:
            self.shown_in = self._layers([one.weights for one in self.keyed])
            self._scattering = [engine.CachedById(FLATS) for _ in self.shown_in]
        for scattering, layer in zip(self._scattering, self.shown_in):
            scattering.of(flat, self._scatterer, layer)()

    def show_one(self, flat: NDArray, key: Any, out: NDArray) -> None:
        """The weights in `flat` of one key, in an array of its shape."""
        whole = out.reshape(-1)
        self._scatterer(flat, [(segment, whole[segment.start:segment.stop]) for segment in self.bucket.segments
                               if segment.parameter.key == key])()

    def _sum_up(self, scale: float, out: NDArray) -> None:
        others = self._staged  # it may hold newer arrays when this runs

        def add() -> None:
            total = engine.view(out)
            with np.errstate(all="ignore"):  # a run may diverge
                for staged in others:
                    total += engine.view(staged)
                if scale != 1:
                    total *= np.float32(scale)

        engine.push(add, others, [out])

    def _gatherer(self, flat: NDArray, layer: Layer) -> Callable[[], None]:
        # Elements of `flat` that the layer has no array for stay as they are.
        near = self._near(flat, layer) if len(layer) == len(self.bucket.segments) else flat
        copy = self._copier([array for _, array in layer], self._parts(near, layer))

        def gather() -> None:
            copy()
            near.copyto(flat)
        return copy if near is flat else gather

    def _scatterer(self, flat: NDArray, layer: Layer) -> Callable[[], None]:
        near = self._near(flat, layer)
        copy = self._copier(self._parts(near, layer), [array for _, array in layer])

        def scatter() -> None:
            flat.copyto(near)
            copy()
        return copy if near is flat else scatter

    def _near(self, flat: NDArray, layer: Layer) -> NDArray:
        """A flat array on the device of these arrays, or `flat` where they lie on several."""
        device, *others = {array.context for _, array in layer}
        if others or device == self.context:
            return flat
        if device not in self._on_device:
            self._on_device[device] = mx.nd.zeros(self.bucket.size, ctx=device)
        return self._on_device[device]

    def _copier(self, sources: List[NDArray], targets: List[NDArray]) -> Callable[[], None]:
        at_once = self.bucket.first.dtype == WIRE_DTYPE and len({array.context for array in (*sources, *targets)}) == 1
        return on_mxnet.PreparedCopy(sources, targets) if at_once else functools.partial(_copy_each, sources, targets)

    @staticmethod
    def _parts(flat: NDArray, layer: Layer) -> List[NDArray]:
        return [flat[segment.offset:segment.end] for segment, _ in layer]

    def _layers(self, arrays: Sequence[List[NDArray]]) -> List[Layer]:
        """A layer of the first array of each key, one of the second array of each key that has one, and so on."""
        return [[(segment, one[number].reshape(-1)[segment.start:segment.stop])
                 for one, segment in zip(arrays, self.bucket.segments) if number < len(one)]
                for number in range(max(map(len, arrays)))]


def put(arrays: Sequence[NDArray], values: Sequence[Any]) -> None:
    with mx.autograd.pause():  # row-sparse weights are sent by the first forward pass that reads them
        for array, value in zip(arrays, values):
            # Not array[:] = value: that fails where oneDNN keeps a weight in a layout of its own.
            (value if isinstance(value, mx.nd.NDArray) else mx.nd.array(value, dtype=array.dtype)).copyto(array)
