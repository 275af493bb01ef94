"""One worker of a measured job, on PyTorch: DistributedDataParallel over gloo, ``ddp.py SPEC.json``.

On the accelerator of backward.py, then SGD with momentum. Run by path, with the interpreter that has torch.
"""
import os
import sys
from datetime import timedelta
from typing import Any, Dict, Tuple

import backward  # type: ignore[import-not-found]  # beside this file
import torch
import usage  # type: ignore[import-not-found]  # beside this file
from torch.nn.parallel import DistributedDataParallel


def wrapped(model: Any, system: Dict[str, Any]) -> Tuple[Any, Any]:
    parallel = DistributedDataParallel(model, **system["options"])
    return parallel, backward.sgd(parallel)


def main(file: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{os.environ['ODSGD_BENCH_FOLDER']}/rendezvous",
                                         rank=int(os.environ["ODSGD_WORKER_RANK"]),
                                         world_size=int(os.environ["DMLC_NUM_WORKER"]), timeout=timedelta(seconds=60))
    backward.measure_all(file, usage.now, wrapped)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
