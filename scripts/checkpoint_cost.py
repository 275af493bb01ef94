#!/usr/bin/env python3
"""What checkpoints cost a job: a worker of 25 million parameters with momentum, whose passes are cheap.

    odsgd launch -n 2 -s 2 scripts/checkpoint_cost.py EVERY ITERATIONS FOLDER

EVERY 0: no checkpoints. Prints the time of an iteration, and for how long worker 0 stood still for each checkpoint.
"""
import shutil
import sys
import time
from pathlib import Path
from typing import List

import odsgd  # noqa: F401  first, as every script does

# isort: split
from mxnet import autograd, gluon, nd

import kvstore
from odsgd import checkpoint

LAYERS, WIDTH = 6, 2048


def main(every: int, iterations: int, folder: Path) -> None:
    store = kvstore.create("ssgd")
    net = gluon.nn.HybridSequential()
    for _ in range(LAYERS):
        net.add(gluon.nn.Dense(WIDTH, in_units=WIDTH))
    net.initialize()
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-4, "momentum": 0.9}, kvstore=store)
    keeper = checkpoint.keep(store, net, folder, every) if every else None
    x = nd.ones((1, WIDTH))
    began = 0.0
    stood: List[float] = []
    for iteration in range(-5, iterations):
        if iteration == 0:
            began = time.perf_counter()
        with autograd.record():
            loss = (net(x) ** 2).mean()
        loss.backward()
        trainer.step(1)
        loss.wait_to_read()
        before = time.perf_counter()
        if keeper is not None:
            keeper.step()
            if keeper.iteration % every == 0:
                stood.append(time.perf_counter() - before)
    took_ms = 1000 * (time.perf_counter() - began) / iterations
    if keeper is not None:
        keeper.close()
    if store.rank == 0:
        print(f"{took_ms:.1f} ms per iteration; stood still for {', '.join(f'{s:.2f} s' for s in stood) or 'nothing'}")
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
