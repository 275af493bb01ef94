"""A run on a cluster in virtual time: all workers in this process, each a `Training` of its own.

The workers share the data in memory, and the machine: MXNet computes the gradients of as many at a time as there are
cores (`odsgd.training.cli` says so before MXNet is imported).
"""
import math
import os
from pathlib import Path

from kvstore.errors import ConfigError, KVStoreError
from kvstore.job.aside import guarded
from kvstore.messages.seam import Transport
from kvstore.tracing import recorder
from odsgd.config.train import TrainConfig
from odsgd.timeline import timeline
from odsgd.training import models
from odsgd.training.data import data
from odsgd.training.loop import Training, give_up
from odsgd.virtual.transport import VirtualStage

COPIES = 9
"""Arrays of the model's size that a worker has, about: weights, gradients and what carries them."""
THREAD_NBYTES = 5e6
"""Memory that MXNet keeps for a thread that has computed."""


def run(config: TrainConfig) -> int:
    """Train as `config` says; returns the exit code."""
    try:
        if os.environ.get("DMLC_ROLE"):
            raise ConfigError("cluster: a cluster in virtual time is one process; start it without `odsgd launch`")
        cluster = config.virtual_cluster
        _check_memory(config, cluster.workers)
        arrays = data.in_memory(config)

        def train(transport: Transport) -> None:
            Training(config, transport, arrays).run()

        trace, recorder.folder = config.trace or recorder.folder, None  # which is for timelines of real time
        stage = VirtualStage(cluster, config.options.timeout_s, trace)
        stage.run(train, stage.worker if config.needs_servers else stage.ring_worker)
        if trace is not None:
            with guarded("the timeline"):
                stage.finish_trace()
                print(timeline.finish(Path(trace)))
    except (ConfigError, KVStoreError, OSError) as error:
        return give_up(config, error)
    return 0


def _check_memory(config: TrainConfig, workers: int) -> None:
    """ConfigError if the workers' models would not fit."""
    floats = sum(parameter.data().size for parameter in models.create(config).collect_params().values())
    needed, there = workers * (4 * COPIES * floats + THREAD_NBYTES), _available_nbytes()
    if needed > there:
        raise ConfigError(f"{workers} workers of a model with {floats} parameters need about {needed / 1e9:.1f} GB of "
                          f"memory, and {there / 1e9:.1f} GB are free; take fewer workers or a smaller model")


def _available_nbytes() -> float:
    """Memory that is free; infinite if the system does not say."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), math.inf)
