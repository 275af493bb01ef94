"""The devices that a worker computes on: ``--num-gpus``, ``--gpus`` or ``--num-cpus``, as MXNet contexts."""
from typing import Any, List

from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError
from odsgd.config.train import TrainConfig


def contexts(config: TrainConfig) -> List[Any]:
    """The contexts, in the order in which a batch is split over them; ConfigError when a GPU is not there."""
    wanted = list(config.gpus) or list(range(config.num_gpus))
    if not wanted:
        return [mx.cpu(number) for number in range(config.num_cpus)]
    try:
        present = int(mx.context.num_gpus())
    except mx.MXNetError:  # a CUDA build on a machine without a driver
        present = 0
    missing = [number for number in wanted if number >= present]
    if missing:
        there = f"MXNet finds {present} GPU{'s' * (present != 1)} (see nvidia-smi and CUDA_VISIBLE_DEVICES)"
        if not mx.runtime.Features().is_enabled("CUDA"):
            there = "the installed MXNet is a CPU build (for GPUs: pip install '.[cu112]' in a clone of odsgd)"
        listed = [*missing[:3], "…", missing[-1]] if len(missing) > 5 else missing
        raise ConfigError(f"no GPU {', '.join(map(str, listed))} on this machine: {there}. Leave "
                          "--num-gpus and --gpus out to compute on the CPU")
    return [mx.gpu(number) for number in wanted]
