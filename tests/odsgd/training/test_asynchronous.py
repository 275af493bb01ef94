"""Runs of the asynchronous stores: workers as threads whose exchanges arrive in a scripted order, so runs repeat."""
import contextlib
import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.transports.in_process import Stage
from odsgd.config.train import TrainConfig
from odsgd.training import loop, metrics, stability
from odsgd.training.checkpoint import checkpoint
from odsgd.training.evaluation import Evaluator
from odsgd.training.stability import warnings_about
from odsgd.training.step.passes import NetworkPasses
from tests.odsgd.training.runs import final_weights, records, same_bits, tiny, train_together
from tests.scripted import ScriptedStage

WORKERS = 5
ITERATIONS = 12
ASYNC: Dict[str, Any] = dict(batch_size=4, epochs=3, lr=0.05, log_interval=3)  # 4 iterations per epoch for five workers


def order(first: int, last: int, every: int = 1, workers: int = WORKERS) -> List[int]:
    """Whose exchange comes when in iterations first + 1 to last: in each all workers, one after another, shuffled."""
    return [rank for t in range(first + 1, last + 1) if t % every == 0
            for rank in np.random.RandomState(t).permutation(workers)]


def train_in_order(config: TrainConfig, first: int, last: int, every: int = 1, workers: int = WORKERS) -> None:
    """Iterations first + 1 to last."""
    cluster = ScriptedStage(workers, order=order(first, last, every, workers))
    cluster.run(lambda transport: loop.Training(config, transport).run())
    assert not cluster.order


def staleness(out: Path) -> Dict[str, Any]:
    found: Dict[str, Any] = json.loads((out / "staleness.json").read_text())
    del found["updates_per_s"]
    return found


ALGORITHMS: Dict[str, Tuple[Dict[str, Any], int]] = {
    "asgd": (dict(kvstore="asgd", momentum=0.5, wd=1e-3), 1),
    "dcasgd_c": (dict(kvstore="dcasgd_c", lr_step_epochs="1"), 1),
    "dcasgd_a": (dict(kvstore="dcasgd_a", momentum=0.5), 1),
    "softsync": (dict(kvstore="softsync", n=2), 1),  # an update per two pushes: one is held after an odd iteration
    "downpour": (dict(kvstore="downpour", T=3, lr_local=0.02), 3),
    "easgd": (dict(kvstore="easgd", T=2), 2),
    "eamsgd": (dict(kvstore="eamsgd", T=3, delta=0.5), 3),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.usefixtures("dropout_and_batchnorm")
def test_a_run_resumes_to_the_same_bits_at_an_epochs_end_and_within(tmp_path: Path, name: str) -> None:
    options, every = ALGORITHMS[name]
    whole, parts = (tiny(tmp_path / part, **ASYNC, **options) for part in ("whole", "parts"))
    train_in_order(whole, 0, ITERATIONS, every)
    for first, last in ((0, 4), (4, 7), (7, ITERATIONS)):
        train_in_order(dataclasses.replace(parts, iterations=last, resume=first > 0), first, last, every)
    assert same_bits(final_weights(tmp_path / "whole"), final_weights(tmp_path / "parts"))
    assert staleness(tmp_path / "whole") == staleness(tmp_path / "parts")
    assert staleness(tmp_path / "whole")["staleness_max"] > 0


def test_a_run_that_is_stopped_before_its_first_push_resumes_to_the_same_bits(tmp_path: Path) -> None:
    whole, parts = (tiny(tmp_path / part, **ASYNC, kvstore="downpour", T=3, lr_local=0.02, momentum=0.5)
                    for part in ("whole", "parts"))
    train_in_order(whole, 0, ITERATIONS, 3)
    train_in_order(dataclasses.replace(parts, iterations=2), 0, 2, 3)
    train_in_order(dataclasses.replace(parts, resume=True), 2, ITERATIONS, 3)
    assert same_bits(final_weights(tmp_path / "whole"), final_weights(tmp_path / "parts"))
    assert staleness(tmp_path / "whole") == staleness(tmp_path / "parts")


def test_a_part_batch_is_held_where_the_softsync_run_is_stopped(tmp_path: Path) -> None:
    train_in_order(tiny(tmp_path, **ASYNC, kvstore="softsync", n=2, iterations=7), 0, 7)
    with np.load(str(tmp_path / "checkpoints" / "7" / "servers.npz")) as file:
        meta = json.loads(file["meta"].tobytes().decode())
    del meta["arrays"]
    assert [bucket["rule"]["held"] for bucket in meta.values()] == [1] and 7 * WORKERS == 35


def test_an_asynchronous_run_is_resumed_with_the_options_of_its_store(tmp_path: Path) -> None:
    config = tiny(tmp_path, **ASYNC, kvstore="softsync", n=2, iterations=4)
    train_in_order(config, 0, 4)
    with pytest.raises(ConfigError, match="n: 2 in the saved run, 1 now"):
        train_in_order(tiny(tmp_path, **ASYNC, kvstore="softsync", n=1, resume=True), 4, 8)


def test_nobody_waits_at_the_end_of_an_epoch_and_each_is_evaluated(tmp_path: Path) -> None:
    """Worker 0 has two epochs done before worker 1 begins."""
    ends, two = [0] * 10 + [1] * 15 + [0] * 5, dict(kvstore="asgd", lr=0.05, checkpoint_every=0)
    cluster = ScriptedStage(2, order=ends)
    cluster.run(lambda transport: loop.Training(tiny(tmp_path / "run", epochs=3, **two), transport).run())
    assert not cluster.order
    first, second, last = records(tmp_path / "run", "epoch")
    assert [one["epoch"] for one in (first, second, last)] == [1, 2, 3]
    assert len({one["test_loss"] for one in (first, second, last)}) == 3


def ticking(monkeypatch: pytest.MonkeyPatch) -> List[float]:
    """The time of all clocks, which takes a millisecond whenever one is read; a test may add to it."""
    now = [0.0]

    def tick() -> float:
        now[0] += 0.001
        return now[0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=tick))
    return now


def test_the_speed_of_a_worker_has_no_part_of_the_evaluation_beside_its_training(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the updates goes on, since the other workers push meanwhile."""
    now, test = ticking(monkeypatch), NetworkPasses.test

    def slow(passes: NetworkPasses, xs: Any, ys: Any) -> Any:
        now[0] += 1000
        return test(passes, xs, ys)
    monkeypatch.setattr(NetworkPasses, "test", slow)
    train_together([tiny(tmp_path, epochs=3, kvstore="asgd", lr=0.05, num_examples=160, checkpoint_every=0)] * 2)
    told = records(tmp_path, "interval") + records(tmp_path, "epoch")
    assert len(told) == 9 and all(record["iteration_ms"] < 100 for record in told)
    assert records(tmp_path, "staleness")[0]["updates_per_s"] < 0.1


def test_the_last_epoch_of_a_worker_ends_when_it_is_through_and_not_the_slowest(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, iterate = ticking(monkeypatch), loop.Training._iterate

    def slow(run: loop.Training, xs: Any, ys: Any) -> None:
        now[0] += 1000 * (run.store.rank == 1 and run.store.iteration >= 5)
        iterate(run, xs, ys)
    monkeypatch.setattr(loop.Training, "_iterate", slow)
    config = tiny(tmp_path, kvstore="asgd", lr=0.05, checkpoint_every=0)
    ScriptedStage(2, order=[0] * 10 + [1] * 10).run(lambda transport: loop.Training(config, transport).run())
    assert now[0] > 5000 and all(record["iteration_ms"] < 100 for record in records(tmp_path, "epoch"))
    assert records(tmp_path, "staleness")[0]["updates_per_s"] < 0.1


@pytest.mark.parametrize("told", [False, True])
def test_an_epoch_whose_evaluation_a_job_did_not_live_to_see_is_evaluated_when_it_goes_on(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool) -> None:
    """The checkpoint has its weights. An evaluation that came to its end after that is not made again."""
    class Killed(Exception):
        pass

    def train_until(last: int, name: str, **options: Any) -> None:
        def worker(transport: Any) -> None:
            run = loop.Training(tiny(tmp_path / name, batch_size=4, epochs=3, kvstore="asgd", **options), transport)
            iterate = run._iterate

            def until(xs: Any, ys: Any) -> None:
                if run.store.iteration == last:
                    if told:
                        run.evaluator.finish()
                    raise Killed
                iterate(xs, ys)

            run._iterate = until  # type: ignore[method-assign]
            run.run()

        Stage(1).run(worker)

    monkeypatch.setattr(checkpoint, "WRITTEN_WITHIN", 1)  # iteration
    train_until(-1, "whole")
    whole = records(tmp_path / "whole", "epoch")
    with pytest.raises(Killed):
        train_until(whole[0]["iteration"] + 2, "parts")
    assert len(records(tmp_path / "parts", "epoch")) == told
    train_until(-1, "parts", resume=True)
    parts = records(tmp_path / "parts", "epoch")
    for key in ("epoch", "iteration", "train_loss", "test_loss", "test_accuracy"):
        assert [one[key] for one in parts] == [one[key] for one in whole], key


# --- staleness --------------------------------------------------------------------------------------------------------

def test_staleness_is_a_result_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny(tmp_path, **ASYNC, kvstore="asgd")
    cluster = ScriptedStage(WORKERS, order=list(range(WORKERS)) * ITERATIONS)
    cluster.run(lambda transport: loop.Training(config, transport).run())
    found = json.loads((tmp_path / "staleness.json").read_text())
    # In turns, every gradient but the first of each worker is M - 1 updates old; worker m's first m.
    ones = ITERATIONS - 1
    assert found["histogram"] == {"0": 1, "1": 1, "2": 1, "3": 1, "4": 1 + ones * WORKERS}
    assert found["workers"]["2"] == {"staleness_mean": pytest.approx((2 + 4 * ones) / ITERATIONS), "staleness_max": 4,
                                     "pushes": ITERATIONS, "histogram": {"2": 1, "4": ones}}
    assert (found["pushes"], found["updates_per_bucket"], found["staleness_max"]) == (60, 60, 4)
    assert found["lr_mean"] == pytest.approx(0.05) and found["updates_per_s"] > 0
    (event,) = records(tmp_path, "staleness")
    assert {**found, "event": "staleness"} == event
    assert [record["event"] for record in records(tmp_path)[-2:]] == ["staleness", "end"]
    assert records(tmp_path, "interval")[-1]["staleness_mean"] == 4
    assert "staleness: mean 3.83, max 4" in capsys.readouterr().out


def test_workers_that_the_job_lost_are_named_in_the_result_and_in_what_cannot_be_resumed(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(tmp_path, **ASYNC, kvstore="asgd", iterations=4)
    monkeypatch.setattr("kvstore.job.environment.absent_workers", lambda: {3})
    train_in_order(config, 0, 4)
    assert staleness(tmp_path)["lost_workers"] == [3]
    assert "; without workers [3] at the end" in capsys.readouterr().out
    manifest = tmp_path / "checkpoints" / "4" / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["files"]["worker-3.npz"]
    manifest.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"checkpoint 4 has no `worker-3\.npz`: the job had lost that worker by then"):
        train_in_order(dataclasses.replace(config, iterations=8, resume=True), 4, 8)


def test_a_damped_gradient_has_a_lower_effective_learning_rate(tmp_path: Path) -> None:
    train_in_order(tiny(tmp_path, **ASYNC, kvstore="softsync"), 0, ITERATIONS)
    found = staleness(tmp_path)
    damped = sum(pushes / max(int(tau), 1) for tau, pushes in found["histogram"].items()) / found["pushes"]
    assert found["lr_mean"] == pytest.approx(0.05 * damped) and damped < 0.5


def test_a_synchronous_run_has_no_staleness(tmp_path: Path) -> None:
    assert loop.run(tiny(tmp_path)) == 0
    assert not records(tmp_path, "staleness") and not (tmp_path / "staleness.json").exists()
    assert "staleness_mean" not in records(tmp_path, "interval")[0]


def test_a_setting_known_to_diverge_is_said_once_before_training(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_in_order(tiny(tmp_path, **{**ASYNC, "lr": 0.3}, kvstore="asgd", iterations=4), 0, 4)
    assert capsys.readouterr().out.count("\nwarning: effective step 1.5 = lr 0.3 x 5 workers: above 1 ") == 1
    assert [record["event"] for record in records(tmp_path)][:2] == ["start", "warning"]


def test_every_workers_own_iteration_is_its_clock(tmp_path: Path) -> None:
    """All workers of a job that takes turns in whole epochs train with the rate of the epoch they are in."""
    config = tiny(tmp_path, **{**ASYNC, "lr": 0.08}, kvstore="asgd", lr_step_epochs="1", lr_factor=0.5)
    in_turns = [rank for _ in range(3) for rank in range(WORKERS) for _ in range(4)]
    cluster = ScriptedStage(WORKERS, order=in_turns)
    cluster.run(lambda transport: loop.Training(config, transport).run())
    assert staleness(tmp_path)["lr_mean"] == pytest.approx((0.08 + 0.04 + 0.04) / 3)
    assert [record["lr"] for record in records(tmp_path, "epoch")] == [0.08, 0.04, 0.04]


def only_line(workers: int, **options: Any) -> str:
    (line,) = warnings_about(TrainConfig(**options), workers)
    assert "\n" not in line
    return line


def test_the_effective_step_is_lr_times_workers_over_one_minus_momentum() -> None:
    assert only_line(4, kvstore="asgd", lr=0.1, momentum=0.9) == (
        "effective step 4 = lr 0.1 x 4 workers / (1 - momentum 0.9): above 1 asynchronous training is known to diverge."
        " Lower lr to 0.025, or set momentum to 0")


@pytest.mark.parametrize("workers, options, step", [
    (8, dict(kvstore="asgd", lr=0.1), 0.8),
    (8, dict(kvstore="dcasgd_a", lr=0.05, momentum=0.5), 0.8),
    (8, dict(kvstore="softsync", n=2, modulate=False, lr=0.3), 0.6),
    (8, dict(kvstore="softsync", lr=0.3), 0.6),
    (8, dict(kvstore="softsync", n=1, lr=0.3), 0.3),
    (8, dict(kvstore="downpour", T=4, lr=0.1), 0.8),
    (8, dict(kvstore="easgd", lr=0.8), 0.8),
    (8, dict(kvstore="eamsgd", lr=0.08), 0.8),
    (8, dict(kvstore="async_diloco", lr=0.08, momentum=0.9), 0.8),
    (8, dict(kvstore="decoupled", lr=0.08, momentum=0.9), 0.8),
    (8, dict(kvstore="asgd", lr=0.05, lr_warmup="1epoch", lr_warmup_from=0.1), 0.8),
])
def test_what_is_in_flight_depends_on_the_algorithm(workers: int, options: Dict[str, Any], step: float,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    assert warnings_about(TrainConfig(**options), workers) == []
    monkeypatch.setattr(stability, "MOST_STEP", 0.0)
    assert only_line(workers, **options).startswith(f"effective step {step} = ")


def test_each_remedy_named_would_do() -> None:
    assert only_line(8, kvstore="asgd", lr=0.4).endswith(
        "Lower lr to 0.125, or take --kvstore softsync with its modulation")
    assert only_line(2, kvstore="asgd", lr=0.8, momentum=0.5).endswith("Lower lr to 0.25")
    assert only_line(4, kvstore="eamsgd", lr=0.4).endswith("Lower lr to 0.1, or set delta to 0")
    assert only_line(4, kvstore="asgd", lr=0.01, lr_warmup=2, lr_warmup_from=1.0).endswith(
        "Lower lr_warmup_from to 0.25")
    assert warnings_about(TrainConfig(kvstore="asgd", lr=0.125), 8) == []


def test_asynchrony_adds_momentum_to_that_of_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    options: Dict[str, Any] = dict(kvstore="asgd", lr=0.001, momentum=0.9)
    assert warnings_about(TrainConfig(**options), 8) == []
    assert only_line(16, **options) == (
        "total momentum 0.9938: 0.9 of its own, the rest from 16 gradients in flight; above 0.99 asynchronous training "
        "is known to swing or diverge. Set momentum to 0, or take fewer workers (softsync: a smaller n)")
    assert only_line(128, **{**options, "lr": 1e-4}).endswith("or diverge. Take fewer workers (softsync: a smaller n)")
    assert only_line(4, kvstore="eamsgd", lr=0.001, delta=0.995).endswith(
        "total momentum 0.995: 0.995 of its own; above 0.99 asynchronous training is known to swing or diverge. Set "
        "delta to 0")
    monkeypatch.setattr(stability, "MOST_MOMENTUM", 0.0)
    assert only_line(8, **options).startswith("total momentum 0.9875: ")


@pytest.mark.parametrize("workers, options", [
    (1, dict(kvstore="asgd", lr=0.9, momentum=0.9)), (8, dict(kvstore="ssgd", lr=0.9, momentum=0.9)),
    (8, dict(kvstore="asgd", lr=0.9, optimizer="adam"))])
def test_nothing_is_said_of_one_worker_of_synchronous_stores_and_of_optimizers_with_another_scale(
        workers: int, options: Dict[str, Any]) -> None:
    assert warnings_about(TrainConfig(**options), workers) == []


def test_a_worker_that_joined_the_running_job_does_not_wait_for_who_evaluates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODSGD_JOINED", "1")
    store: Any = SimpleNamespace(global_weights=contextlib.nullcontext)
    run_log: Any = SimpleNamespace(silent=True)
    config = tiny(Path(), kvstore="asgd")
    evaluator = Evaluator(config, store, lambda: iter([]), lambda xs, ys: [], run_log, lambda: None, None)
    assert math.isnan(evaluator.evaluate()["test_loss"])
