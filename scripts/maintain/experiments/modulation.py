#!/usr/bin/env python3
"""Does dividing a gradient's learning rate by its staleness save a run that staleness breaks? n-softsync, on and off.

    modulation.py [--workers M] [--n N ...] [--lr LR] [--momentum P] [--rounds R] [--seeds S]
                  [--spread S] [--data-dir MNIST]

The paper's experiment (Zhang, Gupta, Lian, Liu, IJCAI 2016, sec. 4.3, fig. 3) at the size of one machine: M learners, a
mini-batch of 128 / M each, the learning rate and momentum of one learner with 128. The stores run on the transport
inside one process, where the order of pushes is a script: that of workers whose computations take log-normal times, of
the same median and with a logarithm spread by `--spread`. n = M then means a mean staleness of M - 1. A net with one
hidden layer, on scikit-learn's digits or, with --data-dir, on MNIST.
"""
import argparse
import heapq
import os
import statistics
import sys
from pathlib import Path
from random import Random
from typing import Any, Dict, List, Optional

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

HIDDEN = 32
BATCH = 128  # of all workers together


class Net:
    """Softmax over one hidden layer of ReLUs, in NumPy; its weights are one flat array."""

    def __init__(self, inputs: int, classes: int = 10) -> None:
        self.shapes = [(inputs, HIDDEN), (HIDDEN,), (HIDDEN, classes), (classes,)]

    def initial(self, seed: int) -> np.ndarray:
        random = np.random.RandomState(seed)
        return np.concatenate([random.normal(0, (2 / shape[0]) ** 0.5, shape).ravel() if len(shape) == 2 else
                               np.zeros(shape) for shape in self.shapes]).astype(np.float32)

    def parts(self, w: np.ndarray) -> List[np.ndarray]:
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes])
        return [part.reshape(shape) for part, shape in zip(np.split(w, ends[:-1]), self.shapes)]

    def gradient(self, w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Of the mean cross-entropy."""
        w1, b1, w2, b2 = self.parts(w)
        hidden = np.maximum(x @ w1 + b1, 0)
        scores = hidden @ w2 + b2
        p = np.exp(scores - scores.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(y)), y] -= 1
        p /= len(y)
        back = (p @ w2.T) * (hidden > 0)
        return np.concatenate([(x.T @ back).ravel(), back.sum(0), (hidden.T @ p).ravel(), p.sum(0)])

    def loss(self, w: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
        """The mean cross-entropy."""
        w1, b1, w2, b2 = self.parts(w)
        scores = np.maximum(x @ w1 + b1, 0) @ w2 + b2
        scores -= scores.max(1, keepdims=True)
        return float(np.mean(np.log(np.exp(scores).sum(1)) - scores[np.arange(len(y)), y]))

    def accuracy(self, w: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
        w1, b1, w2, b2 = self.parts(w)
        scores = np.maximum(x @ w1 + b1, 0) @ w2 + b2
        return 0.1 if np.isnan(scores).any() else float(np.mean(scores.argmax(1) == y))


class Data:
    """Normalised examples as rows."""

    def __init__(self, data_dir: Optional[str]) -> None:
        from odsgd.training.data import datasets
        arrays = datasets.mnist(data_dir) if data_dir else datasets.digits()
        self.train, self.test = [((part.images.reshape(len(part.images), -1) - np.float32(arrays.mean[0])) /
                                  np.float32(arrays.std[0]), part.labels.astype(int))
                                 for part in (arrays.train, arrays.test)]


def arrivals(workers: int, pushes: int, spread: float, seed: int) -> List[int]:
    """Worker ranks in the order of their pushes."""
    random = Random(seed)
    ready = [(random.random(), rank) for rank in range(workers)]
    heapq.heapify(ready)
    order = []
    for _ in range(pushes):
        now, rank = ready[0]
        order.append(rank)
        heapq.heapreplace(ready, (now + random.lognormvariate(0, spread), rank))
    return order


def train(data: Data, workers: int, rounds: int, lr: float, momentum: float, spread: float, seed: int, batch: int,
          store: str = "asgd", **settings: Any) -> Dict[str, float]:
    """One run; the test accuracy of the global weights, and what the server has counted."""
    import kvstore
    from kvstore.engine._mxnet import mx
    from kvstore.transports.in_process import Stage
    x, y = data.train
    net = Net(x.shape[1])
    order = arrivals(workers, workers * rounds, spread, seed)

    def work(transport: Any) -> Any:
        own = kvstore.create(store, transport, **settings)
        own.set_optimizer(mx.optimizer.SGD(learning_rate=lr, momentum=momentum))
        weight = mx.nd.array(net.initial(seed))
        own.broadcast(0, weight, weight)
        examples = np.random.RandomState(1000 * seed + own.rank)
        with np.errstate(all="ignore"):
            for _ in range(order.count(own.rank)):
                drawn = examples.randint(len(y), size=batch)
                gradient = net.gradient(weight.asnumpy(), x[drawn], y[drawn])
                own.pushpull(0, mx.nd.array(gradient), out=weight)
        with own.global_weights():
            return weight.asnumpy(), own.statistics() if own.rank == 0 else None

    w, counted = Stage(workers, order).run(work)[0]
    with np.errstate(all="ignore"):
        return {"accuracy": net.accuracy(w, *data.test), "tau": counted.mean, "max": counted.max,
                "updates": counted.updates_per_bucket, "lr": counted.lr_mean}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=30)
    parser.add_argument("--n", type=int, nargs="+", default=[1, 15], help="beside M")
    parser.add_argument("--lr", type=float, default=0.05, help="the learning rate of one worker with all of the batch")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--rounds", type=int, default=100, help="pushes of a worker, in the mean")
    parser.add_argument("--spread", type=float, default=0.1, help="of the computing times' logarithm")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data-dir", help="MNIST's files; without it: scikit-learn's digits")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    data = Data(options.data_dir)
    workers, small = options.workers, BATCH // options.workers
    runs: Dict[str, Dict[str, Any]] = {
        "one worker, whole batch": {"workers": 1, "batch": BATCH},
        "one worker, lr / M": {"workers": 1, "batch": small, "lr": options.lr / workers,
                               "rounds": options.rounds * workers}}
    for n in sorted({*options.n, workers}):
        for modulate in (False, True):
            runs[f"{n}-softsync, {'on' if modulate else 'off'}"] = {
                "workers": workers, "batch": small, "store": "softsync", "n": n, "modulate": modulate}
    runs[f"{workers}-softsync, off, lr / M"] = {**runs[f"{workers}-softsync, off"], "lr": options.lr / workers}
    epochs = options.rounds * workers * small / len(data.train[1])
    print(f"M = {workers}, lr {options.lr:g}, momentum {options.momentum:g}, {options.rounds} rounds of mini-batches "
          f"of {small} ({epochs:.1f} epochs), spread {options.spread:g}, {options.seeds} seeds")
    print(f"{'':26}{'accuracy in %: median, of each seed':>40}{'mean tau':>10}{'max':>5}{'lr':>10}{'updates':>9}")
    for name, settings in runs.items():
        found = [train(data, **{"rounds": options.rounds, "lr": options.lr, "momentum": options.momentum,
                                "spread": options.spread, "seed": seed, **settings}) for seed in range(options.seeds)]
        accuracies = [100 * one["accuracy"] for one in found]
        each = " ".join(f"{one:.1f}" for one in accuracies)
        print(f"{name:26}{f'{statistics.median(accuracies):.1f}   {each}':>40}{found[0]['tau']:10.2f}"
              f"{max(one['max'] for one in found):5}{found[0]['lr']:10.5f}{found[0]['updates']:9.0f}", flush=True)


if __name__ == "__main__":
    main()
