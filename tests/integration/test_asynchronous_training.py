"""Asynchronous training by real processes: two workers and one server."""
import json
import sys
from pathlib import Path
from typing import Any, Dict

import pytest

from kvstore.methods import METHODS
from odsgd.config.train import TrainConfig
from tests.jobs import ROOT, launch, run_job

ASYNCHRONOUS = [name for name, method in METHODS.items() if method.asynchronous]
PRESET = str(ROOT / "configs" / "digits_async.yaml")


def options_of(store: str, out: Path) -> Dict[str, Any]:
    return TrainConfig.from_flags(["--config", PRESET, "--kvstore", store, "--eval-every", "16", "--checkpoint-every",
                                   "0", "--out", str(out / store)]).to_dict()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every store's run with the preset, all in one job, since a job takes longer to start than digits to learn."""
    out = tmp_path_factory.mktemp("runs")
    each = [options_of(store, out) for store in ASYNCHRONOUS]
    run_job("tests.jobs:train_each", 2, 1, each)
    return out


def last_record(folder: Path, event: str) -> Dict[str, Any]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["event"] == event][-1]


@pytest.mark.slow
@pytest.mark.parametrize("store", ASYNCHRONOUS)
def test_digits_are_learnt_with_documented_defaults(runs: Path, store: str) -> None:
    seldom = METHODS[store].takes == "weights"  # three exchanges of each worker in all
    assert last_record(runs / store, "epoch")["test_accuracy"] > (0.9 if seldom else 0.95)


@pytest.mark.slow
@pytest.mark.parametrize("store", ASYNCHRONOUS)
def test_staleness_is_measured_in_every_run(runs: Path, store: str) -> None:
    found = json.loads((runs / store / "staleness.json").read_text())
    iteration = last_record(runs / store, "end")["iteration"]
    exchanges = iteration // METHODS[store].intervals(METHODS[store].Options())[0]
    if "quorum" in METHODS[store].option_names():  # a round takes one push or two, and fragments have their own turns
        assert exchanges <= found["updates_per_bucket"] <= 2 * (exchanges + 1)
    else:
        assert found["updates_per_bucket"] == 2 * exchanges
    assert found["updates_per_s"] > 0
    assert set(found["workers"]) == {"0", "1"} and 0 <= found["staleness_mean"] <= found["staleness_max"] > 0
    outer = METHODS[store].outer_sgd(METHODS[store].Options())
    assert found["pushes"] == sum(found["histogram"].values())
    assert 0 < found["lr_mean"] <= (outer[0] if outer else 0.1) + 1e-9


def test_the_command_line_trains_asynchronously_and_resumes(tmp_path: Path) -> None:
    train = [sys.executable, "-m", "odsgd", "train", "--config", PRESET, "--kvstore", "dist_async", "--out",
             str(tmp_path)]
    first = launch(2, 1, [*train, "--iterations", "30"])
    assert first.returncode == 0 and "staleness: mean " in first.stdout, first.stdout + first.stderr
    second = launch(2, 1, [*train, "--epochs", "3", "--resume"])
    assert second.returncode == 0 and "resumed from" in second.stdout, second.stdout + second.stderr
    found = json.loads((tmp_path / "staleness.json").read_text())
    assert found["updates_per_bucket"] == 2 * 3 * 22  # of both parts
