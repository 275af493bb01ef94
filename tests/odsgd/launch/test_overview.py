"""What a user is told of a running job."""
import doctest
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict

import pytest

from kvstore.errors import ConfigError
from odsgd.launch import notice, watch
from odsgd.launch.overview import Overview

HOSTS = {"scheduler": "here", "server 0": "here", "worker 0": "here", "worker 1": "there"}
RUN = {"total": 440, "head": "epoch 2/20", "tail": "loss 0.25, 91 %", "out": "/runs/one"}


def beat(at: int, waited_s: float, nbytes: int = 0, **more: Any) -> Dict[str, Any]:
    return {"at": at, "waited_s": waited_s, "nbytes": nbytes, "silent_s": 0.1, "waits_s": None,
            "activity": "training", **more}


def overview() -> Overview:
    """Four seconds of two workers: 10 iterations per second, worker 0 waits half of its time, worker 1 a tenth."""
    of = Overview(HOSTS)
    for now, at in ((100.0, 40), (102.0, 60), (104.0, 80)):
        stale = [[0, at, at], [1, at, 3 * at]]
        of.beats({"worker 0": beat(at, at / 20, run=RUN), "server 0": beat(3 * at, 0, stale=stale)}, now)
        of.beats({"worker 1": beat(at - 5, at / 100, nbytes=1000000 * at)}, now)
    return of


def test_the_line_says_how_far_the_run_is_and_how_long_it_will_take() -> None:
    line = overview().line(104.0, 100)
    assert line.startswith("epoch 2/20:  18%|") and len(line) <= 100
    assert "| 80/440 [00:04<00:36, 10.00it/s, loss 0.25, 91 %]" in line


def test_a_script_of_ones_own_has_a_line_too() -> None:
    of = Overview(HOSTS)
    assert of.line(100.0, 100) == ""
    for now, at in ((100.0, 40), (102.0, 60)):
        of.beats({"worker 0": {**beat(at, at / 20), "activity": ""}}, now)
    assert of.line(102.0, 100) == "worker 0: 60it [00:02, 10.00it/s, waiting for weights 50%]"


def test_an_evaluation_is_said_to_be_one() -> None:
    of = overview()
    of.beats({"worker 0": beat(80, 4.0, run=RUN, activity="evaluation")}, 105.0)
    assert of.line(105.0, 100).startswith("epoch 2/20, evaluation:")


def test_the_table_has_rates_shares_and_the_slow_worker() -> None:
    first, second, server = overview().table()
    assert (first["name"], first["at"], first["behind"], first["rate"]) == ("worker 0", 80, 0, 10.0)
    assert (first["waiting"], first["own_ms"], first["slow"], first["staleness"]) == (0.5, 50.0, False, 1.0)
    assert (second["waiting"], second["own_ms"], second["slow"]) == (0.1, 90.0, True)
    assert (second["behind"], second["bytes_per_s"], second["staleness"]) == (5, 1e7, 3.0)
    assert (server["name"], server["rate"], server["staleness"], server["own_ms"]) == ("server 0", 30.0, 2.0, None)


def test_a_beat_that_comes_late_or_twice_changes_no_rate() -> None:
    of = Overview(HOSTS)
    for now, at, silent_s in ((101.0, 40, 1.0), (102.0, 60, 0.0), (102.5, 60, 0.5), (105.0, 80, 1.0)):
        of.beats({"worker 0": {**beat(at, 0), "silent_s": silent_s}}, now)
    assert of.table()[0]["rate"] == 10.0


def test_what_a_process_sends_is_not_trusted() -> None:
    of = Overview(HOSTS)
    run = {"total": "many", "head": "\x1b[2J" + "x" * 1000, "tail": 3}
    odd = {"at": 1e300, "waited_s": "long", "nbytes": None, "stale": [[1], [0, "x", 2], 7], "silent_s": 0.0, "run": run}
    for now in (1.0, 2.0):
        of.beats({"worker 0": odd, "worker 9": odd, "server 0": "beat"}, now)
    assert "\x1b" not in of.line(2.0, 80) and len(of.table()) == 3


def test_the_screen_of_the_docstring_is_what_is_shown() -> None:
    assert doctest.testmod(watch).failed == 0


def test_a_job_is_found_by_its_number_and_by_its_run_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                   capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(notice, "SHARED", str(tmp_path))
    with pytest.raises(ConfigError, match="no job of this user runs"):
        watch.main([])
    note = notice.Notice()
    note.write({"job": os.getpid(), "command": "train", "out": str(tmp_path / "run"), "rows": overview().table()})
    for words in ([], [str(os.getpid())], [str(tmp_path / "run"), "--once"]):
        assert watch.main(words) == 0
        assert "worker 1 (slow)  there" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"`elsewhere` is no job that runs here, .* there are \d+: train"):
        watch.main(["elsewhere"])
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (notice.folder() / f"{ended.pid}.json").write_text(json.dumps({"command": "killed", "born": ""}))
    mine = (notice.folder() / f"{os.getpid()}.json").read_text()
    (notice.folder() / "1.json").write_text(mine)  # killed, and its number is another process's now
    assert notice.running() == [os.getpid()]
    note.close()
    assert notice.running() == []


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "SHARED", str(tmp_path))
    notice.folder().mkdir()
    notice.folder().chmod(0o777)
    notice.Notice().write({"command": "train"})
    assert list(notice.folder().iterdir()) == [] and notice.running() == []
