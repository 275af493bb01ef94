"""One worker of a measured job, on PyTorch with a store of odsgd: ``python -m odsgd.lab.bench.torch_worker SPEC.json``.

On the accelerator of backward.py, as ddp.py. Every stint has a store of its own.
"""
import json
import sys
from pathlib import Path
from typing import Any, Dict, Tuple

import odsgd  # noqa: F401  first, as every script does

# isort: split
import torch

from kvstore import methods
from kvstore.fronts.torch.optimizer import Optimizer
from kvstore.fronts.torch.store import create
from odsgd.lab.bench import backward, usage


def wrapped(model: Any, system: Dict[str, Any]) -> Tuple[Any, Any]:
    sgd = backward.sgd(model, 0.0 if methods.find(system["name"]).plain_sgd else 0.9)
    return model, Optimizer(sgd, model, create(system["name"], **system["options"]))


def main(file: str) -> None:
    spec = json.loads(Path(file).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    backward.measure_all(spec, usage.now, lambda made: wrapped(made, spec["system"]))


if __name__ == "__main__":
    main(sys.argv[1])
