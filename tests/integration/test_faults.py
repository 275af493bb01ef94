"""Whatever dies or fails in a training job of real processes: it ends, with the right name, leaving none."""
import os
import signal
import sys
from pathlib import Path
from typing import List

import pytest

from tests.integration.launching import ROOT, Launch, Word, command_line, marked, words

FAULTY = os.path.join(ROOT, "tests", "faulty.py")
SERVER = {"LAUNCH_TEST_SERVER": words(sys.executable, "-m", "kvstore.weights.servers"), "OMP_NUM_THREADS": "1"}

FORKS = """
import os, signal, sys
import kvstore
from kvstore.engine._mxnet import mx
store = kvstore.create("ssgd")
store.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
w = mx.nd.array([4.0])
store.broadcast("w", w, w)
for _ in range(2):
    store.pushpull("w", w, w)
    store.wait()
    child = os.fork()
    if not child:
        signal.alarm(100)
        if store.iteration == 1:
            raise LookupError("of a child")
        sys.exit(3)
    assert os.waitpid(child, 0)[1] != signal.SIGALRM  # on ps-lite MXNet's own threads abort it
print(w.asscalar())
"""

ENDS = """
import kvstore
from kvstore.engine._mxnet import mx
store = kvstore.create("decoupled", H=2, delay=0, quorum=2, merge="mean", lr_outer=1.0, timeout_s=30)
store.set_optimizer(mx.optimizer.SGD(learning_rate=0.1))
w = mx.nd.zeros(1)
store.broadcast("w", w, w)
for _ in range(12 if store.rank else 4):
    store.pushpull("w", w - 3, out=w)
    w.wait_to_read()
print(store.iteration)
"""


def start(fault: str, codec: str = "none", wire: str = "ps-lite") -> Launch:
    return Launch("-n", 2, "-s", 1, "--wire", wire, FAULTY, fault, codec, env=SERVER)


@pytest.mark.parametrize("name, codec, wire", [
    ("worker 1", "none", "ps-lite"), ("server 0", "none", "ps-lite"), ("scheduler", "none", "ps-lite"),
    ("worker 1", "none", "sockets"),
    *(pytest.param(*case, marks=pytest.mark.again) for case in [
        ("server 0", "2bit", "ps-lite"), ("server 0", "none", "sockets"), ("scheduler", "none", "sockets")])])
def test_a_process_that_is_killed_ends_the_job_and_is_named(name: str, codec: str, wire: str) -> None:
    with start("none", codec, wire) as launch:
        launch.wait_for("worker 0 | trains", "worker 1 | trains")
        launch.kill(name, signal.SIGKILL)
        assert launch.wait() == 128 + signal.SIGKILL
    assert name in launch.said.splitlines()[0] and "SIGKILL" in launch.said


@pytest.mark.parametrize("fault, name, message", [
    ("raise", "worker 1", "LookupError: worker failed on purpose"),
    ("update", "server 0", "ArithmeticError: the update went wrong on purpose"),
    ("start", "server 0", "MemoryError: no room for the optimizer state, on purpose"),
    ("unsigned", "server 0", "ProtocolError: an unsigned command reached this server and was not executed"),
    ("exit", "worker 1", "exit code 9"),
    ("interrupt", "worker 1", "interrupted"),
    ("twice", "worker 1", "parameter first was handed in twice in iteration 7"),
])
def test_a_failure_ends_the_job_and_is_told(fault: str, name: str, message: str) -> None:
    with start(fault) as launch:
        if fault == "start":
            launch.wait_for_text(message)
        else:
            launch.wait_for("worker 1 | trains")
        assert launch.wait() != 0
    assert name in launch.said.splitlines()[0], launch
    assert message in launch.said, launch
    assert not os.path.exists("/tmp/owned")


@pytest.mark.parametrize("fault, codec, wire, name, message", [
    ("update", "quantize", "ps-lite", "server 0", "ArithmeticError: the update went wrong on purpose"),
    ("nan", "quantize", "ps-lite", "worker 1", "a number (the first: nan), and were not sent"),
    ("update", "none", "sockets", "server 0", "ArithmeticError: the update went wrong on purpose"),
])
def test_a_failure_beside_ps_lite_ends_the_job_and_is_told(fault: str, codec: str, wire: str, name: str,
                                                           message: str) -> None:
    with start(fault, codec, wire) as launch:
        launch.wait_for("worker 1 | trains")
        assert launch.wait() == 70
    assert name in launch.said.splitlines()[0], launch
    assert message in launch.said, launch


def test_different_models_on_two_workers_are_an_error_with_a_diff() -> None:
    with start("shape") as launch:
        launch.wait_for_text("differ in parameter first")
        assert launch.wait() != 0
    text = "\n".join(launch.errors)
    assert "workers 0 and 1 differ in parameter first" in text
    assert "-parameter first shape (2, 3) float32" in text and "+parameter first shape (3, 2) float32" in text, text


@pytest.mark.parametrize("codec, wire", [
    ("none", "ps-lite"), pytest.param("float16", "ps-lite", marks=pytest.mark.again), ("none", "sockets")])
def test_a_worker_that_is_silent_is_noticed_by_the_deadline(codec: str, wire: str) -> None:
    with start("silent", codec, wire) as launch:
        launch.wait_for("worker 1 | trains")
        assert launch.wait() == 75
    assert "worker 0" in launch.said.splitlines()[0]
    assert "round 6, bucket" in launch.said and "nothing has come from the servers for 5 s" in launch.said


@pytest.mark.parametrize("name, waiters, wire", [
    ("worker 1", "worker 0 waits for it since iteration", "ps-lite"),
    pytest.param("worker 0", "worker 1 waits for it since iteration", "ps-lite", marks=pytest.mark.again),
    ("server 0", "workers 0 and 1 wait for it since iteration", "ps-lite"),
    ("server 0", "workers 0 and 1 wait for it since iteration", "sockets")])
def test_a_stopped_process_is_named_soon_and_fails_after_the_hang_timeout_with_its_stacks(
        name: str, waiters: str, wire: str) -> None:
    with Launch("-n", 2, "-s", 1, "--wire", wire, "--hang-timeout", 5, FAULTY, "none", env=SERVER) as launch:
        launch.wait_for("worker 0 | trains", "worker 1 | trains")
        launch.kill(name, signal.SIGSTOP)
        launch.wait_for_text(f"warning: {name} on host 127.0.0.1 has not answered for")
        assert launch.wait() == 75
    verdict = next(line for line in launch.errors if f"{name} failed" in line)
    assert "it is stopped (SIGSTOP, Ctrl-Z or a debugger); " + waiters in verdict
    assert any(line.startswith(f"{name} | ") and "most recent call first" in line for line in launch.errors), launch


STUCK = """
import os
import time

from kvstore.methods.sync import SSGD, Synchronous


class StuckWorker(Synchronous):
    def iterate(self, grad, step):
        if step.t == 50 and os.environ.get("ODSGD_WORKER_RANK") == "1":
            time.sleep(600)
        return super().iterate(grad, step)


class Stuck(SSGD):
    name, worker = "stuck", StuckWorker
"""


def test_a_worker_that_stands_still_in_training_is_named_and_shows_where(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    train: List[Word] = [sys.executable, "-m", "odsgd", "train", "--method-file", tmp_path / "stuck.py",
                         "--out", tmp_path / "run"]
    with Launch("-n", 2, "-s", 1, "--hang-timeout", 5, *train, env=SERVER) as launch:
        assert launch.wait() == 75
    verdict = next(line for line in launch.errors if "worker 1 failed" in line)
    assert "it has been at iteration 50 for" in verdict and "waits for nobody; worker 0 waits for it" in verdict
    assert any('stuck.py", line 11 in iterate' in line for line in launch.errors), launch


def test_a_stopped_agent_is_a_lost_host() -> None:
    with Launch("-n", 2, "-s", 1, "--hang-timeout", 5, FAULTY, "none", env=SERVER) as launch:
        launch.wait_for("worker 0 | trains", "worker 1 | trains")
        agent = next(pid for pid in marked(launch.mark) if "odsgd.launch.agent" in command_line(pid))
        os.kill(agent, signal.SIGSTOP)
        launch.wait_for_text("warning: the agent on host 127.0.0.1 has not answered for")
        assert launch.wait() == 70
    assert "lost host 127.0.0.1 (scheduler, server 0, worker 0, worker 1): its agent has not answered" in launch.said
    assert "has not confirmed" not in launch.said  # it was woken to end its processes


@pytest.mark.parametrize("wire", ["ps-lite", "sockets"])
def test_a_worker_whose_script_ends_without_close_is_not_waited_for_by_a_quorum(tmp_path: Path, wire: str) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    with Launch("-n", 2, "-s", 1, "--wire", wire, tmp_path / "ends.py", env=SERVER) as launch:
        assert launch.wait() == 0, launch
    assert sorted(launch.output) == ["worker 0 | 4", "worker 1 | 12"]


@pytest.mark.parametrize("wire", ["sockets"])  # on ps-lite MXNet's own threads abort such a child, or it hangs in them
def test_a_forked_child_that_ends_leaves_the_job_alone(tmp_path: Path, wire: str) -> None:
    (tmp_path / "forks.py").write_text(FORKS)
    with Launch("-n", 2, "-s", 1, "--wire", wire, tmp_path / "forks.py", env=SERVER) as launch:
        assert launch.wait() == 0, launch
    assert sorted(launch.output) == ["worker 0 | 1.0", "worker 1 | 1.0"]


CROSSED = """
import numpy as np
import tests.lean
import odsgd
import kvstore
store = kvstore.create("ssgd", timeout_s=30)
for size in (3, 5) if store.rank else (5, 3):
    print(store.allreduce(np.ones(size)))
"""


@pytest.mark.parametrize("wire", ["sockets", "ps-lite"])
def test_sums_of_different_lengths_that_meet_are_told(tmp_path: Path, wire: str) -> None:
    (tmp_path / "crossed.py").write_text(CROSSED)
    with Launch("-n", 2, "-s", 1, "--wire", wire, tmp_path / "crossed.py", env=SERVER) as launch:
        assert launch.wait() == 70, launch
    assert not any("[" in line for line in launch.output)
    assert {"sockets": "numbers; all workers make the same collective calls, in the same order",
            "ps-lite": "numbers, and all 2 workers together 8; all make the same collective calls"}[wire] in launch.said
