"""Training without servers by real processes: two workers that send to each other by MPI."""
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest

from odsgd.config.train import TrainConfig
from tests.jobs import PATIENCE_S, ROOT, environment, run_job

pytest.importorskip("mpi4py")
PRESET = str(ROOT / "configs" / "digits_ring.yaml")

LEARNING = {
    "sasgd": "--kvstore sasgd",
    "dsync": "--kvstore dsync",
    "pipesgd": "--kvstore pipesgd",
    "quantize": "--kvstore pipesgd --codec quantize",
    "odsgd": "--kvstore odsgd --transport ring",
    "delayed": "--kvstore delayed --transport ring",
    "ssgd_sharded": "--kvstore ssgd --transport sharded",
    "odsgd_sharded": "--kvstore odsgd --transport sharded",
}
RESUMED = {
    "sasgd": "--kvstore sasgd --T 4 --wd 1e-4",
    "pipesgd": "--kvstore pipesgd --K 3 --warmup 5 --momentum 0.9 --lr 0.05 --lr-step-epochs 1 --codec quantize",
    "odsgd": "--kvstore odsgd --transport ring --warmup 5 --momentum 0.9 --lr 0.05 --lr-local 0.02 "
             "--optimizer-local dcasgd_a",
    "odsgd_sharded": "--kvstore odsgd --transport sharded --warmup 5 --optimizer adam --lr 0.005 --lr-local 0.02 "
                     "--optimizer-local dcasgd_a",
}
STOP, TOTAL = 18, 30  # past the warm-up; within an interval of sasgd; sums of pipesgd under way


def options(flags: str, out: Path, **more: Any) -> Dict[str, Any]:
    config = TrainConfig.from_flags(["--config", PRESET, *flags.split(), "--out", str(out)])
    return {**config.to_dict(), **more}


def train(runs: List[Dict[str, Any]]) -> None:
    """All runs in one job, since a job takes longer to start than digits to learn."""
    run_job("tests.jobs:train_each", 2, 0, runs)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: the preset with each store, and each way of `RESUMED` whole and up to `STOP`."""
    out = tmp_path_factory.mktemp("runs")
    train([options(f"{flags} --eval-every 16 --checkpoint-every 0", out / name) for name, flags in LEARNING.items()]
          + [options(flags, out / f"{name}-whole", iterations=TOTAL) for name, flags in RESUMED.items()]
          + [options(flags, out / f"{name}-parts", iterations=STOP) for name, flags in RESUMED.items()])
    train([options(flags, out / f"{name}-parts", iterations=TOTAL, resume=True) for name, flags in RESUMED.items()])
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNING)
def test_digits_are_learnt_to_over_95_percent_with_documented_defaults(out: Path, name: str) -> None:
    records = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
    assert [record for record in records if record["event"] == "epoch"][-1]["test_accuracy"] > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_resumes_to_the_same_bits(out: Path, name: str) -> None:
    """All that the last checkpoint holds, of both workers; and the first part had something to lose."""
    for part in ("worker-0.npz", "worker-1.npz", "servers.npz"):
        with np.load(out / f"{name}-whole" / "checkpoints" / str(TOTAL) / part) as whole, \
                np.load(out / f"{name}-parts" / "checkpoints" / str(TOTAL) / part) as parts:
            assert whole.files == parts.files
            for key in whole.files:
                np.testing.assert_array_equal(whole[key], parts[key], err_msg=key)
    with np.load(out / f"{name}-parts" / "checkpoints" / str(STOP) / "worker-0.npz") as saved:
        kept = [key for key in saved.files
                if key.startswith(("worker/", "optimizer_local/")) and key.endswith("weight")]
        assert kept and all(np.abs(saved[key]).max() > 0 for key in kept)


def test_the_command_line_starts_no_server_for_a_store_that_needs_none(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "odsgd", "launch", "-n", "2", sys.executable, "-m", "odsgd", "train", "--config",
               PRESET, "--iterations", "3", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and "server 0" not in done.stdout and "scheduler" not in done.stdout, done.stdout
    assert json.loads((tmp_path / "checkpoints" / "3" / "manifest.json").read_text())["num_workers"] == 2
