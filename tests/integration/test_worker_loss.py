"""An asynchronous job of real processes goes on without a worker that is killed, where it was told to."""
import json
import os
import signal
import sys
from pathlib import Path
from typing import List

import pytest

from tests.integration.launching import PATIENCE_S, ROOT, Launch, Word, words
from tests.jobs import until

PRESET = os.path.join(ROOT, "configs", "digits_async.yaml")
LASTING = os.path.join(ROOT, "tests", "lasting.py")
SERVER = {"LAUNCH_TEST_SERVER": words(sys.executable, "-m", "kvstore.weights.servers"), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("wire", ["ps-lite", "sockets"])
def test_sums_evaluation_another_optimizer_and_the_end_do_without_the_lost_worker(wire: str) -> None:
    with Launch("-n", 3, "-s", 1, "--wire", wire, "--on-worker-loss", "continue", LASTING, env=SERVER) as launch:
        launch.wait_for("worker 0 | trains", "worker 1 | trains", "worker 2 | trains")
        launch.kill("worker 0", signal.SIGKILL)
        assert launch.wait() == 0
    assert "worker 0 was lost" in launch.said and "finished without workers [0]" in launch.said
    assert "had not ended" not in launch.said  # the servers do not wait for the lost one either
    # Both that are left have gone through the same sums and seen the same weights.
    ended = sorted(line for line in launch.output if "ended" in line)
    assert [line.split(" | ")[0] for line in ended] == ["worker 1", "worker 2"]
    assert len({line.split(" | ")[1] for line in ended}) == 1
    assert "2 present, who added 12.000" in ended[0]


def test_evaluation_and_writing_move_on_when_worker_0_is_lost(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train: List[Word] = [sys.executable, "-m", "odsgd", "train", "--config", PRESET, "--kvstore", "asgd",
                         "--epochs", 60, "--log-interval", 5, "--checkpoint-every", "20epochs", "--out", run]
    with Launch("-n", 3, "-s", 1, "--on-worker-loss", "continue", *train, env=SERVER) as launch:
        until(lambda: any(line.startswith("worker 0 | epoch 2/") for line in launch.output), PATIENCE_S)
        launch.kill("worker 0", signal.SIGKILL)
        assert launch.wait() == 0, launch
    assert "worker 0 was lost" in launch.said and "finished without workers [0]" in launch.said
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert ["worker 1 goes on" in record["text"] for record in records if record["event"] == "warning"].count(True) == 1
    epochs = {record["epoch"]: record for record in records if record["event"] == "epoch"}
    numbers = sorted(epochs)  # worker 1 may have been farther when it took over, and goes on without a gap
    assert {1, 2} <= set(numbers) and numbers[-1] == 60 and epochs[60]["test_accuracy"] > 0.9
    assert sum(after - before > 1 for before, after in zip(numbers, numbers[1:])) <= 1 and len(numbers) > 40
    assert [record["event"] for record in records][-2:] == ["staleness", "end"]
    assert json.loads((run / "staleness.json").read_text())["lost_workers"] == [0]
    manifest = json.loads((run / "checkpoints" / str(records[-1]["iteration"]) / "manifest.json").read_text())
    assert set(manifest["files"]) == {"worker-1.npz", "worker-2.npz", "servers.npz", "weights.params"}
    assert (run.stat().st_mode & 0o777, (run / "metrics.jsonl").stat().st_mode & 0o777) == (0o700, 0o600)


def decoupled(run: Path, epochs: int, *more: Word) -> List[Word]:
    return [sys.executable, "-m", "odsgd", "train", "--config", PRESET, "--kvstore", "decoupled", "--H", 6,
            "--quorum", 2, "--epochs", epochs, "--log-interval", 5, "--out", run, *more]


def test_a_worker_of_decoupled_diloco_that_dies_costs_its_own_rounds_and_nobody_elses(tmp_path: Path) -> None:
    with Launch("-n", 3, "-s", 1, "--wire", "sockets", "--on-worker-loss", "continue", *decoupled(tmp_path / "run", 40),
                env=SERVER) as launch:
        until(lambda: any(line.startswith("worker 0 | epoch 2/") for line in launch.output), PATIENCE_S)
        launch.kill("worker 1", signal.SIGKILL)
        assert launch.wait() == 0, launch
    assert "finished without workers [1]" in launch.said
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    epochs = [record for record in records if record["event"] == "epoch"]
    assert len(epochs) == 40 and epochs[-1]["test_accuracy"] > 0.9
    for log in json.loads((tmp_path / "run" / "rounds.json").read_text()).values():
        members = [rank for ranks, _ in log for rank in ranks]
        sent = [members.count(rank) for rank in range(3)]
        # All that the first of them found; of the other, what it sent before the first had ended: a round has two.
        assert max(sent) >= records[-1]["iteration"] // 6 - 1 and min(sent[0], sent[2]) > 0.9 * max(sent)
        assert 0 < sent[1] < sent[0] and not any(1 in ranks for ranks, _ in log[-10:])


def test_a_job_of_decoupled_diloco_repeats_to_the_bit_by_the_log_of_its_rounds(tmp_path: Path) -> None:
    ways: List[List[Word]] = [[], ["--replay", tmp_path / "0" / "rounds.json"]]
    for run, more in enumerate(ways):
        with Launch("-n", 3, "-s", 1, *decoupled(tmp_path / str(run), 6, *more), env=SERVER) as launch:
            assert launch.wait() == 0, launch
    (one, other) = (next((tmp_path / run / "checkpoints").glob("84/weights.params")).read_bytes() for run in "01")
    assert one == other
