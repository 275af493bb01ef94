"""Asynchronous settings known to diverge, said before the time is spent."""
from __future__ import annotations

from typing import List

from odsgd.config import TrainConfig


def warnings_about(config: TrainConfig, num_workers: int) -> List[str]:
    """One line for every bound that `config` is beyond; none are known yet."""
    return []
