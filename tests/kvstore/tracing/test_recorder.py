"""The recorder: what its bars say, what it leaves behind, and that nothing is there when it is off."""
import functools
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

import numpy as np
import pytest

import kvstore
from kvstore.engine import engine
from kvstore.engine._mxnet import mx
from kvstore.messages.buckets import Bucket, Keys, Parameter, plan
from kvstore.session.session import Session
from kvstore.tracing import recorder as trace
from kvstore.tracing.trace import STAGES
from kvstore.transports.in_process import Stage
from tests.jobs import ROOT, Result, environment, until
from tests.scenarios import Scenario, train

LONG_S = 300


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[trace.Recorder]:
    monkeypatch.setattr(trace, "folder", str(tmp_path))
    monkeypatch.setattr(trace, "on", None)
    made = trace.begin("worker", 0, 1)
    assert made is not None
    yield made
    mx.nd.waitall()
    made.close()


def events(tmp_path: Path) -> Dict[str, List[Dict[str, Any]]]:
    """The bars of worker 0, by stage."""
    mx.nd.waitall()
    assert trace.on is not None
    trace.on.close()
    bars = [event for event in json.loads((tmp_path / "worker-0.json").read_text()) if event["ph"] == "X"]
    return {stage: [bar for bar in bars if bar["cat"] == stage] for stage in STAGES}


def a_bucket() -> Bucket:
    return plan([Parameter(0, "w", (4,), "float32", 1.0, 1.0)], Keys(1), 1024, False)[0]


def test_a_bar_lasts_from_what_is_read_to_what_is_written(tmp_path: Path, recorder: trace.Recorder,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, moment = a_bucket(), recorder.moment
    released: List[float] = []
    looked: List[trace.Moment] = []

    def noted(arrays: List[Any]) -> trace.Moment:
        looked.append(moment(arrays))
        return looked[-1]

    monkeypatch.setattr(recorder, "moment", noted)
    inputs, output = mx.nd.zeros(4), mx.nd.zeros(4)
    read, written = threading.Event(), threading.Event()

    def wait_for(event: threading.Event) -> None:
        event.wait(LONG_S)

    engine.push(functools.partial(wait_for, read), [], [inputs])
    engine.push(functools.partial(wait_for, written), [inputs], [output])
    recorder.span("gather", bucket, reads=[inputs], writes=[output])
    for event, array in ((read, inputs), (written, output)):
        released.append(1e6 * time.monotonic())
        event.set()
        array.wait_to_read()
        until(lambda: looked[0].s)
    bar, = events(tmp_path)["gather"]
    assert released[0] <= bar["ts"] + 0.1 and bar["ts"] < released[1] <= bar["ts"] + bar["dur"] + 0.1
    assert bar["args"] == {"bucket": bucket.id, "bytes": 16, "round": 0}


def test_a_bar_of_something_written_long_ago_begins_when_it_is_asked_for(tmp_path: Path,
                                                                         recorder: trace.Recorder) -> None:
    """As a fetch for an evaluation reads what the last exchange has brought."""
    bucket, flat, answer = a_bucket(), mx.nd.zeros(4), mx.nd.zeros(4)
    recorder.span("gather", bucket, reads=[mx.nd.zeros(4)], writes=[flat])
    mx.nd.waitall()
    time.sleep(0.05)
    asked_us = 1e6 * time.monotonic()
    recorder.span("exchange", bucket, reads=[flat], writes=[answer])
    bar, = events(tmp_path)["exchange"]
    assert bar["ts"] >= asked_us - 0.1


@pytest.mark.parametrize("store, asked", [("asgd", [0, 1, 2, 3]), ("diloco", [1, 3])])
def test_exchanges_have_the_iteration_that_asked_for_them(tmp_path: Path, recorder: trace.Recorder, store: str,
                                                          asked: List[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """And none where an evaluation did."""
    next_step = Session.next_step

    def computed(self: Session, *rates: Any) -> Any:
        recorder.iterations += 1
        return next_step(self, *rates)

    monkeypatch.setattr(Session, "next_step", computed)
    options = {"H": 2} if store == "diloco" else {}
    Stage(1).run(lambda transport: train(Scenario(store, options, iterations=4), 0, transport))
    seen = [bar["args"].get("iteration") for bar in events(tmp_path)["exchange"]]
    assert sorted({one for one in seen if one is not None}) == asked
    assert (None in seen) == (store == "asgd")  # whose evaluation fetches


def test_bars_of_a_lane_do_not_overlap_and_exchanges_have_a_row_each(tmp_path: Path, recorder: trace.Recorder) -> None:
    recorder.add("scatter", "scatter", 1.0, 2.0, bucket=3)
    recorder.add("scatter", "scatter", 1.5, 1.8, bucket=4)
    recorder.add("exchange", "exchange", 1.0, 4.0, bucket=3)
    recorder.add("exchange", "exchange", 2.0, 3.0, bucket=4)
    bars = events(tmp_path)
    assert [(bar["ts"], bar["dur"]) for bar in bars["scatter"]] == [(1e6, 1e6), (2e6, 0)]
    assert [(bar["ts"], bar["dur"]) for bar in bars["exchange"]] == [(1e6, 3e6), (2e6, 1e6)]
    assert len({bar["tid"] for bar in bars["exchange"]}) == 2


@pytest.mark.parametrize("local, copies", [("dcasgd_c", 3), ("sgd", 0)])  # SGD writes its result elsewhere at once
def test_the_lanes_of_the_host_have_a_bar_per_bucket_and_iteration(tmp_path: Path, recorder: trace.Recorder, local: str,
                                                                     copies: int) -> None:
    scenario = Scenario("odsgd", {"warmup": 2, "lr_local": 0.05, "bucket_nbytes": 64, "optimizer_local": local},
                        iterations=5)
    Stage(1).run(lambda transport: train(scenario, 0, transport))
    bars = events(tmp_path)
    buckets = {bar["args"]["bucket"] for bar in bars["gather"]}
    assert len(buckets) > 1
    for lane, iterations in {"gather": 5, "copy": copies, "local update": 3}.items():
        seen = sorted((bar["args"]["bucket"], bar["args"]["round"]) for bar in bars.get(lane, []))
        assert seen == sorted((bucket, t) for bucket in buckets for t in range(iterations)), lane
    assert len(bars["scatter"]) >= 5 * len(buckets)  # and what shows the global weights


def test_training_is_the_same_to_the_bit_with_and_without(tmp_path: Path, recorder: trace.Recorder,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario("odsgd", {"warmup": 2, "lr_local": 0.05, "bucket_nbytes": 64}, iterations=5)

    def path() -> np.ndarray:
        result: Result = Stage(1).run(lambda transport: train(scenario, 0, transport))[0]
        return result["path"]

    traced = path()
    assert events(tmp_path)["gather"]
    monkeypatch.setattr(trace, "folder", None)
    monkeypatch.setattr(trace, "on", None)
    np.testing.assert_array_equal(traced, path())


def test_a_process_that_dies_leaves_what_it_has_written(tmp_path: Path) -> None:
    script = ("import os, time; from kvstore.tracing import recorder as trace; trace.begin('worker', 0, 1); "
              "trace.on.add('compute', 'forward', 1.0, 2.0, iteration=0)\n"
              "while 'iteration' not in open(os.environ['ODSGD_TRACE'] + '/worker-0.json').read():\n"
              "    time.sleep(0.01)\n"
              "os._exit(9)")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=300,
                          env={**environment(), "ODSGD_TRACE": str(tmp_path)})
    lines = (tmp_path / "worker-0.json").read_text().splitlines()
    assert done.returncode == 9 and lines[0] == "["
    assert json.loads(lines[-1])["args"] == {"iteration": 0}


def test_it_is_off_unless_a_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "folder", None)
    kvstore.create("local")
    assert trace.on is None
