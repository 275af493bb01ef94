"""Processes that serve."""
import socket
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_a_server_on_sockets_may_load_a_method_whose_file_imports_mxnet(tmp_path: Path) -> None:
    pytest.importorskip("kvstore.engine._mxnet")
    (tmp_path / "own.py").write_text("import mxnet\nfrom kvstore.methods.sync import SSGD\n\n\nclass Own(SSGD):\n"
                                     "    name = 'own'\n")
    script = ("import os, sys\nfrom kvstore import methods\nfrom kvstore.weights.servers import __main__, sockets\n"
              "sockets.serve = lambda: print(methods.load(sys.argv[1]).name, os.environ['DMLC_ROLE'])\n"
              "sys.exit(__main__.main())\n")
    env = {**environment(), "DMLC_ROLE": "server", "ODSGD_WIRE": "sockets", "DMLC_PS_ROOT_URI": "127.0.0.1",
           "DMLC_PS_ROOT_PORT": "9", "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1"}
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "own.py")], cwd=ROOT, env=env,
                          capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (0, "own server\n"), done.stderr
