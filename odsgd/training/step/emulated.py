"""An accelerator that takes time and nothing else, so that few cores can carry the communication of many workers.

    device = Emulated(net.collect_params().values(), seconds=0.2)
    for _ in range(100):
        device.iteration()      in place of record and backward
        trainer.step(batch)

Forward and backward become operations of MXNet's engine that sleep. They wait as a GPU's would. The forward pass of a
layer reads that layer's weights, so it waits for them and for no others. The backward pass writes one gradient after
the other, last layer first, when nobody reads the gradient of the iteration before any more. A layer is one parameter,
or whatever else the caller lists.

The device does one thing at a time. A step starts at the end of the one before, or when its inputs were ready, not when
a thread woke up, so that lateness does not add up. No thread of the engine's is held meanwhile.
"""
import itertools
import math
import queue
import threading
import time
import traceback
from typing import Any, Callable, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from kvstore.engine import engine
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import EXIT_FAILURE, ConfigError
from kvstore.job import ending
from kvstore.tracing import recorder as trace

FORWARD = 1 / 3
"""The forward pass's share of an iteration: the backward pass multiplies twice where it multiplies once."""

STEP_S = 2e-3
"""Neighbouring layers that take less together are one step. Each step costs some 70 us of a core."""

Gradient = Callable[[int, int, np.ndarray], np.ndarray]
"""(iteration, number of the layer, its weights as a flat view) -> its gradient."""


class Emulated:
    """One worker's devices. Where a timeline is recorded the first one, which stands for all, tells it of each step.

    Parameters
    ----------
    layers : Gluon parameters, or pairs (weights, gradient) of arrays, in the order of the forward pass
    seconds : of an iteration, in the mean
    forward : the forward pass's share of it
    spread : sigma of the lognormal distribution of that time, drawn anew in each iteration; the mean stays
    seed : of these draws; a number or several, different on each worker
    gradient : called when a gradient is due, for its values (single precision on the CPU); None: the arrays keep theirs
    """

    def __init__(self, layers: Iterable[Any], seconds: float, spread: float = 0.0, seed: Any = 0,
                 gradient: Optional[Gradient] = None, forward: float = FORWARD) -> None:
        replicas = _by_device(layers)
        sizes = np.array([weight.size for weight, _ in replicas[0]], float)
        self.iterations = 0
        self._factors = factors(spread, seed)
        self._devices = [_Device(pairs, seconds * sizes / sizes.sum(), forward, gradient, None if number else trace.on)
                         for number, pairs in enumerate(replicas)]

    def iteration(self) -> List[NDArray]:
        """Queue a forward and a backward pass; returns at once, for each device an array written when it is through."""
        factor = next(self._factors)
        self.iterations += 1
        if trace.on is not None:
            trace.on.iterations = self.iterations
        return [device.iteration(self.iterations - 1, factor) for device in self._devices]


def factors(spread: float, seed: Any) -> Iterator[float]:
    """Random factors of mean 1; without a spread, ones."""
    random = np.random.RandomState(seed)
    return (math.exp(random.normal(-spread * spread / 2, spread)) if spread else 1.0 for _ in itertools.count())


def _by_device(layers: Iterable[Any]) -> List[List[Tuple[NDArray, NDArray]]]:
    """Per device, the layers that have a gradient."""
    layers = [layer for layer in layers if isinstance(layer, (tuple, list)) or layer.grad_req != "null"]
    if not layers:
        raise ConfigError("nothing to emulate: no layer has a gradient")
    if isinstance(layers[0], (tuple, list)):
        return [[(weight, grad) for weight, grad in layers]]
    for layer in layers:
        for weight in layer.list_data():
            weight._fresh_grad = True  # or the Trainer takes the gradient for an old one
    return [list(pairs) for pairs in zip(*(zip(layer.list_data(), layer.list_grad()) for layer in layers))]


class _Device:
    """One accelerator: its layers, and the tasks that it has been given.

    `durations` : seconds of each layer, forward and backward together
    """

    def __init__(self, layers: List[Tuple[NDArray, NDArray]], durations: np.ndarray, forward: float,
                 gradient: Optional[Gradient], recorder: Optional[trace.Recorder]) -> None:
        self._layers, self._gradient, self._recorder = layers, gradient, recorder
        numbers = list(range(len(layers)))
        self._forward = steps(numbers, forward * durations)
        self._backward = steps(numbers[::-1], (1 - forward) * durations)
        self._asked: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._end_s = 0.0
        threading.Thread(target=self._run, name="odsgd-device", daemon=True).start()

    def iteration(self, number: int, factor: float) -> NDArray:
        for layers, seconds in self._forward:
            self._ask(_Task("forward", number, layers, factor * seconds), [self._layers[k][0] for k in layers], [])
        for layers, seconds in self._backward:
            self._ask(_Task("backward", number, layers, factor * seconds), [self._layers[k][0] for k in layers],
                      [self._layers[k][1] for k in layers])
        through = mx.nd.zeros(1)
        self._ask(_Task("end", number, [], 0.0), [], [through])
        return through

    def _ask(self, task: "_Task", reads: List[NDArray], writes: List[NDArray]) -> None:
        engine.push_async(task.begin, reads, writes)
        self._asked.put(task)

    def _run(self) -> None:
        try:
            while True:
                self._carry_out(self._asked.get())
        except BaseException:
            ending.die(traceback.format_exc(), EXIT_FAILURE)  # on this thread there is no one to catch it

    def _carry_out(self, task: "_Task") -> None:
        task.ready.wait()
        start_s = max(self._end_s, task.ready_s)
        self._end_s = start_s + task.seconds
        time.sleep(max(0.0, self._end_s - time.monotonic()))
        if task.what == "backward" and self._gradient is not None:
            for k in task.layers:
                weight, grad = self._layers[k]
                np.copyto(engine.view(grad), self._gradient(task.iteration, k, engine.view(weight)).reshape(-1))
        task.done()
        if task.layers and self._recorder:
            self._recorder.add("compute", task.what, start_s, self._end_s, iteration=task.iteration, layers=task.layers)


class _Task:
    """A step of one iteration."""

    def __init__(self, what: str, iteration: int, layers: List[int], seconds: float) -> None:
        self.what, self.iteration, self.layers, self.seconds = what, iteration, layers, seconds
        self.ready, self.ready_s = threading.Event(), 0.0
        self.done: engine.Done

    def begin(self, done: engine.Done) -> None:
        """The engine says that its inputs have been written, and its outputs have been read."""
        self.done, self.ready_s = done, time.monotonic()
        self.ready.set()


def steps(order: Sequence[int], seconds: np.ndarray) -> List[Tuple[List[int], float]]:
    """Layers in `order`, put together until each step takes STEP_S; with the seconds of each step."""
    steps: List[Tuple[List[int], float]] = []
    for k in order:
        if steps and (steps[-1][1] < STEP_S or seconds[k] == 0):
            steps[-1] = ([*steps[-1][0], k], steps[-1][1] + seconds[k])
        else:
            steps.append(([k], float(seconds[k])))
    return steps
