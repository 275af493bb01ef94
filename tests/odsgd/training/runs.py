"""Tiny runs, and what they leave behind."""
import json
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from kvstore.engine._mxnet import NDArray, mx
from kvstore.messages.seam import Transport
from kvstore.transports.in_process import Stage
from odsgd.config.train import TrainConfig
from odsgd.training import loop

TINY: Dict[str, Any] = {
    "dataset": "synthetic", "image_shape": (1, 6, 6), "num_classes": 3, "num_examples": 80, "batch_size": 8,
    "kvstore": "local", "epochs": 2, "log_interval": 4}  # 10 iterations per epoch for one worker, 5 for two


def tiny(out: Path, **options: Any) -> TrainConfig:
    return TrainConfig(**{**TINY, "out": str(out), **options})


def train_together(configs: Sequence[TrainConfig]) -> None:
    """One worker per configuration, as threads of this process."""
    stage = Stage(len(configs))

    def make(worker_rank: int) -> Transport:
        if configs[0].transport == "sharded":
            return stage.sharded_worker(worker_rank)
        return stage.worker(worker_rank) if configs[0].needs_servers else stage.ring_worker(worker_rank)
    stage.run(lambda transport: loop.Training(configs[transport.worker_rank], transport).run(), make)


def records(out: Path, event: Optional[str] = None) -> List[Dict[str, Any]]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if event in (None, record["event"])]


def final_weights(out: Path) -> Dict[str, NDArray]:
    folders = sorted((out / "checkpoints").iterdir(), key=lambda folder: int(folder.name))
    weights: Dict[str, NDArray] = mx.nd.load(str(folders[-1] / "weights.params"))
    return weights


def same_bits(one: Dict[str, NDArray], other: Dict[str, NDArray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name].asnumpy(), other[name].asnumpy())
                                              for name in one)
