"""An asynchronous job of real processes goes on without a worker that is killed, where it was told to."""
import os
import signal
import sys

import pytest

from tests.integration.launching import ROOT, Launch, words

pytestmark = pytest.mark.timeout(300)  # the machine may do other things beside
LASTING = os.path.join(ROOT, "tests", "lasting.py")
SERVER = {"LAUNCH_TEST_SERVER": words(sys.executable, "-m", "kvstore.server"), "OMP_NUM_THREADS": "1"}


def test_sums_evaluation_and_the_end_do_without_the_lost_worker() -> None:
    with Launch("-n", 3, "-s", 1, "--on-worker-loss", "continue", LASTING, env=SERVER) as launch:
        launch.wait_for("worker 0 | trains", "worker 1 | trains", "worker 2 | trains")
        launch.kill("worker 1", signal.SIGKILL)
        assert launch.wait() == 0
    assert "worker 1 was lost" in launch.said and "finished without workers [1]" in launch.said
    assert "had not ended" not in launch.said  # the servers do not wait for the lost one either
    # Both that are left have gone through the same sums and seen the same weights.
    ended = sorted(line for line in launch.output if "ended" in line)
    assert [line.split(" | ")[0] for line in ended] == ["worker 0", "worker 2"]
    assert len({line.split(" | ")[1] for line in ended}) == 1
    assert "2 present" in ended[0]
