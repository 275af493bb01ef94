"""A method of the user's own on the command line: its options are flags, in the help, and keys of a YAML file."""
import dataclasses
from pathlib import Path
from typing import Iterator

import pytest

from kvstore.errors import ConfigError
from kvstore.methods import find
from odsgd.config.train import TrainConfig
from odsgd.launch.command import check_command
from scripts.maintain import docs_tables
from tests import methods
from tests.odsgd.training.runs import final_weights, same_bits, tiny, train_together


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """Of the method `halved`, which has an option `sent_part`."""
    with methods.as_they_were():
        yield methods.write(tmp_path)


@pytest.mark.parametrize("flag", ["--sent-part", "--sent_part"])
@pytest.mark.parametrize("method_file", ["--method-file", "--method_file"])
def test_an_option_of_its_own_is_a_flag_with_either_dash(file: Path, method_file: str, flag: str) -> None:
    config = TrainConfig.from_flags([method_file, str(file), flag, "0.25"])
    assert (config.kvstore, config.method.name, config.name) == ("halved", "halved", "digits-mlp-halved")
    assert config.options.plain()["sent_part"] == 0.25 and config.method_file == str(file)
    assert TrainConfig(**config.to_dict()) == config
    assert dataclasses.replace(config, epochs=3).options == config.options


def test_files_may_lie_at_home(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "cluster.yaml").write_text("workers: 3")
    (tmp_path / "run.yaml").write_text(
        f"method_file: ~/{file.relative_to(tmp_path)}\nsent_part: 0.25\ntrace: ~/timeline\ncluster: ~/cluster.yaml\n")
    config = TrainConfig.from_flags(["--config=~/run.yaml"])
    assert (config.kvstore, config.trace, config.virtual_cluster.workers) == ("halved", f"{tmp_path}/timeline", 3)


def test_its_name_is_not_needed_and_another_wins(file: Path) -> None:
    flags = ["--method-file", f"{file}:Halved"]
    assert TrainConfig.from_flags(flags).kvstore == TrainConfig.from_flags([*flags, "--kvstore", "halved"]).kvstore
    assert TrainConfig.from_flags([*flags, "--kvstore", "ssgd"]).kvstore == "ssgd"


def test_help_and_the_table_show_its_options(file: Path, capsys: pytest.CaptureFixture[str],
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        TrainConfig.from_flags(["--method-file", str(file), "--help-all"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--sent-part X halved: part of a gradient that is sent (default: 0.5)" in shown
    item = "- `sent_part` (`halved`; a number, above 0; default `0.5`): part of a gradient that is sent\n"
    assert item in docs_tables.method_list()


@pytest.mark.parametrize("named", ["by a flag", "by the file"])
def test_its_option_may_stand_in_yaml(file: Path, tmp_path: Path, named: str) -> None:
    yaml = tmp_path / "run.yaml"
    yaml.write_text("sent_part: 0.125\nlr: 0.3\n" + (f"method-file: {file}\n" if named == "by the file" else ""))
    flags = ["--config", str(yaml), *(["--method-file", str(file)] if named == "by a flag" else [])]
    config = TrainConfig.from_flags(flags)
    assert (config.kvstore, config.options.plain()["sent_part"], config.lr) == ("halved", 0.125, 0.3)
    assert TrainConfig.from_flags([*flags, "--sent-part", "2"]).options.plain()["sent_part"] == 2.0


def test_the_resolved_configuration_reads_back_as_itself(file: Path, tmp_path: Path) -> None:
    config = TrainConfig.from_flags(["--method-file", str(file), "--sent-part", "0.25"])
    (tmp_path / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert TrainConfig.from_flags(["--config", str(tmp_path / "config.yaml")]) == config


def test_the_launcher_checks_its_options_too(file: Path) -> None:
    command = ["odsgd", "train", "--method-file", str(file), "--sent-part"]
    config = check_command([*command, "0.25"])
    assert config is not None and config.needs_servers
    with pytest.raises(ConfigError, match="--sent-part: expected a number, above 0, got `0`"):
        check_command([*command, "0"])


@pytest.mark.parametrize("flags, said", [
    (["--sent-prt", "1"], "unknown option `--sent-prt`; did you mean `--sent-part`?"),
    (["--sent-part", "none"], "--sent-part: expected a number, above 0, got `none`"),
    (["--kvstore", "ssgd", "--sent-part", "1"], "sent_part has no meaning with kvstore `ssgd`; it goes with halved"),
    (["--kvstore", "halfed"], "unknown kvstore `halfed`; did you mean `halved`?"),
])
def test_a_wrong_option_is_one_line_that_names_it(file: Path, flags: list, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_flags(["--method-file", str(file), *flags])
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_an_option_by_a_name_of_the_trainers_is_refused(tmp_path: Path) -> None:
    with methods.as_they_were():
        path = methods.write(tmp_path, methods.HALVED.replace("sent_part", "momentum"))
        with pytest.raises(ConfigError, match="option momentum of kvstore `halved` is one of `odsgd train`'s own; give "
                                              f"it another name in {path}:Halved"):
            TrainConfig.from_flags(["--method-file", str(path), "--momentum", "0.5"])


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_flags(["--method-file", f"{tmp_path}/no.py"])
    assert str(caught.value).startswith(f"no file `{tmp_path}/no.py`") and "\n" not in str(caught.value)


def test_without_the_file_its_options_are_unknown() -> None:
    with pytest.raises(ConfigError, match="unknown option `sent_part`"):
        TrainConfig(kvstore="ssgd", sent_part=1.0)


def test_it_trains_and_goes_on_from_a_checkpoint(file: Path, tmp_path: Path) -> None:
    whole, parts = (tiny(tmp_path / part, kvstore="halved", method_file=str(file), sent_part=0.25)
                    for part in ("whole", "parts"))
    train_together([whole] * 2)
    train_together([dataclasses.replace(parts, iterations=7)] * 2)
    train_together([dataclasses.replace(parts, resume=True)] * 2)
    assert same_bits(final_weights(tmp_path / "whole"), final_weights(tmp_path / "parts"))
    scaled = tiny(tmp_path / "scaled", kvstore="ssgd", lr=0.025)  # a quarter of a gradient is a quarter of the rate
    train_together([scaled] * 2)
    assert find("halved").name == "halved"
    for name, array in final_weights(tmp_path / "scaled").items():
        assert abs(array - final_weights(tmp_path / "whole")[name]).max().asscalar() < 1e-5
