"""What a user is told of a running job."""
import doctest
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict

import pytest

from kvstore.errors import ConfigError
from odsgd.launch import supervisor
from odsgd.launch.view import join, status_file, watch
from odsgd.launch.view.overview import Overview, line
from tests.odsgd.launch.jobs import job

HOSTS = {"scheduler": "here", "server 0": "here", "worker 0": "here", "worker 1": "there"}
RUN = {"total": 440, "head": "epoch 2/20", "tail": "loss 0.25, 91 samples/s, accuracy 91%", "out": "/runs/one"}


def beat(at: int, waited_s: float, nbytes: int = 0, **more: Any) -> Dict[str, Any]:
    return {"at": at, "waited_s": waited_s, "nbytes": nbytes, "silent_s": 0.1, "waits_s": None,
            "activity": "training", **more}


def overview() -> Overview:
    """Four seconds of two workers: 10 iterations per second, worker 0 waits half of its time, worker 1 a tenth."""
    of = Overview()
    for now, at in ((100.0, 40), (102.0, 60), (104.0, 80)):
        stale = [[0, at, at], [1, at, 3 * at]]
        of.beats({"worker 0": beat(at, at / 20, run=RUN), "server 0": beat(3 * at, 0, stale=stale)}, now)
        of.beats({"worker 1": beat(at - 5, at / 100, nbytes=1000000 * at)}, now)
    return of


def test_the_line_says_how_far_the_run_is_and_how_long_it_will_take() -> None:
    status = overview().status(104.0)
    shown = line(status, 110)
    assert shown.startswith("epoch 2/20:  18%|") and len(shown) == 110
    assert "| 80/440 [00:04<00:36, 10.00it/s, loss 0.25, 91 samples/s, accuracy 91%]" in shown
    short = "epoch 2/20: 18% 80/440 [00:04<00:36, loss 0.25, 91 samples/s, accuracy 91%]"
    assert line(status, len(short)) == short
    for columns in range(45, len(short)):  # whole words are left out
        shown = line(status, columns)
        assert len(shown) <= columns and shown[:-1] in short and shown.endswith(("91 samples/s]", "0.25]", "<00:36]"))


def test_a_process_that_has_sent_a_petabyte_still_has_a_rate() -> None:
    of = Overview()
    for now in (100.0, 102.0):
        of.beats({"worker 0": beat(int(now), 0, nbytes=10 ** 16 + 10 ** 7 * int(now))}, now)
    assert of.table(HOSTS)[0]["bytes_per_s"] == 1e7


def test_a_script_of_ones_own_has_a_line_too() -> None:
    of = Overview()
    assert not of.status(100.0)
    for now, at in ((100.0, 40), (102.0, 60)):
        of.beats({"worker 0": {**beat(at, at / 20), "activity": ""}}, now)
    assert line(of.status(102.0), 100) == "worker 0: 60it [00:02, 10.00it/s, waiting for weights 50%]"


def test_an_evaluation_is_said_to_be_one() -> None:
    of = overview()
    of.beats({"worker 0": beat(80, 4.0, run=RUN, activity="evaluation")}, 105.0)
    assert line(of.status(105.0), 100).startswith("epoch 2/20, evaluation:")


def test_the_table_has_rates_shares_and_the_slow_worker() -> None:
    first, second, server = overview().table(HOSTS)
    assert (first["name"], first["at"], first["behind"], first["rate"]) == ("worker 0", 80, 0, 10.0)
    assert (first["waiting"], first["own_ms"], first["slow"], first["staleness"]) == (0.5, 50.0, False, 1.0)
    assert (second["waiting"], second["own_ms"], second["slow"]) == (0.1, 90.0, True)
    assert (second["behind"], second["bytes_per_s"], second["staleness"]) == (5, 1e7, 3.0)
    assert (server["name"], server["rate"], server["staleness"], server["own_ms"]) == ("server 0", 30.0, 2.0, None)


def test_workers_are_compared_at_one_time_although_their_beats_come_at_different_ones() -> None:
    """Both do 200 iterations per second; worker 1's beats come 0.9 s after worker 0's. Then worker 1 is stopped."""
    of, hosts = Overview(), {"worker 0": "here", "worker 1": "here"}
    for second in range(100, 105):
        of.beats({"worker 0": beat(200 * second, 0)}, second)
        of.beats({"worker 1": beat(200 * second + 180, 0)}, second + 0.9)
    assert [row["behind"] for row in of.table(hosts)] == [0, 0]
    for second in range(105, 115):
        of.beats({"worker 0": beat(200 * second, 0)}, second)
    assert [row["behind"] for row in of.table(hosts)] == [0, 200 * 114 - 200 * 104 - 180]


def test_a_worker_that_counts_anew_beside_one_that_stands_still_has_no_rate_and_nobody_is_slow() -> None:
    of, hosts = Overview(), {"worker 0": "here", "worker 1": "here", "worker 2": "here"}
    for now, at in ((100.0, 9), (102.0, 5), (104.0, 1)):
        of.beats({"worker 0": beat(at, 0), "worker 1": beat(at, 0), "worker 2": beat(7, 0)}, now)
    assert [(row["rate"], row["slow"]) for row in of.table(hosts)] == [(None, False), (None, False), (0.0, False)]


def test_a_share_made_of_samples_is_never_more_than_all_and_a_little_slower_is_not_slow() -> None:
    """Of iterations of 100 ms, the workers compute 0, 5 and 9 ms, and 0, 5 and 20."""
    def rows(last: float) -> Any:
        of, hosts = Overview(), {f"worker {rank}": "here" for rank in range(3)}
        for now in (100.0, 104.0):
            of.beats({f"worker {rank}": beat(int(10 * now), share * now)
                      for rank, share in enumerate((1.08, 0.95, last))}, now)
        return [(row["waiting"], row["slow"]) for row in of.table(hosts)]

    assert rows(0.91) == [(1.0, False), (pytest.approx(0.95), False), (pytest.approx(0.91), False)]
    assert [slow for _, slow in rows(0.8)] == [False, False, True]


@pytest.mark.parametrize("iteration_s", [0.7, 3.0, 15.0])
def test_rates_cut_no_iteration_and_of_equal_workers_none_is_slow(iteration_s: float) -> None:
    of, hosts = Overview(), {"worker 0": "here", "worker 1": "here"}
    for second in range(200):
        for rank, phase in enumerate((0.0, 0.45)):
            of.beats({f"worker {rank}": beat(int((second + phase) / iteration_s), 0)}, 1000 + second + phase)
        rows = of.table(hosts)
        assert not any(row["slow"] for row in rows)
        if second > max(11, 2 * iteration_s):
            assert all(row["rate"] == pytest.approx(1 / iteration_s, rel=0.2) for row in rows)
    for second in range(200, 260):
        of.beats({"worker 0": beat(int(200 / iteration_s), 0)}, 1000 + second)
    assert of.table(hosts)[0]["rate"] < 0.8 / iteration_s, "it stands still"


def test_of_slow_iterations_too_the_slow_worker_is_found() -> None:
    of, hosts = Overview(), {"worker 0": "here", "worker 1": "here"}
    for second in range(100):
        of.beats({"worker 0": beat(second // 3, 0), "worker 1": beat(second // 5, 0)}, 1000 + second)
    assert [row["slow"] for row in of.table(hosts)] == [False, True]


def test_evaluations_and_checkpoints_are_not_a_workers_own_time() -> None:
    """20 iterations of 200 ms, and then 4 s in which worker 0 evaluates and worker 1 waits for it."""
    of = Overview()
    for second in range(30):
        at, trains = 20 * (second // 8) + 5 * min(second % 8, 4), second % 8 < 5
        for rank, else_at in enumerate(("evaluation", "checkpoint")):
            of.beats({f"worker {rank}": beat(at, 0, activity="training" if trains else else_at)}, 100 + second)
        assert second < 2 or [row["own_ms"] for row in of.table(HOSTS)[:2]] == [200.0, 200.0]


def test_a_beat_that_comes_late_or_twice_changes_no_rate() -> None:
    of = Overview()
    for now, at, silent_s in ((101.0, 40, 1.0), (102.0, 60, 0.0), (102.5, 60, 0.5), (105.0, 80, 1.0)):
        of.beats({"worker 0": {**beat(at, 0), "silent_s": silent_s}}, now)
    assert of.table(HOSTS)[0]["rate"] == 10.0


def test_what_a_process_sends_is_not_trusted() -> None:
    of = Overview()
    run = {"total": "many", "head": "\x1b[2J" + "x" * 1000, "tail": 3}
    odd = {"at": 7, "waited_s": "long", "nbytes": None, "stale": [[1], [0, "x", 2], 7], "silent_s": 0.0, "run": run}
    for now in (1.0, 2.0):
        of.beats({"worker 0": odd, "worker 9": odd, "server 0": "beat"}, now)
    assert line(of.status(2.0), 900).startswith("[2Jxx") and len(of.table(HOSTS)) == 3
    for now in (3.0, 4.0):
        of.beats({"worker 0": {**odd, "at": 1e300}}, now)
    assert len(line(of.status(4.0), 80)) <= 80


def test_the_screen_of_the_docstring_is_what_is_shown() -> None:
    assert doctest.testmod(watch).failed == 0


def test_a_job_is_found_by_its_number_and_by_its_run_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                   capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(status_file, "SHARED", str(tmp_path))
    with pytest.raises(ConfigError, match="no job of this user runs"):
        watch.main([])
    note = status_file.StatusFile()
    note.write({"job": os.getpid(), "command": "train", "out": str(tmp_path / "run"), "rows": overview().table(HOSTS)})
    for words in ([], [str(os.getpid())], [str(tmp_path / "run"), "--once"]):
        assert watch.main(words) == 0
        assert "worker 1 (slow)  there" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"`elsewhere` is no job that runs here, .* there are \d+: train"):
        watch.main(["elsewhere"])
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (status_file.folder() / f"{ended.pid}.json").write_text(json.dumps({"command": "killed", "start_time": ""}))
    mine = (status_file.folder() / f"{os.getpid()}.json").read_text()
    (status_file.folder() / "1.json").write_text(mine)  # killed, and its number is another process's now
    assert list(status_file.running()) == [os.getpid()]
    with pytest.raises(ConfigError, match=r"nobody can join job .*: its launcher is of another version of odsgd"):
        join.main([str(os.getpid())])
    note.write({"closed": "no place is empty", "joiners": {}})
    with pytest.raises(ConfigError, match=r"nobody can join job .*: no place is empty"):
        join.main([])
    assert not note.take_request()
    note.write({"closed": "", "joiners": {}})
    monkeypatch.setattr(join, "ANSWERED_WITHIN_S", 0.2)
    with pytest.raises(ConfigError, match=r"its launcher has not answered for 0\.2 s; is it stopped"):
        join.main([])
    assert not note.take_request()  # who has given up asks no more
    with status_file.requested(os.getpid()) as one, status_file.requested(os.getpid()) as other:
        taken = {str(note.take_request()): ["worker 1", "a"], str(note.take_request()): ["worker 2", "b"]}
        assert sorted(taken) == sorted([one, other]) and note.take_request() is None
        note.write({"closed": "no place is empty", "joiners": taken})  # the last one is taken
        assert [join._place(os.getpid(), request) for request in taken] == [["worker 1", "a"], ["worker 2", "b"]]
    (status_file.folder() / f"{os.getpid()}.left.join").touch()  # for a killed launcher that had the same number
    assert status_file.StatusFile().take_request() is None
    note.close()
    assert list(status_file.running()) == []


def test_a_job_is_found_by_the_folder_of_its_run_also_while_it_starts(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_file, "SHARED", str(tmp_path / "shared"))
    (tmp_path / "shared").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    note = status_file.StatusFile()
    for out, command in (("", "train --out run"), ("", f"train --out={tmp_path}/run"), (str(tmp_path / "run"), "x")):
        note.write({"job": os.getpid(), "command": command, "out": out})
        assert [watch.found(folder) for folder in ("run", "run/", "link", None)] == [os.getpid()] * 4
        with pytest.raises(ConfigError, match="`other` is no job that runs here, nor the folder of its run"):
            watch.found("other")
    note.close()


def test_a_folder_that_is_another_users_is_named_at_the_launch_and_to_who_watches(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(status_file, "SHARED", str(tmp_path))
    status_file.folder().mkdir()
    status_file.folder().chmod(0o777)  # anybody can write there, as in one that is another user's
    words = f"cannot reach this user's jobs: `{status_file.folder()}` belongs to user {os.getuid()} (drwxrwxrwx), "
    with pytest.raises(ConfigError, match=re.escape(words)):
        watch.main([])
    assert supervisor.run(job(1, 0, command=(sys.executable, "-c", "pass"))) == 0
    assert words in capfd.readouterr().err


@pytest.mark.parametrize("name", ["x" * 250, "a\u00a0b", "nu\udcff"])
def test_a_job_is_found_whatever_the_folder_of_its_run_is_called(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(status_file, "SHARED", str(tmp_path))
    of, note = overview(), status_file.StatusFile()
    of.beats({"worker 0": beat(90, 4.0, run={"out": str(tmp_path / name)})}, 105.0)
    note.write({"command": "x", "out": of.out()})
    assert watch.found(str(tmp_path / name)) == os.getpid()
    note.write({"command": "x", "out": "\0"})
    with pytest.raises(ConfigError, match="is no job that runs here"):
        watch.found(str(tmp_path / name))
    note.close()


def test_the_file_is_gone_though_a_signal_came_while_it_was_removed(tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_file, "SHARED", str(tmp_path))
    note = status_file.StatusFile()
    note.write({"command": "train"})
    unlink, signals = Path.unlink, ["SIGINT"]

    def interrupted(path: Path) -> None:
        if signals:
            sys.exit(signals.pop())
        unlink(path)
    monkeypatch.setattr(Path, "unlink", interrupted)
    with pytest.raises(SystemExit, match="SIGINT"):
        note.close()
    assert not any(tmp_path.rglob("*.json"))


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_file, "SHARED", str(tmp_path))
    status_file.folder().mkdir()
    status_file.folder().chmod(0o777)
    status_file.StatusFile().write({"command": "train"})
    assert list(status_file.folder().iterdir()) == [] and list(status_file.running()) == []
