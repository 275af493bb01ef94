"""Checks the workers' command of a job before anything starts."""
from __future__ import annotations

import os
from pathlib import Path
from typing import List, Optional, Sequence

from odsgd.config.flags import given
from odsgd.config.train import TrainConfig

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "train.py"


def check_command(command: Sequence[str], elsewhere: bool = False) -> Optional[TrainConfig]:
    """The configuration of a worker's command, if it is ``odsgd train`` and can be known here; ConfigError.

    So the launcher reports a misspelt option once, before a process starts, and not every worker. `elsewhere`: the
    workers run on other hosts, so the file of ``--config`` may be there and not here; then only the flags are checked,
    each for itself.
    """
    flags = _flags_of_train(list(command))
    if flags is None:
        return None
    method_file, config_file = given(flags, "--method-file", "--config") if elsewhere else (None, None)
    if method_file and method_file.endswith(".py") and not os.path.exists(method_file):
        return None
    if config_file and not os.path.exists(config_file):
        TrainConfig.parse(flags)
        return None
    return TrainConfig.from_flags(flags)


def _flags_of_train(words: List[str]) -> Optional[List[str]]:
    if words and Path(words[0]).name.startswith("python"):
        words = ["odsgd", *words[3:]] if words[1:3] == ["-m", "odsgd"] else words[1:]
    if words and Path(words[0]).resolve() == SCRIPT:
        return words[1:]
    return words[2:] if [Path(word).name for word in words[:2]] == ["odsgd", "train"] else None
