"""Counting, the clock and the file of metrics."""
import io
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, Type

import numpy as np
import pytest

from kvstore.engine._mxnet import mx
from odsgd.config.train import TrainConfig
from odsgd.training.metrics import IN_FLIGHT, Clock, Meter, Sums
from odsgd.training.run_log import RunLog
from odsgd.training.step.passes import BatchResult
from tests.jobs import ROOT


def run_log(folder: Path, silent: bool = False, done: int = 0, resume: bool = False) -> RunLog:
    return RunLog(TrainConfig(out=str(folder), epochs=4, resume=resume), silent, done, 80)


def tally(loss: Any, hits: Any) -> Any:
    return mx.nd.array([loss, hits])


def test_a_meter_reads_late_in_order_and_all_in_the_end() -> None:
    read = []
    meter = Meter(lambda iteration, sums: read.append((iteration, sums.loss)))
    for iteration in range(9):
        meter.add(iteration, [tally(10.0 * iteration, 1)], examples=4)
        assert [number for number, _ in read] == list(range(iteration + 1 - IN_FLIGHT))
    meter.drain()
    assert read == [(iteration, 10.0 * iteration) for iteration in range(9)]


def test_the_parts_of_several_devices_are_added() -> None:
    read = []
    meter = Meter(lambda _, sums: read.append(sums))
    meter.add(0, [tally(1.5, 2), tally(2.0, 1)], examples=8)
    meter.drain()
    assert read == [Sums(loss=3.5, hits=3.0, examples=8)]


def test_means_are_per_example_and_nothing_has_no_mean() -> None:
    sums = Sums()
    assert math.isnan(sums.mean_loss) and math.isnan(sums.accuracy)
    sums.add(Sums(3.0, 1, 4))
    sums.add(Sums(1.0, 2, 4))
    assert (sums.mean_loss, sums.accuracy) == (0.5, 0.375)


@pytest.mark.parametrize("hybridize", [False, True])
def test_a_tally_is_the_summed_loss_and_the_right_answers(hybridize: bool) -> None:
    count = BatchResult()
    count.hybridize(hybridize)
    output = mx.nd.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    result = count(mx.nd.array([1.0, 2.0, 4.0]), output, mx.nd.array([1, 1, 1]))
    assert result.asnumpy().tolist() == [7.0, 2.0]


def test_the_clock_stands_still_while_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock()
    now[0] = 102.0
    assert clock.read() == 0.0
    now[0] = 100.0
    clock.go_on()
    now[0] = 103.0
    clock.stop()
    clock.stop()
    now[0] = 200.0
    assert clock.read() == 3.0
    clock.go_on()
    now[0] = 201.0
    clock.go_on()
    now[0] = 202.0
    assert clock.read() == 5.0


def test_records_are_lines_at_once_and_numbers_without_a_word_in_json_are_null(tmp_path: Path) -> None:
    log = run_log(tmp_path)
    log._write("epoch", {"train_loss": math.nan, "parts": [math.inf, 1.5], "lr": 0.1})
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    log.close()
    assert line == {"event": "epoch", "train_loss": None, "parts": [None, 1.5], "lr": 0.1}


@pytest.mark.parametrize("found, kept", [('{"a": 1}\n{"b', '{"a": 1}\n'), ('{"a": 1}\n', '{"a": 1}\n'), ('{"b', ""),
                                         ("", "")])
def test_a_line_cut_short_is_dropped_when_more_are_added(tmp_path: Path, found: str, kept: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(found)
    log = run_log(tmp_path, resume=True)
    log._write("end", {})
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == kept + '{"event": "end"}\n'


def test_a_new_run_starts_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("old\n")
    run_log(tmp_path).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert (tmp_path / "earlier-1" / "metrics.jsonl").read_text() == "old\n"


def test_sums_of_many_iterations_keep_double_precision() -> None:
    sums = Sums()
    for _ in range(1000):
        sums.add(Sums(float(np.float32(0.1)), 0, 1))
    assert sums.mean_loss == pytest.approx(float(np.float32(0.1)), rel=1e-13)


RECORD: Dict[str, Any] = {"epoch": 2, "iteration": 40, "train_loss": 0.25, "train_accuracy": 0.912,
                          "samples_per_s": 1234.5,
                          "iteration_ms": 12.345, "lr": 0.1, "lr_local": 0.05}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = run_log(tmp_path)
    log.interval(RECORD)
    log.epoch({**RECORD, "lr_local": None, "test_loss": 0.3, "test_accuracy": 0.95})
    log.close()
    assert capsys.readouterr().out.splitlines() == [
        "iteration 40/80: loss 0.2500, accuracy 91.20%, 1234 samples/s, 12.35 ms, lr 0.1, lr_local 0.05",
        "epoch 2/4: loss 0.2500, accuracy 91.20%, 1234 samples/s, 12.35 ms, lr 0.1; test: loss 0.3000, accuracy 95.00%"]


def test_staleness_is_shown_where_it_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = run_log(tmp_path)
    log.interval({**RECORD, "staleness_mean": 0.987, "updates_per_s": 151.4})
    log.close()
    assert capsys.readouterr().out.endswith(", lr_local 0.05, staleness 0.99, 151 updates/s\n")


def test_a_bar_on_a_terminal_counts_iterations_from_where_the_run_goes_on(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    log = run_log(tmp_path, done=39)
    log.advance()
    log.interval(RECORD)
    log.say("a line")
    log.close()
    assert "40/80" in terminal.getvalue() and "loss 0.2500, 1234 samples/s, accuracy 91.20%" in terminal.getvalue()
    assert capsys.readouterr().out == "a line\n"


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_the_other_workers_are_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                      capsys: pytest.CaptureFixture[str], stream: Type[io.StringIO]) -> None:
    stderr = stream()
    monkeypatch.setattr(sys, "stderr", stderr)
    log = run_log(tmp_path, silent=True)
    log.advance()
    log.interval(RECORD)
    log.epoch(RECORD)
    log.close()
    assert capsys.readouterr().out == stderr.getvalue() == "" and not list(tmp_path.iterdir())


def test_a_log_without_room_ends_no_training(tmp_path: Path) -> None:
    program = ("from odsgd.config.train import TrainConfig\nfrom odsgd.training.run_log import RunLog\n"
               f"run_log = RunLog(TrainConfig(out={str(tmp_path)!r}), False, 0, 3)\n"
               "run_log.say('one')\nrun_log.say('two')\n")
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0
    assert done.stderr == ("warning: standard output failed, and the job goes on without: OSError: [Errno 28] No space "
                           "left on device\n")
