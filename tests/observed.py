"""A training script whose observers raise, find no room, or hang: board, trace and pulse. It trains on."""
import os
import resource
import sys
import time
from typing import Any, Callable, Dict

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(sys.path[0])  # beside this script lie the tests of kvstore, under that name
    import tests.lean  # noqa: F401

import odsgd  # noqa: F401  comes first, as in every script

# isort: split
import kvstore
from kvstore.engine._mxnet import mx
from kvstore.job.pulse import pulse
from kvstore.tracing import recorder
from odsgd import board

STEPS = 500


def main(fault: str, folder: str) -> None:
    store = kvstore.create("ssgd")
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.1))
    weights = {key: mx.nd.ones((2, 3)) for key in ("first", "second")}
    for key, weight in weights.items():
        store.broadcast(key, weight, weight)
    board.to(folder)
    looks: Dict[str, Callable[[], Any]] = {
        "raise": lambda: 1 // 0, "full": lambda: {1}, "block": lambda: time.sleep(600)}
    pulse.more["broken"] = looks[fault]
    for step in range(STEPS):
        for key, weight in weights.items():
            store.pushpull(key, weight * 0.1, out=weight)
        mx.nd.waitall()
        board.log(step, {"loss": 1.0})
        if step == 5:
            go_wrong(fault)
        time.sleep(0.01)
    print(f"trained, {weights['first'].sum().asscalar():.4f}", flush=True)
    store.close()


def go_wrong(fault: str) -> None:
    writer = board._board and board._board._writer
    if fault == "raise":
        assert recorder.on is not None
        recorder.on._file.close()
        if writer:
            writer.add_scalar = lambda *_: 1 // 0
    elif fault == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    elif fault == "block" and writer:
        writer.file_writer.event_writer._ev_writer.write_event = lambda _: time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
