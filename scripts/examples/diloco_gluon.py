"""Workers that exchange weights once in 20 steps, with MXNet's Gluon: the trainer's Adam steps on every worker.

    odsgd launch -n 2 -s 1 scripts/examples/diloco_gluon.py

In place of 20, hundreds suit longer runs. What is learned: which of three angles a point on a spiral belongs to.
"""
from typing import Tuple

import numpy as np

import odsgd  # noqa: F401  isort: skip, since it stands before MXNet
from mxnet import autograd, gluon, nd, random

import kvstore

STEPS = 400


def spirals(number: int, generator: np.random.RandomState) -> Tuple[nd.NDArray, nd.NDArray]:
    """Points on three arms, and their arms."""
    arm, along = generator.randint(3, size=number), generator.rand(number)
    angle = 2.1 * arm + 4 * along + 0.2 * generator.randn(number)
    return nd.array(np.stack([along * np.cos(angle), along * np.sin(angle)], 1)), nd.array(arm)


def main() -> None:
    store = kvstore.create("diloco", H=20, momentum_outer=0.5)
    random.seed(0)
    model, loss = gluon.nn.HybridSequential(), gluon.loss.SoftmaxCrossEntropyLoss()
    model.add(gluon.nn.Dense(64, "relu"), gluon.nn.Dense(64, "relu"), gluon.nn.Dense(3))
    model.initialize()
    trainer = gluon.Trainer(model.collect_params(), "adam", {"learning_rate": 0.01}, kvstore=store)
    generator = np.random.RandomState(1 + store.rank)  # every worker has examples of its own
    for _ in range(STEPS):
        x, y = spirals(32, generator)
        with autograd.record():
            losses = loss(model(x), y)
        losses.backward()
        trainer.step(32)
    x, y = spirals(1000, np.random.RandomState(0))
    with store.global_weights():
        right = float((model(x).argmax(1) == y).mean().asscalar())
    print(f"worker {store.rank}: {right:.1%} of unseen points are right", flush=True)
    store.close()


if __name__ == "__main__":
    main()
