"""Event files for TensorBoard, read back."""
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np
import pytest

pytest.importorskip("tensorboardX")

from kvstore.job.pulse import pulse
from odsgd import board, callbacks
from odsgd.report.runs import read_records
from odsgd.training import loop
from tests.jobs import ROOT, environment
from tests.odsgd.training.runs import records, tiny, train_together

Scalars = Dict[str, List[Tuple[int, float]]]


def events(folder: Path) -> Iterator[Any]:
    """All that was written there: records of a length, its checksum, an event and its checksum."""
    from tensorboardX.proto.event_pb2 import Event
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            yield Event.FromString(content[at + 12:at + 12 + length])
            at += length + 16


def scalars(folder: Path) -> Scalars:
    found: Scalars = {}
    for event in events(folder):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def shown(of: List[Dict[str, Any]], key: str) -> List[Any]:
    return [(one["iteration"], pytest.approx(one[key])) for one in of]


def histograms(folder: Path) -> List[Dict[float, float]]:
    return [dict(zip(value.histo.bucket_limit, value.histo.bucket)) for event in events(folder)
            for value in event.summary.value if value.HasField("histo")]


def test_a_run_writes_what_its_metrics_say(tmp_path: Path) -> None:
    train_together([tiny(tmp_path / "run", kvstore="asgd", board=True)] * 2)
    found, intervals = scalars(tmp_path / "run"), records(tmp_path / "run", "interval")
    epochs = records(tmp_path / "run", "epoch")
    for tag, key in (("train/loss", "train_loss"), ("rates/lr", "lr"), ("speed/samples_per_s", "samples_per_s"),
                     ("speed/waiting_ms", "waiting_ms"), ("staleness/mean", "staleness_mean")):
        assert found[tag] == shown(intervals, key), tag
    for tag, key in (("epoch/accuracy", "train_accuracy"), ("test/loss", "test_loss")):
        assert found[tag] == shown(epochs, key), tag
    stale = records(tmp_path / "run", "staleness")[-1]
    counted = [sum(histogram.values()) for histogram in histograms(tmp_path / "run")]
    assert counted and 0 < sum(counted) <= stale["pushes"]


def test_a_run_that_goes_on_hides_what_comes_after_its_checkpoint(tmp_path: Path) -> None:
    """As TensorBoard has it: what a START follows counts below its step alone."""
    loop.run(tiny(tmp_path, board=True, iterations=17))
    shutil.rmtree(tmp_path / "checkpoints" / "17")  # as if it had been killed before
    next(tmp_path.glob("events.*")).rename(tmp_path / "events.out.tfevents.0.before")
    loop.run(tiny(tmp_path, board=True, resume=True))
    left: Dict[int, float] = {}
    for event in events(tmp_path):
        if event.HasField("session_log"):
            left = {step: loss for step, loss in left.items() if step < event.step}
        left.update((event.step, value.simple_value) for value in event.summary.value if value.tag == "epoch/loss")
    assert list(left.items()) == shown(read_records(tmp_path).epochs, "train_loss")


def test_a_new_run_moves_what_one_without_checkpoints_has_measured(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        if number:  # as if the one before had been asynchronous
            for name in ("staleness.json", "rounds.json"):
                (tmp_path / name).write_text(f"{number}")
        loop.run(tiny(tmp_path, board=True, emulate_compute="1ms", lr=0.1 * (number + 1)))
        moved = f"the metrics of an earlier run lie in {tmp_path}/earlier-{number} now" in capsys.readouterr().out
        assert moved == (number > 0)
    for folder, lr in (("earlier-1", 0.1), ("earlier-2", 0.2), ("", 0.3)):
        of = tmp_path / folder
        assert records(of, "start")[0]["config"]["lr"] == pytest.approx(lr)
        assert scalars(of)["rates/lr"] == shown(records(of, "interval"), "lr")
        for name in ("staleness.json", "rounds.json"):
            assert (of / name).exists() == bool(folder) and (not folder or (of / name).read_text() == folder[-1])


def test_a_script_logs_with_the_time_of_its_iterations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODSGD_BOARD", str(tmp_path))
    board.log(10, {"train/loss": 0.5}, lr=0.1)
    board.log(30, lr=0.05)
    board.close()
    found = scalars(tmp_path)
    assert found["train/loss"] == [(10, 0.5)] and [step for step, _ in found["lr"]] == [10, 30]
    assert [step for step, _ in found["speed/iteration_ms"]] == [30] and found["speed/waiting_ms"] == [(30, 0.0)]


def test_an_iteration_of_a_script_waits_no_longer_than_it_takes(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited_s = iter([0.0, 1e6])
    monkeypatch.setitem(pulse.more, "waited_s", lambda: next(waited_s))
    board.to(tmp_path)
    board.log(1, {})
    board.log(2, {})
    board.close()
    found = scalars(tmp_path)
    assert found["speed/waiting_ms"] == found["speed/iteration_ms"]


def test_what_a_sample_of_waiting_stands_for_beyond_an_iteration_counts_in_the_next(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled_s = (0, 0.02, 0, 0, 0, 1000, 0, 0, 0, 0, 0, 0, 0)  # the last one is of a worker that stood still
    now, waited_s = (iter(np.cumsum(each)) for each in ([0.01] * len(sampled_s), sampled_s))
    monkeypatch.setattr(board, "time", SimpleNamespace(monotonic=lambda: next(now), time=lambda: 0.0))
    monkeypatch.setitem(pulse.more, "waited_s", lambda: next(waited_s))
    board.to(tmp_path)
    for iteration in range(len(sampled_s)):
        board.log(iteration)
    board.close()
    assert [round(waited) for _, waited in scalars(tmp_path)["speed/waiting_ms"]] == \
        [10, 10, 0, 0, 10, 10, 10, 10, 10, 10, 0, 0]


@pytest.mark.parametrize("name", ["ODSGD_WORKER_RANK", "DMLC_WORKER_ID", "RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"])
def test_of_a_jobs_workers_one_writes_whoever_started_them(
        name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    board.to(tmp_path / "other")
    board.log(1, loss=1.0)
    assert not (tmp_path / "other").exists()


def test_what_is_logged_last_is_in_the_file_when_the_process_has_ended(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", f"from odsgd import board; board.to({str(tmp_path)!r}); board.log(7, x=1)"],
                   env=environment(), cwd=ROOT, check=True, timeout=300)
    assert scalars(tmp_path)["x"] == [(7, 1.0)]


def test_an_estimator_logs_its_metrics(tmp_path: Path) -> None:
    from kvstore.engine._mxnet import mx
    from tests.odsgd.test_callbacks import data
    board.to(tmp_path)
    net = mx.gluon.nn.Dense(3, in_units=5)
    net.initialize()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.25})
    estimator = callbacks.events.Estimator(net, mx.gluon.loss.SoftmaxCrossEntropyLoss(), trainer=trainer,
                                           context=mx.cpu(), train_metrics=mx.metric.Accuracy(),
                                           val_metrics=mx.metric.Accuracy())
    estimator.logger.setLevel("ERROR")
    batches = mx.gluon.data.DataLoader(mx.gluon.data.ArrayDataset(*data(0)), batch_size=4)
    estimator.fit(batches, val_data=batches, epochs=2, event_handlers=[callbacks.OnBoard(interval=3)])
    board.close()
    found = scalars(tmp_path)
    assert [step for step, _ in found["train/accuracy"]] == [3, 6] and found["rates/lr"] == [(3, 0.25), (6, 0.25)]
    assert [step for step, _ in found["test/accuracy"]] == [4, 8]
