"""``odsgd train``."""
import os
from typing import List

from odsgd.config.train import TrainConfig


def main(argv: List[str]) -> int:
    """Train as these flags say; returns the exit code."""
    config = TrainConfig.from_flags(argv)
    os.umask(int(config.umask, 8))
    if config.cluster is not None:  # MXNet reads these when it is imported
        os.environ.setdefault("MXNET_CPU_WORKER_NTHREADS", str(os.cpu_count() or 1))
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        from odsgd.training.step.virtual import run as run_virtual
        return run_virtual(config)
    from odsgd.training.loop import run  # MXNet's import takes a second: only once the options are right
    return run(config)
