"""``odsgd train``."""
import os
import shlex
from typing import List

from kvstore.errors import ConfigError
from kvstore.job import environment
from odsgd.config.train import TrainConfig


def main(argv: List[str]) -> int:
    """Train as these flags say; returns the exit code."""
    config = TrainConfig.from_flags(argv)
    os.umask(int(config.umask, 8))
    if config.cluster is None and config.needs_servers and config.kvstore != "local" and not environment.in_job():
        command = shlex.join(["odsgd", "launch", "-n", "2", "-s", "1", "odsgd", "train", *argv])
        raise ConfigError(f"`{config.kvstore}` needs a job of workers and servers. To start one here: `{command}`. To "
                          "train in this process alone: --kvstore local")
    config.make_folder()
    if config.cluster is not None:  # MXNet reads these when it is imported
        os.environ.setdefault("MXNET_CPU_WORKER_NTHREADS", str(os.cpu_count() or 1))
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        from odsgd.training.step.virtual import run as run_virtual
        return run_virtual(config)
    from odsgd.training.loop import run  # MXNet's import takes a second: only once the options are right
    return run(config)
