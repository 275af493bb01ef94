"""Jobs that are hit while they train, and go on by themselves to the bits of a run that was left alone."""
import functools
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import pytest

from kvstore.engine._mxnet import mx
from tests.integration.launching import ROOT, Launch, Word, words
from tests.jobs import until

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
SERVER = {"LAUNCH_TEST_SERVER": words(sys.executable, "-m", "kvstore.weights.servers"), "OMP_NUM_THREADS": "1"}
HIT = Path(ROOT) / "tests" / "hit.py"
METHODS: Dict[str, List[str]] = {
    "ssgd": ["--kvstore", "ssgd"],
    "odsgd": ["--kvstore", "odsgd", "--optimizer-local", "dcasgd_a", "--lr-local", "0.02", "--warmup", "10"],
    "pipesgd": ["--kvstore", "pipesgd", "--warmup", "10"],
    "diloco": ["--kvstore", "diloco", "--H", "4", "--fragments", "2", "--delay", "3", "--momentum-outer", "0.5"],
}


EPOCHS = 3


def start(out: Path, method: str, *launcher: Word, hit: Optional[Tuple[str, int]] = None,
          epochs: int = EPOCHS) -> Launch:
    """A job of two workers; of `hit`, a process and an iteration, the process is killed there."""
    return Launch("-n", 2, "-s", 0 if method == "pipesgd" else 1, *launcher, *train(hit), "--dataset", "digits",
                  "--epochs", epochs, "--lr", "0.05", "--momentum", "0.9", *METHODS[method], "--checkpoint-every", 10,
                  "--out", out, env=SERVER)


def train(hit: Optional[Tuple[str, int]]) -> List[Word]:
    return [sys.executable, *([HIT, *hit] if hit else ["-m", "odsgd"]), "train"]


def weights(out: Path, iteration: int) -> Dict[str, Any]:
    loaded: Dict[str, Any] = mx.nd.load(str(out / "checkpoints" / str(iteration) / "weights.params"))
    return loaded


def newest(out: Path) -> int:
    manifests = (out / "checkpoints").glob("*/manifest.json")
    return max((int(manifest.parent.name) for manifest in manifests), default=0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Dict[str, Any]]:
    """The last weights of a method's job that nothing hits, which runs once."""
    @functools.lru_cache(maxsize=None)
    def run(method: str) -> Dict[str, Any]:
        out = tmp_path_factory.mktemp("whole") / method
        with start(out, method) as launch:
            assert launch.wait() == 0, launch
        return weights(out, 22 * EPOCHS)
    return run


@pytest.mark.parametrize("method, victim", [("odsgd", "worker 0"), ("odsgd", "server 0"), ("pipesgd", "worker 1"),
                                            pytest.param("diloco", "worker 1", marks=pytest.mark.again)])
def test_a_job_that_was_hit_ends_with_the_bits_of_one_that_was_not(
        tmp_path: Path, whole: Callable[[str], Dict[str, Any]], method: str, victim: str) -> None:
    with start(tmp_path / "hit", method, "--max-restarts", 2, hit=(victim, 35)) as launch:
        assert launch.wait() == 0, launch
    restart = next(line for line in launch.errors if "restart 1 of 2, from checkpoint" in line)
    assert re.search(r"from checkpoint \d+0; this loses \d+\.\d s, at least \d+ iterations$", restart), restart
    assert any("resumed from" in line for line in launch.output)
    one, other = weights(tmp_path / "hit", 22 * EPOCHS), whole(method)
    assert all(np.array_equal(one[name].asnumpy(), other[name].asnumpy()) for name in one)


def test_worker_0_does_not_begin_again_where_its_checkpoints_are_not(tmp_path: Path) -> None:
    with start(tmp_path, "ssgd", "--max-restarts", 2, epochs=60) as launch:
        until(lambda: newest(tmp_path) >= 20 or launch.process.poll() is not None)
        launch.kill("worker 1", signal.SIGKILL)
        (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
        assert launch.wait() == 64, launch
    assert re.search(r"it reported: the job has saved checkpoint \d+, and there is none in `\S+checkpoints` on host",
                     launch.said), launch
    assert "not started again: the options would be wrong again" in launch.said


@pytest.mark.again
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before_it(tmp_path: Path) -> None:
    with start(tmp_path, "odsgd", epochs=2) as launch:
        assert launch.wait() == 0, launch
    part = tmp_path / "checkpoints" / "44" / "worker-1.npz"
    part.write_bytes(part.read_bytes()[:-10])
    with Launch("-n", 2, "-s", 1, sys.executable, "-m", "odsgd", "train", "--config", tmp_path / "config.yaml",
                "--resume", env=SERVER) as launch:
        assert launch.wait() == 0, launch
    said = next(line for line in launch.output if "is not whole" in line)
    assert "warning: checkpoint 44 is not whole" in said and said.endswith("going on from checkpoint 40")


def test_a_failure_that_repeats_itself_and_a_mistake_are_not_started_again(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "import tests.lean, odsgd, sys\nfrom kvstore.job.pulse import connecting, pulse\nconnecting()\npulse.moved(7)\n"
        "raise LookupError('as always')\n")
    with Launch("-n", 1, "-s", 0, "--max-restarts", 5, tmp_path / "fails.py") as launch:
        assert launch.wait() == 1
    assert sum("restart" in line for line in launch.errors) == 1
    assert "not started again: worker 0 has failed in the same way as before" in launch.said


def test_a_mistake_that_all_workers_make_is_not_tried_for_ever(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import tests.lean, odsgd\nfrom kvstore.job import ending\n"
                                       "ending.die_of_errors()\nraise KeyError('label')\n")
    with Launch("-n", 3, "-s", 0, "--max-restarts", 5, tmp_path / "fails.py") as launch:
        assert launch.wait() == 70
    assert sum("restart 1 of 5" in line for line in launch.errors) == 1 and "restart 2 of 5" not in launch.said
    assert "has failed in the same way as before" in launch.said and "  in the same way: worker" in launch.said
    assert "not the cause" not in launch.said


def test_a_setting_that_cannot_work_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import tests.lean, odsgd, kvstore\nkvstore.create('odsdg')\n")
    with Launch("-n", 2, "-s", 0, "--max-restarts", 5, tmp_path / "fails.py") as launch:
        assert launch.wait() == 64
    assert "restart 1 of 5" not in launch.said and "did you mean `odsgd`?" in launch.said


def test_a_worker_that_cannot_start_again_is_left_out(tmp_path: Path) -> None:
    out = tmp_path / "run"
    cannot = 'if [ "$ODSGD_WORKER_RANK" = 2 ] && [ -n "$ODSGD_RESTARTS" ]; then exit 1; fi; exec "$0" "$@"'
    with Launch("-n", "2:3", "-s", 1, "--max-restarts", 1, "--rejoin-timeout", 2, "sh", "-c", cannot,
                *train(("worker 2", 35)), "--dataset", "digits", "--epochs", 4, "--lr", "0.05", "--momentum", "0.9",
                "--kvstore", "odsgd", "--momentum-local", "0.5", "--checkpoint-every", 10, "--lr-scaling", "linear",
                "--out", out, env=SERVER) as launch:
        assert launch.wait() == 0, launch
    assert "worker 2 did not come back; trying again for 2 s, then without" in launch.said
    assert "going on with 2 of 3 workers, without worker 2; batches are dealt anew" in launch.said
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    told = next(record["text"] for record in records
                if record["event"] == "warning" and "go on where" in record["text"])  # another is that warmup is long
    assert re.match(r"2 workers go on where 3 were: \d+ of the 1437 examples of epoch \d+ are left and dealt", told)
    assert told.endswith("lr times 0.6667 (lr_scaling linear)")
    ended = [record for record in records if record["event"] == "epoch"][-1]
    assert (ended["epoch"], ended["lr"]) == (4, pytest.approx(0.05 * 2 / 3)) and ended["test_accuracy"] > 0.9


def test_a_worker_that_can_start_again_is_taken_in_at_a_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "run"
    cannot = 'if [ "$ODSGD_WORKER_RANK" = 1 ] && [ "$ODSGD_RESTARTS" = 1 ]; then exit 1; fi; exec "$0" "$@"'
    with Launch("-n", "1:2", "-s", 1, "--max-restarts", 1, "--rejoin-timeout", 0, "--grow", "sh", "-c", cannot,
                sys.executable, "-m", "odsgd", "train", "--dataset", "digits", "--epochs", 30, "--lr", "0.05",
                "--kvstore", "ssgd", "--checkpoint-every", 10, "--out", out, env=SERVER) as launch:
        until(lambda: newest(out) >= 20 or launch.process.poll() is not None)
        launch.kill("worker 1", signal.SIGKILL)
        assert launch.wait() == 0, launch
    said = iter(launch.said.splitlines())
    for pattern in (r"restart 1 of 1, from checkpoint \d+", "going on with 1 of 2 workers, without worker 1",
                    r"back: 127.0.0.1; the job ends after checkpoint (\d+) and is started again with all",
                    r"going on from checkpoint \d+ with all workers, if they come"):
        assert any(re.search(pattern, line) for line in said), launch
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    told = [record["text"] for record in records if record["event"] == "warning"]
    assert [text.partition(":")[0] for text in told] == ["1 workers go on where 2 were",
                                                         "2 workers go on where 1 were"]


SCRIPT = """
import tests.lean
import odsgd
from mxnet import autograd, gluon, nd
import mxnet as mx, os, signal, sys
import kvstore
from odsgd import checkpoint

out, fails = sys.argv[1], sys.argv[2] == "fails"
mx.random.seed(1)
net = gluon.nn.Dense(2, in_units=3)
net.initialize()
store = kvstore.create("odsgd", warmup=3)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=store)
keeper = checkpoint.keep(store, net, out, every=10)
for iteration in range(keeper.iteration, 75):
    x = nd.array([[iteration % 7, store.rank + 1, 1]]) / 7
    with autograd.record():
        loss = (net(x) - x.sum()).square().mean()
    loss.backward()
    trainer.step(1)
    keeper.step()
    if fails and iteration == 50 and store.rank == 1 and "ODSGD_RESTARTS" not in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
keeper.close()
print("began", keeper.iteration, checkpoint.latest(out))
"""


def test_a_script_of_ones_own_goes_on_with_three_lines(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    for name in ("fails", "whole"):
        with Launch("-n", 2, "-s", 1, "--max-restarts", 1, tmp_path / "script.py", tmp_path / name / "run", name,
                    env=SERVER) as launch:
            assert launch.wait() == 0, launch
        assert launch.output[-1].endswith("| began 75 70")
        assert any("restart 1 of 1, from checkpoint" in line for line in launch.errors) == (name == "fails")
    one, other = (mx.nd.load(str(tmp_path / name / "run" / "70" / "weights.params")) for name in ("fails", "whole"))
    assert all(np.array_equal(one[key].asnumpy(), other[key].asnumpy()) for key in one)
