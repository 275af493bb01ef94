"""What a YAML file says is read, or refused in one line with the file's name."""
from pathlib import Path
from typing import Any, Callable

import pytest

from kvstore.errors import ConfigError
from odsgd.config.files import read_cluster, read_yaml_file
from odsgd.config.train import TrainConfig
from odsgd.lab.advise.cli import of_profile
from odsgd.lab.advise.config import AdviseConfig
from odsgd.lab.cluster.links import described

CLUSTER_READERS = {
    "train": lambda path: TrainConfig.from_flags(["--cluster", path]).virtual_cluster,
    "advise": lambda path: of_profile(AdviseConfig.from_flags([path, "--model", "cnn"])),
    "cluster": described}


def complaint(reader: Callable[[str], Any], path: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        reader(str(path))
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("content, why", [
    ("lr: 1\nlr: 2", "is not YAML: `lr` stands twice, in line 2; leave one out"),
    ("hosts: {server0: {}, server0: {}}", "is not YAML: `server0` stands twice, in line 1"),
    ("? [1]", "is not YAML: while constructing a mapping"),
    ("workers: [", "is not YAML: while parsing a flow node"),
])
def test_what_is_not_yaml_is_one_line(tmp_path: Path, content: str, why: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(content)
    assert complaint(read_yaml_file, path).startswith(f"`{path}` {why}")


def test_an_option_in_two_spellings_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("lr-local: 0.1\nlr_local: 0.2")
    assert complaint(lambda path: TrainConfig.from_flags(["--config", path]), path) == (
        "option lr_local stands twice, once with `-` and once with `_`; leave one of them out")


@pytest.mark.parametrize("reader", CLUSTER_READERS.values(), ids=CLUSTER_READERS)
@pytest.mark.parametrize("content", [b"\xff\xfe", b"? [1]", b"workers: 2001-99-99", b"[" * 3000, b"7", b"links: fast"])
def test_a_bad_description_of_a_cluster_is_one_line_with_its_file(tmp_path: Path, content: bytes,
                                                                  reader: Callable[[str], Any]) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(content)
    assert complaint(reader, path).startswith(f"`{path}`")


def test_a_description_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "none"
    assert complaint(read_cluster, path).startswith(f"cannot read `{path}`, the description of a cluster in YAML: No ")


def test_an_empty_description_is_the_defaults_and_what_is_given_wins(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("")
    assert (read_cluster(str(path)).workers, read_cluster(str(path), workers=4).workers) == (2, 4)
