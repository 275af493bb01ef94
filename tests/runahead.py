"""A worker that never reads what it has asked for until the end: the order of its messages is the engine's alone."""
from typing import Dict

import numpy as np


def downpour(worker_rank: int, push_every: int, fetch_every: int, steps: int) -> Dict[str, np.ndarray]:
    """Gradient -1, server lr 1, no local step: the weights count the pushes that a fetch contains."""
    import kvstore
    from kvstore.engine._mxnet import mx
    store = kvstore.create("downpour", push_every=push_every, fetch_every=fetch_every, lr_local=0.0)
    store.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
    w = mx.nd.zeros(1000)
    store.broadcast("w", w, w)
    seen = [mx.nd.zeros(1) for _ in range(steps)]
    big = mx.nd.ones((700, 700))
    for t in range(steps):
        slow = mx.nd.dot(big, big)[0][0] * 0  # the gradient takes its time
        store.pushpull("w", mx.nd.broadcast_add(-mx.nd.ones(1000), slow.reshape(1)), out=w)
        w[:1].copyto(seen[t])
    return {"seen": np.array([array.asscalar() for array in seen])}
