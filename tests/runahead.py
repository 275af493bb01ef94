"""Workers that run ahead: what they wait for is the engine's alone."""
import contextlib
import os
import signal
from pathlib import Path
from typing import Dict, Iterator, List

import numpy as np


def elastic(worker_rank: int) -> Dict[str, np.ndarray]:
    """Gradient 1, lr 1, alpha 1/2, an exchange in every step; the server stands still during the second."""
    import kvstore
    from kvstore.engine._mxnet import mx
    store = kvstore.create("easgd", T=1, alpha=0.5, timeout_s=30)
    store.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
    w, server = mx.nd.array([4.0]), next(servers())
    seen: List[float] = []
    store.broadcast("w", w, w)

    def step() -> None:
        store.pushpull("w", mx.nd.ones(1), out=w)
        seen.append(w.asscalar())
    step()
    store.wait()
    os.kill(server, signal.SIGSTOP)
    try:
        step()
    finally:
        os.kill(server, signal.SIGCONT)
    step()
    return {"seen": np.array(seen)}


def servers() -> Iterator[int]:
    """The processes of this job's servers: they have the parent that this worker has."""
    for folder in filter(lambda folder: folder.name.isdigit(), Path("/proc").iterdir()):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if parent == str(os.getppid()) and b"DMLC_ROLE=server" in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


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
