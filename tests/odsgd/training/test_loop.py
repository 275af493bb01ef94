"""A run from its configuration to its files: one worker in this process, or several as threads that take turns."""
import dataclasses
import json
import math
import re
import shutil
import types
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

import numpy as np
import pytest

from kvstore.engine._mxnet import mx
from kvstore.errors import EXIT_USAGE, ConfigError, DivergedError, ProtocolError
from kvstore.fronts.gluon.store import Store
from kvstore.transports.in_process import Stage
from odsgd.config.train import TrainConfig
from odsgd.training import loop, metrics
from odsgd.training.checkpoint import resuming
from odsgd.training.checkpoint.checkpoint import CheckpointWriter, UnfinishedCheckpoint
from odsgd.training.run_log import RunLog
from odsgd.training.schedule import Schedule
from tests.odsgd.training.runs import final_weights, records, same_bits, tiny, train_together

# --- the loop ---------------------------------------------------------------------------------------------------------

def test_a_run_learns_and_writes_a_record_for_start_intervals_epochs_and_end(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert loop.run(tiny(tmp_path, epochs=3)) == 0
    kinds = [record["event"] for record in records(tmp_path)]
    assert kinds[0] == "start" and kinds[-1] == "end" and kinds.count("epoch") == 3 and kinds.count("interval") == 6
    last = records(tmp_path, "epoch")[-1]
    assert last["epoch"] == 3 and last["iteration"] == 30 and last["test_accuracy"] > 0.9
    assert last["test_loss"] < 0.4 and last["train_accuracy"] > 0.9 and last["samples_per_s"] > 0
    assert records(tmp_path, "end")[0]["test_accuracy"] == last["test_accuracy"]
    start = records(tmp_path, "start")[0]
    assert start["config"]["lr"] == 0.1 and start["versions"]["mxnet"] == mx.__version__
    printed = capsys.readouterr().out
    assert "1 worker x batch 8 = global batch 8; 10 iterations per epoch, 30 in all; lr 0.1" in printed
    assert "epoch 3/3: loss" in printed and "iteration 28/30: loss" in printed
    assert TrainConfig.from_flags(["--config", str(tmp_path / "config.yaml")]) == tiny(tmp_path, epochs=3)


def test_emulated_compute_reports_speed_and_neither_loss_nor_accuracy(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert loop.run(tiny(tmp_path, emulate_compute="10ms")) == 0
    epochs = records(tmp_path, "epoch")
    assert len(epochs) == 2 and not any("accuracy" in name or "loss" in name for record in epochs for name in record)
    assert all(record["samples_per_s"] > 0 and record["iteration_ms"] >= 10 for record in epochs[1:])
    printed = capsys.readouterr().out
    assert "epoch 2/2: emulated compute, " in printed and "accuracy" not in printed.partition("epoch")[2]
    assert "warning: forward and backward are emulated, 10ms per iteration" in printed
    assert not (tmp_path / "checkpoints").exists()


def test_an_interval_has_the_numbers_of_all_iterations_that_were_read_since_the_last(tmp_path: Path) -> None:
    loop.run(tiny(tmp_path, log_interval=1, epochs=1))
    shown = [record["iteration"] for record in records(tmp_path, "interval")]
    assert shown == [5, 6, 7, 8, 9, 10]  # four iterations are in flight when the first is read
    epoch = records(tmp_path, "epoch")[0]
    assert math.isfinite(epoch["train_loss"]) and epoch["iteration_ms"] > 0


def test_an_iteration_waits_no_longer_than_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "waited_s", property(lambda store: 1000.0 * store.iteration))  # a sample's estimate
    loop.run(tiny(tmp_path, log_interval=5))
    told = records(tmp_path, "interval") + records(tmp_path, "epoch")
    assert len(told) == 6 and all(record["waiting_ms"] == record["iteration_ms"] for record in told)


def test_what_a_sample_of_waiting_stands_for_beyond_an_interval_counts_in_the_next(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(metrics, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    store: Any = types.SimpleNamespace(waited_s=0.0, iteration=0, num_workers=1, session=types.SimpleNamespace(
        transport=None, left_out=0))
    config = tiny(tmp_path)
    trainer = types.SimpleNamespace(_amp_loss_scaler=None)
    measured = metrics.Measurements(config, Schedule(config, 100, 1), store, trainer)
    measured.begin_epoch()
    told = []
    for sampled_s in (0.02, 0, 0, 0, 1000, 0, 0, 0, 0, 0, 0, 0):  # the last one is of a worker that stood still
        now[0], store.waited_s, store.iteration = now[0] + 0.01, store.waited_s + sampled_s, store.iteration + 1
        told.append(round(measured.record(measured.interval)["waiting_ms"]))
        measured.begin_interval()
    assert told == [10, 10, 0, 0, 10, 10, 10, 10, 10, 10, 0, 0]


@pytest.mark.parametrize("every", [3, 30])
def test_the_speed_of_an_epoch_has_no_part_of_its_checkpoints(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """One is finished at the next, or 20 iterations after it began."""
    now, finish = [0.0], UnfinishedCheckpoint.finish

    def tick() -> float:
        now[0] += 0.001
        return now[0]

    def slow(unfinished: UnfinishedCheckpoint) -> List[str]:
        now[0] += 1000
        return finish(unfinished)
    monkeypatch.setattr(metrics, "time", types.SimpleNamespace(perf_counter=tick))
    monkeypatch.setattr(UnfinishedCheckpoint, "finish", slow)
    loop.run(tiny(tmp_path, epochs=1, num_examples=480, checkpoint_every=every))
    told = records(tmp_path, "interval") + records(tmp_path, "epoch")
    assert now[0] > 1000 and all(record["iteration_ms"] < 100 for record in told)


def test_learning_rates_follow_their_schedules_and_are_logged(tmp_path: Path) -> None:
    config = tiny(tmp_path, kvstore="odsgd", lr=0.4, lr_local=0.2, lr_step_epochs="1", lr_step_epochs_local="2",
                  warmup=2, lr_warmup=4, epochs=3, log_interval=10 ** 6)
    train_together([config, config])
    rates = [(record["lr"], record["lr_local"]) for record in records(tmp_path, "epoch")]
    assert rates == [pytest.approx(pair) for pair in [(0.4, 0.2), (0.04, 0.2), (0.04, 0.02)]]


@pytest.mark.parametrize("local, shown", [("none", None), ("sgd", 0.1)])
def test_a_local_rate_that_is_not_given_is_shown_as_what_it_follows(
        tmp_path: Path, local: str, shown: Optional[float]) -> None:
    train_together([tiny(tmp_path, kvstore="odsgd", optimizer_local=local, epochs=1)] * 2)
    assert records(tmp_path, "epoch")[0]["lr_local"] == shown


def test_training_numbers_are_those_of_all_workers(tmp_path: Path) -> None:
    alone = tiny(tmp_path / "alone", lr=0, epochs=1)
    loop.run(alone)
    train_together([dataclasses.replace(alone, kvstore="ssgd", batch_size=4, out=str(tmp_path / "two"))] * 2)
    one, two = (records(tmp_path / name, "epoch")[0] for name in ("alone", "two"))
    assert one["train_loss"] == pytest.approx(two["train_loss"], rel=1e-6)
    assert one["train_accuracy"] == two["train_accuracy"] and one["test_loss"] == pytest.approx(two["test_loss"])


def test_two_devices_train_as_one_does(tmp_path: Path) -> None:
    for count in (1, 2):
        loop.run(tiny(tmp_path / str(count), num_cpus=count, batch_size=8 // count))
    one, two = (final_weights(tmp_path / name) for name in ("1", "2"))
    assert all(np.allclose(one[name].asnumpy(), two[name].asnumpy(), atol=1e-6) for name in one)


@pytest.mark.parametrize("every, tested", [(0, []), (1, [1, 2, 3]), (2, [2, 3])])
def test_evaluation_comes_every_so_many_epochs_and_at_the_end(tmp_path: Path, every: int, tested: List[int]) -> None:
    loop.run(tiny(tmp_path, epochs=3, eval_every=every))
    assert [record["epoch"] for record in records(tmp_path, "epoch") if "test_accuracy" in record] == tested


def test_a_run_that_stops_within_an_epoch_is_evaluated_and_saved(tmp_path: Path) -> None:
    loop.run(tiny(tmp_path, iterations=13))
    epochs = records(tmp_path, "epoch")
    assert [(record["epoch"], record["iteration"]) for record in epochs] == [(1, 10), (2, 13)]
    assert "test_accuracy" in epochs[-1] and (tmp_path / "checkpoints" / "13" / "manifest.json").exists()


def test_only_worker_0_speaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_together([tiny(tmp_path, kvstore="ssgd", epochs=1)] * 3)
    assert capsys.readouterr().out.count("global batch 24") == 1
    assert len(records(tmp_path, "start")) == len(records(tmp_path, "end")) == 1


def test_local_in_a_job_of_several_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMLC_NUM_WORKER", "2")
    with pytest.raises(ConfigError, match="`local` is for one process and this job has 2 workers"):
        loop.run(tiny(tmp_path))


# --- a loss that is not finite ----------------------------------------------------------------------------------------

def test_a_loss_that_is_not_finite_stops_the_run_with_iteration_and_settings(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert loop.run(tiny(tmp_path, lr=1e30, momentum=0.5, checkpoint_every=0)) == 70
    line = capsys.readouterr().err
    assert re.match(r"odsgd train: worker 0, iteration [23]: \d+ elements of the gradient of \w+ are infinite or "
                    r"not a number \(the first: (nan|inf|-inf)\)", line)
    assert "(lr 1e+30, batch_size 8, optimizer sgd, momentum 0.5, wd 0.0" in line
    assert "on_nan be `skip` or `continue`" in line
    assert not (tmp_path / "checkpoints").exists()


def test_a_loss_that_is_not_finite_is_met_with_a_shrug_if_asked(tmp_path: Path) -> None:
    assert loop.run(tiny(tmp_path, lr=1e30, on_nan="continue")) == 0
    assert records(tmp_path, "epoch")[-1]["train_loss"] is None


@pytest.mark.parametrize("options, remedy", [
    (dict(kvstore="diloco", H=99), "Lower lr, or lengthen lr_warmup;"),
    (dict(kvstore="odsgd", optimizer_local="none"), "Lower lr, or lengthen warmup or lr_warmup;"),
    (dict(kvstore="odsgd"), "Lower lr or lr_local, or lengthen warmup or lr_warmup;")])
def test_a_loss_that_is_not_finite_is_told_with_what_the_store_has_against_it(
        tmp_path: Path, options: Dict[str, Any], remedy: str) -> None:
    run = loop.Training(tiny(tmp_path, **options), Stage(1).worker(0))
    with pytest.raises(DivergedError, match=rf"^iteration 7: the loss of this worker is nan \(.*\)\. {remedy}"):
        run.measured._take(6, metrics.Sums(math.nan, 0, 8))  # the first is 0


@pytest.mark.parametrize("answer", ["stop", "find"])
def test_a_loss_that_is_not_finite_is_told_long_before_the_next_exchange(tmp_path: Path, answer: str) -> None:
    with pytest.raises(DivergedError, match=r"iteration [1-4]: the loss of this worker is nan"):
        train_together([tiny(tmp_path, kvstore="diloco", lr=1e30, H=1000, epochs=3, on_nan=answer)])


def test_the_worker_that_sees_it_first_stops_the_others(tmp_path: Path) -> None:
    config = tiny(tmp_path, kvstore="odsgd", lr=1e30, lr_local=0.5, warmup=1)
    with pytest.raises(DivergedError, match=r"lr_local 0\.5, .*optimizer sgd.* warmup 1.* optimizer_local sgd"):
        train_together([config] * 2)


# --- going on with a run ----------------------------------------------------------------------------------------------

MOMENTUM: Dict[str, Any] = dict(momentum=0.9, wd=1e-3, lr=0.05, epochs=3)
COMPENSATED: Dict[str, Any] = dict(
    kvstore="odsgd", optimizer_local="dcasgd_a", momentum_local=0.5, lr_local=0.02, lr_step_epochs="2", warmup=4,
    **MOMENTUM)
CODED: Dict[str, Any] = dict(kvstore="odsgd", codec="2bit", codec_threshold=0.01, codec_weights="quantize",
                             lr_local=0.02, warmup=4, **MOMENTUM)
OF_WEIGHTS: Dict[str, Any] = dict(kvstore="diloco", H=4, fragments=2, delay=3, momentum_outer=0.5, **MOMENTUM)
WITHOUT_SERVERS: Dict[str, Dict[str, Any]] = {
    "dsync": dict(kvstore="dsync", **MOMENTUM),
    "pipesgd": dict(kvstore="pipesgd", K=3, warmup=3, codec="truncate", lr_step_epochs="1", **MOMENTUM),
    "sasgd": dict(kvstore="sasgd", T=4, lr=0.05, wd=1e-3, epochs=3, lr_step_epochs="1"),
    "odsgd ring": {**COMPENSATED, "transport": "ring"},
    "odsgd sharded": {**COMPENSATED, "transport": "sharded"},
    "ssgd sharded": dict(kvstore="ssgd", transport="sharded", optimizer="adam", lr=0.01, epochs=3),
}


@pytest.mark.parametrize("stop", [3, 10, 17])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.usefixtures("dropout_and_batchnorm")
def test_one_worker_resumes_to_the_same_bits(tmp_path: Path, stop: int, devices: int) -> None:
    whole, parts = (tiny(tmp_path / name, num_cpus=devices, batch_size=8 // devices, **MOMENTUM)
                    for name in ("whole", "parts"))
    loop.run(whole)
    loop.run(dataclasses.replace(parts, iterations=stop))
    loop.run(dataclasses.replace(parts, resume=True))
    assert same_bits(final_weights(tmp_path / "whole"), final_weights(tmp_path / "parts"))
    assert not TrainConfig.from_flags(["--config", str(tmp_path / "parts" / "config.yaml")]).resume


@pytest.mark.parametrize("drawing", [dict(kvstore="ssgd", optimizer="sgld"),
                                     dict(kvstore="odsgd", warmup=2, optimizer_local="sgld")],
                         ids=["sgld", "local sgld"])
def test_an_optimizer_that_draws_resumes_to_the_same_bits(tmp_path: Path, drawing: Dict[str, Any]) -> None:
    whole, parts = (tiny(tmp_path / name, lr=0.01, epochs=1, **drawing) for name in ("whole", "parts"))
    for config in (whole, dataclasses.replace(parts, iterations=3), dataclasses.replace(parts, resume=True)):
        train_together([config])
    assert same_bits(final_weights(tmp_path / "whole"), final_weights(tmp_path / "parts"))


@pytest.mark.parametrize("algorithm", [dict(kvstore="ssgd", **MOMENTUM), dict(kvstore="delayed", warmup=3, **MOMENTUM),
                                       COMPENSATED, CODED, OF_WEIGHTS, *WITHOUT_SERVERS.values()],
                         ids=["ssgd", "delayed", "odsgd", "codecs", "diloco", *WITHOUT_SERVERS])
@pytest.mark.usefixtures("dropout_and_batchnorm")
def test_two_workers_resume_to_the_same_bits_within_warmup_and_past_it(
        tmp_path: Path, algorithm: Dict[str, Any]) -> None:
    """Stopped again and again, within an epoch and at its end."""
    whole, parts = (tiny(tmp_path / name, **algorithm) for name in ("whole", "parts"))
    train_together([whole] * 2)
    for stop in (2, 4, 5, 8, None):
        train_together([dataclasses.replace(parts, iterations=stop, resume=stop != 2)] * 2)
    assert same_bits(final_weights(tmp_path / "whole"), final_weights(tmp_path / "parts"))


@pytest.mark.parametrize("algorithm", [COMPENSATED, WITHOUT_SERVERS["sasgd"], WITHOUT_SERVERS["pipesgd"]],
                         ids=["odsgd", "sasgd", "pipesgd"])
@pytest.mark.usefixtures("dropout_and_batchnorm")
def test_how_often_checkpoints_are_made_does_not_change_the_result(tmp_path: Path, algorithm: Dict[str, Any]) -> None:
    for every in (0, 3):
        train_together([tiny(tmp_path / str(every), checkpoint_every=every, **algorithm)] * 2)
    assert same_bits(final_weights(tmp_path / "0"), final_weights(tmp_path / "3"))


def test_workers_without_a_common_file_system_resume_each_from_its_own_host(tmp_path: Path) -> None:
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    first = [tiny(host, iterations=7, keep_checkpoints=1, checkpoint_every=3, **COMPENSATED) for host in hosts]
    train_together(first)
    assert {path.name for path in (hosts[1] / "checkpoints" / "7").iterdir()} == {"worker-1.npz"}
    assert [[folder.name for folder in (host / "checkpoints").iterdir()] for host in hosts] == [["7"], ["7"]]
    train_together([dataclasses.replace(config, iterations=None, resume=True) for config in first])
    train_together([tiny(tmp_path / "whole", **COMPENSATED)] * 2)
    assert same_bits(final_weights(hosts[0]), final_weights(tmp_path / "whole"))


@pytest.mark.usefixtures("dropout_and_batchnorm")
def test_a_run_goes_on_on_another_transport(tmp_path: Path) -> None:
    """What a checkpoint keeps of the global optimizer does not depend on who holds it."""
    train_together([tiny(tmp_path / "whole", **COMPENSATED)] * 2)
    for first, second in (("server", "ring"), ("ring", "sharded"), ("sharded", "server")):
        parts = tiny(tmp_path / first, transport=first, **COMPENSATED)
        train_together([dataclasses.replace(parts, iterations=7)] * 2)
        train_together([dataclasses.replace(parts, transport=second, resume=True)] * 2)
        assert same_bits(final_weights(tmp_path / "whole"), final_weights(tmp_path / first))


def test_a_resumed_run_adds_to_the_metrics_and_drops_the_line_that_was_cut(tmp_path: Path) -> None:
    loop.run(tiny(tmp_path, epochs=1))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"event": "epo')
    loop.run(tiny(tmp_path, epochs=2, resume=True))
    assert [record["epoch"] for record in records(tmp_path, "epoch")] == [1, 2]
    assert [record["iteration"] for record in records(tmp_path, "start")] == [0, 10]


@pytest.mark.parametrize("workers", [1, 3])
def test_seconds_of_an_epoch_that_is_resumed_in_its_middle_are_those_of_all_of_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    train_together([tiny(tmp_path, kvstore="ssgd", iterations=1)])
    manifest = tmp_path / "checkpoints" / "1" / "manifest.json"
    facts = json.loads(manifest.read_text())
    assert facts["epoch_so_far"]["seconds"] > 0
    facts["epoch_so_far"]["seconds"] = 1000.0
    manifest.write_text(json.dumps(facts))
    monkeypatch.setenv("ODSGD_MOST_WORKERS", "3")
    train_together([tiny(tmp_path, kvstore="ssgd", resume=True)] * workers)
    assert [record["seconds"] > 1000 for record in records(tmp_path, "epoch")] == [False, True, False]


@pytest.mark.parametrize("every", [1, 0])
def test_an_epoch_of_which_more_workers_find_too_little_left_is_evaluated_and_told(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    train_together([tiny(tmp_path, kvstore="ssgd", iterations=9, epochs=1)])  # of 10
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(line for line in metrics.read_text().splitlines(True) if '"event": "epoch"' not in line))
    monkeypatch.setenv("ODSGD_MOST_WORKERS", "2")
    train_together([tiny(tmp_path, epochs=1, kvstore="ssgd", eval_every=every, resume=True)] * 2)
    told, = records(tmp_path, "epoch")
    assert (told["epoch"], told["iteration"]) == (1, 9) and told["samples_per_s"] > 0
    assert told.get("test_accuracy") == records(tmp_path, "end")[-1].get("test_accuracy")
    assert ("test_accuracy" in told) == bool(every)


def test_seconds_of_epochs_have_all_checkpoints_but_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, copy = [0.0], CheckpointWriter.begin

    def begin(writer: CheckpointWriter, facts: Mapping[str, Any]) -> None:
        seconds[0] += 10
        copy(writer, facts)
    monkeypatch.setattr(RunLog, "seconds", lambda run_log: seconds[0])
    monkeypatch.setattr(CheckpointWriter, "begin", begin)
    loop.run(tiny(tmp_path, epochs=3))
    assert [record["seconds"] for record in records(tmp_path, "epoch")] == [0, 10, 10]


def test_resuming_a_finished_run_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop.run(tiny(tmp_path))
    before = final_weights(tmp_path)
    assert loop.run(tiny(tmp_path, resume=True)) == 0
    assert "nothing is left to do" in capsys.readouterr().out
    assert same_bits(before, final_weights(tmp_path))


def refusal(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a run is refused."""
    assert loop.run(config) == 64
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


def test_what_changes_the_result_must_be_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop.run(tiny(tmp_path, epochs=1))
    line = refusal(tiny(tmp_path, resume=True, lr=0.2, model="lenet"), capsys)
    assert "model: mlp in the saved run, lenet now; lr: 0.1 in the saved run, 0.2 now" in line


def test_what_does_not_change_the_result_may_differ(tmp_path: Path) -> None:
    loop.run(tiny(tmp_path, epochs=1))
    assert loop.run(tiny(tmp_path, resume=True, epochs=2, log_interval=3, keep_checkpoints=1, on_nan="continue")) == 0
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["20"]


def test_another_number_of_workers_is_refused(tmp_path: Path) -> None:
    config = tiny(tmp_path, kvstore="ssgd", epochs=1)
    train_together([config] * 2)
    with pytest.raises(ConfigError, match="num_workers: 2 in the saved run, 1 now; batches_per_epoch: 5"):
        train_together([dataclasses.replace(config, resume=True, epochs=2)])


def test_a_new_run_does_not_mix_with_one_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop.run(tiny(tmp_path))
    assert "holds a run with checkpoints up to iteration 20" in refusal(tiny(tmp_path), capsys)


def test_resuming_what_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no complete checkpoint in" in refusal(tiny(tmp_path, resume=True), capsys)


def test_a_job_that_is_started_again_before_it_has_looked_at_its_folder_takes_up_no_other_run(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told: List[Any] = []
    monkeypatch.setattr(resuming, "report", lambda event, **fields: told.append((event, *fields.values())))
    monkeypatch.setenv("ODSGD_RESTARTS", "1")
    loop.run(tiny(tmp_path / "other", epochs=1))
    assert "holds a run with checkpoints up to iteration 10" in refusal(tiny(tmp_path / "other"), capsys)
    assert "no complete checkpoint in" in refusal(tiny(tmp_path / "none", resume=True), capsys)
    assert told == [("resumed", 0, str(tmp_path / "other" / "checkpoints"))]  # the launcher says so to the next attempt
    monkeypatch.setenv("ODSGD_SAVED", "0")
    assert loop.run(tiny(tmp_path / "other")) == 0
    assert [record["iteration"] for record in records(tmp_path / "other", "start")] == [0, 10]
    assert told[1:] == [("resumed", 10, str(tmp_path / "other" / "checkpoints"))]


def test_lr_that_scales_with_other_workers_than_before_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ODSGD_MOST_WORKERS", "4")
    loop.run(tiny(tmp_path, epochs=1, lr_scaling="linear"))
    loop.run(tiny(tmp_path, epochs=2, lr_scaling="linear", resume=True))
    assert "lr jumps" not in capsys.readouterr().out
    monkeypatch.delenv("ODSGD_MOST_WORKERS")
    loop.run(tiny(tmp_path, epochs=3, lr_scaling="linear", resume=True))
    assert "lr_scaling linear goes by MAX of -n MIN:MAX, which was 4 and is 1: lr jumps" in capsys.readouterr().out
    assert [record["lr"] for record in records(tmp_path, "epoch")] == [0.025, 0.025, 0.1]


# --- frozen layers ----------------------------------------------------------------------------------------------------

@pytest.mark.usefixtures("dropout_and_batchnorm")
@pytest.mark.parametrize("workers", [1, 3])
def test_frozen_layers_and_their_statistics_keep_their_bits_and_the_last_one_learns(tmp_path: Path,
                                                                                    workers: int) -> None:
    begun = tiny(tmp_path / "begun", epochs=1)
    loop.run(begun)
    weights = final_weights(tmp_path / "begun")
    file = str(next((tmp_path / "begun" / "checkpoints").glob("*/weights.params")))
    config = tiny(tmp_path / "last", epochs=2, trainable="last", weights=file, batch_size=4,
                  kvstore="ssgd" if workers > 1 else "local")
    train_together([config] * workers)
    learned = final_weights(tmp_path / "last")
    changed = {name for name in weights if not np.array_equal(weights[name].asnumpy(), learned[name].asnumpy())}
    assert changed == {"4.weight", "4.bias"} and len(weights) == 8
    assert records(tmp_path / "last", "start")[0]["parameters"] == 12 * 3 + 3


def test_other_weights_beside_a_run_that_goes_on_are_told_not_to_count(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    loop.run(tiny(tmp_path / "begun", epochs=1))
    file = next((tmp_path / "begun" / "checkpoints").glob("*/weights.params"))
    loop.run(tiny(tmp_path / "run", epochs=1, weights=str(file)))
    monkeypatch.chdir(file.parent)
    for epochs, given, told in ((2, file.name, False), (3, "other.params", True)):
        shutil.copy(file, "other.params")
        loop.run(tiny(tmp_path / "run", epochs=epochs, weights=given, resume=True))
        said = capsys.readouterr().out
        assert (f"the run goes on from its checkpoint, without --weights `{given}`" in said) == told


def test_workers_whose_frozen_layers_differ_are_told_before_the_first_step(tmp_path: Path) -> None:
    configs = []
    for seed in (1, 2):
        loop.run(tiny(tmp_path / str(seed), epochs=1, seed=seed))
        file = next((tmp_path / str(seed) / "checkpoints").glob("*/weights.params"))
        configs.append(tiny(tmp_path / "run", kvstore="ssgd", trainable="last", weights=str(file)))
    with pytest.raises(ProtocolError, match="workers 0 and 1 differ in the weights of frozen layers"):
        train_together(configs)


@pytest.mark.parametrize("stop", [None, 7])
def test_a_given_gamma_p_of_lr_over_workers_is_model_averaging_through_warm_up_steps_and_resume(
        tmp_path: Path, stop: Optional[int]) -> None:
    def final(name: str, **options: Any) -> Dict[str, Any]:
        config = tiny(tmp_path / name, kvstore="sasgd", T=2, lr=0.1, lr_warmup=3, lr_step_epochs="1", **options)
        train_together([dataclasses.replace(config, iterations=stop)] * 2)
        if stop is not None:
            train_together([dataclasses.replace(config, resume=True)] * 2)
        return final_weights(tmp_path / name)
    averaged, given, untouched = final("averaged"), final("given", gamma_p=0.05), final("other", gamma_p=0.06)
    for name, weights in averaged.items():
        np.testing.assert_allclose(given[name].asnumpy(), weights.asnumpy(), rtol=1e-4, atol=1e-6)
    assert any(np.abs(untouched[name].asnumpy() - weights.asnumpy()).max() > 1e-3 for name, weights in averaged.items())


def test_an_argument_that_the_optimizer_does_not_take_is_told_in_one_line(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert loop.run(tiny(tmp_path, optimizer_params="nesterov=true")) == EXIT_USAGE
    line, = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("odsgd train: optimizer_params: optimizer `sgd` does not take them: ") and "nesterov" in line


@pytest.mark.usefixtures("dropout_and_batchnorm")
def test_a_run_with_frozen_layers_resumes_to_the_same_bits_without_the_file_of_its_weights(tmp_path: Path) -> None:
    loop.run(tiny(tmp_path / "begun", epochs=1, seed=5))
    file = tmp_path / "weights.params"
    next((tmp_path / "begun" / "checkpoints").glob("*/weights.params")).rename(file)
    whole, parts = (tiny(tmp_path / part, kvstore="odsgd", warmup=2, trainable="last", weights=str(file))
                    for part in ("whole", "parts"))
    train_together([whole, whole])
    train_together([dataclasses.replace(parts, iterations=7)] * 2)
    file.unlink()
    train_together([dataclasses.replace(parts, resume=True, weights=None)] * 2)
    assert same_bits(final_weights(tmp_path / "whole"), final_weights(tmp_path / "parts"))
