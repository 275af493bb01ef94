"""``odsgd train``."""
from typing import List

from odsgd.config.train import TrainConfig


def main(argv: List[str]) -> int:
    """Train as these flags say; returns the exit code."""
    config = TrainConfig.from_flags(argv)
    from odsgd.training.train import run  # MXNet's import takes a second: only once the options are right
    return run(config)
