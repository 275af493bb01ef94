"""A worker that trains several runs one after another, in one job: they share its connection and its start."""
import json
from typing import Any, Dict, List

from tests.jobs import Result


def train_each(worker_rank: int, runs: List[Dict[str, Any]]) -> Result:
    """One training after another, from the options of each."""
    from odsgd.config.train import TrainConfig
    from odsgd.training import loop
    for options in runs:
        assert loop.run(TrainConfig(**options)) == 0, json.dumps(options)
    return {}
