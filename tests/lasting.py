"""An asynchronous worker that trains until it is told that another one is lost, and then to the end."""
import os
import sys
import time

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(sys.path[0])  # beside this script lie the tests of kvstore, under that name
    import tests.lean  # noqa: F401

import odsgd  # noqa: F401  comes first, as in every script

# isort: split
import numpy as np

import kvstore
from kvstore.engine._mxnet import mx
from kvstore.job.environment import lost_workers
from tests.jobs import alone


def main() -> None:
    store = kvstore.create("asgd", timeout_s=60)
    w = alone(store, mx.nd.ones((2, 3)), learning_rate=0.01)
    deadline = time.monotonic() + 80
    for step in range(10 ** 6):
        store.pushpull("w", w * 0.1, out=w)
        w.wait_to_read()
        if step == 5:
            print("trains", flush=True)
        if lost_workers():
            break
        assert time.monotonic() < deadline, "never told of a lost worker"
        time.sleep(0.005)
    present = int(store.allreduce(np.ones(1))[0])
    store.barrier()
    with store.global_weights():
        ended = w.asnumpy().sum()
    store.set_optimizer(mx.optimizer.create("test"))  # adds gradients up
    store.pushpull("w", mx.nd.ones(w.shape), out=w)
    store.barrier()
    with store.global_weights():
        print(f"ended at {ended:.6f}, {present} present, who added {w.asnumpy().sum() - ended:.3f}", flush=True)


if __name__ == "__main__":
    main()
