"""What a dynamic loss scale costs an iteration, in single precision: that of a small network, with one and without.

    odsgd launch -n 2 -s 1 python scripts/maintain/experiments/loss_scale.py scaled ssgd
    odsgd launch -n 2 -s 1 python scripts/maintain/experiments/loss_scale.py plain ssgd
"""
import sys
import time
from typing import Any

import odsgd  # noqa: F401, a process that is launched as a server becomes one here
from kvstore.engine._mxnet import mx

WARM, MEASURED, BATCH = 30, 150, 32


def network() -> Any:
    """0.3 M parameters for images of 32 x 32."""
    nn = mx.gluon.nn
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 3, activation="relu"), nn.MaxPool2D(), nn.Conv2D(32, 3, activation="relu"), nn.MaxPool2D(),
            nn.Dense(256, activation="relu"), nn.Dense(10))
    net.initialize()
    net.hybridize()
    return net


def main(how: str, store_name: str) -> None:
    """Worker 0 prints the milliseconds."""
    from mxnet.contrib import amp
    mx.random.seed(1)
    net, loss_of = network(), mx.gluon.loss.SoftmaxCrossEntropyLoss()
    x, y = mx.nd.random.uniform(shape=(BATCH, 3, 32, 32)), mx.nd.zeros(BATCH)
    net(x)
    store = mx.kv.create(store_name)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore=store)
    if how == "scaled":  # without amp.init, which would let operators compute in half precision
        amp.amp._amp_initialized, amp.amp._loss_scaler = True, amp.loss_scaler.LossScaler()
        amp.init_trainer(trainer)
    for t in range(WARM + MEASURED):
        if t == WARM:
            store.barrier()
            began = time.perf_counter()
        with mx.autograd.record():
            loss = loss_of(net(x), y)
            if how == "scaled":
                with amp.scale_loss(loss, trainer) as scaled:
                    mx.autograd.backward(scaled)
            else:
                loss.backward()
        trainer.step(BATCH)
    store.barrier()
    if store.rank == 0:
        print(f"{store_name}, {how}: {(time.perf_counter() - began) / MEASURED * 1000:.2f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
