"""Training by real processes: the launcher, a scheduler, a server, two workers."""
import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import numpy as np
import pytest

from kvstore.engine._mxnet import mx
from tests.jobs import PATIENCE_S, ROOT, environment

pytestmark = pytest.mark.timeout(1200)  # several jobs each

SSGD = ["--model", "mobilenet0.25", "--dataset", "synthetic", "--image-shape", "1,16,16", "--num-examples", "40",
        "--num-classes", "3", "--batch-size", "4", "--epochs", "2", "--kvstore", "ssgd", "--lr", "0.05",
        "--momentum", "0.9"]
"""Five iterations per epoch for two workers, of a network with BatchNorm."""
ODSGD = ["--dataset", "digits", "--epochs", "12", "--kvstore", "odsgd", "--lr", "0.05", "--momentum", "0.9",
         "--wd", "1e-4", "--optimizer-local", "dcasgd_a", "--lr-local", "0.02", "--momentum-local", "0.5",
         "--warmup", "10"]
"""22 iterations per epoch."""


def start(*flags: Any) -> "subprocess.Popen[str]":
    """A job of two workers and one server, as a process group of its own."""
    command = [sys.executable, "scripts/launch.py", "-n", "2", "-s", "1", sys.executable, "scripts/train.py",
               *map(str, flags)]
    return subprocess.Popen(command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, universal_newlines=True, start_new_session=True)


def finish(process: "subprocess.Popen[str]") -> Tuple[int, str]:
    """Exit code and output."""
    try:
        output, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.communicate()
    return process.returncode, output


def train(*flags: Any) -> str:
    code, output = finish(start(*flags))
    assert code == 0, output
    return output


def epochs(out: Path) -> List[Dict[str, Any]]:
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["event"] == "epoch"]


def weights(out: Path, iteration: int) -> Dict[str, Any]:
    return mx.nd.load(str(out / "checkpoints" / str(iteration) / "weights.params"))


def assert_same_bits(one: Dict[str, Any], other: Dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    differing = [name for name in one if not np.array_equal(one[name].asnumpy(), other[name].asnumpy())]
    assert not differing


def test_digits_are_learnt_to_over_95_percent_with_odsgd_on_two_workers(tmp_path: Path) -> None:
    output = train("--config", "configs/digits_odsgd.yaml", "--num-cpus", 2, "--out", tmp_path)
    last = epochs(tmp_path)[-1]
    assert last["test_accuracy"] > 0.95 and last["train_accuracy"] > 0.95 and last["lr_local"] is not None
    assert "worker 1 |" not in output  # one worker speaks


@pytest.mark.again
def test_ssgd_resumes_to_the_same_bits_in_the_middle_of_an_epoch_unless_a_part_is_damaged(tmp_path: Path) -> None:
    train(*SSGD, "--out", tmp_path / "whole", "--checkpoint-every", 0)
    train(*SSGD, "--out", tmp_path / "parts", "--checkpoint-every", 0, "--iterations", 7)
    with damaged(tmp_path / "parts" / "checkpoints" / "7" / "worker-1.npz") as expected:
        code, output = finish(start(*SSGD, "--out", tmp_path / "parts", "--resume"))
        assert code != 0 and expected in output and "Traceback" not in output
    train(*SSGD, "--out", tmp_path / "parts", "--resume")
    assert_same_bits(weights(tmp_path / "whole", 10), weights(tmp_path / "parts", 10))


@contextlib.contextmanager
def damaged(path: Path) -> Iterator[str]:
    """Ten bytes of the file are missing meanwhile; gives what is to be said about it."""
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    yield f"`{path}`: expected {len(content)} bytes, got {len(content) - 10} bytes"
    path.write_bytes(content)


def test_odsgd_resumes_to_the_same_bits_wherever_it_was_interrupted(tmp_path: Path) -> None:
    train(*ODSGD, "--out", tmp_path / "whole", "--checkpoint-every", 0)
    endless = start(*ODSGD, "--epochs", 10 ** 6, "--out", tmp_path / "parts", "--checkpoint-every", 3)
    wait_for(lambda: any(int(manifest.parent.name) >= 15 for manifest in
                         (tmp_path / "parts" / "checkpoints").glob("*/manifest.json")), endless)
    endless.send_signal(signal.SIGTERM)
    assert finish(endless)[0] != 0
    output = train(*ODSGD, "--out", tmp_path / "parts", "--resume")
    assert "resumed from" in output and "nothing is left" not in output
    assert_same_bits(weights(tmp_path / "whole", 264), weights(tmp_path / "parts", 264))


def test_a_job_goes_on_whatever_becomes_of_those_who_watch_it_and_report_on_it(tmp_path: Path) -> None:
    """One who finds no room, one who is stopped, one who is killed."""
    job = start(*ODSGD, "--epochs", 10 ** 6, "--emulate-compute", "10ms", "--out", tmp_path)
    terminal, end = pty.openpty()
    goes_on(tmp_path, job)
    with open("/dev/full", "w") as full:
        assert odsgd("watch", tmp_path, stdout=full, stderr=subprocess.DEVNULL).wait(PATIENCE_S) != 0
        assert odsgd("report", tmp_path, "--table", stdout=full, stderr=subprocess.DEVNULL).wait(PATIENCE_S) != 0
    watching, reporting = odsgd("watch", tmp_path, stdout=end), odsgd("report", tmp_path, stdout=end)
    assert os.read(terminal, 1)
    reporting.send_signal(signal.SIGSTOP)
    watching.send_signal(signal.SIGSTOP)
    goes_on(tmp_path, job)
    for process in (watching, reporting):
        process.kill()
        process.wait(PATIENCE_S)
    goes_on(tmp_path, job)
    job.send_signal(signal.SIGTERM)
    assert "nothing of the job is left" in finish(job)[1]
    os.close(terminal)
    os.close(end)


def goes_on(out: Path, job: "subprocess.Popen[str]") -> None:
    """Wait for some epochs more."""
    def nbytes() -> int:
        return sum(path.stat().st_size for path in out.glob("metrics.jsonl"))
    seen = nbytes()
    wait_for(lambda: nbytes() > seen + 2000, job)


def odsgd(*arguments: Any, **streams: Any) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "odsgd", *map(str, arguments)], cwd=ROOT, env=environment(),
                            stdin=subprocess.DEVNULL, **streams)


def wait_for(ready: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not ready():
        assert process.poll() is None and time.monotonic() < deadline, finish(process)[1]
        time.sleep(0.02)


def test_a_gradient_that_is_not_finite_ends_the_job_and_says_where(tmp_path: Path) -> None:
    code, output = finish(start("--config", "configs/digits_odsgd.yaml", "--lr", "1e30", "--out", tmp_path))
    assert code != 0
    gradient = r"worker [01] \| iteration \d+: \d+ elements of the gradient of \w+ are infinite or not a"
    loss = r"worker [01] \| iteration \d+: the loss of this worker is (nan|inf)"  # which is seen first is a race
    assert re.search(f"{gradient}|{loss}", output), output
    assert "Traceback" not in output


def test_of_two_jobs_with_one_folder_at_the_same_moment_one_is_refused(tmp_path: Path) -> None:
    ends = [finish(job) for job in [start(*ODSGD, "--out", tmp_path / "run") for _ in range(2)]]
    assert sorted(code for code, _ in ends) == [0, 64], ends
    refused = next(output for code, output in ends if code)
    assert f"{tmp_path / 'run'}`" in refused and re.search("take another (--out|folder)", refused)
