"""How long each layer takes, forward and backward, on one worker: a few iterations of its own training.

MXNet's engine says so: an operation that writes a layer's weights runs when the forward pass has read them, and one
that reads its gradient when that is there. Such operations hold the passes up themselves, so other iterations, without
them, say how long the whole takes, and the layers' times are scaled to that.
"""
import itertools
import math
import statistics
from typing import Any, Dict, List, Tuple

from kvstore.engine._mxnet import mx
from kvstore.transports.in_process import Stage
from odsgd.config.train import TrainConfig
from odsgd.lab.instants import Instant
from odsgd.training.loop import Training

ITERATIONS, WARM_UP = 20, 3
LATE_S = 600.0
STEADY = 0.003
"""Times that differ by less than this are called constant."""


class Network:
    """The user's network on one worker, without a job."""

    def __init__(self, config: TrainConfig) -> None:
        stage = Stage(1, timeout_s=config.options.timeout_s)
        self._training = Training(config, stage.worker(0) if config.needs_servers or config.kvstore == "local"
                                  else stage.ring_worker(0))
        self.layers = self._training.trainable
        self._batches = itertools.chain.from_iterable(map(self._training.data.train, itertools.count()))

    def _queue(self, looked_at: bool) -> Tuple[List[Instant], List[Instant]]:
        """Queue an iteration; returns when both passes were through with each layer, or only when it was over."""
        xs, ys = next(self._batches)
        with mx.autograd.record():
            losses = [self._training.passes.loss(self._training.net(x), y) for x, y in zip(xs, ys)]
        forward = [Instant([], layer.list_data()) for layer in self.layers if looked_at]
        mx.autograd.backward(losses)
        looked = self.layers if looked_at else self.layers[:1]
        return forward, [Instant(layer.list_grad()) for layer in looked]

    def times(self, count: int) -> List[float]:
        """Seconds of `count` iterations in a row, each queued while the one before runs."""
        ends = [self._queue(False)[1][0] for _ in range(WARM_UP)]
        for _ in range(count):
            ends[-2].wait(LATE_S)
            ends.append(self._queue(False)[1][0])
        over = [end.wait(LATE_S) for end in ends[WARM_UP - 1:]]
        return [end - begin for begin, end in zip(over, over[1:])]

    def shares(self, count: int) -> List[Tuple[float, float]]:
        """Seconds of each layer, forward and backward; medians."""
        asked = [self._queue(True) for _ in range(2)]
        taken = []
        for _ in range(count):
            asked.append(self._queue(True))  # before the wait, or the device idles and the next first layer pays for it
            taken.append(_of_layers(asked[-3], asked[-2]))
        return [(statistics.median(one[0] for one in layer), statistics.median(one[1] for one in layer))
                for layer in zip(*taken)]


Asked = Tuple[List[Instant], List[Instant]]


def _of_layers(before: Asked, asked: Asked) -> List[Tuple[float, float]]:
    """What each layer took, of an iteration that followed another."""
    begin = max(one.wait(LATE_S) for one in before[1])
    ends = (one.wait(LATE_S) for one in (*asked[0], *reversed(asked[1])))
    over = list(itertools.accumulate([begin, *ends], max))  # so that no layer ends before the one before it
    took = [after - before for before, after in zip(over, over[1:])]
    return list(zip(took[:len(asked[0])], reversed(took[len(asked[0]):])))


def measure(config: TrainConfig) -> Dict[str, Any]:
    """`compute` of the description."""
    if config.emulate_compute is not None:
        return {"iteration": config.emulate_compute.seconds, "draws": _draws(config.emulate_compute.spread)}
    network = Network(config)
    times, shares = network.times(ITERATIONS), network.shares(ITERATIONS // 2)
    scale = statistics.mean(times) / sum(map(sum, shares))
    layers = {layer.name: [scale * seconds for seconds in pair] for layer, pair in zip(network.layers, shares)}
    return {"layers": layers, "draws": _draws(statistics.stdev(map(math.log, times)))}


def _draws(spread: float) -> str:
    return f"lognormal:{spread:.3g}" if spread > STEADY else "constant"
