"""Workers that run ahead: of an exchange that they need not wait for, and with messages in the order of the rule."""
import contextlib
import os
import signal
from pathlib import Path
from typing import Iterator, List

import numpy as np
import pytest

from tests.jobs import Result, alone, run_job


def elastic(worker_rank: int) -> Result:
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


def downpour(worker_rank: int, push_every: int, fetch_every: int, steps: int) -> Result:
    """Gradient -1, server lr 1, no local step: the weights count the pushes that a fetch contains."""
    import kvstore
    from kvstore.engine._mxnet import mx
    store = kvstore.create("downpour", push_every=push_every, fetch_every=fetch_every, lr_local=0.0)
    w = alone(store, mx.nd.zeros(1000), learning_rate=1.0)
    seen = [mx.nd.zeros(1) for _ in range(steps)]
    big = mx.nd.ones((700, 700))
    for t in range(steps):
        slow = mx.nd.dot(big, big)[0][0] * 0  # the gradient takes its time
        store.pushpull("w", mx.nd.broadcast_add(-mx.nd.ones(1000), slow.reshape(1)), out=w)
        w[:1].copyto(seen[t])
    return {"seen": np.array([array.asscalar() for array in seen])}


@pytest.mark.parametrize("push_every, fetch_every, expected", [
    (2, 3, [0, 0, 2, 2, 2, 6]),   # the fetch of step 3 contains the push of step 2
    (1, 2, [0, 2, 2, 4, 4, 6]),
])
def test_a_fetch_contains_every_push_the_worker_has_asked_for(push_every: int, fetch_every: int,
                                                              expected: List[int]) -> None:
    result, = run_job("tests.integration.test_run_ahead:downpour", 1, 1, push_every, fetch_every, 6)
    np.testing.assert_array_equal(result["seen"], expected)


def test_the_gradient_of_elastic_averaging_does_not_wait_for_the_exchange() -> None:
    # x: 4 - 1 = 3, X = 3 1/2; x: 3 -> 3 1/2, then 2 1/2, X = 3; x: 2 1/2 -> 3, then 2.
    result, = run_job("tests.integration.test_run_ahead:elastic", 1, 1)
    np.testing.assert_array_equal(result["seen"], [3.0, 2.5, 2.0])
