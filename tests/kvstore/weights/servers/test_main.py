"""Processes that serve."""
import socket
import subprocess
import sys

from kvstore.errors import EXIT_FAILURE
from tests.jobs import PATIENCE_S, ROOT, environment


def test_a_scheduler_whose_port_is_taken_says_so_in_a_line() -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        env = {**environment(), "DMLC_ROLE": "scheduler", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_NUM_WORKER": "1",
               "DMLC_PS_ROOT_PORT": str(port), "DMLC_NUM_SERVER": "1"}
        done = subprocess.run([sys.executable, "-m", "kvstore.weights.servers"], cwd=ROOT, env=env, capture_output=True,
                              text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (EXIT_FAILURE, (
        f"scheduler: port {port} of 127.0.0.1 is taken by another program; name another one with --port, or leave the "
        "option out and a free one is chosen\n"))
