"""What a user sees."""
import io
import subprocess
import sys
from typing import Any, Dict, Type

import pytest

from odsgd.training.progress import Progress
from tests.jobs import ROOT

RECORD: Dict[str, Any] = {"epoch": 2, "iteration": 40, "train_loss": 0.25, "train_accuracy": 0.912,
                          "samples_per_s": 1234.5,
                          "iteration_ms": 12.345, "lr": 0.1, "lr_local": 0.05}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(80, 0, silent=False)
    progress.interval(RECORD)
    progress.epoch({**RECORD, "lr_local": None, "test_loss": 0.3, "test_accuracy": 0.95}, epochs=4)
    progress.close()
    assert capsys.readouterr().out.splitlines() == [
        "iteration 40/80: loss 0.2500, accuracy 91.20%, 1234 samples/s, 12.35 ms, lr 0.1, lr_local 0.05",
        "epoch 2/4: loss 0.2500, accuracy 91.20%, 1234 samples/s, 12.35 ms, lr 0.1; test: loss 0.3000, accuracy 95.00%"]


def test_staleness_is_shown_where_it_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(80, 0, silent=False)
    progress.interval({**RECORD, "staleness_mean": 0.987, "updates_per_s": 151.4})
    assert capsys.readouterr().out.endswith(", lr_local 0.05, staleness 0.99, 151 updates/s\n")


def test_a_bar_on_a_terminal_counts_iterations_from_where_the_run_goes_on(monkeypatch: pytest.MonkeyPatch,
                                                                            capsys: pytest.CaptureFixture[str]
                                                                            ) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = Progress(80, 39, silent=False)
    progress.advance()
    progress.interval(RECORD)
    progress.say("a line")
    progress.close()
    assert "40/80" in terminal.getvalue() and "loss 0.2500, 1234 samples/s, accuracy 91.20%" in terminal.getvalue()
    assert capsys.readouterr().out == "a line\n"


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_the_other_workers_are_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                      stream: Type[io.StringIO]) -> None:
    stderr = stream()
    monkeypatch.setattr(sys, "stderr", stderr)
    progress = Progress(80, 0, silent=True)
    progress.advance()
    progress.interval(RECORD)
    progress.epoch(RECORD, epochs=4)
    progress.close()
    assert capsys.readouterr().out == stderr.getvalue() == ""


def test_a_log_without_room_ends_no_training() -> None:
    program = ("from odsgd.training.progress import Progress\nprogress = Progress(3, 0, silent=False)\n"
               "progress.say('one')\nprogress.say('two')\n")
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0
    assert done.stderr == ("warning: standard output failed, and the job goes on without: OSError: [Errno 28] No space "
                           "left on device\n")
