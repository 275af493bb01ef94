"""A worker joins a running job of real processes: one that was left out at first, and one in a dead one's place."""
import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launching import ROOT, Launch, words

SCRIPT = os.path.join(ROOT, "tests", "joining.py")
ENV = {"LAUNCH_TEST_SERVER": words(sys.executable, "-m", "kvstore.weights.servers"), "OMP_NUM_THREADS": "1"}


def join(launch: Launch) -> "subprocess.CompletedProcess[str]":
    """As soon as the launcher has told that the job has begun."""
    asked = subprocess.run([sys.executable, "-m", "odsgd", "join", str(launch.process.pid)], cwd=ROOT, timeout=120,
                           capture_output=True, text=True)
    return join(launch) if "it is still starting" in asked.stderr else asked


def began(launch: Launch, name: str) -> int:
    """Wait until a joiner trains, and check that it began at the weights of the others. Returns how many iterations the
    job had done before the joiner's first.
    """
    launch.wait_for(f"odsgd launch: {name} has joined", f"{name} | trains on")
    found = [re.match(rf"{name} \| began at (\S+) after (\d+) iterations", line) for line in launch.output]
    (weights, iteration), *_ = [one.groups() for one in reversed(found) if one]
    assert weights == "3.0"  # neither its own 100 nor what the gradient taken there would have made of it
    return int(iteration)


@pytest.mark.parametrize("method, front_end, other, differs", [
    ("decoupled", "gluon", "5 0.1", "options H is 4 there and 5 here"),
    pytest.param("async_diloco", "torch", "4 0.2", r"local_step lr is \[?0\.1\]? there and \[?0\.2\]? here",
                 id="async_diloco-on_pytorch")])
def test_workers_join_and_die_while_the_others_train_on(method: str, front_end: str, other: str, differs: str,
                                                        tmp_path: Path) -> None:
    """On PyTorch where that is installed, else on Gluon."""
    file, settings = tmp_path / "end", tmp_path / "end.settings"
    settings.write_text("4 0.1")
    by = front_end if importlib.util.find_spec(front_end) else "gluon"
    with Launch("-n", 3, "--spare", 1, "-s", 1, "--wire", "sockets", "--on-worker-loss", "continue", SCRIPT, by,
                method, file, env=ENV) as launch:
        launch.wait_for("worker 0 | trains", "worker 1 | trains")
        asked = join(launch)
        assert (asked.returncode, asked.stdout.split(" of ")[0]) == (0, "worker 2"), asked
        began(launch, "worker 2")
        asked = join(launch)
        assert asked.returncode == 64 and "no place is empty" in asked.stderr

        launch.kill("worker 1", signal.SIGKILL)
        launch.wait_for_text("worker 1 was lost")
        settings.write_text(other)
        assert join(launch).returncode == 0
        launch.wait_for_text("exit code 64; the job goes on with 2 of 3 workers")
        assert re.search(f"this worker cannot join, since the job trains otherwise: {differs}", launch.said)
        settings.write_text("4 0.1")
        assert join(launch).returncode == 0
        assert began(launch, "worker 1") > 100
        launch.kill("worker 2", signal.SIGKILL)
        launch.wait_for_text("worker 2 was lost")
        file.touch()
        assert launch.wait() == 0, launch
    assert "the job has finished without workers [2]" in launch.said
    assert "worker 0 | ended at 3.0, leads True" in launch.output
    assert not any("leads True" in line for line in launch.output if not line.startswith("worker 0"))
