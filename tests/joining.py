"""A worker whose weights go towards 3 until FILE exists: `joining.py METHOD FILE`. FILE with the suffix .H says H.

The weights of a worker that begins with the job start at 1, those of a joiner at 100; a joiner prints its weights after
its first step.
"""
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(sys.path[0]).parent)  # beside this script lie the tests of kvstore, under that name
    import tests.lean  # noqa: F401

import odsgd  # noqa: F401  comes first, as in every script

# isort: split
import kvstore
from kvstore.engine._mxnet import mx
from kvstore.job.environment import joined


def main(method: str, file: Path) -> None:
    H = int(file.with_suffix(".H").read_text())
    store = kvstore.create(method, H=H, momentum_outer=0.0, lr_outer=0.7, timeout_s=60)
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.1))
    alone = kvstore.create("local")  # the job has no part in it
    assert alone.leads and alone.iteration == 0
    w = mx.nd.ones((2, 3)) * (100 if joined() else 1)
    store.broadcast("w", w, w)
    deadline = time.monotonic() + 200
    for step in range(10 ** 6):
        store.pushpull("w", w - 3, out=w)
        if step == 0 and joined():
            print(f"began at {w.asnumpy().mean():.1f} after {store.iteration - 1} iterations", flush=True)
        if step == 100:
            print("trains on" if joined() else "trains", flush=True)
        if file.exists():
            break
        assert time.monotonic() < deadline, "never told to end"
        time.sleep(0.005)
    with store.global_weights():
        print(f"ended at {w.asnumpy().mean():.1f}, leads {store.leads}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
