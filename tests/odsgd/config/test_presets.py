"""The files of configs/: each is a recipe that works as it stands, and says what it is for."""
from pathlib import Path

import pytest

from odsgd.config.train import TrainConfig

FOLDER = Path(__file__).parents[3] / "configs"
CONFIGS = sorted(set(FOLDER.glob("*.yaml")) - set(FOLDER.glob("bench_*.yaml")))  # those are of `odsgd bench`


def test_there_are_presets() -> None:
    assert {"digits_odsgd.yaml", "digits_ssgd.yaml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_preset_is_valid_and_opens_with_what_one_needs_to_know(path: Path) -> None:
    config = TrainConfig.from_flags(["--config", str(path), *([] if "digits" in path.name else ["--data-dir", "DIR"])])
    opening = "".join(line for line in path.read_text().splitlines(True) if line.startswith("#"))
    for label in ("reproduces", "launch", "machine", "time", "expect", "batch"):
        assert f"# {label}" in opening, label
    assert f"--config configs/{path.name}" in opening
    assert f"mini-batch of {config.worker_batch_size} per worker" in opening or config.device_count == 1
