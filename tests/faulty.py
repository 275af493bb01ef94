"""Training scripts that go wrong in one place, and an optimizer that goes wrong on the servers."""
import os
import subprocess
import sys
import time
from typing import Any

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(sys.path[0])  # beside this script lie the tests of kvstore, under that name
    import tests.lean  # noqa: F401

import odsgd  # noqa: F401  comes first, as in every script

# isort: split
import kvstore
from kvstore.engine._mxnet import mx
from kvstore.fronts import choice
from kvstore.fronts.gluon.store import Store
from kvstore.transports import joining, pslite


class FailsOnServer(mx.optimizer.SGD):
    """Raises in its `fails_at`th update."""

    def __init__(self, fails_at: int = 20, **options: Any) -> None:
        super().__init__(**options)
        self.fails_at = fails_at

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        self._update_count(index)
        if self.num_update >= self.fails_at:
            raise ArithmeticError("the update went wrong on purpose")


class FailsToStart(mx.optimizer.SGD):
    def create_state_multi_precision(self, index: Any, weight: Any) -> None:
        raise MemoryError("no room for the optimizer state, on purpose")


def main(fault: str, codec: str) -> None:
    """Two keys, steps for ever; `fault` says what goes wrong after a few."""
    sys.modules["tests.faulty"] = sys.modules["__main__"]
    choice.connect("ssgd", timeout_s=600.0)  # a job takes its time to come up, whatever it is allowed later
    store = kvstore.create("odsgd", warmup=2, timeout_s=5.0 if fault == "silent" else 600.0,
                           codec=codec)
    optimizer = {"update": FailsOnServer, "start": FailsToStart}.get(fault, mx.optimizer.SGD)(learning_rate=0.1)
    type(optimizer).__module__ = "tests.faulty" if fault in ("update", "start") else type(optimizer).__module__
    store.set_optimizer(optimizer)
    shape = (3, 2) if fault == "shape" and store.rank == 1 else (2, 3)
    weights = {key: mx.nd.ones(shape) for key in ("first", "second")}
    for key, weight in weights.items():
        store.broadcast(key, weight, weight)
    for step in range(10 ** 6):
        for key, weight in weights.items():
            store.pushpull(key, weight * 0.1, out=weight)
        if step > 3:
            mx.nd.waitall()
        if step == 3:
            subprocess.check_call(["true"], preexec_fn=lambda: None)  # a fork, with exchanges under way
        if step == 5:
            print("trains", flush=True)
            go_wrong(fault, store)
        time.sleep(0.01)


def go_wrong(fault: str, store: Store) -> None:
    if store.rank != 1:
        return
    if fault == "raise":
        raise LookupError("worker failed on purpose")
    if fault == "silent":
        time.sleep(60)
    if fault == "unsigned":
        native: Any = joining.shared(pslite.Connection, 600.0, synchronous=True)
        native.native._send_command_to_servers(0, "cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    if fault == "nan":
        store.pushpull("first", mx.nd.full((2, 3), float("nan")), out=mx.nd.ones((2, 3)))
        store.pushpull("second", mx.nd.ones((2, 3)), out=mx.nd.ones((2, 3)))
    if fault == "interrupt":
        raise KeyboardInterrupt
    if fault == "exit":
        raise SystemExit(9)
    if fault == "twice":
        store.pushpull("first", mx.nd.ones((2, 3)), out=mx.nd.ones((2, 3)))
        store.pushpull("first", mx.nd.ones((2, 3)), out=mx.nd.ones((2, 3)))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else os.environ["FAULT"], sys.argv[2] if len(sys.argv) > 2 else "none")
