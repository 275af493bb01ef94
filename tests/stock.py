"""Workers of jobs that the tests compare ours with or start without our launcher."""
from typing import Dict

import numpy as np


def train_stock(worker_rank: int, scale: float) -> Dict[str, np.ndarray]:
    """The scenario `ssgd` with MXNet's own `dist_sync`, servers and all; gradients multiplied by `scale`."""
    from kvstore.engine._mxnet import mx
    from tests.scenarios import MOMENTUM, SCENARIOS, SHAPES, flat, initial, loss

    autograd, gluon = mx.autograd, mx.gluon
    parameters, start = gluon.ParameterDict("net_"), 0
    for name, shape in SHAPES.items():
        stop = start + int(np.prod(shape))
        parameters.get(name, shape=shape, init=mx.init.Constant(mx.nd.array(initial()[start:stop].reshape(shape))))
        start = stop
    parameters.initialize(ctx=mx.cpu())
    trainer = gluon.Trainer(parameters, "sgd", dict(MOMENTUM), kvstore="dist_sync")
    path = [flat(parameters)]
    for t in range(SCENARIOS["ssgd"].iterations):
        with autograd.record():
            total = loss(parameters, mx.cpu(), worker_rank, t) * SCENARIOS["ssgd"].batch * scale
        total.backward()
        trainer.step(SCENARIOS["ssgd"].batch)
        path.append(flat(parameters))
    return {"path": np.array(path)}
