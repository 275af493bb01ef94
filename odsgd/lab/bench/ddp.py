"""One worker of a measured job, on PyTorch: DistributedDataParallel over gloo, ``ddp.py SPEC.json``.

On the accelerator of backward.py, then SGD with momentum. Run by path, with the interpreter that has torch.
"""
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Dict, Tuple

import backward  # type: ignore[import-not-found]  # beside this file
import torch
import usage  # type: ignore[import-not-found]  # beside this file
from torch.nn.parallel import DistributedDataParallel


def wrapped(model: Any, options: Dict[str, Any]) -> Tuple[Any, Any]:
    parallel = DistributedDataParallel(model, **options)
    return parallel, backward.sgd(parallel)


def main(file: str) -> None:
    spec = json.loads(Path(file).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method="file://" + spec["folder"] + "/rendezvous",
                                         rank=int(os.environ["ODSGD_WORKER_RANK"]),
                                         world_size=int(os.environ["DMLC_NUM_WORKER"]), timeout=timedelta(seconds=60))
    backward.measure_all(spec, usage.now, lambda made: wrapped(made, spec["system"]["options"]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
