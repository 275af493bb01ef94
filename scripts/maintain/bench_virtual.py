#!/usr/bin/env python3
"""What a virtual cluster costs over the gradients alone: 30 workers of Caffe's CIFAR-10 network with batch 4.

    scripts/maintain/bench_virtual.py [STORE ...]
    scripts/maintain/bench_virtual.py times STORE WORKERS ITERATIONS

Prints, per store, milliseconds of this machine per gradient: forward and backward alone, as one network and as one per
worker, and all of a training run on a virtual cluster. In turns, several times; the medians. Or, with `times`, how long
the same machine computes a job without gradients: 32 servers, 64 buckets of 1.6 MB, 10 Gbit/s.
"""
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MXNET_CPU_WORKER_NTHREADS", str(os.cpu_count() or 1))

import kvstore
from kvstore.engine._mxnet import mx
from odsgd.virtual import times
from odsgd.virtual.description import of
from odsgd.virtual.transport import VirtualStage

WORKERS, BATCH, ITERATIONS, REPEAT = 30, 4, 15, 5


def network() -> Any:
    """cifar10_quick's larger sister of Caffe's examples, 89,578 parameters."""
    nn = mx.gluon.nn
    net = nn.HybridSequential(prefix="caffe_")
    with net.name_scope():
        for channels in (32, 32, 64):
            net.add(nn.Conv2D(channels, 5, padding=2, activation="relu"), nn.MaxPool2D(3, 2))
        net.add(nn.Flatten(), nn.Dense(10))
    net.initialize(mx.init.Xavier())
    net(mx.nd.zeros((1, 3, 32, 32)))
    net.hybridize(static_alloc=True)
    return net


def gradient(net: Any, x: Any, y: Any, loss: Any) -> None:
    with mx.autograd.record():
        value = loss(net(x), y)
    value.backward()


def made() -> List[Any]:
    x, y = mx.nd.random.normal(shape=(BATCH, 3, 32, 32)), mx.nd.array(range(BATCH))
    return [network(), x, y, mx.gluon.loss.SoftmaxCrossEntropyLoss()]


def alone() -> float:
    """Milliseconds per gradient, of as many networks at a time as there are workers."""
    workers = [made() for _ in range(WORKERS)]

    def all_of_them() -> None:
        for worker in workers:
            gradient(*worker)

    all_of_them()
    mx.nd.waitall()
    began = time.perf_counter()
    for _ in range(ITERATIONS):
        all_of_them()
    mx.nd.waitall()
    return 1000 * (time.perf_counter() - began) / (ITERATIONS * WORKERS)


def together(store: str) -> float:
    """The same on a virtual cluster."""
    stage = VirtualStage(of({"workers": WORKERS, "compute": {"draws": "lognormal:0.1"}}))
    clock: Dict[str, float] = {}

    def train(transport: Any) -> None:
        net, x, y, loss = made()
        kv = kvstore.create(store, transport)
        trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.001}, kvstore=kv)
        for iteration in range(ITERATIONS + 1):
            if iteration == 1:
                kv.barrier()
                mx.nd.waitall()
                clock.setdefault("began", time.perf_counter())
            gradient(net, x, y, loss)
            trainer.step(BATCH)
        kv.barrier()
        mx.nd.waitall()
        clock["ended"] = time.perf_counter()
        kv.close()

    stage.run(train, stage.ring_worker if store in ("sasgd", "dsync", "pipesgd") else stage.worker)
    return 1000 * (clock["ended"] - clock["began"]) / (ITERATIONS * WORKERS)


def times_alone(store: str, workers: int, iterations: int) -> str:
    """Seconds of one core."""
    cluster = of({"workers": workers, "servers": 32, "links": {"goodput": "10gbit"},
                  "compute": {"iteration": "200ms", "draws": "lognormal:0.1"}})
    began, buckets = time.process_time(), 64
    pace = times.simulate(cluster, store, times.layers({f"layer{b}": 25_000_000 // buckets for b in range(buckets)}),
                          {"bucket_nbytes": 4 * (25_000_000 // buckets)}, iterations, warm_up=1)
    return (f"{store}, {workers} workers, {iterations} iterations of {1000 * pace.iteration:.0f} ms: "
            f"{time.process_time() - began:.1f} s")


def main(stores: List[str]) -> None:
    systems: Dict[str, Callable[[], float]] = {"gradients alone": alone}
    systems.update({store: lambda store=store: together(store) for store in stores})  # type: ignore[misc]
    found: Dict[str, List[float]] = {name: [] for name in systems}
    for _ in range(REPEAT):
        for name, measure in systems.items():
            found[name].append(measure())
    bare = statistics.median(found["gradients alone"])
    for name, values in found.items():
        middle = statistics.median(values)
        print(f"{name:>16}: {middle:6.2f} ms per gradient ({min(values):.2f} to {max(values):.2f}), "
              f"{100 * (middle / bare - 1):+.0f} %")


if __name__ == "__main__":
    if sys.argv[1:2] == ["times"]:
        print(times_alone(sys.argv[2], *map(int, sys.argv[3:])))
    else:
        main(sys.argv[1:] or ["softsync", "odsgd", "ssgd"])
