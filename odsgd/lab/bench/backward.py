"""The emulated accelerator for PyTorch, and the times of a training loop on it. Standard library and torch only.

The counterpart of worker.py: a backward pass that sleeps without using a core and makes the gradients available layer
by layer, last first, in the same times.
"""
import functools
import json
import os
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch

STEP_S = 2e-3
"""Layers that take less together have their gradients at the same moment, as on the emulated accelerator of MXNet."""


class Device:
    """An accelerator. Its ends follow from durations, not from when a thread woke up, so that lateness adds nothing."""

    def __init__(self) -> None:
        self.end_s, self.slept_s = 0.0, 0.0

    def begin(self) -> None:
        self.end_s = self.slept_s = max(self.end_s, time.perf_counter())

    def work(self, seconds: float, last: bool) -> None:
        self.end_s += seconds
        if last or self.end_s - self.slept_s >= STEP_S:
            time.sleep(max(0.0, self.end_s - time.perf_counter()))
            self.slept_s = self.end_s


class Layer(torch.autograd.Function):
    """Passes its input on; its backward takes a while, then there is a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, work: Callable[[], None]) -> torch.Tensor:
        ctx.weight, ctx.work = weight, work
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.work()
        return grads[0], torch.zeros_like(ctx.weight), None


class Model(torch.nn.Module):
    """Layers one after the other; all the time is the backward pass's, shared by size."""

    def __init__(self, shapes: Sequence[Sequence[int]], seconds: float) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(*shape)) for shape in shapes])
        total = sum(weight.numel() for weight in self.weights)
        self.device = Device()
        self.works = [functools.partial(self.device.work, seconds * weight.numel() / total, last=number == 0)
                      for number, weight in enumerate(self.weights)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.device.begin()  # here: a real one is asynchronous, which hides the time of Python for the rest
        for weight, work in zip(self.weights, self.works):
            x = Layer.apply(x, weight, work)
        return x


def measure(shapes: Sequence[Sequence[int]], stint: Dict[str, Any], usage: Callable[[], Dict[str, float]],
            wrap: Callable[[Model], Tuple[Any, Any]]) -> Dict[str, Any]:
    """The times of one stint; `wrap` gives what to call and its optimizer."""
    model, optimizer = wrap(Model(shapes, stint["compute_ms"] / 1000))
    x = torch.ones(1, requires_grad=True)
    moments: List[float] = []
    for number in range(stint["warm_up"] + stint["iterations"]):
        if number == stint["warm_up"]:
            before, moments = usage(), [time.monotonic()]
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        moments.append(time.monotonic())
    return {"moments_s": moments, "usage": [before, usage()]}


def measure_all(file: str, usage: Callable[[], Dict[str, float]],
                wrap: Callable[[Model, Dict[str, Any]], Tuple[Any, Any]]) -> None:
    """Measure every stint of a job, and write what this worker has measured; `wrap` gets the system, too."""
    spec = json.loads(Path(file).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    measured = [measure(model["shapes"], stint, usage, lambda made: wrap(made, spec["system"]))
                for model in spec["models"] for stint in model["stints"]]
    Path(spec["folder"], os.environ["ODSGD_WORKER_RANK"] + ".json").write_text(json.dumps(measured), encoding="utf-8")


def sgd(model: Any, momentum: float = 0.9) -> torch.optim.SGD:
    """The optimizer, at a rate at which no rule makes much of gradients that nothing computes."""
    return torch.optim.SGD(model.parameters(), lr=1e-6, momentum=momentum)
