"""Options: where they come from, what they turn into, and what is said when they cannot work."""
import dataclasses
import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

import pytest
import yaml

import odsgd.cli  # noqa: F401  which knows all commands and their flags
from kvstore import methods as algorithms
from kvstore.errors import ConfigError
from kvstore.methods import local_optimizers
from kvstore.methods.common import CodedOptions
from kvstore.options import TrainingLength, integer, option, plain
from odsgd.config import methods
from odsgd.config.flags import parse_flags
from odsgd.config.train import TrainConfig, option_fields
from odsgd.config.train_options import Compute, TrainOptions
from scripts.maintain import docs_tables

ISSUE_EXAMPLE = """--model resnet18_v2 --dataset cifar10 --data-dir DIR --num-gpus 4 --batch-size 32
    --kvstore dist_sync --optimizer sgd --lr 0.1 --momentum 0.9 --wd 1e-4
    --optimizer-local dcasgd_a --lr-local 0.5 --momentum-local 0 --warmup 200
    --lr-step-epochs 80,120 --lr-step-epochs-local 82,122 --lr-factor 0.1 --epochs 160"""


CODES: Dict[str, Any] = CodedOptions.__dataclass_fields__


def from_flags(line: str) -> TrainConfig:
    return TrainConfig.from_flags(line.split())


def message(flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        from_flags(flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def method_options(config: TrainConfig, batches_per_epoch: int = 1) -> Dict[str, Any]:
    """What the method's own options come to, without those that have no value; lengths in iterations."""
    plain = config.options.in_iterations(batches_per_epoch).plain()
    return {name: value for name, value in plain.items() if name not in methods.COMMON and value is not None
            and not (name in CODES and isinstance(config.options, CodedOptions) and CODES[name].default == value)}


def optimizer_local(config: TrainConfig) -> Optional[str]:
    return getattr(config.options, "optimizer_local", None)


def yaml_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


# --- flags ------------------------------------------------------------------------------------------------------------

def test_the_command_line_of_the_published_code_is_understood() -> None:
    config = from_flags(ISSUE_EXAMPLE)
    assert (config.kvstore, optimizer_local(config), config.lr_local, config.wd) == ("odsgd", "dcasgd_a", 0.5, 1e-4)
    assert (config.lr_step_epochs, config.lr_step_epochs_local) == ((80, 120), (82, 122))
    assert method_options(config, batches_per_epoch=390) == {
        "warmup": 200, "optimizer_local": "dcasgd_a", "lr_local": 0.5, "momentum_local": 0.0,
        "lamda": 2.0, "m": 0.95, "epsilon": 1e-7}
    assert config.transport == "server"
    assert config.optimizer_arguments() == {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-4}


def test_every_flag_is_understood_with_underscores_too() -> None:
    underscored = " ".join("--" + word[2:].replace("-", "_") if word.startswith("--") else word
                           for word in ISSUE_EXAMPLE.split())
    assert "--optimizer_local" in underscored
    assert from_flags(underscored) == from_flags(ISSUE_EXAMPLE)


def test_underscores_of_a_value_are_left_alone() -> None:
    assert from_flags("--out=my_run").out == "my_run"
    here = from_flags("--out=~/run --checkpoint-to=~/copies")
    assert (here.out, here.checkpoint_to) == (os.path.expanduser("~/run"), os.path.expanduser("~/copies"))
    assert from_flags("--optimizer_params=clip_gradient=5").optimizer_params == {"clip_gradient": 5}


@pytest.mark.parametrize("flags, ours", [
    ("--mode imperative", "--no-hybridize"),
    ("--mode symbolic", ""),
    ("--num-worker 12 --dataset cifar10 --data-dir here", "--dataset cifar10 --data-dir here"),
    ("--num-worker 12 --dataset imagenet --data-dir here", "--data-threads 12 --dataset imagenet --data-dir here"),
    ("--optimizer_local CADCASGD", "--optimizer-local dcasgd_a"),
    ("--optimizer_local ADCASGD", "--optimizer-local dcasgd_a"),
    ("--optimizer_local DCASGD", "--optimizer-local dcasgd"),
    ("--optimizer_local LASGD", "--optimizer-local dcasgd"),
    ("--optimizer_local PSGD", "--optimizer-local sgd"),
])
def test_words_of_the_authors_scripts_are_understood(flags: str, ours: str) -> None:
    assert from_flags(flags) == from_flags(ours)


def test_truth_values_have_a_flag_to_turn_them_off() -> None:
    assert from_flags("").hybridize and not from_flags("--no_hybridize").hybridize


@pytest.mark.parametrize("flags, said", [
    ("--lr-locl 1", "unknown option `--lr-locl`; did you mean `--lr-local`?"),
    ("--lr_locl 1", "unknown option `--lr-locl`; did you mean `--lr-local`?"),
    ("--batch 3", "unknown option `--batch`"),
    ("digits", "unexpected argument `digits`"),
    ("--lr", "argument --lr: expected one argument"),
    ("--lr fast", "--lr: expected a number, at least 0, got `fast`"),
    ("--lr nan", "--lr: expected a number, at least 0, got `nan`"),
    ("--lr -1", "--lr: expected a number, at least 0, got `-1`"),
    ("--batch-size 0", "--batch-size: expected a whole number, 1 or more"),
    ("--batch-size 2.5", "--batch-size: expected a whole number, 1 or more"),
    ("--epsilon 0", "--epsilon: expected a number, above 0, got `0`"),
    ("--warmup 2weeks", "--warmup: expected iterations (200) or epochs (2epochs), got `2weeks`"),
    ("--optimizer-params clip", "--optimizer-params: expected keywords as key=value"),
    ("--optimizer-params learning_rate=1", "optimizer_params: the run sets learning_rate itself; leave it out"),
    ("--wd 0.01 --optimizer-params wd=0.1", "optimizer_params: wd is an option of its own; give it there"),
    ("--optimizer-params momentum=0.9", "optimizer_params: momentum is an option of its own"),
    ("--optimizer-params rescale_grad=1", "optimizer_params: the run sets rescale_grad itself"),
    ("--optimizer-params beta2=0.9x", "optimizer_params: beta2: expected a number, true or false, got `0.9x`"),
    ("--optimizer-params clip_gradient=abc", "optimizer_params: clip_gradient: expected a number, true or false"),
    ("--optimizer adam --optimizer-params beta1=abc", "optimizer_params: beta1: expected a number, true or false"),
    ("--lr-step-epochs 80;120", "--lr-step-epochs: expected whole numbers, 1 or more, separated by commas, got"),
    ("--model resnet18_v3", "--model: unknown model `resnet18_v3`; did you mean `resnet18_v2`"),
    ("--dataset digit", "--dataset: unknown data set `digit`; did you mean `digits`?"),
    ("--optimizer sdg", "--optimizer: unknown optimizer `sdg`; did you mean `sgd`?"),
    ("--optimizer-params 1", "--optimizer-params: expected keywords as key=value"),
    ("--optimizer-params clip_gradient=1,clip_gradient=2", "--optimizer-params: `clip_gradient` stands twice; leave "),
    *((f"--optimizer-params clip_gradient={value}",
       "optimizer_params: clip_gradient: expected a number, true or false, got") for value in ("nan", "inf")),
    ("--config a.yaml --config b.yaml", "--config stands twice, with `a.yaml` and `b.yaml`; leave one of them out"),
    ("--method-file ./mine", "method `./mine`: expected FILE.py, FILE.py:CLASS or MODULE:CLASS"),
    *((f"--{name}=", f"--{name}: expected {kind}, got nothing; is a variable empty?") for name, kind in [
        ("config", "a path"), ("out", "a path"), ("trace", "a path"),
        ("checkpoint-to", "text"), ("method-file", "text"), ("gpus", "whole numbers, 0 or more, separated by commas"),
        ("optimizer-params", "keywords as key=value,key=value")]),
    ("--num-server 2", "unknown option `--num-server`; did you mean `--num-servers`, an option of `odsgd launch`?"),
    ("--hostfile hosts", "unknown option `--hostfile`: it is an option of `odsgd launch`."),
    ("--mode fast", "--mode: unknown mode `fast`"),
    ("--optimizer-local dcasgd-c", "did you mean `dcasgd_c`?"),
    ("--on-nan ignore", "--on-nan: unknown answer `ignore`"),
    ("--kvstore odsdg", "unknown kvstore `odsdg`; did you mean `odsgd`?"),
    ("--model resnet50", "unknown model `resnet50`; did you mean `resnet50_v1` or `resnet50_v2`?"),
])
def test_a_wrong_flag_is_one_line_that_names_it(flags: str, said: str) -> None:
    assert said in message(flags)


def test_help_names_every_option(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # no word is cut
    with pytest.raises(SystemExit) as stop:
        from_flags("--help-all")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    of_methods = {name for method in algorithms.METHODS.values() for name in method.option_names()}
    for name in [*of_methods, *TrainOptions.__dataclass_fields__]:
        assert f"--{name.replace('_', '-')} " in shown, name
    words = " ".join(shown.split())
    assert "--hybridize compile the network into one graph (default; --no-hybridize turns it off)" in words
    assert "by its staleness (default: true; --no-modulate turns it off)" in words
    assert "e.g. 200, or 2epochs (defaults: odsgd: 200; delayed, pipesgd: 0)" in words


def default_shown(field: Any) -> str:
    value = field.metadata["otherwise"] if field.default is None else plain(field.default)
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def test_help_says_of_every_option_of_a_method_what_it_is_and_its_default(
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        from_flags("--help-all")
    entries = [" ".join(entry.split()) for entry in capsys.readouterr().out.split("\n  --")]
    said = {entry.partition(" ")[0].replace("-", "_"): entry for entry in entries}
    for store, method in algorithms.METHODS.items():
        for field in dataclasses.fields(method.Options):
            entry, default = said[field.name], re.escape(default_shown(field))
            alone = re.escape(field.metadata["help"]) + rf" \(default: {default}[;)]"
            among = re.escape(field.metadata["help"]) + rf" \(defaults: .*\b{store}\b[^:;]*: {default}[;)]"
            assert re.search(alone, entry) or re.search(among, entry), f"{store}: {entry}"


# --- names of stores --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("flags, kvstore, local", [
    ("", "odsgd", "sgd"),
    ("--kvstore dist_sync", "ssgd", None),
    ("--kvstore dist", "ssgd", None),
    ("--kvstore dist_device_sync --optimizer-local none", "odsgd", "none"),
    ("--kvstore odsgd --optimizer-local adam", "odsgd", "adam"),
    ("--kvstore device", "local", None),
    ("--kvstore delayed", "delayed", None),
    ("--kvstore dist_async", "asgd", None),
    ("--kvstore dist_device_async", "asgd", None),
])
def test_mxnets_names_of_stores_become_ours(flags: str, kvstore: str, local: Optional[str]) -> None:
    config = from_flags(flags)
    assert (config.kvstore, optimizer_local(config)) == (kvstore, local)


# --- what goes together -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("flags, said", [
    ("--kvstore ssgd --optimizer-local sgd", "optimizer_local has no meaning with kvstore `ssgd`; it goes with odsgd"),
    ("--kvstore dist_sync --lr-local 1", "lr_local has no meaning with kvstore `dist_sync` without optimizer_local"),
    ("--kvstore dist_sync --optimizer-local sgd --T 4", "T has no meaning with kvstore `dist_sync`, which is odsgd;"),
    ("--kvstore ssgd --warmup 5", "warmup has no meaning with kvstore `ssgd`; it goes with odsgd or delayed"),
    ("--kvstore local --warmup 5", "warmup has no meaning with kvstore `local`"),
    ("--optimizer-local none --lr-local 1", "lr_local has no meaning with optimizer_local `none`"),
    ("--optimizer-local none --momentum-local 0.5", "momentum_local has no meaning with optimizer_local `none`, which"),
    ("--optimizer-local none --lr-step-epochs-local 3",
     "lr_step_epochs_local has no meaning with optimizer_local `none`, which takes no local step"),
    ("--kvstore sasgd --optimizer adam", "leave optimizer and momentum out (momentum: SASGD has none)"),
    ("--optimizer-local sgd --lamda 1", "lamda goes with optimizer_local dcasgd_c or dcasgd_a, not with `sgd`"),
    ("--optimizer-local dcasgd_c --m 0.5", "m goes with optimizer_local dcasgd_a, not with `dcasgd_c`"),
    ("--kvstore ssgd --lamda 1", "lamda has no meaning with kvstore `ssgd`; it goes with odsgd or dcasgd_c or"),
    ("--kvstore dcasgd_c --m 0.5", "m has no meaning with kvstore `dcasgd_c`; it goes with odsgd or dcasgd_a"),
    ("--kvstore asgd --no-modulate", "modulate has no meaning with kvstore `asgd`; it goes with softsync"),
    ("--kvstore easgd --delta 0.5", "delta has no meaning with kvstore `easgd`; it goes with eamsgd"),
    ("--kvstore easgd --alpha 0.1 --beta 0.5", "beta has no meaning beside alpha"),
    ("--kvstore easgd --alpha 1", "--alpha: expected a number, at least 0 and below 1, got `1`"),
    ("--kvstore ssgd --codec 3bit", "--codec: unknown codec `3bit`; did you mean `2bit`?"),
    ("--kvstore ssgd --codec-weights 2bit", "--codec-weights: unknown codec `2bit`. Known: bfloat16, float16, none"),
    ("--kvstore ssgd --codec-threshold 0.1", "codec_threshold has no meaning with codec `none`; 2bit and"),
    ("--kvstore odsgd --transport ring --codec 1bit", "codec `1bit` needs servers: a ring encodes sums anew at every"),
    ("--transport ring --codec-weights float16", "codec_weights has no meaning on a ring, where no weights travel"),
    ("--kvstore pipesgd --codec 2bit", "codec `2bit` needs servers"),
    ("--kvstore easgd --codec float16", "codec has no meaning with kvstore `easgd`; it goes with"),
    ("--kvstore easgd --momentum 0.9", "leave optimizer and momentum out (momentum: store `eamsgd`, option `delta`)"),
    ("--kvstore eamsgd --optimizer adam", "kvstore `eamsgd` takes plain SGD steps of its own"),
    ("--kvstore sasgd --momentum 0.9", "kvstore `sasgd` takes plain SGD steps of its own: leave optimizer and momentum "
                                       "out"),
    ("--kvstore asgd --transport ring", "transport has no meaning with kvstore `asgd`; it goes with ssgd or odsgd or "
                                       "delayed"),
    ("--kvstore ssgd --transport ring", "store ssgd runs on transport server or sharded, not on `ring`"),
    ("--kvstore dsync --K 2", "K has no meaning with kvstore `dsync`; it goes with pipesgd"),
    ("--kvstore pipesgd --codec quantise", "unknown codec `quantise`; did you mean `quantize`?"),
    ("--kvstore downpour --T 3 --push-every 1 --fetch-every 2", "T has no meaning beside push_every and fetch_every"),
    ("--optimizer adam --momentum 0.9", "momentum: optimizer `adam` takes no momentum"),
    ("--optimizer-local adam --momentum-local 0.9", "momentum_local: optimizer `adam` takes no momentum"),
    ("--lr-step-epochs 20,10", "lr_step_epochs: 20,10 does not rise"),
    ("--lr-step-epochs-local 20", "lr_step_epochs_local needs lr_local"),
    ("--lr-decay poly --lr-step-epochs 20", "lr_step_epochs has no meaning with lr_decay `poly`"),
    ("--lr-warmup-from 0.1", "lr_warmup_from needs lr_warmup"),
    ("--dataset mnist", "dataset `mnist` needs data_dir"),
    ("--augment", "augment goes with cifar10 or imagenet, not with dataset `digits`"),
    ("--num-classes 7", "num_classes goes with imagenet or synthetic, not with dataset `digits`"),
    ("--num-gpus 2 --num-cpus 2", "give one of num_gpus, gpus and num_cpus"),
    ("--gpus 1,1", "gpus: 1,1 names a device twice"),
    ("--thumbnail", "thumbnail is for Gluon's ResNets and MobileNets, not for model `mlp`"),
])
def test_a_contradiction_is_one_line(flags: str, said: str) -> None:
    assert said in message(flags)


def test_the_constructor_checks_as_the_command_line_does() -> None:
    with pytest.raises(ConfigError, match="lr: expected a number, at least 0, got `fast`"):
        TrainConfig(lr="fast")
    assert TrainConfig(warmup="2epochs").options == TrainConfig(warmup=TrainingLength(2, "epochs")).options


# --- resolved values --------------------------------------------------------------------------------------------------

def test_defaults_that_depend_on_other_options_are_filled_in() -> None:
    config = TrainConfig()
    assert config.out == "runs/digits-mlp-odsgd-sgd"
    assert method_options(config) == {"warmup": 200, "optimizer_local": "sgd", "momentum_local": 0.0}
    assert method_options(TrainConfig(optimizer_local="dcasgd_c"))["lamda"] == 0.04
    assert method_options(TrainConfig(kvstore="delayed")) == {"warmup": 0}
    assert TrainConfig(dataset="synthetic").image_shape == (3, 32, 32)


@pytest.mark.parametrize("flags, options", [
    ("--kvstore asgd", {}),
    ("--kvstore dcasgd_c", {"lamda": 0.04}),
    ("--kvstore dcasgd_a --lamda 1", {"lamda": 1.0, "m": 0.95, "epsilon": 1e-7}),
    ("--kvstore softsync --n 2 --no-modulate", {"n": 2, "modulate": False}),
    ("--kvstore downpour --T 3 --lr-local 0.5", {"T": 3, "lr_local": 0.5}),
    ("--kvstore downpour --push-every 2 --fetch_every 3", {"push_every": 2, "fetch_every": 3}),
    ("--kvstore easgd --alpha 0.3", {"T": 4, "alpha": 0.3}),
    ("--kvstore eamsgd --T 2 --delta 0", {"T": 2, "beta": 0.9, "delta": 0.0}),
    ("--kvstore dsync", {"codec": "none"}),
    ("--kvstore dsync --codec quantize", {"codec": "quantize"}),
    ("--kvstore pipesgd", {"K": 2, "codec": "none", "warmup": 0}),
    ("--kvstore pipesgd --K 3 --codec truncate --warmup 2epochs", {"K": 3, "codec": "truncate", "warmup": 14}),
    ("--kvstore sasgd", {"T": 1}),
    ("--kvstore sasgd --T 4 --gamma-p 0.1 --lr-local 0.5", {"T": 4, "gamma_p": 0.1, "lr_local": 0.5}),
    ("--kvstore delayed --transport ring", {"warmup": 0}),
    ("--kvstore delayed --transport sharded", {"warmup": 0}),
    ("--kvstore ssgd --transport sharded", {}),
    ("--kvstore delayed --transport ring --codec float16", {"warmup": 0, "codec": "float16"}),
])
def test_asynchronous_stores_and_those_without_servers_get_their_options(flags: str, options: Dict[str, Any]) -> None:
    config = from_flags(flags)
    asynchronous = config.kvstore in ("asgd", "dcasgd_c", "dcasgd_a", "softsync", "downpour", "easgd", "eamsgd")
    assert config.asynchronous == config.needs_servers == asynchronous and method_options(config, 7) == options
    assert TrainConfig(**config.to_dict()) == config
    assert TrainConfig().needs_servers and TrainConfig(transport="server").needs_servers


def test_an_emulated_compute_time_has_a_unit_and_perhaps_a_spread() -> None:
    config = TrainConfig.from_flags(["--emulate-compute", "0.2s,lognormal:0.1"])
    assert config.emulate_compute == Compute(seconds=0.2, spread=0.1)
    assert config.to_dict()["emulate_compute"] == "200ms,lognormal:0.1" and config.eval_every == 0
    assert TrainConfig(**config.to_dict()) == config
    assert TrainConfig(emulate_compute="33.3ms").to_dict()["emulate_compute"] == "33.3ms"
    for same, time in (("200ms,lognormal:0", "200ms"), (".5s", "500ms"), ("5.s", "5000ms")):
        assert TrainConfig(emulate_compute=same).to_dict()["emulate_compute"] == time
    for wrong in ("200", "0ms", "200ms,normal:1", "-1s", "200ms,lognormal:-1", ".s"):
        with pytest.raises(ConfigError, match="emulate_compute: expected a time"):
            TrainConfig(emulate_compute=wrong)
    with pytest.raises(ConfigError, match="resume has no meaning"):
        TrainConfig(emulate_compute="1ms", resume=True)


def test_a_span_may_count_epochs() -> None:
    assert [method_options(TrainConfig(warmup=text), 50)["warmup"] for text in ("3epochs", "1epoch", "2e", "7", 7)] \
        == [150, 50, 100, 7, 7]


def test_options_of_no_concern_to_a_store_do_not_reach_it() -> None:
    assert TrainConfig(kvstore="easgd", timeout_s=5).options.plain() == {
        "bucket_nbytes": None, "timeout_s": 5.0, "on_nan": "stop", "uneven": "wait",
        "reduction": "mean", "T": 4, "alpha": None, "beta": 0.9}
    assert method_options(TrainConfig(kvstore="local")) == {}
    assert "lr_step_epochs_local" not in TrainConfig(lr_local=1, lr_step_epochs_local="3").options.plain()


@pytest.mark.parametrize("flags, count", [("", 1), ("--num-cpus 2", 2), ("--gpus 0,2", 2), ("--num-gpus 4", 4)])
def test_devices_are_counted_before_any_is_opened(flags: str, count: int) -> None:
    assert from_flags(f"{flags} --batch-size 10").worker_batch_size == 10 * count


def test_the_batch_size_is_that_of_one_device_as_in_gluons_scripts() -> None:
    config = from_flags(ISSUE_EXAMPLE)  # 4 GPUs
    assert (config.batch_size, config.worker_batch_size) == (32, 128)
    assert TrainConfig(batch_size=32).worker_batch_size == 32


def test_what_changes_a_result_keeps_a_run_from_being_resumed_and_nothing_else() -> None:
    config = TrainConfig(lr=0.2, num_cpus=2)
    saved = TrainConfig(lr=0.1, model="lenet", log_interval=3, out="elsewhere", epochs=99).to_dict()
    assert config.mismatches(saved) == ["model: lenet in the saved run, mlp now", "lr: 0.1 in the saved run, 0.2 now",
                                        "devices of a worker: 1 in the saved run, 2 now"]
    assert config.mismatches(config.to_dict()) == []
    assert TrainConfig(lr_decay="poly").mismatches(TrainConfig(lr_decay="poly", epochs=3).to_dict()) == \
        ["epochs: 3 in the saved run, 10 now"]


# --- the rest ---------------------------------------------------------------------------------------------------------

def test_launcher_and_agent_start_without_numpy_and_options_are_checked_without_mxnet() -> None:
    code = ("import sys, odsgd.launch.command, odsgd.launch.agent.agent\n"
            "assert not {'numpy', 'kvstore.methods'} & set(sys.modules)\n"
            "import odsgd.config.train\n"
            "assert not {'mxnet', 'gluoncv'} & set(sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def items(text: str) -> List[str]:
    """Of a list of the docs, each in one line."""
    return [" ".join(item.split()) for item in ("\n" + text).split("\n- ")[1:]]


def names_of(text: str) -> List[str]:
    return [item.split("`")[1] for item in items(text)]


def test_the_lists_of_the_docs_have_an_item_for_every_option() -> None:
    of_runs, of_methods = docs_tables.run_list(), docs_tables.method_list()
    assert names_of(of_runs) == [*TrainOptions.__dataclass_fields__]
    assert list(dict.fromkeys(names_of(of_methods))) == list(methods.fields())
    assert set(option_fields()) == {*names_of(of_runs), *names_of(of_methods)}
    assert all(field.metadata["help"] for field in option_fields().values())


@pytest.mark.parametrize("store", algorithms.METHODS)
def test_the_list_of_the_docs_says_of_every_store_which_options_it_takes_with_which_default(store: str) -> None:
    parts = [re.fullmatch(r"`(\w+)` \((.*?)\): (.*)", item) for item in items(docs_tables.method_list())]
    told = {part[1]: part for part in parts
            if part and (part[2].startswith("all stores; ") or f"`{store}`" in part[2].partition("; ")[0])}
    for field in dataclasses.fields(algorithms.find(store).Options):
        part = told.pop(field.name)
        assert not default_shown(field) or part[2].replace("`", "").endswith(f"; default {default_shown(field)}")
        assert part[3].replace("\\[", "[") == field.metadata["help"]
    assert not told


@pytest.mark.parametrize("store", algorithms.METHODS)
def test_a_store_gets_its_own_defaults_and_its_configuration_reads_back_as_itself(store: str) -> None:
    config = TrainConfig(kvstore=store)
    assert config.options == algorithms.find(store).Options()
    assert TrainConfig(**config.to_dict()) == config
    assert set(config.to_dict()) == {*TrainOptions.__dataclass_fields__, *config.method.option_names()}


def test_a_configuration_with_one_option_changed_keeps_those_of_its_method() -> None:
    config = TrainConfig(kvstore="easgd", T=7, alpha=0.3)
    assert dataclasses.replace(config, iterations=5) == TrainConfig(kvstore="easgd", T=7, alpha=0.3, iterations=5)
    changes: Dict[str, Any] = {"T": 2}
    assert dataclasses.replace(config, **changes) == TrainConfig(kvstore="easgd", T=2, alpha=0.3)


def test_local_optimizers_include_those_of_the_paper() -> None:
    assert {"none", "sgd", "dcasgd_c", "dcasgd_a"} <= {"none", *local_optimizers.NAMES}
    for name in ("none", "sgd", "dcasgd_c", "dcasgd_a"):
        assert optimizer_local(TrainConfig(optimizer_local=name)) == name


@pytest.mark.parametrize("words, letters", [
    ("--kvstore easgd --interval 7", "--kvstore easgd --T 7"),
    ("--kvstore pipesgd --pipeline-depth 3", "--kvstore pipesgd --K 3"),
    ("--kvstore softsync --updates_per_round 2", "--kvstore softsync --n 2"),
    ("--kvstore dcasgd_a --mean-square-decay=0.5", "--kvstore dcasgd_a --m 0.5"),
    ("--kvstore odsgd --epoch 3 --mom-local 0.5", "--kvstore odsgd --epochs 3 --momentum-local 0.5")])
def test_the_papers_letters_have_words_beside_them(words: str, letters: str) -> None:
    assert from_flags(words) == from_flags(letters) != from_flags(" ".join(letters.split()[:2]))


def test_an_option_that_has_such_a_word_for_its_name_keeps_it() -> None:
    made = dataclasses.make_dataclass("Both", [("T", int, option(1, integer(1), "a length")),
                                               ("interval", int, option(1, integer(1), "another"))])
    fields = {field.name: field for field in dataclasses.fields(made)}
    assert parse_flags(fields, "program", ["--interval", "3"])[0] == {"interval": 3}


def test_a_umask_is_written_in_octal_digits_which_yaml_takes_for_a_number_without_quotes() -> None:
    config = TrainConfig.from_flags(["--umask", "027"])
    assert config.umask == "027" and yaml.safe_load(config.to_yaml())["umask"] == "027"
    assert TrainConfig().umask == "077"
    for wrong in (yaml.safe_load("022"), "0o22", "999", "-22", "22222", "777"):
        with pytest.raises(ConfigError, match=r"umask.*three octal digits"):
            TrainConfig(umask=wrong)


def test_a_folder_whose_name_is_not_utf_8_is_refused_before_the_training(tmp_path: Path) -> None:
    config = TrainConfig(kvstore="local", out=os.fsdecode(bytes(tmp_path) + b"/r\xe9sultats"))
    with pytest.raises(ConfigError, match=r"^--out .*sultats: its name is not UTF-8; name another folder$"):
        config.make_folder()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_mistake_unless_a_restart_may_find_it_otherwise(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(kvstore="local", out=str(tmp_path / "run"))

    def fail(code: int) -> None:
        def mkdir(*given: Any, **named: Any) -> None:
            raise OSError(code, os.strerror(code))
        monkeypatch.setattr(Path, "mkdir", mkdir)
        config.make_folder()

    for code in (errno.ENOSPC, errno.EACCES):
        with pytest.raises(ConfigError, match="name a folder that can be made and written there"):
            fail(code)
    monkeypatch.setenv("ODSGD_RESTARTS", "1")
    with pytest.raises(OSError, match="No space left"):
        fail(errno.ENOSPC)
    with pytest.raises(ConfigError, match="Permission denied"):
        fail(errno.EACCES)
