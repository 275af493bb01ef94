"""What a YAML file says is read, or refused in one line with the file's name."""
from pathlib import Path
from typing import Any, Callable

import pytest
import yaml

from kvstore.errors import ConfigError
from odsgd.config.files import read_cluster, read_yaml_file
from odsgd.config.train import TrainConfig
from odsgd.lab.advise.cli import of_profile
from odsgd.lab.advise.config import AdviseConfig
from odsgd.lab.cluster.links import described
from tests.odsgd.config.test_train import ISSUE_EXAMPLE, from_flags, message, method_options, optimizer_local, yaml_file

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


# --- the configuration of a run ---------------------------------------------------------------------------------------

def test_the_resolved_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    config = from_flags(ISSUE_EXAMPLE + " --optimizer-params clip_gradient=5,nesterov=true --checkpoint-every 2epochs")
    (tmp_path / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert from_flags(f"--config {tmp_path / 'config.yaml'}") == config
    assert TrainConfig(**config.to_dict()) == config


def test_the_authors_threads_decode_the_data_set_that_the_file_names(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "dataset: imagenet\ndata_dir: here\n")
    assert from_flags(f"--config {path} --num-worker 8").data_threads == 8
    assert from_flags(f"--config {path} --num-worker 8 --dataset cifar10").data_threads is None


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "lr: 0.3\nepochs: 4\n")
    config = from_flags(f"--config {path} --lr 0.5")
    assert (config.lr, config.epochs) == (0.5, 4)


def test_a_store_named_by_a_flag_wins_over_what_the_file_says_of_another(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "lr: 0.3\nkvstore: odsgd\noptimizer_local: dcasgd_c\nlr_local: 0.5\ntimeout_s: 9\n")
    config = from_flags(f"--config {path} --kvstore ssgd")
    assert (config.kvstore, config.lr, config.options.timeout_s, config.lr_local) == ("ssgd", 0.3, 9, None)
    assert optimizer_local(config) is None
    assert from_flags(f"--config {path} --kvstore dist_sync") == from_flags(f"--config {path}")
    assert "lr_local has no meaning" in message(f"--config {path} --kvstore ssgd --lr-local 1")


def test_a_store_may_bring_its_options_in_one_word_and_flags_win() -> None:
    assert from_flags("--kvstore odsgd:warmup=2epochs:lr-local=0.5 --lr-local 0.25") == \
        from_flags("--kvstore odsgd --warmup 2epochs --lr-local 0.25")
    assert "unknown option `wrmup`; did you mean `warmup`?" in message("--kvstore odsgd:wrmup=3")


def test_what_has_one_name_but_another_good_value_with_another_store_gives_way_too(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "kvstore: odsgd\noptimizer_local: dcasgd_a\nlamda: 0.95\nm: 0\nlr_local: 0.5\n")
    assert from_flags(f"--config {path} --kvstore dcasgd_a").options == TrainConfig(kvstore="dcasgd_a").options
    assert from_flags(f"--config {path} --kvstore downpour").lr_local is None
    elastic = yaml_file(tmp_path, "kvstore: easgd\nT: 7\nbeta: 0.5\n")
    assert method_options(from_flags(f"--config {elastic} --kvstore eamsgd")) == {"T": 7, "beta": 0.5, "delta": 0.9}
    assert method_options(from_flags(f"--config {elastic} --kvstore easgd"))["beta"] == 0.5


@pytest.mark.parametrize("first, then", [
    ("--kvstore diloco", "--kvstore sparseloco"), ("--kvstore sparseloco", "--kvstore diloco"),
    ("--kvstore diloco", "--kvstore decoupled"), ("--kvstore decoupled", "--kvstore eager"),
    ("--kvstore easgd", "--kvstore sparseloco"), ("--kvstore sparseloco", "--kvstore eamsgd"),
    ("--optimizer-local dcasgd_c", "--optimizer-local dcasgd_a"),
    ("--optimizer-local dcasgd_a", "--optimizer-local dcasgd_c"),
    ("--optimizer-local dcasgd_a", "--optimizer-local sgd"),
])
def test_defaults_that_a_runs_own_file_has_are_not_those_of_another_store_or_local_optimizer(
        tmp_path: Path, first: str, then: str) -> None:
    path = yaml_file(tmp_path, from_flags(first).to_yaml())
    assert from_flags(f"--config {path} {then}").options == from_flags(then).options


def test_an_option_of_the_local_optimizer_that_a_flag_names_may_stand_in_the_file(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "lamda: 0.5\n")
    assert method_options(from_flags(f"--config {path} --optimizer-local dcasgd_c"))["lamda"] == 0.5
    path = yaml_file(tmp_path, "optimizer_local: dcasgd_c\nlamda: 0.5\n")
    assert method_options(from_flags(f"--config {path} --optimizer-local dcasgd_c"))["lamda"] == 0.5


def test_a_whole_number_in_a_file_is_decimal_and_other_text_stays_text(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "batch_size: 010\nepochs: 3\nout: 2026_11_29\ncheckpoint_to: 2026-11-29\n"
                               "checkpoint_every: 1_000\numask: 027\nlr_step_epochs: [1, 02]\n")
    config = from_flags(f"--config {path}")
    assert config == from_flags("--batch-size 010 --epochs 3 --out 2026_11_29 --checkpoint-to 2026-11-29 "
                                "--checkpoint-every 1_000 --umask 027 --lr-step-epochs 1,02")
    assert (config.batch_size, config.out, config.umask) == (10, "2026_11_29", "027")
    path = yaml_file(tmp_path, "seed: 1:30\n")
    assert "seed: expected a whole number, 0 or more and below 2^31, got `1:30`" in message(f"--config {path}")


def test_yaml_values_may_be_written_as_one_writes_them(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "wd: 1e-4\nlr-step-epochs: [8, 12]\ngpus: 0\nwarmup: 2epochs\nlr_local: null\n"
                               "optimizer_params: {beta1: 0.5}\noptimizer: adam\n")
    config = from_flags(f"--config {path}")
    assert (config.wd, config.lr_step_epochs, config.gpus) == (1e-4, (8, 12), (0,))
    assert (config.lr_local, config.optimizer_params) == (None, {"beta1": 0.5})
    assert config.options.plain()["warmup"] == "2epochs"


@pytest.mark.parametrize("text, said", [
    ("lr_locl: 1", "unknown option `lr_locl` in `{path}`; did you mean `lr_local`?"),
    ("lr: fast", "`{path}`: lr: expected a number, at least 0, got `fast`"),
    ("lr: null", "`{path}`: lr: expected a number, at least 0, got `None`"),
    ("kvstore: [ssgd]", "`{path}`: kvstore: expected text, got `['ssgd']`"),
    ("augment: 2", "`{path}`: augment: expected true or false, got `2`"),
    ("dataset: digit", "`{path}`: dataset: unknown data set `digit`; did you mean `digits`?"),
    ("- lr", "`{path}`: expected lines of the form `option: value`"),
    ("lr: [", "`{path}` is not YAML:"),
])
def test_a_wrong_file_is_one_line_that_names_file_and_key(tmp_path: Path, text: str, said: str) -> None:
    path = yaml_file(tmp_path, text)
    assert said.format(path=path) in message(f"--config {path}")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert message(f"--config {tmp_path}/no.yaml") == (
        f"cannot read `{tmp_path}/no.yaml`, a configuration in YAML: No such file or directory")


def test_what_yaml_writes_is_plain() -> None:
    assert yaml.safe_load(TrainConfig().to_yaml())["checkpoint_every"] == "1epoch"
