"""One worker of a measured job, on PyTorch with a store of odsgd: ``python -m odsgd.lab.bench.torch_worker SPEC.json``.

On the accelerator of backward.py, as ddp.py. Every stint has a store of its own.
"""
import sys
from typing import Any, Dict, Tuple

import odsgd  # noqa: F401  first, as every script does
from kvstore import methods
from kvstore.fronts.torch.optimizer import Optimizer
from kvstore.fronts.torch.store import create
from odsgd.lab.bench import backward, usage


def wrapped(model: Any, system: Dict[str, Any]) -> Tuple[Any, Any]:
    sgd = backward.sgd(model, 0.0 if methods.find(system["name"]).plain_sgd else 0.9)
    return model, Optimizer(sgd, model, create(system["name"], **system["options"]))


if __name__ == "__main__":
    backward.measure_all(sys.argv[1], usage.now, wrapped)
