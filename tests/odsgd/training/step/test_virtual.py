"""Runs on a cluster in virtual time: all of `odsgd train`, in one process."""
import dataclasses
import json
from pathlib import Path
from typing import Any, Dict

import pytest

from kvstore import methods
from kvstore.errors import EXIT_FAILURE, EXIT_USAGE, ConfigError
from odsgd.config.train import TrainConfig
from odsgd.training.step import virtual
from tests.odsgd.training.runs import final_weights, records, same_bits, tiny, train_together

WORKERS = 5
RUN: Dict[str, Any] = dict(batch_size=4, epochs=3, lr=0.05, log_interval=3, workers=WORKERS)  # 4 iterations per epoch
STORES = [name for name, method in methods.METHODS.items() if method.transports != ("process",)]
METHODS: Dict[str, Dict[str, Any]] = {"easgd": {"T": 2}, "eamsgd": {"T": 3}, "sasgd": {"T": 3}, "downpour": {"T": 3},
                                      "softsync": {"n": 2}, "pipesgd": {"K": 3}, "odsgd": {"warmup": 2}}


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    """The description of one whose workers are far apart and whose messages take as long as the passes."""
    file = tmp_path / "cluster.yaml"
    file.write_text("servers: 2\nlinks: {goodput: 1mbit}\ncompute: {iteration: 20ms, draws: 'lognormal:0.4'}\n")
    return str(file)


def trained(out: Path, **options: Any) -> Path:
    assert virtual.run(tiny(out, **RUN, **options)) == 0
    return out


@pytest.mark.usefixtures("dropout_and_batchnorm")
@pytest.mark.parametrize("store", STORES)
def test_a_run_resumes_to_the_same_bits_and_times(tmp_path: Path, cluster: str, store: str) -> None:
    """Stopped at an epoch's end and within one, where both meet for a checkpoint."""
    options: Dict[str, Any] = dict(kvstore=store, cluster=cluster, checkpoint_every=2, **METHODS.get(store, {}))
    whole = trained(tmp_path / "whole", **options)
    parts = trained(tmp_path / "parts", **options, iterations=4)
    trained(parts, **options, iterations=6, resume=True)
    trained(parts, **options, resume=True)
    assert same_bits(final_weights(whole), final_weights(parts))
    ends = [records(out, "epoch")[-1]["virtual_seconds"] for out in (whole, parts)]
    assert ends[0] == pytest.approx(ends[1], rel=2e-3 if store == "pipesgd" else 1e-9) and ends[0] > 12 * 0.01
    if methods.find(store).asynchronous:
        histograms = [json.loads((out / "staleness.json").read_text())["workers"] for out in (whole, parts)]
        assert histograms[0] == histograms[1]


@pytest.mark.parametrize("store", ["ssgd", "odsgd", "dsync"])
def test_a_synchronous_run_has_the_bits_of_workers_without_virtual_time(tmp_path: Path, cluster: str,
                                                                       store: str) -> None:
    out = trained(tmp_path / "virtual", kvstore=store, cluster=cluster, **METHODS.get(store, {}))
    options = {key: value for key, value in RUN.items() if key != "workers"}
    train_together([tiny(tmp_path / "scripted", kvstore=store, **options, **METHODS.get(store, {}))] * WORKERS)
    assert same_bits(final_weights(out), final_weights(tmp_path / "scripted"))


def test_a_full_disk_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    assert virtual.run(tiny(tmp_path, **RUN, cluster="virtual", kvstore="ssgd")) == EXIT_FAILURE
    complaint = capsys.readouterr().err
    assert complaint.startswith(f"odsgd train: cannot write `{tmp_path}") and complaint.count("\n") == 1
    assert "(--resume) if one is complete" in complaint  # none is here


def test_metrics_have_virtual_seconds_beside_real_ones(tmp_path: Path) -> None:
    out = trained(tmp_path / "run", kvstore="asgd", cluster="virtual")
    intervals, epochs = records(out, "interval"), records(out, "epoch")
    seconds = [record["virtual_seconds"] for record in intervals]
    assert seconds == sorted(seconds) and 0.25 < seconds[0] < 1  # three iterations of about 0.1 s and their exchange
    assert all(80 < record["virtual_iteration_ms"] < 250 and record["iteration_ms"] > 0 for record in epochs)
    assert epochs[0]["virtual_samples_per_s"] == pytest.approx(
        1000 * 4 * WORKERS / epochs[0]["virtual_iteration_ms"], rel=1e-6)
    assert epochs[0]["test_accuracy"] is not None


def test_the_speed_of_asynchronous_workers_counts_what_each_of_them_has_done(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("compute: {speeds: {1: 0.4, 2: 0.4, 3: 0.25, 4: 0.25}}\n")
    out = trained(tmp_path / "run", kvstore="asgd", cluster=str(tmp_path / "cluster.yaml"), iterations=6,
                  num_examples=240)
    (record,) = records(out, "interval")
    own = 4 * 1000 / record["virtual_iteration_ms"]  # images of worker 0 a second
    assert record["virtual_samples_per_s"] == pytest.approx(own * (6 + 2 + 2 + 1 + 1) / 6, rel=1e-6)


def test_a_file_decides_about_the_workers_unless_a_flag_does(tmp_path: Path) -> None:
    file = tmp_path / "three.yaml"
    file.write_text("workers: 3\n")
    assert TrainConfig(cluster=str(file)).virtual_cluster.workers == 3
    assert TrainConfig(cluster=str(file), workers=7).virtual_cluster.workers == 7


@pytest.mark.parametrize("options, complaint", [
    (dict(workers=3), "workers goes with cluster"),
    (dict(cluster="virtual", kvstore="local"), "kvstore `local` is for one process"),
    (dict(cluster="virtual", num_gpus=1), "num_gpus has no meaning with cluster"),
    (dict(cluster="virtual", emulate_compute="1ms"), "emulate_compute has no meaning with cluster"),
    (dict(cluster="virtual", kvstore="softsync", n=3), "`n` is 3, more than the 2 workers"),
    (dict(cluster="virtual", kvstore="ssgd", transport="sharded"), "no transport `sharded`; take `server` or `ring`"),
    (dict(cluster="nowhere.yaml"), "cannot read `nowhere.yaml`, the description of a cluster in YAML: No such file"),
])
def test_what_does_not_go_together_is_told_before_anything_starts(options: Dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        TrainConfig(**options)


def test_codecs_of_a_ring_have_times(tmp_path: Path, cluster: str) -> None:
    plain, coded = (trained(tmp_path / codec, kvstore="dsync", cluster=cluster, codec=codec) for codec in
                    ("none", "quantize"))
    ends = [records(out, "epoch")[-1]["virtual_seconds"] for out in (plain, coded)]
    assert ends[1] < 0.9 * ends[0] and not same_bits(final_weights(plain), final_weights(coded))


def test_another_cluster_does_not_go_on_with_a_run(tmp_path: Path, cluster: str,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    out = trained(tmp_path / "run", kvstore="asgd", cluster=cluster, iterations=4)
    assert virtual.run(tiny(out, **RUN, kvstore="asgd", cluster="virtual", resume=True)) == EXIT_USAGE
    assert "cluster: virtual, settings" in capsys.readouterr().err


def test_a_description_that_changes_or_goes_while_a_run_trains_is_not_read_again(tmp_path: Path, cluster: str) -> None:
    config = tiny(tmp_path / "run", **RUN, kvstore="ssgd", cluster=cluster)
    said = Path(cluster).read_text()
    Path(cluster).unlink()
    assert virtual.run(config) == 0
    Path(cluster).write_text(said)
    assert virtual.run(dataclasses.replace(config, epochs=3, resume=True)) == 0


def test_a_run_that_would_need_more_memory_than_there_is_says_how_much(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(virtual, "_available_nbytes", lambda: 20e6)
    assert virtual.run(tiny(tmp_path / "run", **RUN, kvstore="asgd", cluster="virtual")) == EXIT_USAGE
    assert "5 workers of a model with" in (said := capsys.readouterr().err) and "GB are free" in said
    assert not (tmp_path / "run").exists()


def test_a_bucket_that_waits_does_not_hold_up_the_others_of_its_worker(tmp_path: Path) -> None:
    """Servers beside workers: what is asked of one's own arrives first, though it was asked last."""
    file = tmp_path / "cluster.yaml"
    file.write_text("servers: 8\nplacement: beside\ncompute: {iteration: 20ms, draws: 'lognormal:0.1'}\n")
    options = dict(RUN, workers=8, batch_size=1, epochs=1, iterations=3, model="mlp_500", image_shape=(1, 28, 28))
    assert virtual.run(tiny(tmp_path / "run", **options, kvstore="asgd", eval_every=0, cluster=str(file))) == 0
