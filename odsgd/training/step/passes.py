"""What computes an iteration: the network, perhaps with bars on a timeline, or an accelerator that only takes time.

In half precision (``--dtype float16``) are weights, gradients, and what the network computes with them. The store has
the same weights in single precision, and updates those. Gradients are divided by loss scale and batch size in single
precision, too. The loss is computed in it, since its sum over the classes needs the range.
"""
import contextlib
import importlib
from typing import Any, List, Sequence, Tuple

from kvstore.engine._mxnet import mx
from kvstore.tracing import recorder
from odsgd.config.train import TrainConfig
from odsgd.config.train_options import Compute
from odsgd.training.step.emulated import Emulated

amp: Any = importlib.import_module(f"{mx.__name__}.contrib.amp")


class BatchResult(mx.gluon.HybridBlock):
    """(sum of the losses, right answers) of one device's part of a batch, as one array: one read instead of two."""

    def hybrid_forward(self, F: Any, loss: Any, output: Any, label: Any) -> Any:
        """Outside autograd.record: it needs no gradient."""
        return F.concat(F.sum(loss), F.sum(F.argmax(output, axis=1) == label), dim=0)


class NetworkPasses:
    """Forward and backward of `net` on every device."""

    warnings: Sequence[str] = ()

    def __init__(self, config: TrainConfig, net: Any, trainer: Any) -> None:
        self._net, self._trainer, self._half = net, trainer, config.dtype == "float16"
        if self._half:  # a dynamic loss scale, as `amp.init_trainer` makes it
            trainer._amp_original_scale = trainer._scale
            trainer._amp_loss_scaler = amp.loss_scaler.LossScaler()
        self.loss, self._result = mx.gluon.loss.SoftmaxCrossEntropyLoss(), BatchResult()
        for block in (self.loss, self._result):
            block.hybridize(config.hybridize)

    def train(self, xs: List[Any], ys: List[Any]) -> List[Any]:
        """Queue forward and backward; the result of each device's part of the batch."""
        outputs, losses = self._queue(xs, ys)
        return [self._result(loss, output, y) for loss, output, y in zip(losses, outputs, ys)]

    def _queue(self, xs: List[Any], ys: List[Any]) -> Tuple[List[Any], List[Any]]:
        """Queue both; outputs and losses."""
        with mx.autograd.record():
            outputs = [self._forward(x) for x in xs]
            losses = [self.loss(output, y) for output, y in zip(outputs, ys)]
            with amp.scale_loss(losses, self._trainer) if self._half else contextlib.nullcontext(losses) as scaled:
                mx.autograd.backward(scaled)
        return outputs, losses

    def _forward(self, x: Any) -> Any:
        """The network's output for an input in single precision, in single precision."""
        return self._net(x.astype("float16")).astype("float32") if self._half else self._net(x)

    def test(self, xs: List[Any], ys: List[Any]) -> List[Any]:
        """Queue only the forward pass; the same results."""
        outputs = [self._forward(x) for x in xs]
        return [self._result(self.loss(output, y), output, y) for output, y in zip(outputs, ys)]


class RecordedPasses(NetworkPasses):
    """With bars of both passes on the timeline: from the weights of the first layer with a gradient, which are read
    first, to its gradient, which is written last."""

    def __init__(self, config: TrainConfig, net: Any, trainer: Any, on: recorder.Recorder) -> None:
        super().__init__(config, net, trainer)
        self._on = on
        self._first = next(one for one in net.collect_params().values() if one.grad_req != "null")

    def _queue(self, xs: List[Any], ys: List[Any]) -> Tuple[List[Any], List[Any]]:
        began = self._on.moment(self._first.list_data())
        outputs, losses = super()._queue(xs, ys)
        self._on.passes(began, losses, self._first.list_grad())
        return outputs, losses


class EmulatedPasses(NetworkPasses):
    """Only time passes. Gradients keep the values of the first batch; there is no data, and no result."""

    def __init__(self, config: TrainConfig, net: Any, trainer: Any, compute: Compute, data: Any, rank: int) -> None:
        super().__init__(config, net, trainer)
        super().train(*next(iter(data.train(0))))
        self._emulated = Emulated(net.collect_params().values(), compute.seconds, compute.spread,
                                  seed=[config.seed, rank])
        self.warnings = [f"forward and backward are emulated, {compute} per iteration: speeds count, and nothing is "
                         "learned, evaluated or kept"]

    def train(self, xs: List[Any], ys: List[Any]) -> List[Any]:
        return [mx.nd.tile(through, 2) for through in self._emulated.iteration()]


def passes_for(config: TrainConfig, net: Any, trainer: Any, data: Any, rank: int) -> NetworkPasses:
    """The passes of this run."""
    if config.emulate_compute is not None:
        return EmulatedPasses(config, net, trainer, config.emulate_compute, data, rank)
    if recorder.on is not None:
        return RecordedPasses(config, net, trainer, recorder.on)
    return NetworkPasses(config, net, trainer)
