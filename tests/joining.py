"""A worker whose weights go towards 3 until FILE exists: `joining.py gluon|torch METHOD FILE`. FILE with the suffix
.settings says H and the rate of a worker's own steps.

The weights of a worker that begins with the job start at 1, those of a joiner at 100; a joiner prints its weights after
its first step.
"""
import sys
import time
from pathlib import Path
from typing import Any, Callable, Tuple

if __name__ == "__main__":
    sys.path[0] = str(Path(sys.path[0]).parent)  # beside this script lie the tests of kvstore, under that name
    import tests.lean  # noqa: F401

import odsgd  # noqa: F401  comes first, as in every script

# isort: split
import kvstore
from kvstore.job.environment import joined

Steps = Tuple[Any, Callable[[], Any], Callable[[], float]]
"""A store, what takes a step by it, and the mean of the weights."""


def by_gluon(method: str, lr: float, options: Any, first: float) -> Steps:
    from kvstore.engine._mxnet import mx
    store = kvstore.create(method, **options)
    store.set_optimizer(mx.optimizer.SGD(learning_rate=lr))
    alone = kvstore.create("local")  # the job has no part in it
    assert alone.leads and alone.iteration == 0
    w = mx.nd.ones((2, 3)) * first
    store.broadcast("w", w, w)
    return store, lambda: store.pushpull("w", w - 3, out=w), lambda: w.asnumpy().mean()


def by_torch(method: str, lr: float, options: Any, first: float) -> Steps:
    import torch

    import odsgd.torch as od
    store, model = od.create(method, **options), torch.nn.Linear(2, 3)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, first)
    optimizer = od.Optimizer(torch.optim.SGD(model.parameters(), lr=lr), model, store)

    def step() -> None:
        optimizer.zero_grad()
        torch.stack([((parameter - 3) ** 2).sum() / 2 for parameter in model.parameters()]).sum().backward()
        optimizer.step()

    return store, step, lambda: model.weight.mean().item()


def main(front_end: str, method: str, file: Path) -> None:
    H, lr = file.with_suffix(".settings").read_text().split()
    options = {"H": int(H), "momentum_outer": 0.0, "lr_outer": 0.7, "timeout_s": 60}
    store, step, mean = {"gluon": by_gluon, "torch": by_torch}[front_end](
        method, float(lr), options, 100.0 if joined() else 1.0)
    deadline = time.monotonic() + 200
    for number in range(10 ** 6):
        step()
        if number == 0 and joined():
            print(f"began at {mean():.1f} after {store.iteration - 1} iterations", flush=True)
        if number == 100:
            print("trains on" if joined() else "trains", flush=True)
        if file.exists():
            break
        assert time.monotonic() < deadline, "never told to end"
        time.sleep(0.005)
    with store.global_weights():
        print(f"ended at {mean():.1f}, leads {store.leads}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
