"""Workers whose data are not of one length, in a script of one's own: who waits for whom is told at once."""
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import launch

SCRIPT = """
import json
import sys
import tests.lean
import odsgd
import mxnet as mx
import kvstore

store = kvstore.create(sys.argv[2], timeout_s=15, **json.loads(sys.argv[3]))
net = mx.gluon.nn.Dense(1, in_units=1)
net.initialize(mx.init.One())
trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
for t in range(5 if store.rank == 1 else 9):
    with mx.autograd.record():
        loss = net(mx.nd.ones((1, 1)))
    loss.backward()
    trainer.step(1)
    mx.nd.waitall()
if sys.argv[1] == "changes" and store.rank == 1:
    trainer._optimizer.wd = 0.5
if sys.argv[1] == "closes" and store.rank == 1:
    try:
        raise OSError("a broken image")
    finally:
        store.close()
if sys.argv[1] == "handles" and store.rank == 1:
    try:
        raise OSError("an end that the script expects")
    except OSError:
        store.close()
if sys.argv[1] == "evaluates":
    store.barrier()
if sys.argv[1] == "fails" and store.rank == 1:
    sys.exit("bad data")
print("weight %.4f" % net.weight.data().asscalar())
if sys.argv[1] == "raises":
    raise SystemExit(0 * store.rank)
"""


@pytest.mark.slow
@pytest.mark.parametrize("then, said", [
    ("ends", "odsgd launch: worker 1 has ended after iteration 5"),
    ("evaluates", "warning: worker 1 waits elsewhere after iteration 5")])
def test_the_worker_that_has_no_more_batches_is_named(then: str, said: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = launch(2, 1, [sys.executable, str(script), then, "ssgd", "{}"])
    assert done.returncode == 75, done.stderr
    assert f"{said}, and worker 0 waits in iteration 6" in done.stderr
    assert ("was not over within 15 s" in done.stderr) == (then == "evaluates")  # its own deadline


@pytest.mark.slow
@pytest.mark.parametrize("store, servers, options", [
    ("ssgd", 1, {}), ("odsgd", 1, {"warmup": 0, "codec": "float16"}),
    *([("dsync", 0, {}), ("ssgd", 0, {"transport": "sharded"})] if importlib.util.find_spec("mpi4py") else [])])
def test_the_others_go_on_where_a_worker_that_has_ended_joins(store: str, servers: int, options: Any,
                                                              tmp_path: Path) -> None:
    """Every gradient is 1, and so is the mean of those that there are: W falls by 0.1 in each of the 9 iterations."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    words = [sys.executable, str(script), "ends", store, json.dumps({**options, "uneven": "join"})]
    done = launch(2, servers, words)
    assert done.returncode == 0, done.stderr
    assert "worker 0 | weight 0.1000\n" in done.stdout
    assert "not of one length" not in done.stderr
    if options:
        return  # the way of a barrier is that of the store, whatever its options
    ends = launch(2, servers, [word if word != "ends" else "evaluates" for word in words])
    assert ends.returncode == 0 and ends.stdout.count("| weight 0.") == 2, ends.stdout + ends.stderr


@pytest.mark.slow
@pytest.mark.parametrize("then, joins", [("fails", False), ("raises", True), ("handles", True)])
def test_a_worker_joins_that_ends_by_raising_status_0_and_not_by_a_message(then: str, joins: bool,
                                                                           tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = launch(2, 1, [sys.executable, str(script), then, "ssgd", json.dumps({"uneven": "join"})])
    assert done.returncode == (0 if joins else 1), done.stderr
    assert ("worker 0 | weight 0.1000\n" in done.stdout) is joins
    assert ("worker 1 ends after iteration 5, and does not join" in done.stderr) is not joins


@pytest.mark.slow
@pytest.mark.parametrize("then, code, said", [
    ("closes", 70, "it reported: OSError: a broken image"),
    ("changes", 64,
     "it reported: iteration 6 has not taken place: the optimizer's settings have changed, wd from 0.0 to")])
def test_a_worker_that_fails_as_it_would_join_ends_the_job_at_once_with_its_error(
        then: str, code: int, said: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = launch(2, 1, [sys.executable, str(script), then, "ssgd", json.dumps({"uneven": "join"})])
    assert done.returncode == code and "worker 1 failed (" in done.stderr and said in done.stderr, done.stderr


SHORT = """
import sys
import time
import tests.lean
import odsgd
import kvstore

stores = [kvstore.create(sys.argv[1], timeout_s=timeout_s) for timeout_s in (2000.0, 3.0)]
stores[1].barrier()
if stores[0].rank == 1:
    time.sleep(1000)
stores[1].barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("store, servers", [
    ("ssgd", 1), *([("dsync", 0)] if importlib.util.find_spec("mpi4py") else [])])
def test_each_store_of_a_process_waits_as_long_as_it_says(store: str, servers: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SHORT, encoding="utf-8")
    done = launch(2, servers, [sys.executable, str(script), store])
    assert done.returncode == 75, done.stderr
    assert "a sum over the workers was not over within 3 s: another worker" in done.stderr
