"""MXNet's own servers beside ours, and ours started by a tracker that only sets DMLC_*."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import List

import numpy as np

from odsgd.launch.addresses import reserve_port
from tests.jobs import ROOT, environment, load, run_job, worker_command

BARE = ("import numpy, sys; numpy.bool = bool; "
        "sys.modules.update(dict.fromkeys(('bokeh', 'pandas', 'scipy', 'sklearn'))); ")
"""What MXNet needs here, and half the time of its import: it does without these, if they are not there."""
STOCK_SERVER = [sys.executable, "-c", BARE + "import mxnet"]


class Tracker:
    """A tracker of another make: starts M workers, S servers and a scheduler with nothing but DMLC_* set."""

    def __init__(self, workers: int, servers: int, server_command: List[str],
                 worker_command: List[str], **env: str) -> None:
        self.port = reserve_port()
        common = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(self.port.getsockname()[1]),
                  "DMLC_NODE_HOST": "127.0.0.1", "DMLC_NUM_WORKER": str(workers), "DMLC_NUM_SERVER": str(servers),
                  **env}
        roles = [("scheduler", server_command), *[("server", server_command)] * servers,
                 *[("worker", worker_command)] * workers]
        count = {"worker": 0}
        self.processes: List[subprocess.Popen[str]] = []
        for role, command in roles:
            rank = {"DMLC_WORKER_ID": str(count[role])} if role in count else {}
            if role in count:
                count[role] += 1
            self.processes.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                                   universal_newlines=True, env={**environment(), **common, **rank,
                                                                                 "DMLC_ROLE": role}))

    def wait(self) -> str:
        """Everything that was printed; all processes must have ended well."""
        try:
            text = "\n".join(process.communicate(timeout=300)[0] for process in self.processes)
        finally:
            self.port.close()
            for process in self.processes:
                process.kill()
        assert [process.returncode for process in self.processes] == [0] * len(self.processes), text
        return text


def test_ssgd_walks_the_path_of_mxnets_dist_sync(tmp_path: Path) -> None:
    """Scaled alike: MXNet's servers sum over workers, ours take the mean."""
    Tracker(2, 1, STOCK_SERVER, worker_command("tests.stock:train_stock", str(tmp_path), 0.5)).wait()
    ours = run_job("tests.scenarios:run_all", 2, 1, ["ssgd"])
    for m in range(2):
        stock = load(tmp_path / f"worker-{m}.npz")["path"]
        np.testing.assert_allclose(ours[m]["ssgd/path"], stock, rtol=1e-5, atol=1e-6)


def test_a_script_started_by_a_foreign_tracker_in_every_role_trains(tmp_path: Path) -> None:
    script = worker_command("tests.scenarios:run_all", str(tmp_path), ["odsgd"])
    said = Tracker(2, 1, script, script).wait()
    ours = run_job("tests.scenarios:run_all", 2, 1, ["odsgd"])
    for m in range(2):
        np.testing.assert_array_equal(load(tmp_path / f"worker-{m}.npz")["odsgd/path"], ours[m]["odsgd/path"])
    assert "no ODSGD_SECRET in the environment: commands are not authenticated" in said
