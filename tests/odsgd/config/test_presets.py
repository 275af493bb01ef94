"""The files of configs/: each is a recipe that works as it stands, and says what it is for."""
import re
import shlex
import sys
from pathlib import Path

import pytest

from odsgd.config.train import TrainConfig
from odsgd.launch import command
from odsgd.launch.command import check_command

FOLDER = Path(__file__).parents[3] / "configs"
CONFIGS = sorted(set(FOLDER.glob("*.yaml")) - {FOLDER / "bench.yaml"})  # those are of `odsgd bench`

each_preset = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


def opening(path: Path) -> str:
    return "".join(line for line in path.read_text().splitlines(True) if line.startswith("#"))


def test_there_are_presets() -> None:
    assert {"digits_odsgd.yaml", "digits_ssgd.yaml"} <= {path.name for path in CONFIGS}


@each_preset
def test_a_preset_is_valid_and_opens_with_what_one_needs_to_know(path: Path) -> None:
    config = TrainConfig.from_flags(["--config", str(path), *([] if "digits" in path.name else ["--data-dir", "DIR"])])
    for label in ("reproduces", "launch", "machine", "time", "expect", "batch"):
        assert f"# {label}" in opening(path), label
    assert f"--config configs/{path.name}" in opening(path)
    one_device = config.worker_batch_size == config.batch_size
    assert one_device or f"mini-batch of {config.worker_batch_size} per worker" in opening(path)


@each_preset
def test_the_launcher_takes_the_command_that_a_preset_gives(path: Path, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parent)
    hosts = tmp_path / "hosts"
    hosts.write_text("a\n")
    line, = re.findall(r"# launch +odsgd launch (.*)", opening(path).replace("\\\n#", ""))
    line = line.replace("-H hosts", f"-H {hosts}").replace("DIR", str(tmp_path))
    line = line.replace("odsgd train", f"{sys.executable} -m odsgd train")
    job = command.parse(shlex.split(line))
    config = check_command(job.command)
    assert config is not None
    config.method(config.options, job.num_workers)  # complains of options that do not go with so many
