"""What `odsgd bench` is asked for: systems, models, computing times; and what limits an iteration."""
from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any, Dict, List, Optional

import pytest
import yaml

from kvstore.errors import ConfigError
from odsgd.lab.bench import cli, models, results, systems
from odsgd.lab.bench.config import BenchConfig
from tests.jobs import ROOT

FILE = ROOT / "configs" / "bench.yaml"
PRESETS: Dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
N = 4_000_000  # bytes


def config(*flags: str) -> BenchConfig:
    return BenchConfig.from_flags(flags)


# --- what is asked for ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, name, options, servers, of_four, extra", [
    ("ssgd", "ssgd", {}, "auto", 4, 0),
    ("ssgd@2", "ssgd", {}, "2", 2, 2),
    ("odsgd@1", "odsgd", {"warmup": 0}, "1", 1, 1),
    ("odsgd:warmup=5:optimizer_local=none", "odsgd", {"warmup": 5, "optimizer_local": "none"}, "auto", 4, 0),
    ("odsgd:transport=ring", "odsgd", {"warmup": 0, "transport": "ring"}, None, 0, 0),
    ("ssgd:transport=sharded", "ssgd", {"transport": "sharded"}, None, 0, 0),
    ("odsgd:transport=server@1", "odsgd", {"warmup": 0, "transport": "server"}, "1", 1, 1),
    ("pipesgd:codec=quantize", "pipesgd", {"warmup": 0, "codec": "quantize"}, None, 0, 0),
    ("sasgd:gamma_p=0.1", "sasgd", {"gamma_p": 0.1}, None, 0, 0),
    ("mxnet/p3@1", "mxnet/p3", {}, "1", 1, 1),
    ("torch/ddp:bucket_cap_mb=4", "torch/ddp", {"bucket_cap_mb": 4}, None, 0, 0),
    ("horovod/mxnet", "horovod/mxnet", {}, None, 0, 0),
])
def test_a_system_is_a_name_with_options_and_servers(
        text: str, name: str, options: Dict[str, Any], servers: Optional[str], of_four: int, extra: int) -> None:
    system = systems.parse(text)
    assert (system.name, system.servers, system.options) == (name, servers, options)
    assert (system.num_servers(4), system.extra_hosts()) == (of_four, extra)


def test_a_store_on_pytorch_is_the_store_with_another_worker() -> None:
    pytest.importorskip("torch")
    system, alone = systems.parse("torch+odsgd:warmup=3@1"), systems.parse("odsgd:warmup=3@1")
    assert (system.name, system.options, system.servers) == (alone.name, alone.options, alone.servers)
    assert str(system) == "torch+odsgd:warmup=3@1" and system.worker_command(None)[-1].endswith("torch_worker.py")
    with pytest.raises(ConfigError, match="goes before a store of odsgd"):
        systems.parse("torch+mxnet/p3")
    with pytest.raises(ConfigError, match="measured in float32"):
        config("--systems", "torch+odsgd", "--dtype", "float16")


@pytest.mark.parametrize("text, complaint", [
    ("odsdg", "unknown system `odsdg`; did you mean `odsgd`?"),
    ("local", "unknown system `local`"),
    ("dsync@1", "it has no servers"),
    ("torch/ddp@auto", "it has no servers"),
    ("horovod/mxnet@1", "it has no servers"),
    ("odsgd:transport=ring@2", "it has no servers"),
    ("ssgd@0", "expected a number of servers or `auto`"),
    ("ssgd@", "expected a number of servers or `auto`"),
    ("pipesgd:quantize", "expected :OPTION=VALUE behind the store's name, got `:quantize`"),
    ("torch/ddp:bucket_cap=4", "unknown option of torch/ddp `bucket_cap`; did you mean `bucket_cap_mb`?"),
    ("odsgd:lr_locl=1", "unknown option of odsgd `lr_locl`; did you mean `lr_local`?"),
])
def test_a_system_that_does_not_exist_is_told(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        systems.parse(text)
    assert complaint in str(error.value)


@pytest.mark.parametrize("text, ms", [("272ms", 272), ("0.5s", 500), ("0", 0), ("wire", 100), ("2wire", 200),
                                          ("wire/5", 20), ("0.5wire", 50), ("cnn=3ms", 3)])
def test_a_computing_time_is_a_duration_or_a_multiple_of_the_wires(text: str, ms: float) -> None:
    compute, = config("--systems", "ssgd", "--rates", "1gbit", "--compute", text).compute
    assert compute.milliseconds(wire_ms=100) == pytest.approx(ms)
    again, = config("--systems", "ssgd", "--rates", "1gbit", "--compute", str(compute)).compute
    assert again == compute


@pytest.mark.parametrize("flags, complaint", [
    ([], "no systems"),
    (["--systems", "ssgd", "--models", "cnnn"], "unknown model `cnnn`"),
    (["--systems", "ssgd", "--compute", "5"], "expected times as 272ms"),
    (["--systems", "ssgd", "--compute", "wire/0"], "expected times as 272ms"),
    (["--systems", "ssgd", "--compute", "wire"], "loopback has no T_wire"),
    (["--systems", "ssgd", "--compute", "4.2M=3ms"], "the models are cnn"),
    (["--systems", "ssgd", "--models", "cnn,4.2M", "--compute", "4.2M=3ms"], "no time for model cnn"),
    (["--systems", "ssgd", "--baseline", "odsgd"], "baseline `odsgd` is not among the systems: ssgd"),
    (["--systems", "ssgd,torch/ddp", "--dtype", "float16"], "torch/ddp is measured in float32"),
    (["--systems", "ssgd", "--dtype", "float64"], "expected float32 or float16"),
    (["--systems", "ssgd", "--rates", "fast"], "fast"),
    (["--systems", "ssgd,odsgd,ssgd"], "systems: `ssgd` is there more than once; name each once"),
    (["--systems", "ssgd", "--models", "cnn,cnn,4.2M"], "models: `cnn` is there more than once"),
    (["--systems", "ssgd", "--compute", "0,34ms,34ms"], "compute: `34ms` is there more than once"),
    (["--systems", "ssgd", "--workers", "2,4,2"], "workers: `2` is there more than once"),
    (["--systems", "ssgd", "--rates", "1gbit,1gbit"], "rates: `1gbit` is there more than once"),
    (["--systems", "ssgd", "--columns", "cpus"], "expected columns: cpu"),
    (["--systems", "ssgd", "--wokers", "2"], "did you mean `--workers`?"),
    (["--systems", "ssgd", "--reference-values", "none/2/cnn/ssgd=n/a"], "expected numbers as RATE/WORKERS/MODEL/SYS"),
    (["--systems", "ssgd", "--reference-values", "3"], "expected numbers as RATE/WORKERS/MODEL/SYSTEM=NUMBER, got `3`"),
])
def test_a_benchmark_that_cannot_be_run_is_told_before_anything_starts(flags: List[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(*flags)
    assert complaint in str(error.value)


def test_others_numbers_may_be_flags_whose_systems_have_options() -> None:
    asked = config("--systems", "ssgd", "--reference-values", "none/2/cnn/ssgd=3,none/2/cnn/pipesgd:codec=quantize=4.5")
    assert asked.reference_values == {"none/2/cnn/ssgd": 3.0, "none/2/cnn/pipesgd:codec=quantize": 4.5}


@pytest.mark.parametrize("flag", ["--json", "--markdown"])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
        flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "measure", lambda *arguments: pytest.fail("something was measured"))
    with pytest.raises(ConfigError, match=r"^cannot write `.*`: Is a directory; name another file$"):
        cli.main(["--systems", "ssgd", flag, str(tmp_path)])


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_can_be_run(name: str) -> None:
    if "torch+" in str(PRESETS[name]["systems"]) and importlib.util.find_spec("torch") is None:
        with pytest.raises(ConfigError, match="needs PyTorch beside MXNet, in this Python: scripts/setup torch"):
            config("--config", f"{FILE}:{name}")
        return
    preset = config("--config", f"{FILE}:{name}")
    known = {"/".join((rate, str(workers), model, system.label)) for rate in preset.rates for workers in preset.workers
             for model in preset.models for system in preset.systems}
    assert set(preset.reference_values) <= known


def test_flags_win_over_the_file() -> None:
    assert config("--config", f"{FILE}:peers", "--repeat", "1").repeat == 1


@pytest.mark.parametrize("name", ["on-slow-links", "on_slow_links"])
def test_names_and_their_options_may_have_dashes(name: str, tmp_path: Path) -> None:
    (tmp_path / "bench.yaml").write_text("on-slow-links: {systems: ssgd, warm-up: 7}", encoding="utf-8")
    assert config("--config", f"{tmp_path / 'bench.yaml'}:{name}").warm_up == 7


def test_a_name_that_the_file_does_not_have_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown name `perrs` in .*; did you mean `peers`"):
        config("--config", f"{FILE}:perrs")


def test_the_models_have_the_sizes_that_they_are_named_for() -> None:
    assert {name: (len(models.shapes(name)), models.size(name)) for name in models.PLAIN} == {
        "4.2M": (10, 4_208_650), "cnn": (10, 505_058), "0.27M": (97, 271_098), "25.6M": (161, 25_557_032),
        "138M": (32, 138_357_544), "355M": (292, 354_823_168), "5000x1000": (5000, 5_000_000), "5M": (1, 5_000_000)}


def test_a_network_of_odsgd_train_has_the_shapes_of_its_parameters() -> None:
    pytest.importorskip("kvstore.engine._mxnet")
    assert models.shapes("mlp")[0][1:] == (3 * 32 * 32,) and models.shapes("mlp")[-1] == (10,)
    assert models.size("resnet18_v2") == 11_179_978  # the OD-SGD paper's


# --- limits -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("system, workers, nbytes", [
    ("ssgd@1", 4, 4 * N),
    ("ssgd@2", 4, 2 * N),
    ("ssgd@4", 2, N),                  # a worker's own link
    ("mxnet/dist_sync@1", 2, 2 * N),
    ("ssgd", 4, 1.5 * N),              # 3/4 N to the others' servers, and as much from the own one
    ("torch/ddp", 4, 1.5 * N),
    ("horovod/mxnet", 4, 1.5 * N),
    ("pipesgd", 2, N),
    ("pipesgd", 1, 0),
    ("pipesgd:codec=truncate", 2, N / 2),
    ("pipesgd:codec=quantize", 2, N / 4 + 4),  # and a scale
    ("odsgd:codec=float16:codec_weights=float16@1", 2, N),
    ("odsgd:codec=2bit@1", 2, 2 * N),  # the way back
    ("ssgd:codec=2bit:codec_weights=quantize", 2, N / 32 + N / 8 + 2),
    ("odsgd:codec=truncate:transport=ring", 2, N / 2),
    ("easgd@1", 4, N),                 # exchanges every fourth iteration
    ("easgd:T=8@1", 4, N / 2),
    ("downpour:T=2@1", 4, 2 * N),
    ("downpour:push_every=4:fetch_every=1@1", 4, 4 * N),
    ("downpour:push_every=1:fetch_every=2", 4, 0.75 * 1.5 * N),
    ("sasgd:T=2", 4, 0.75 * N),
])
def test_the_busiest_link_carries(system: str, workers: int, nbytes: float) -> None:
    assert results.wire_nbytes(systems.parse(system), workers, N) == nbytes


def test_the_limit_is_the_longer_of_computing_and_communicating() -> None:
    assert results.bound_ms(30.0, N, 1e8) == 40.0
    assert results.bound_ms(50.0, N, 1e8) == 50.0
    assert results.bound_ms(30.0, N, math.inf) == 30.0
