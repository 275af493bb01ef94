#!/usr/bin/env python3
"""What checkpoints cost a job of 25 million parameters with momentum, on an emulated accelerator.

    odsgd launch -n 2 -s 2 scripts/maintain/checkpoint_cost.py EVERY PAIRS COMPUTE_MS FOLDER

By turns EVERY iterations that begin with a checkpoint and EVERY without one, PAIRS times. Prints the time of an
iteration in each, and for how long worker 0 stood still for each checkpoint.
"""
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Iterable, List

import odsgd  # noqa: F401  first, as every script does

# isort: split
from mxnet import autograd, gluon, nd

import kvstore
from odsgd import checkpoint
from odsgd.training.step.emulated import Emulated

LAYERS, WIDTH = 6, 2048
FIRST = 10
"""Iterations before the first checkpoint, in which the job gets going."""


def main(every: int, pairs: int, compute_ms: float, folder: Path) -> None:
    store = kvstore.create("ssgd")
    net = gluon.nn.HybridSequential()
    for _ in range(LAYERS):
        net.add(gluon.nn.Dense(WIDTH, in_units=WIDTH))
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-4, "momentum": 0.9}, kvstore=store)
    keeper = checkpoint.keep(store, net, folder, 2 * every)
    with autograd.record():
        loss = (net(nd.ones((1, WIDTH))) ** 2).mean()
    loss.backward()
    device = Emulated(net.collect_params().values(), compute_ms / 1000)
    keeper.iteration = -FIRST
    stood: List[float] = []
    ends: List[float] = []
    through = device.iteration()
    for _ in range(-FIRST, 2 * every * pairs):
        trainer.step(1)
        queued, through = through, device.iteration()
        queued[0].wait_to_read()
        before = time.perf_counter()
        ends.append(before)
        keeper.step()
        if keeper.iteration % (2 * every) == 0:
            stood.append(time.perf_counter() - before)
    keeper.close()
    if store.rank == 0:
        report(ends[FIRST:], stood, every)
        shutil.rmtree(folder, ignore_errors=True)


def report(ends: List[float], stood: List[float], every: int) -> None:
    blocks = [1000 * (end - start) / every for start, end in zip(ends[::every], ends[every::every])]
    kept, plain = blocks[::2], blocks[1::2]
    costs = [100 * (one / other - 1) for one, other in zip(kept, plain)]
    print(f"ms per iteration with a checkpoint: {numbers(kept)}; without: {numbers(plain)}; cost in %: {numbers(costs)}"
          f", median {statistics.median(costs):.1f}; stood still for {numbers(1000 * s for s in stood)} ms")


def numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
