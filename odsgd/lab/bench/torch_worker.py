"""One worker of a measured job, on PyTorch, ours or DistributedDataParallel over gloo: ``torch_worker.py SPEC.json``.

The counterpart of worker.py: on an emulated accelerator whose backward pass sleeps without using a core and makes the
gradients available layer by layer, last first, in the same times; then SGD. Every stint has a store of its own.

Run by path: DistributedDataParallel has an interpreter of its own, which needs only the standard library and torch.
"""
import functools
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
import usage  # type: ignore[import-not-found]  # beside this file

DDP = "torch/ddp"
LR, MOMENTUM = 1e-6, 0.9
"""At this rate no rule makes much of gradients that nothing computes."""
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


def measure(call: Callable[[torch.Tensor], torch.Tensor], optimizer: Any, stint: Dict[str, Any]) -> Dict[str, Any]:
    """The times of one stint."""
    x = torch.ones(1, requires_grad=True)
    moments: List[float] = []
    for number in range(stint["warm_up"] + stint["iterations"]):
        if number == stint["warm_up"]:
            before, moments = usage.now(), [time.monotonic()]
        optimizer.zero_grad()
        call(x).sum().backward()
        optimizer.step()
        moments.append(time.monotonic())
    return {"moments_s": moments, "usage": [before, usage.now()]}


def wrapped(model: Model, name: str, options: Dict[str, Any]) -> Tuple[Any, Any]:
    """The model to call, and its optimizer: with DistributedDataParallel, or of a store of ours."""
    if name == DDP:
        parallel = torch.nn.parallel.DistributedDataParallel(model, **options)
        return parallel, torch.optim.SGD(parallel.parameters(), LR, MOMENTUM)
    from kvstore import methods
    from kvstore.fronts.torch.optimizer import Optimizer
    from kvstore.fronts.torch.store import create
    sgd = torch.optim.SGD(model.parameters(), LR, 0.0 if methods.find(name).plain_sgd else MOMENTUM)
    return model, Optimizer(sgd, model, create(name, **options))


def main(file: str) -> None:
    """Measure every stint of a job, and write what this worker has measured."""
    spec = json.loads(Path(file).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    name, options = spec["system"]["name"], spec["system"]["options"]
    if name == DDP:
        torch.distributed.init_process_group("gloo", init_method=f"file://{spec['folder']}/rendezvous",
                                             rank=int(os.environ["ODSGD_WORKER_RANK"]),
                                             world_size=int(os.environ["DMLC_NUM_WORKER"]),
                                             timeout=timedelta(seconds=60))
    measured = []
    for model in spec["models"]:
        for stint in model["stints"]:
            layers = Model(model["shapes"], stint["compute_ms"] / 1000)
            measured.append(measure(*wrapped(layers, name, options), stint))
    Path(spec["folder"], os.environ["ODSGD_WORKER_RANK"] + ".json").write_text(json.dumps(measured), encoding="utf-8")
    if name == DDP:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    del sys.path[0]  # this folder: its files are no modules for others
    main(sys.argv[1])
