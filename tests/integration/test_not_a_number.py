"""A gradient that is not a number, in a script of one's own: the job ends, and says where."""
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import launch

pytestmark = pytest.mark.slow

SCRIPT = """
import json
import sys
import tests.lean
import odsgd
import mxnet as mx
import kvstore

place, x = slice(*json.loads(sys.argv[1])), mx.nd.ones((4, 64))
for name, options in json.loads(sys.argv[2]):
    store = kvstore.create(name, **options)
    net = mx.gluon.nn.Dense(40, in_units=64, prefix="first_")
    net.initialize()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
    for t in range(1, 7):
        with mx.autograd.record():
            loss = (net(x) ** 2).mean()
        loss.backward()
        if t == 3 and store.rank == 1:
            net.weight.grad().reshape(-1)[place] = float("nan")
        trainer.step(4)
        mx.nd.waitall()
    print("weights", net.weight.data().sum().asscalar())
"""
ALL, LAST = [None, None], [-1, None]
FOUND = r"elements of the gradient of first_weight are infinite or not a number \(the first: nan\)"


def job(tmp_path: Path, name: str, place: Any, servers: int = 1, **options: Any) -> Any:
    return job_of(tmp_path, place, (name, options), servers=servers)


def job_of(tmp_path: Path, place: Any, *stores: Any, servers: int = 1) -> Any:
    """One job whose workers train with one store after another."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    return launch(2, servers, [sys.executable, str(script), json.dumps(place), json.dumps(stores)])


@pytest.mark.parametrize("name, options", [("odsgd", {"warmup": 0}), ("asgd", {}), ("ssgd", {"codec": "float16"})])
def test_a_worker_whose_gradient_is_not_a_number_stops_the_job(tmp_path: Path, name: str, options: Any) -> None:
    done = job(tmp_path, name, ALL, **options)
    assert done.returncode == 70, done.stderr
    assert re.search(rf"^worker 1 \| iteration 3: \d+ {FOUND}, and were not sent\. Lower", done.stderr, re.M)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name, where", [("ssgd", "update 3 since its start, the sum over the workers: "),
                                         ("asgd", "worker 1, at update ")])
def test_a_number_that_only_the_server_finds_stops_the_job(tmp_path: Path, name: str, where: str) -> None:
    done = job(tmp_path, name, LAST)
    assert done.returncode == 70, done.stderr
    line = next(line for line in done.stderr.splitlines() if line.startswith("server 0 | "))
    assert where in line and re.search(f"1 {FOUND}", line) and "Traceback" not in done.stderr


def test_find_names_the_worker_always(tmp_path: Path) -> None:
    done = job(tmp_path, "ssgd", LAST, on_nan="find")
    assert done.returncode == 70, done.stderr
    assert re.search(rf"^worker 1 \| iteration 3: 1 {FOUND}, and were not sent", done.stderr, re.M)


def test_skip_leaves_the_round_out_and_says_so_and_continue_goes_on(tmp_path: Path) -> None:
    done = job_of(tmp_path, ALL, ("ssgd", {"on_nan": "skip"}), ("odsgd", {"on_nan": "skip", "warmup": 0}),
                  ("ssgd", {"on_nan": "continue"}))
    assert done.returncode == 0, done.stderr
    skipped = re.findall(rf"^worker 1 \| iteration 3: (\d+) {FOUND}, and are skipped$", done.stderr, re.M)
    sums = re.findall(rf"^server 0 \| update 3 since its start, the sum over the workers: (\d+) {FOUND}",
                      done.stderr, re.M)
    assert sum(map(int, skipped)) == sum(map(int, sums)) == 2 * 40 * 64, done.stderr  # in all buckets of two stores
    one, other = (re.findall(rf"^worker {rank} \| weights (\S+)", done.stdout, re.M) for rank in (0, 1))
    assert one[0] == other[0] and "nan" not in one[:2] + other[:2] and one[2:] == other[2:] == ["nan"], done.stdout


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="no MPI here: pip install '.[mpi]'")
@pytest.mark.parametrize("name, options", [("dsync", {}), ("ssgd", {"transport": "sharded"})])
def test_without_servers_the_worker_is_named_always(tmp_path: Path, name: str, options: Any) -> None:
    done = job(tmp_path, name, LAST, servers=0, **options)
    assert done.returncode == 70, done.stderr
    assert re.search(rf"^worker 1 \| iteration 3: 1 {FOUND}, and were not sent", done.stderr, re.M)
