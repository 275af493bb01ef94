"""A job from Python, as a script or a notebook starts one."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import PATIENCE_S, ROOT, environment

SCRIPT = """
import json
import threading
import numpy as np
import odsgd
from odsgd.launch.function import JobError

def together(scale, offset):
    import tests.lean
    import kvstore
    store = kvstore.create("ssgd")
    return store.rank, float(store.allreduce(np.array([store.rank + 1]))[0]) * scale + offset

def fails():
    import os
    if os.environ["ODSGD_WORKER_RANK"] == "1":
        raise ValueError("no data")
    return "well"

print("RESULTS " + json.dumps(odsgd.launch(together, 10, num_workers=2, num_servers=1, offset=1)))
results = []
thread = threading.Thread(target=lambda: results.extend(odsgd.launch(together, 1, num_workers=2, offset=0)))
thread.start()
thread.join()
print("BESIDE " + json.dumps(results))
try:
    odsgd.launch(fails, num_workers=2, num_servers=0)
except JobError as error:
    print("FAILED " + json.dumps([str(error), repr(error.__cause__)]))
"""


@pytest.mark.slow
def test_a_function_of_a_script_runs_on_every_worker_and_its_results_and_errors_come_back(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], cwd=ROOT, env=environment(), capture_output=True, text=True,
                          timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines()
                if line.startswith(("RESULTS", "BESIDE", "FAILED")))
    assert json.loads(said["RESULTS"]) == [[0, 31.0], [1, 31.0]]
    assert json.loads(said["BESIDE"]) == [[0, 3.0], [1, 3.0]]
    assert json.loads(said["FAILED"]) == ["the job ended with exit code 1; worker 1 raised ValueError('no data')",
                                          "ValueError('no data')"]
