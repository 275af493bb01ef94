from __future__ import annotations

import doctest
import json
import math
from pathlib import Path
from typing import Any, Dict, List

import pytest

from kvstore.errors import ConfigError
from odsgd.lab import report


def write_run(folder: Path, events: List[Dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def epoch(number: int, accuracy: float, samples_per_s: float, seconds: float) -> Dict[str, Any]:
    return {"event": "epoch", "epoch": number, "test_accuracy": accuracy, "samples_per_s": samples_per_s,
            "seconds": seconds}


def test_the_example_in_the_docstring_is_what_it_prints() -> None:
    assert doctest.testmod(report).failed == 0


def test_an_outcome_is_last_accuracy_median_speed_and_total_time(tmp_path: Path) -> None:
    run = write_run(tmp_path / "odsgd", [
        epoch(0, 0.5, 100, 3.0), {"event": "interval", "loss": 1.0}, epoch(1, 0.7, 900, 1.0), epoch(2, 0.9, 300, 1.5)])
    outcome = report.read_run(run)
    assert outcome[:5] == ("odsgd", 3, 0.9, 300.0, 5.5) and outcome.staleness is None


def test_what_was_not_measured_is_nan(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"event": "epoch", "epoch": 1, "samples_per_s": None, "seconds": 1.0}])
    assert report.table([report.read_run(run)]).splitlines()[1].split() == ["run", "1", "nan", "%", "-", "nan", "1.0"]


def test_accuracy_is_averaged_over_the_last_five_epochs_where_all_were_evaluated(tmp_path: Path) -> None:
    accuracies = [0.1, 0.5, 0.25, 0.75, 0.5, 0.25]
    epochs = [epoch(number, accuracy, 100, 1.0) for number, accuracy in enumerate(accuracies)]
    again = [epochs[5], {**epochs[5], "test_accuracy": 0.75}]  # resumed: the later counts
    run = write_run(tmp_path / "run", [*epochs[:5], *again])
    assert report.read_run(run).last_five == 2.75 / 5
    assert report.table([report.read_run(run)]).splitlines()[1].split()[2:6] == ["75.00", "%", "55.00", "%"]
    few = report.read_run(write_run(tmp_path / "few", epochs[:4]))
    unknown = report.read_run(write_run(tmp_path / "unknown", [*epochs[:4], {**epochs[4], "test_accuracy": None}]))
    for outcome in (few, unknown):
        assert math.isnan(outcome.last_five) and " -  " in report.table([outcome])


def test_an_epoch_written_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [epoch(0, 0.5, 100, 1.0), epoch(1, 0.6, 100, 1.0), epoch(1, 0.7, 100, 2.0)])
    assert report.read_run(run)[:5] == ("run", 2, 0.7, 100.0, 3.0)


def test_half_a_last_line_is_no_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [epoch(0, 0.5, 100, 1.0)])
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"event": "epo')
    assert report.read_run(run).epochs == 1


def test_staleness_has_columns_where_a_run_measured_it(tmp_path: Path) -> None:
    stale = {"event": "staleness", "staleness_mean": 2.951, "staleness_max": 7, "updates_per_s": 412.3}
    runs = [write_run(tmp_path / "asgd", [epoch(1, 0.9, 100, 1.0), {**stale, "staleness_max": 4}, stale]),
            write_run(tmp_path / "ssgd", [epoch(1, 0.9, 100, 1.0)])]
    header, asgd, ssgd = report.table([report.read_run(run) for run in runs]).splitlines()
    assert header.endswith("seconds  staleness  max  updates/s")
    assert asgd.split()[-3:] == ["2.95", "7", "412"] and ssgd.split()[-3:] == ["-", "-", "-"]


def test_a_missing_run_is_named_with_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        report.main([str(tmp_path / "nothing")])
    assert str(error.value) == (
        f"{tmp_path}/nothing/metrics.jsonl: No such file or directory; expected the folder of a run (--out)")


def test_a_run_without_an_epoch_is_an_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"event": "interval"}])
    with pytest.raises(ConfigError, match="no finished epoch"):
        report.read_run(run)


@pytest.mark.parametrize("arguments", [[], ["--all"]])
def test_bad_usage_is_told_with_where_to_read_on(arguments: List[str]) -> None:
    with pytest.raises(ConfigError, match="RUN; `odsgd report --help` says how"):
        report.main(arguments)


def test_the_table_is_printed_and_help_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(write_run(tmp_path / "one", [epoch(0, 0.5, 100, 1.0)]))]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "one"
    with pytest.raises(SystemExit) as stop:
        report.main(["--help"])
    assert stop.value.code == 0 and "usage: odsgd report" in capsys.readouterr().out
