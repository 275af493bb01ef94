from __future__ import annotations

import base64
import doctest
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Dict, List

import pytest

from kvstore.errors import ConfigError
from odsgd.report import page, runs
from odsgd.report.breakdown import breakdown_of, timeline_of
from odsgd.report.cli import main


def read_run(folder: Path) -> runs.Outcome:
    return runs.outcome(runs.read_records(folder))


def write_run(folder: Path, events: List[Dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def epoch(number: int, accuracy: float, samples_per_s: float, seconds: float) -> Dict[str, Any]:
    return {"event": "epoch", "epoch": number, "test_accuracy": accuracy, "samples_per_s": samples_per_s,
            "seconds": seconds}


def test_the_example_in_the_docstring_is_what_it_prints() -> None:
    assert doctest.testmod(runs).failed == 0


def test_an_outcome_is_last_accuracy_median_speed_and_total_time(tmp_path: Path) -> None:
    run = write_run(tmp_path / "odsgd", [
        epoch(0, 0.5, 100, 3.0), {"event": "interval", "loss": 1.0}, epoch(1, 0.7, 900, 1.0), epoch(2, 0.9, 300, 1.5)])
    outcome = read_run(run)
    assert outcome[:5] == ("odsgd", 3, 0.9, 300.0, 5.5) and outcome.staleness is None


def test_a_run_on_a_virtual_cluster_is_told_in_its_time(tmp_path: Path) -> None:
    events = [{**epoch(number, 0.5, 100, 1.0), "iteration": number, "virtual_samples_per_s": 7.0 * number,
               "virtual_seconds": 20.0 * number} for number in (1, 2, 3)]
    run = write_run(tmp_path / "run", events)
    assert runs.table([read_run(run)]).splitlines()[1].split()[-4:] == ["14", "virtual", "60.0", "virtual"]
    records = runs.read_records(run)
    assert records.seconds() == [20.0, 40.0, 60.0]
    real = write_run(tmp_path / "real", [epoch(number, 0.5, 100, 1.0) for number in (1, 2, 3)])
    assert [line.partition(":")[0] for line in runs.compared([read_run(run), read_run(real)])] == ["Accuracy"]
    text = page.html([records, runs.read_records(real)])
    assert "<td>run (virtual)</td>" in text and "<td>real</td>" in text
    assert any(b"checkpoints unless virtual" in base64.b64decode(one) for one in re.findall('base64,([^"]+)', text))
    stale = read_run(run)._replace(staleness=(1.0, 2, 300.0))
    assert runs.table([stale, read_run(real)]).splitlines()[1].endswith("300 virtual")


def test_what_was_not_measured_is_nan(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"event": "epoch", "epoch": 1, "samples_per_s": None, "seconds": 1.0}])
    assert runs.table([read_run(run)]).splitlines()[1].split() == ["run", "1", "-", "-", "nan", "1.0"]


def test_metrics_that_lack_their_beginning_tell_no_time(tmp_path: Path) -> None:
    """As after a resume from the second place, where metrics are not copied."""
    lacks = read_run(write_run(tmp_path / "lacks", [epoch(number, 0.5, 100, 1.0) for number in (1, 4, 5)]))
    whole = read_run(write_run(tmp_path / "whole", [epoch(number, 0.5, 100, 1.0) for number in range(1, 6)]))
    assert runs.table([lacks]).splitlines()[1].split() == ["lacks", "5", "50.00", "%", "-", "100", "-"]
    said, = runs.compared([lacks, whole])
    assert said == "The metrics of lacks lack 2 of its 5 epochs: the time of all is not known."


def test_runs_whose_folders_have_the_same_name_are_told_apart(tmp_path: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(write_run(tmp_path / name / "seed0", [epoch(1, 0.5, 100, 1.0)])) for name in ("a", "b")]
    main([*folders, "--table"])
    assert "Accuracy: a/seed0 50.00 %, b/seed0 50.00 %." in capsys.readouterr().out
    main([folders[0], "--table"])
    assert capsys.readouterr().out.splitlines()[1].startswith("seed0 ")
    main([folders[0], folders[0], "--table"])
    assert "Time: seed0 took 0 % less than seed0" in capsys.readouterr().out


def test_accuracy_is_averaged_over_the_last_five_epochs_where_all_were_evaluated(tmp_path: Path) -> None:
    accuracies = [0.1, 0.5, 0.25, 0.75, 0.5, 0.25]
    epochs = [epoch(number, accuracy, 100, 1.0) for number, accuracy in enumerate(accuracies)]
    again = [epochs[5], {**epochs[5], "test_accuracy": 0.75}]  # resumed: the later counts
    run = write_run(tmp_path / "run", [*epochs[:5], *again])
    assert read_run(run).last_five == 2.75 / 5
    assert runs.table([read_run(run)]).splitlines()[1].split()[2:6] == ["75.00", "%", "55.00", "%"]
    few = read_run(write_run(tmp_path / "few", epochs[:4]))
    unknown = read_run(write_run(tmp_path / "unknown", [*epochs[:4], {**epochs[4], "test_accuracy": None}]))
    for outcome in (few, unknown):
        assert math.isnan(outcome.last_five) and " -  " in runs.table([outcome])


def test_an_epoch_written_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [epoch(0, 0.5, 100, 1.0), epoch(1, 0.6, 100, 1.0), epoch(1, 0.7, 100, 2.0)])
    assert read_run(run)[:5] == ("run", 2, 0.7, 100.0, 3.0)


def test_epochs_of_an_attempt_behind_the_checkpoint_that_was_resumed_do_not_count(tmp_path: Path) -> None:
    at = [{**epoch(number, 0.5 + number / 10, 100, 1.0), "iteration": 10 * number} for number in (1, 2, 3)]
    start = {"event": "start", "iteration": 0, "config": {"epochs": 2}, "batches_per_epoch": 10}
    run = write_run(tmp_path / "run", [start, *at, {**start, "iteration": 10}, {**at[1], "test_accuracy": 0.65},
                                       {"event": "end"}])
    assert read_run(run)[:5] == ("run", 2, 0.65, 100.0, 2.0)


@pytest.mark.parametrize("iterations, end, epochs", [
    (None, [], "2 of 4000"), (25, [], "2 of 3"), (None, [{"event": "end"}], "2")])
def test_a_run_that_was_stopped_is_not_shown_as_finished(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], iterations: Any, end: List[Dict[str, Any]], epochs: str,
) -> None:
    config = {"epochs": 4000, "iterations": iterations}
    start = {"event": "start", "batches_per_epoch": 10, "config": config}
    run = write_run(tmp_path / "run", [start, epoch(1, 0.5, 100, 1.0), epoch(2, 0.7, 100, 1.0), *end])
    assert main(["--table", str(run)]) == 0
    said = capsys.readouterr().out
    assert re.search(rf"^run\s+{epochs}\s+70.00 %", said, re.MULTILINE)
    assert ("run has not come to its end" in said) == (not end)


def test_half_a_last_line_is_no_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [epoch(0, 0.5, 100, 1.0)])
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"event": "epo')
    assert read_run(run).epochs == 1


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b'5\n{"event": "end"}\n'])
def test_a_file_that_has_no_records_is_told(tmp_path: Path, content: bytes) -> None:
    run = write_run(tmp_path / "run", [])
    (run / "metrics.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        read_run(run)


def test_staleness_has_columns_where_a_run_measured_it(tmp_path: Path) -> None:
    stale = {"event": "staleness", "staleness_mean": 2.951, "staleness_max": 7, "updates_per_s": 412.3}
    folders = [write_run(tmp_path / "asgd", [epoch(1, 0.9, 100, 1.0), {**stale, "staleness_max": 4}, stale]),
               write_run(tmp_path / "ssgd", [epoch(1, 0.9, 100, 1.0)])]
    header, asgd, ssgd = runs.table(list(map(read_run, folders))).splitlines()
    assert header.endswith("seconds  staleness  max  updates/s")
    assert asgd.split()[-3:] == ["2.95", "7", "412"] and ssgd.split()[-3:] == ["-", "-", "-"]


def test_metrics_of_a_stranger_write_nothing_to_the_terminal_but_text(tmp_path: Path) -> None:
    stale = {"event": "staleness", "staleness_mean": 2.0, "staleness_max": "\x1b]0;title\x07", "updates_per_s": 4.0}
    assert runs.table([read_run(write_run(tmp_path / "run", [epoch(1, 0.9, 100, 1.0), stale]))]).split()[-2] == \
        r"\x1b]0;title\x07"


def test_staleness_of_a_run_that_ended_is_not_that_of_its_next_part_which_was_killed(tmp_path: Path) -> None:
    """Without staleness there is nothing in a picture of its shares to explain, either: a warning is an error here."""
    stale = {"event": "staleness", "staleness_mean": 2.951, "staleness_max": 7, "updates_per_s": 412.3}
    interval = {"event": "interval", "iteration": 12, "staleness_mean": 1.0, "samples_per_s": 100}
    start, end = {"event": "start", "iteration": 10}, {"event": "end"}
    of = [{**epoch(1, 0.9, 100, 1.0), "iteration": 10}, stale, end]
    assert read_run(write_run(tmp_path / "done", [*of, start, end])).staleness == (2.951, 7, 412.3)
    killed = write_run(tmp_path / "killed", [*of, start, interval])
    assert read_run(killed).staleness is None and main([str(killed)]) == 0


def test_a_missing_run_is_named_with_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        main([str(tmp_path / "nothing")])
    assert str(error.value) == (
        f"{tmp_path}/nothing/metrics.jsonl: No such file or directory; expected the folder of a run (--out)")


def test_a_run_without_an_epoch_is_an_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"event": "interval"}])
    with pytest.raises(ConfigError, match="no finished epoch"):
        read_run(run)


@pytest.mark.parametrize("arguments", [[], ["--all"]])
def test_bad_usage_is_told_with_where_to_read_on(arguments: List[str]) -> None:
    with pytest.raises(ConfigError, match="RUN; `odsgd report --help` says how"):
        main(arguments)


def test_the_table_is_printed_and_help_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write_run(tmp_path / "one", [epoch(0, 0.5, 100, 1.0)]))]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "one"
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0 and "usage: odsgd report" in capsys.readouterr().out


# --- the page ---------------------------------------------------------------------------------------------------------

def bar(stage: str, start_ms: float, end_ms: float, **args: int) -> Dict[str, Any]:
    return {"ph": "X", "name": stage, "cat": stage, "pid": 1, "tid": 0, "ts": 1000 * start_ms,
            "dur": 1000 * (end_ms - start_ms), "args": args}


def traced_run(folder: Path) -> Path:
    """Two epochs of three iterations. In an iteration of 10 ms the device computes 6, and an exchange of 5 ms begins
    beside the last 3 of them. An evaluation of 100 ms stands between the epochs.
    """
    begins_ms = [0, 10, 20, 130, 140, 150]
    bars = [event for number, ms in enumerate(begins_ms) for event in (
        bar("compute", ms, ms + 6, iteration=number), bar("exchange", ms + 3, ms + 8, bucket=0, bytes=4, round=number))]
    about = {"ph": "M", "name": "odsgd", "pid": 1, "tid": 0, "args": {
        "role": "worker", "rank": 0, "host": "here", "boot": "1", "job": "1", "wall_s": 0.0, "monotonic_s": 0.0}}
    run = write_run(folder, [
        {"event": "start", "iteration": 0, "batches_per_epoch": 3, "num_workers": 1, "host": "<here>",
         "config": {"trace": str(folder / "trace"), "kvstore": "asgd", "lr": 0.1}},
        *({"event": "interval", "iteration": at, "samples_per_s": 100 * at, "staleness_mean": 1.0} for at in (2, 4)),
        {**epoch(1, 0.5, 100, 1.0), "iteration": 3}, {**epoch(2, 0.75, 100, 1.0), "iteration": 6},
        {"event": "staleness", "staleness_mean": 1.0, "staleness_max": 2, "updates_per_s": 10.0,
         "histogram": {"0": 1, "1": 4, "2": 1}}])
    (run / "trace").mkdir()
    (run / "trace" / "worker-0.json").write_text(json.dumps([about, *bars]))
    return run


def test_an_iteration_is_split_by_the_timeline_without_the_ends_of_epochs(tmp_path: Path) -> None:
    breakdown = breakdown_of(runs.read_records(traced_run(tmp_path / "run")))
    assert breakdown is not None
    assert [round(ms, 6) for ms in (sum(breakdown.values()), *breakdown.values())] == [10, 3, 3, 2, 2]


def test_a_timeline_that_a_later_job_has_written_is_not_the_runs(tmp_path: Path) -> None:
    """The run is from second 60 to 90."""
    run = traced_run(tmp_path / "run")
    metrics, trace = run / "metrics.jsonl", run / "trace" / "worker-0.json"
    metrics.write_text(metrics.read_text().replace('"start",', '"start", "time": "1970-01-01T00:01:00+00:00",').replace(
        '"iteration": 6', '"iteration": 6, "seconds_since_start": 30.0'))
    text, records = trace.read_text(), runs.read_records(run)
    for wall_s, own in ((59.0, True), (85.0, True), (95.0, False)):
        trace.write_text(text.replace('"wall_s": 0.0', f'"wall_s": {wall_s}'))
        assert (timeline_of(records) is not None) == own


def test_an_iteration_is_split_by_samples_where_there_is_no_timeline(tmp_path: Path) -> None:
    epochs = [{**epoch(at, 0.9, 100, 1.0), "iteration_ms": 10.0 * at, "waiting_ms": 1.0 * at} for at in (1, 3, 2)]
    breakdown = breakdown_of(runs.read_records(write_run(tmp_path / "sampled", epochs)))
    assert breakdown == {"not waiting": 18.0, "waiting": 2.0}
    assert breakdown_of(runs.read_records(write_run(tmp_path / "neither", [epoch(1, 0.9, 100, 1.0)]))) is None


def test_the_page_is_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(traced_run(tmp_path / "runs" / "asgd")),
               str(write_run(tmp_path / "runs" / "s&gd", [{**epoch(1, 0.9, 100, 1.0), "iteration": 3}]))]
    assert main(folders) == 0
    assert f"page: {tmp_path}/runs/report.html" in capsys.readouterr().out.splitlines()
    text = (tmp_path / "runs" / "report.html").read_text()
    assert text.count('src="data:image/svg+xml;base64,') == 5 and not re.search(r'(src|href)="(?!data:)', text)
    assert "<td>s&amp;gd</td>" in text and "<td>&lt;here&gt;</td>" in text
    assert "<td>asgd</td><td>10.00</td><td>3.00</td><td>3.00</td><td>2.00</td><td>2.00</td>" in text


def test_two_runs_are_compared_in_the_last_two_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(write_run(tmp_path / name, [epoch(1, accuracy, 100, seconds)]))
               for name, accuracy, seconds in (("new", 0.9, 3.0), ("old", 0.95, 4.0))]
    assert main([*folders, "-o", str(tmp_path / "page.html")]) == 0
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines == ["Accuracy: new 90.00 %, old 95.00 %.", "Time: new took 25 % less than old, 3.0 s against 4.0 s."]
    assert all(line in (tmp_path / "page.html").read_text() for line in lines)
    longer = runs.outcome(runs.read_records(write_run(tmp_path / "longer", [epoch(n, 0.9, 100, 3.0) for n in (1, 2)])))
    assert runs.compared([longer, read_run(Path(folders[1]))]) == ["Accuracy: longer 90.00 %, old 95.00 %."]


def test_a_page_is_written_only_where_it_is_asked_for_and_by_a_known_name(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [epoch(1, 0.9, 100, 1.0)])
    assert main([str(run), "--table"]) == 0 and [path.name for path in run.iterdir()] == ["metrics.jsonl"]
    with pytest.raises(ConfigError, match=r"-o page.pdf: expected a name that ends in .html"):
        main([str(run), "-o", "page.pdf"])


@pytest.mark.slow
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    """Its text is in the document, and the colours of its pictures are on the screen."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")
    path = tmp_path / "report.html"
    path.write_text(page.html([runs.read_records(traced_run(tmp_path / "asgd"))]), encoding="utf-8")
    shot = tmp_path / "shot.png"
    done = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                           f"--user-data-dir={tmp_path}/profile", "--window-size=1000,2600", f"--screenshot={shot}",
                           path.as_uri()], capture_output=True, text=True, timeout=300)
    assert shot.exists(), done.stderr
    from matplotlib import image
    pixels = (image.imread(str(shot))[..., :3] * 255).round().astype(int)
    for colour in ((0x44, 0x77, 0xAA), (0xEE, 0x77, 0x33)):  # of the first run, and of what is exposed
        assert (abs(pixels - colour).max(axis=-1) <= 2).sum() > 500
