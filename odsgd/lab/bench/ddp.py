"""One worker of a measured job, on PyTorch: DistributedDataParallel over gloo, ``ddp.py SPEC.json``.

The counterpart of worker.py: a backward pass that sleeps without using a core and makes the gradients available layer
by layer, last first, in the same times; then SGD with momentum. Run by path, with the interpreter that has torch.
"""
import functools
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

import network  # type: ignore[import-not-found]  # beside this file
import torch  # type: ignore[import-not-found]
import usage  # type: ignore[import-not-found]  # beside this file
from torch.nn.parallel import DistributedDataParallel  # type: ignore[import-not-found]

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


def measure(shapes: Sequence[Sequence[int]], stint: Dict[str, Any], options: Dict[str, Any]) -> Dict[str, Any]:
    """The times of one stint."""
    model = DistributedDataParallel(Model(shapes, stint["compute_ms"] / 1000), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    x = torch.ones(1, requires_grad=True)
    moments: List[float] = []
    for number in range(stint["warm_up"] + stint["iterations"]):
        if number == stint["warm_up"]:
            before, moments = usage.now(), [time.monotonic()]
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        moments.append(time.monotonic())
    return {"moments_s": moments, "usage": [before, usage.now()]}


def main(file: str) -> None:
    spec = json.loads(Path(file).read_text(encoding="utf-8"))
    rank = int(os.environ["ODSGD_WORKER_RANK"])
    os.environ["GLOO_SOCKET_IFNAME"] = network.interface(os.environ["DMLC_NODE_HOST"])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method="file://" + spec["folder"] + "/rendezvous", rank=rank,
                                         world_size=int(os.environ["DMLC_NUM_WORKER"]), timeout=timedelta(seconds=60))
    measured = [measure(model["shapes"], stint, spec["system"]["options"])
                for model in spec["models"] for stint in model["stints"]]
    Path(spec["folder"], f"{rank}.json").write_text(json.dumps(measured), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
