"""Rounds of a ring on real ranks, under a plain mpiexec: bits, order, errors, deadlines."""
import hashlib
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest

from kvstore.errors import EXIT_FAILURE, ConfigError
from kvstore.job import ending
from kvstore.messages.codecs import WITHOUT_RESIDUAL, codec
from kvstore.transports.mpi import World
from kvstore.transports.ring import PartRound, cut
from kvstore.transports.rounds import Round, Rounds, owned
from tests.jobs import PATIENCE_S, ROOT, environment

MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
pytestmark = pytest.mark.skipif(MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
                                reason="no MPI here: pip install '.[mpi]'")
SIZES = [1, 7, 64, 1000, 3]
ROUNDS = 60


def mpi_job(workers: int, function: str, *arguments: Any, **variables: Any) -> "subprocess.CompletedProcess[str]":
    """`function` of this file on so many ranks; what came of it."""
    env = {**environment(), **variables}
    return subprocess.run([str(MPIEXEC), "-n", str(workers), sys.executable, __file__, function, *map(str, arguments)],
                          env=env, capture_output=True, text=True, timeout=PATIENCE_S)


def all_say_right(workers: int, function: str) -> None:
    job = mpi_job(workers, function)
    assert (job.returncode, job.stdout) == (0, "right\n" * workers), job.stderr


def start(timeout_s: float = 60.0) -> Rounds:
    connection = World(60.0)
    ending.end_well(connection.close)
    return Rounds(connection.comm, connection.mpi, timeout_s)


def allreduce(rounds: Rounds, arrays: List[np.ndarray], name: str) -> List[np.ndarray]:
    """The sums of buckets that become ready in an order of this worker's own."""
    totals = [np.empty_like(array) for array in arrays]
    over = threading.Semaphore(0)
    asked = [rounds.ask(Round(f"bucket {index}", codec(name))) for index in range(len(arrays))]
    for index in random.sample(range(len(arrays)), len(arrays)):
        rounds.begin(asked[index], arrays[index], totals[index], over.release)
    for _ in arrays:
        over.acquire()
    return totals


def say(line: str) -> None:
    """In one piece, since several ranks write to one pipe."""
    os.write(1, f"{line}\n".encode())


def descend() -> None:
    """Gradient descent on bowls of one centre per worker; the weights' bits at the end."""
    rounds = start()
    m, p = rounds.worker_rank, rounds.num_workers
    random.seed(m)
    for name in WITHOUT_RESIDUAL:
        centres = [np.random.RandomState(100 * m + size).standard_normal(size).astype(np.float32) for size in SIZES]
        weights = [np.zeros(size, np.float32) for size in SIZES]
        for _ in range(ROUNDS):
            grads = [w - centre for w, centre in zip(weights, centres)]
            for w, total in zip(weights, allreduce(rounds, grads, name)):
                w -= np.float32(0.1 / p) * total
        means = [rounds.total(centre) / p for centre in centres]
        worst = max(np.abs(w - mean).max() for w, mean in zip(weights, means))
        say(f"{name} {hashlib.sha256(np.concatenate(weights).tobytes()).hexdigest()} {worst}")


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_all_ranks_have_the_same_bits_after_many_rounds(workers: int) -> None:
    job = mpi_job(workers, "descend")
    assert job.returncode == 0, job.stderr
    lines = [line.split() for line in job.stdout.splitlines()]
    for name in WITHOUT_RESIDUAL:
        bits = [line[1] for line in lines if line[0] == name]
        assert len(bits) == workers and len(set(bits)) == 1, job.stdout
    assert all(float(worst) < 0.1 for _, _, worst in lines)  # and they have gone where they should


def totals() -> None:
    """Small, empty, large and shaped arrays."""
    rounds = start()
    p = rounds.num_workers
    for shape in [(), (0,), (1,), (3, 5), (400_001,)]:
        total = rounds.total(np.full(shape, rounds.worker_rank + 1))
        assert total.shape == shape and np.all(total == p * (p + 1) / 2), (shape, total)
    say("right")


@pytest.mark.parametrize("workers", [1, 3])
def test_totals(workers: int) -> None:
    all_say_right(workers, "totals")


def many() -> None:
    """More rounds than are in flight are given before the first can begin."""
    rounds = start()
    asked = [rounds.ask(Round("bucket", codec("none"))) for _ in range(5 * rounds.WINDOW)]
    sums, over = [np.zeros(3, np.float32) for _ in asked], threading.Semaphore(0)
    for round_, out in reversed([*zip(asked, sums)]):
        rounds.begin(round_, np.full(3, round_.number, np.float32), out, over.release)
    assert all(over.acquire(timeout=30) for _ in asked)
    assert all((out == rounds.num_workers * round_.number).all() for round_, out in zip(asked, sums))
    say("right")


@pytest.mark.parametrize("workers", [1, 2])
def test_all_rounds_come_to_an_end_however_many_wait(workers: int) -> None:
    all_say_right(workers, "many")


def pass_by() -> None:
    """The first round pauses on the first rank while as many later ones as can pass it by."""
    rounds = start()
    line, over, summed = rounds.line(), threading.Semaphore(0), threading.Event()
    first = rounds.ask(PartRound("bucket", [0, 3, 6]), line)
    first.own, first.total = np.ones(6, np.float32), np.zeros(6, np.float32)
    first.summed, first.over = summed.set, over.release
    first.part = cut(first.total, first.cuts)[owned(rounds.worker_rank, 2)]
    rounds.give(first)
    sums = [np.zeros(6, np.float32) for _ in range(2 * line.TAGS)]
    for number, out in enumerate(sums):
        later = rounds.ask(Round("bucket", codec("none")), line)
        rounds.begin(later, np.full(6, number, np.float32), out, over.release)
    assert summed.wait(30)
    if rounds.worker_rank:
        rounds.resume(first)
    assert all(over.acquire(timeout=30) for _ in range(line.TAGS - 1))
    rounds.total(np.zeros(1))  # what may begin by now has begun
    if not rounds.worker_rank:
        rounds.resume(first)
    assert all(over.acquire(timeout=30) for _ in range(line.TAGS + 2))
    assert (first.total == 2).all() and all((out == 2 * number).all() for number, out in enumerate(sums))
    say("right")


def test_rounds_that_pass_a_paused_one_by_do_not_meet_its_messages() -> None:
    all_say_right(2, "pass_by")


def cross() -> None:
    """Rounds of two lines, asked for in an order of each rank's own, with totals between; some lines after others."""
    rounds = start()
    random.seed(rounds.worker_rank)
    for turn in range(5):
        lines = [rounds.line() for _ in range(2)]
        for number in range(30):
            values = {line: np.full(1000, 100 * turn + 2 * number + index, np.float32)
                      for index, line in enumerate(lines)}
            sums, over = {line: np.empty_like(value) for line, value in values.items()}, threading.Semaphore(0)
            for line in random.sample(lines, 2):
                rounds.begin(rounds.ask(Round("bucket", codec("none")), line), values[line], sums[line], over.release)
            assert rounds.total(np.array(7)) == 7 * rounds.num_workers
            for _ in lines:
                over.acquire()
            for line, value in values.items():
                np.testing.assert_array_equal(sums[line], rounds.num_workers * value)
        rounds.end(lines[turn % 2])
    say("right")


@pytest.mark.parametrize("workers", [2, 3])
def test_rounds_of_different_lines_do_not_meet(workers: int) -> None:
    all_say_right(workers, "cross")


def diverge() -> None:
    rounds = start()
    grad = np.ones(6, np.float32)
    grad[4] = np.inf if rounds.worker_rank == 1 else 1
    allreduce(rounds, [np.ones(6, np.float32), grad], "quantize")


def test_quantize_names_the_bucket_that_it_cannot_send() -> None:
    job = mpi_job(2, "diverge")
    assert job.returncode
    assert "round 2, bucket 1, block 1 of 2: the codec quantize cannot send inf" in job.stderr


def desert() -> None:
    """The last worker takes one round less, and stays."""
    rounds = start(timeout_s=5.0)
    for _ in range(2 if rounds.worker_rank < 2 else 1):
        allreduce(rounds, [np.ones(6, np.float32)], "none")
    time.sleep(PATIENCE_S)


def test_a_round_that_does_not_end_is_named() -> None:
    job = mpi_job(3, "desert")
    assert job.returncode
    assert "round 2, bucket 0: nothing has moved on the ring for 5 s; worker" in job.stderr


def mismatch(report: str) -> None:
    """Worker 1 sends more than worker 0 expects, which MPI calls an error."""
    rounds = start()
    os.environ["ODSGD_REPORT_FD"] = str(os.open(f"{report}-{rounds.worker_rank}", os.O_WRONLY | os.O_CREAT))
    rounds.total(np.ones(6 if rounds.worker_rank == 0 else 600))
    time.sleep(PATIENCE_S)


def test_an_error_of_mpi_is_told_as_the_consequence_of_another_failure(tmp_path: Path) -> None:
    report = tmp_path / "report"
    job = mpi_job(2, "mismatch", report)
    assert job.returncode == EXIT_FAILURE
    assert "round 1, a sum over the workers: MPI reports an error: " in job.stderr
    assert "; has another worker of the ring died, or " in job.stderr and "Abort(" not in job.stderr
    assert json.loads(report.with_name("report-0").read_text())["consequence"] is True


def alone() -> None:
    start()


def test_ranks_of_the_launcher_and_of_mpi_must_agree() -> None:
    job = mpi_job(1, "alone", ODSGD_WORKER_RANK="1")
    assert job.returncode and "is 0 of 1, and this process is worker 1 of 1 of the job" in job.stderr
    job = mpi_job(1, "alone", DMLC_NUM_WORKER="2")
    assert job.returncode and "worker 0 of 2 of the job; mpi4py must be built on the MPI" in job.stderr


def test_a_process_without_a_job_is_told_how_to_get_one() -> None:
    done = subprocess.run([sys.executable, __file__, "alone"], env=environment(),
                          stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    assert done.returncode and "this store needs a job; start the script with `odsgd launch" in done.stderr


def test_without_mpi4py_the_way_to_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigError, match=r"pip install 'mpi4py>=4\.1' 'mpich>=5\.0'"):
        World(1.0)


def test_servers_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODSGD_REPORT_FD", "-1")
    monkeypatch.setenv("DMLC_NUM_SERVER", "2")
    monkeypatch.delenv("PMI_PORT", raising=False)
    with pytest.raises(ConfigError, match="the job has 2 servers; launch it with `-s 0`"):
        World(1.0)


def test_the_benchmark_of_the_ring_runs() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts/maintain/bench_ring.py"), "-n", "2", "--floats", "1000",
                           "--repeat", "1"], capture_output=True, text=True,
                          timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert [line.split("  ")[1] for line in done.stdout.splitlines() if "our ring" in line] == [
        f"our ring, codec {name}" for name in WITHOUT_RESIDUAL]


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
