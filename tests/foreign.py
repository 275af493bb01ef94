"""A script of MXNet's world.

It knows nothing of odsgd.    foreign.py WAY STORE OUT    WAY: trainer, device or module
"""
from __future__ import annotations, print_function  # noqa: UP010  which must stay in front

import os
import sys
from typing import Any, Iterator, List, Tuple

sys.modules.update(dict.fromkeys(("bokeh", "pandas", "scipy", "sklearn")))  # type: ignore[arg-type]  # half the import

import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402

STEPS, BATCH = 20, 4


def batches(rank: int) -> Iterator[Tuple[Any, Any]]:
    random = np.random.RandomState(rank)
    for _ in range(STEPS):
        yield (mx.nd.array(random.normal(size=(BATCH, 10))), mx.nd.array(random.normal(size=(BATCH, 5))))


def by_trainer(kv: Any, rank: int) -> List[Any]:
    net = mx.gluon.nn.Dense(5, in_units=10)
    net.initialize(mx.init.Constant(0.25))
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.02, "momentum": 0.9, "wd": 0.01},
                               **({} if kv is None else {"kvstore": kv}))
    for x, y in batches(rank):
        with mx.autograd.record():
            loss = ((net(x) - y) ** 2).sum(axis=1) / 2
        loss.backward()
        trainer.step(BATCH)
    return [net.weight.data(), net.bias.data()]


def by_module(kv: Any, rank: int) -> List[Any]:
    out = mx.sym.LinearRegressionOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=5, name="dense"),
                                        name="out", grad_scale=5)
    module = mx.mod.Module(out, label_names=["out_label"])
    module.bind([("data", (BATCH, 10))], [("out_label", (BATCH, 5))])
    module.init_params(mx.init.Constant(0.25))
    module.init_optimizer(kvstore=kv, optimizer="sgd", optimizer_params={"learning_rate": 0.02, "momentum": 0.9})
    for x, y in batches(rank):
        module.forward_backward(mx.io.DataBatch([x], [y]))
        module.update()
    params = module.get_params()[0]
    return [params["dense_weight"], params["dense_bias"]]


def main(way: str, name: str, out: str) -> None:
    kv = None if way == "device" else mx.kv.create(name)
    rank = 0 if kv is None else kv.rank
    weights = (by_module if way == "module" else by_trainer)(kv, rank)
    np.savez("%s-%s.npz" % (out, os.environ.get("DMLC_WORKER_ID", "0")), kind="" if kv is None else kv.type,
             weights=np.concatenate([array.asnumpy().reshape(-1) for array in weights]))


if __name__ == "__main__":
    main(*sys.argv[1:])
