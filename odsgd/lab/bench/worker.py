"""One worker of a measured job, on MXNet: ``python -m odsgd.lab.bench.worker SPEC.json``.

Per stint it runs `warm_up` iterations and then `iterations`. An iteration queues the work of a training loop: the
emulated accelerator computes on the weights and writes the gradients, and every parameter is handed to the store, in
the order and with the priorities of ``gluon.Trainer.step``. It ends when the weights of the next iteration can be read.
The loop is one iteration ahead of the engine, as training is; without computing it waits, so that exchanges follow each
other.

Written to FOLDER/RANK.json: per stint the moments at which iterations began and ended, in seconds of the machine's one
clock, and the usage of the process.
"""
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import kvstore
import odsgd  # noqa: F401
from kvstore import methods
from kvstore.engine._mxnet import mx
from odsgd.lab.bench import usage
from odsgd.lab.instants import Instant
from odsgd.training.step.emulated import Emulated

KEYS_PER_MODEL = 10000

MOMENTUM = 0.9  # of stores that allow it


class Loop:
    """The training loop of one model on one store."""

    def __init__(self, store: Any, shapes: Sequence[Sequence[int]], first_key: int, dtype: str) -> None:
        self.weights = [mx.nd.ones(shape, dtype=dtype) for shape in shapes]
        self.grads = [mx.nd.zeros(shape, dtype=dtype) for shape in shapes]
        self.keys = range(first_key, first_key + len(shapes))
        self.store = store
        self.store.broadcast(list(self.keys), self.weights, self.weights)

    def measure(self, stint: Dict[str, Any]) -> Dict[str, Any]:
        layers, seconds = list(zip(self.weights, self.grads)), stint["compute_ms"] / 1000
        device = Emulated(layers, seconds, forward=0.0) if seconds else None
        self._iterations(device, stint["warm_up"])
        before = usage.now()
        moments = self._iterations(device, stint["iterations"])
        return {"moments_s": moments, "usage": [before, usage.now()]}

    def _iterations(self, device: Optional[Emulated], count: int) -> List[float]:
        """When `count` iterations began and ended."""
        moments = [Instant(self.weights)]
        moments[0].wait()
        for _ in range(count):
            if device:
                device.iteration()
            self.step()
            moments.append(Instant(self.weights))
            moments[-2 if device else -1].wait()
        return [moment.wait() for moment in moments]

    def step(self) -> None:
        """Queue what brings new weights, as a trainer does."""
        for number, key in enumerate(self.keys):
            self.store.pushpull(key, self.grads[number], out=self.weights[number], priority=-number)


def _stores(system: Dict[str, Any]) -> Iterator[Any]:
    """A store per model: our stores serve one model each. A process can have only one store of stock MXNet."""
    if system["stock"]:
        store = mx.kv.create("dist_async" if system["name"].endswith("async") else "dist_sync")
        store.set_optimizer(optimizer())
        yield from itertools.repeat(store)
    while True:
        store = kvstore.create(system["name"], **system["options"])
        store.set_optimizer(optimizer(0.0 if methods.find(system["name"]).plain_sgd else MOMENTUM))
        yield store


def optimizer(momentum: float = MOMENTUM) -> Any:
    """Nothing writes the gradients: at this rate no rule makes much of the values that happen to be in them."""
    return mx.optimizer.SGD(learning_rate=1e-6, momentum=momentum)


def main(file: str) -> None:
    """Measure every stint of a job; a model's computing times on one store."""
    spec = json.loads(Path(file).read_text(encoding="utf-8"))
    stores = _stores(spec["system"])
    measure(spec, lambda number, shapes: Loop(next(stores), shapes, number * KEYS_PER_MODEL, spec["dtype"]))


def measure(spec: Dict[str, Any], make: Callable[[int, Any], Loop]) -> None:
    """The stints of all models, each on a loop that `make` makes of the model's number and shapes."""
    measured = []
    for number, model in enumerate(spec["models"]):
        loop = make(number, model["shapes"])
        measured += [loop.measure(stint) for stint in model["stints"]]
    Path(spec["folder"], os.environ["ODSGD_WORKER_RANK"] + ".json").write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
