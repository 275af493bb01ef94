"""The papers' tables and figures: declared in full, run and taken up again, and reported from files alone."""
import collections
import contextlib
import dataclasses
import fcntl
import fnmatch
import hashlib
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import tempfile
import time
from concurrent import futures
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence

import pytest

from kvstore.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, ConfigError
from scripts.reproduction import claims, cli, declarations, front, measures, pages, pictures, results, run, words
from scripts.reproduction.declarations import BEYOND, PAPERS, Item, Paper, Trial, named, paper_called, papers
from scripts.reproduction.results import Result
from tests.jobs import ROOT

SHOWN = {"od-sgd": (21, 6), "sasgd": (10, 3), "pipe-sgd": (4, 0), "delayed-update": (7, 3),
         "staleness-aware-asgd": (4, 0)}
"""Figures and tables of each paper, as counted in it."""

ITEMS = [item for paper in papers() for item in paper.items.values()]
TRIALS = [trial for item in ITEMS for scale in item.scales for trial in item.trials(scale, 1)]

TINY = """
title: Tiny
cite: "Nobody: Nothing."
items:
  figure-1:
    caption: "Digits, twice."
    state: run
    measures: [accuracy, staleness]
    options: {model: mlp, dataset: digits, kvstore: asgd, batch_size: 16, lr: 0.05, epochs: 4}
    cluster: {workers: 3, compute: {draws: "lognormal:0.2"}}
    scales: {small: {differs: ["all of it"]}}
    cells:
      asgd: {label: ASGD, paper: {accuracy: 99}}
      ssgd: {label: SSGD, options: {kvstore: ssgd}}
    pictures: [{kind: curve, x: seconds}, {kind: histogram, cells: [asgd]}, {kind: bars}]
    claims:
      learns: {says: "It learns.", where: "1", tests: [{of: asgd.accuracy, above: 50}]}
      same: {says: "Both the same.", where: "2", tests: [{of: asgd.accuracy, minus: ssgd.accuracy, below: 30}]}
      rest: {says: "The rest.", where: "3", why: "not run"}
  figure-2: {caption: "The same.", state: run, cells_of: figure-1, pictures: [{kind: curve, y: error}]}
"""


GRID = """
  figure-3:
    {caption: Rates., state: own, measures: [accuracy], scales: {small: {}}, cells: figure-1, grid: {lr: [0.2, 0.1]}}
"""


SOURCE = run.source


def declared(folder: Path, text: str = TINY) -> Paper:
    path = folder / "tiny.yaml"
    path.write_text(text, encoding="utf-8")
    return declarations.read_paper(path)


# --- declarations -----------------------------------------------------------------------------------------------------

def test_every_table_and_figure_is_declared() -> None:
    assert [*SHOWN] == [*PAPERS]
    for paper in papers()[:-1]:
        figures, tables = SHOWN[paper.name]
        expected = {*(f"figure-{n + 1}" for n in range(figures)), *(f"table-{n + 1}" for n in range(tables))}
        found = {re.match(r"\w+-\d+|", name)[0] for name in paper.items}  # type: ignore[index]
        assert found - {""} == expected


def test_training_takes_the_options_of_every_cell(tmp_path: Path) -> None:
    for trial in TRIALS:
        config = run.configuration(trial, tmp_path, tmp_path)
        assert trial.cell.real or config.virtual_cluster.seed == trial.seed, trial


def test_every_preset_and_every_state_is_there() -> None:
    assert len(TRIALS) > 100
    for item in ITEMS:
        assert item.preset is None or (ROOT / "configs" / item.preset).exists(), item.full_name
        assert item.state != "preset" or item.preset, item.full_name
        assert item.state != "none" or item.note, item.full_name
        assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in item.cells), item.full_name
        assert (item.state in ("drawing", "own") or item.paper == "delayed-update" or item.claims or item.cells_of
                or item.preset), item.full_name


def test_what_all_cells_share_goes_to_the_stores_that_take_it(tmp_path: Path) -> None:
    text = TINY.replace("epochs: 4}", "epochs: 4, n: 2}").replace("SSGD, options: {kvstore: ssgd}",
                                                                 "softsync, options: {kvstore: softsync}")
    asgd, softsync = declared(tmp_path, text).items["figure-1"].trials("small", 1)
    assert softsync.asked["options"]["n"] == 2 and "n" not in asgd.asked["options"]


def test_a_scale_multiplies_options(tmp_path: Path) -> None:
    text = TINY.replace("options: {kvstore: ssgd}", "options: {kvstore: ssgd, lr: 0.4}").replace(
        'small: {differs', 'small: {times: {lr: 0.125, lr_local: 0.5}, differs')
    asgd, ssgd = declared(tmp_path, text).items["figure-1"].trials("small", 1)
    assert ssgd.asked["options"]["lr"] == 0.05 and asgd.asked["options"]["lr"] == 0.00625  # 0.4 / 8, and 0.05 / 8
    assert "lr_local" not in ssgd.asked["options"]


def test_other_options_have_a_folder_of_their_own(tmp_path: Path) -> None:
    before, after = (next(declared(tmp_path, text).items["figure-1"].trials("small", 1))
                     for text in (TINY, TINY.replace("lr: 0.05", "lr: 0.06")))
    assert before.file == after.file and before.folder != after.folder


def test_cells_can_be_those_of_another_item_and_one_for_each_value_of_a_grid(tmp_path: Path) -> None:
    items = declared(tmp_path, TINY + GRID).items
    cells = items["figure-3"].cells
    assert [*cells] == ["asgd-1", "asgd-2", "ssgd-1", "ssgd-2"] and [*items["figure-1"].cells] == ["asgd", "ssgd"]
    assert cells["ssgd-2"].options == {"kvstore": "ssgd", "lr": 0.1} and cells["ssgd-2"].label == "SSGD, lr 0.1"


def test_a_grid_is_a_table_of_accuracies_by_value_with_the_best_in_bold(tmp_path: Path) -> None:
    paper = declared(tmp_path, TINY + GRID)
    cells: Dict[str, Any] = {"asgd-1": [0.5], "asgd-2": [0.9, 0.2], "ssgd-2": [0.7]}
    keep(tmp_path, paper.items["figure-3"], **cells)
    text = pages.pages([paper], tmp_path)[tmp_path / "tiny.md"]
    assert ("| test accuracy, %, by lr | 0.1 | 0.2 |\n|---|---:|---:|\n"
            "| ASGD | **55.00 ± 49.50** | 50.00 |\n| SSGD | **70.00** | not run |") in text


def test_claims_can_be_those_of_another_item(tmp_path: Path) -> None:
    items = declared(tmp_path, TINY + "  figure-3: {caption: Again., state: run, scales: {small: {}}, "
                     "cells: figure-1, pictures: figure-1, claims: figure-1}\n").items
    assert items["figure-3"].claims == items["figure-1"].claims and len(items["figure-3"].claims) == 3
    assert items["figure-3"].pictures == items["figure-1"].pictures and len(items["figure-3"].pictures) == 3


def best_rates(grid: Mapping[str, Mapping[int, Result]], size: int) -> Dict[str, List[float]]:
    """By cell of a grid, the rates with the best accuracy."""
    tried: Dict[str, Dict[float, float]] = collections.defaultdict(dict)
    for name, seeds in grid.items():
        for result in seeds.values():
            tried[name.rpartition("-")[0]][result.config["lr"]] = result.column("test_accuracy")[-1]
    assert {len(accuracies) for accuracies in tried.values()} == {size}
    return {name: [lr for lr, one in accuracies.items() if one == max(accuracies.values())]
            for name, accuracies in tried.items()}


def test_the_rates_of_what_has_run_beyond_the_papers_are_the_best_of_their_grids() -> None:
    beyond = paper_called(BEYOND)
    runs = pages.load(beyond, ROOT / "docs" / "results")
    for item, _ in runs:
        if item.startswith("figure-"):
            workers = item.split("-")[1]
            best = best_rates(runs[f"table-{workers}", "small"], 9 if workers == "64" else 12)
            best["odsgd-two"] = best["odsgd"]  # the same with smaller buckets
            assert all(cell.options["lr"] in best[cell.name] for cell in beyond.items[item].cells.values()), item


def test_the_rates_that_the_paper_of_sasgd_does_not_give_are_the_best_of_their_grid() -> None:
    paper = paper_called("sasgd")
    runs = pages.load(paper, ROOT / "docs" / "results")
    best = best_rates(runs["figure-9-rates", "small"], 11)
    cells = paper.items["figure-7"].cells.values()
    of_grid = [cell for cell in cells if not cell.name.endswith("-02")]  # a rate that suits two learners
    assert len(of_grid) == 24 and all(cell.options["lr"] in best[cell.options["kvstore"]] for cell in of_grid)


@pytest.mark.parametrize("old, new, complaint", [
    ("state: run\n    measures", "state: run\n    measure", "unknown key `measure` in .*: figure-1; did you mean"),
    ("minus: ssgd.accuracy", "less: ssgd.accuracy", "unknown key `less` in .*: figure-1, claim same, a test"),
    ("cells_of: figure-1", "claims: figure-7", "unknown item `figure-7` after claims of figure-2"),
    ("    caption: \"Digits, twice.\"\n", "", "figure-1: expected caption, state"),
])
def test_a_wrong_declaration_is_named(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in TINY
    with pytest.raises(ConfigError, match=complaint):
        declared(tmp_path, TINY.replace(old, new))


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.full_name)
def test_what_a_declaration_names_is_there(item: Item) -> None:
    paper = paper_called(item.paper)
    runs = paper.runs_of(item)
    tests = [one for claim in item.claims for one in claim.tests]
    sides = [side for one in tests for side in one.sides]
    assert item.state in declarations.STATES and {*item.scales} <= {*declarations.SCALES}
    assert item.state != "run" or (runs.scales and runs.cells)
    assert {cell for cell, _ in sides} <= {*runs.cells}
    assert {*item.measures, *(measure for _, measure in sides),
            *(measure for cell in item.cells.values() for measure in cell.paper)} <= {*measures.MEASURES}
    for picture in item.pictures:
        assert picture.kind in ("curve", "histogram", "bars", "lengths") and picture.x in declarations.AXES
        assert {*picture.cells, *picture.over, *picture.over.values()} <= {*runs.cells}
    for claim in item.claims:
        assert bool(claim.tests) != bool(claim.why) and claim.about in declarations.ABOUT
        assert {claim.scale, *claim.from_seed} <= {None, *declarations.SCALES}
    for test in tests:
        assert math.isfinite(test.above) or math.isfinite(test.below)
        assert not (test.minus and test.over) and len(test.sides) in ((1, 2) if not test.than else (4,))
    for turn in (turn for scale in item.scales.values() for turn in scale.plan):
        assert fnmatch.filter(item.cells, turn.cells)
    assert not item.grid or item.measures == ("accuracy",)


# --- results ----------------------------------------------------------------------------------------------------------

def made(trial: Trial, accuracies: Sequence[Optional[float]], staleness: Optional[Dict[str, Any]] = None) -> Result:
    """A result with a row for each accuracy; epochs take 36 virtual seconds and 10 iterations."""
    rows: List[List[Optional[float]]] = [[1 + n, 10.0 * (1 + n), 0.5, 0.75, 0.5, accuracy, 36.0 * (1 + n)]
                                         for n, accuracy in enumerate(accuracies)]
    config = {"n": 2, "batch_size": 16, "epochs": len(rows)}
    return Result(trial.cell.name, trial.seed, trial.item.paper, trial.item.name, trial.scale.name, trial.asked, config,
                  {"odsgd": "1", "tree": "1a"}, {"cpu": "a", "cores": 1}, 10, 1, 2.0, rows, staleness)


def ran(item: Item, scale: str = "small", **cells: Sequence[Any]) -> Dict[str, Dict[int, Result]]:
    """By cell and seed, results with an accuracy each, or with one for each epoch; None: there is none."""
    return {name: {seed: made(Trial(item, item.scales[scale], item.cells[name], seed),
                              one if isinstance(one, tuple) else [one])
                   for seed, one in enumerate(seeds) if one is not None}
            for name, seeds in cells.items()}


def keep(folder: Path, item: Item, scale: str = "small", **cells: Sequence[Any]) -> None:
    """Write such results."""
    for name, seeds in ran(item, scale, **cells).items():
        for result in seeds.values():
            results.add(result, folder / Trial(item, item.scales[scale], item.cells[name], 0).file)


@pytest.fixture(autouse=True)
def committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested may have changes that are not committed yet."""
    monkeypatch.setattr(run, "source", lambda: ("c0", "7e"))


@pytest.fixture
def tiny(tmp_path: Path) -> Paper:
    return declared(tmp_path)


@pytest.fixture
def trial(tiny: Paper) -> Trial:
    return next(tiny.items["figure-1"].trials("small", 1))


def test_a_result_comes_back_as_it_was_written(tmp_path: Path, trial: Trial) -> None:
    result = made(trial, [0.1, None, 0.3], {"mean": 1.5, "max": 3, "histogram": {"1": 2, "3": 1}})
    results.add(result, tmp_path / trial.file)
    assert trial.result(tmp_path) == result
    assert math.isnan(result.column("test_accuracy")[1])
    assert dataclasses.replace(trial, seed=1).result(tmp_path) is None


def test_results_of_several_machines_are_put_together_as_lines(tmp_path: Path, tiny: Paper) -> None:
    trials = list(tiny.items["figure-1"].trials("small", 2))
    texts = []
    for machine, some in (("a", trials[:3]), ("b", trials[1:])):
        for trial in some:
            results.add(made(trial, [trial.seed / 2]), tmp_path / machine / trial.file)
        texts.append((tmp_path / machine / trials[0].file).read_text(encoding="utf-8"))
        assert texts[-1].splitlines() == sorted(texts[-1].splitlines())
    (tmp_path / "data" / "tiny").mkdir(parents=True)
    (tmp_path / trials[0].file).write_text("".join(texts), encoding="utf-8")
    runs = pages.load(tiny, tmp_path)
    assert {cell: [*seeds] for cell, seeds in runs["figure-1", "small"].items()} == {"asgd": [0, 1], "ssgd": [0, 1]}


def signed(content: Dict[str, Any]) -> str:
    content.pop("checksum")
    return json.dumps({**content, "checksum": results._checksum(content)})


@pytest.mark.parametrize("change, complaint", [
    (lambda line: line.replace("0.875", "0.975"), "changed by hand or damaged: its checksum is another; restore"),
    (lambda line: line.replace('"schema": 2', '"schema": 3'), "of another version: schema 3, here 2; remove the line"),
    (lambda line: line[:200], "cut off, or no result of a run; restore the line, or remove it and run its cell again"),
    (lambda line: line.replace("schema", "scheme"), "cut off, or no result of a run"),
    (lambda line: "7", "cut off, or no result of a run"),
    (lambda line: line.replace('"small', '"small\xff'), "changed by hand or damaged"),
    (lambda line: signed({**json.loads(line), "curve": {}}), "cut off, or no result of a run"),
])
def test_a_line_that_was_not_written_so_is_named_and_the_rest_is_read(
        tmp_path: Path, tiny: Paper, capsys: pytest.CaptureFixture[str], change: Callable[[str], str],
        complaint: str) -> None:
    first, second = tiny.items["figure-1"].trials("small", 1)
    path = tmp_path / first.file
    for trial, accuracy in ((first, 0.875), (second, 0.5)):
        results.add(made(trial, [accuracy]), path)
    damaged, whole = path.read_text(encoding="utf-8").splitlines()
    path.write_text(f"{change(damaged)}\n{whole}\n", encoding="latin-1")  # a byte that is no text in UTF-8, too
    for _ in range(2):
        assert [*pages.load(tiny, tmp_path)["figure-1", "small"]] == ["ssgd"]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and f"-small.jsonl`, line 1: {complaint}" in said[0]
    results.add(made(first, [0.5]), path)
    assert whole in path.read_text(encoding="utf-8").splitlines() and first.result(tmp_path) == made(first, [0.5])


def test_a_result_that_stands_in_two_lines_with_other_content_is_named(tmp_path: Path, trial: Trial,
                                                                       capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    lines = [results.line_of(dataclasses.replace(made(trial, [0.5]), seconds=seconds)) for seconds in (1, 1, 2)]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert results.read(path) == {}
    said = capsys.readouterr().err
    assert "line 3: figure-1 small asgd 0 stands in another line with other content" in said
    assert "line 2: figure-1 small asgd 0 stands in another line with the same content, and counts once" in said


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path, tiny: Paper) -> None:
    trials = list(tiny.items["figure-1"].trials("small", 10))
    with futures.ProcessPoolExecutor(4, multiprocessing.get_context("fork")) as processes:
        for done in [processes.submit(results.add, made(trial, [0.5]), tmp_path / trial.file) for trial in trials]:
            done.result(60)
    assert len(results.read(tmp_path / trials[0].file)) == 20


def test_a_result_of_other_options_does_not_count_and_is_run_again(tmp_path: Path, trial: Trial,
                                                                   capsys: pytest.CaptureFixture[str]) -> None:
    results.add(made(trial, [0.5]), tmp_path / trial.file)
    paper = declared(tmp_path, TINY.replace("lr: 0.05", "lr: 0.06"))
    later = next(paper.items["figure-1"].trials("small", 1))
    assert later.result(tmp_path) is None
    assert pages.load(paper, tmp_path) == {}
    assert "asgd, small, seed 0: was made with lr: 0.05, and declared is 0.06" in capsys.readouterr().err
    results.add(made(later, [0.6]), tmp_path / later.file)
    assert pages.load(paper, tmp_path)["figure-1", "small"]["asgd"][0].column("test_accuracy") == [0.6]


@pytest.mark.parametrize("change", [{"cell": "bsgd"}, {"scale": "paper"}, {"paper": "small"}])
def test_a_line_that_no_cell_is_declared_for_is_named(
        tmp_path: Path, tiny: Paper, trial: Trial, capsys: pytest.CaptureFixture[str], change: Dict[str, Any]) -> None:
    result = dataclasses.replace(made(trial, [0.5]), **change)
    results.add(result, tmp_path / trial.file)
    name = " ".join(map(str, result.key))
    assert pages.load(tiny, tmp_path) == {}
    assert f"small.jsonl`: no cell is declared as {name} for this file; remove the line" in capsys.readouterr().err


# --- measures and claims ----------------------------------------------------------------------------------------------

def test_measures_are_worked_out_of_rows_and_histogram(trial: Trial) -> None:
    result = made(trial, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], {"mean": 1.5, "max": 5, "histogram": {"1": 2, "4": 1, "5": 1}})
    result.asked["cluster"].update(compute={"iteration": "900ms"}, workers=3)  # an iteration takes 3.6 s
    found = {name: measure.of(result) for name, measure in measures.MEASURES.items()}
    assert found == pytest.approx({
        "accuracy": 60, "accuracy5": 60, "early_accuracy": 20, "error": 40, "train_accuracy": 75, "train_error": 25,
        "staleness": 1.5, "staleness_max": 5, "beyond": 25, "speed": 16 * 60 / 216, "speed128": 128 * 60 / 216,
        "hours": 0.06, "throughput": 3 * 16 * 60 / 216, "iteration": 3600, "exposed": 2700, "waiting": 75,
        "seconds90": math.nan, "seconds93": math.nan, "seconds98": math.nan, "learned": 60, "half_train_accuracy": 75,
        "vibration": 0, "later128": 128 * 50 / 180}, nan_ok=True)
    lost = made(trial, [0.1, 0.4, 0.1, 0.2])  # of the second half one step
    lost.rows[-1][2] = None
    assert measures.diverged(lost) and math.isnan(measures.MEASURES["learned"].of(lost))
    shaking = made(trial, [0.1, 0.4, 0.1, 0.2, 0.1, 0.4])  # 10 points down, 30 up: 20 from their mean of 10
    assert measures.MEASURES["vibration"].of(shaking) == pytest.approx(20)
    assert math.isnan(measures.MEASURES["later128"].of(made(trial, [0.1])))
    del result.config["n"]
    assert math.isnan(measures.MEASURES["beyond"].of(result)), "above 2n"
    result.config["epochs"] = 160  # of which five are averaged, also where rows of others were left out
    assert measures.MEASURES["accuracy5"].of(result) == pytest.approx(40)
    rising = made(trial, [0.5, 0.8, 0.96])  # 0.9 after five eighths of the third epoch, the epochs being 36 s long
    assert measures.MEASURES["seconds90"].of(rising) == pytest.approx(2 * 36 + 36 * 0.625)
    for passed in ([0.91, 0.96], [0.91, 0.89, 0.92]):  # the time of an epoch alone
        assert math.isnan(measures.MEASURES["seconds90"].of(made(trial, passed)))
    assert math.isnan(measures.spread([1.0, math.nan])[1]) and math.isnan(measures.MEASURES["waiting"].of(rising))


def test_measures_of_half_the_epochs_go_by_epochs_where_rows_were_left_out(trial: Trial) -> None:
    """Of 160 epochs, the second half of which goes by 10 points up or down; earlier versions kept some rows."""
    whole = made(trial, [0.3] * 80 + [0.4, 0.5] * 40)
    thin = dataclasses.replace(whole, rows=whole.rows[:-6:2] + whole.rows[-6:])
    assert measures.MEASURES["early_accuracy"].of(thin) == pytest.approx(30)
    assert measures.MEASURES["vibration"].of(whole) == pytest.approx(10, rel=0.03)
    assert math.isnan(measures.MEASURES["vibration"].of(thin))


def test_the_interval_is_students() -> None:
    # t of 2 degrees of freedom, 97.5 %: 4.3027; standard deviation of 1, 2, 6: sqrt(7)
    found = measures.estimate([1, 2, 6])
    assert (found.mean, found.seeds) == (3, 3)
    half = pytest.approx(4.3027 * (7 / 3) ** 0.5, rel=1e-4)
    assert found.high - found.mean == half and found.mean - found.low == half


@pytest.mark.parametrize("asgd, ssgd, verdict", [
    ([0.80, 0.81], [0.70, 0.71], claims.HOLDS),  # 10 points each, though the seeds differ by one
    ([0.80, 0.81], [0.40, 0.41], claims.FAILS),  # 40 points
    ([0.80, 0.80], [0.40, 0.60], claims.OPEN),   # 40 and 20
    ([0.80], [0.80], claims.OPEN),               # a single seed
    ([0.80, 0.80], [None, None, 0.80, 0.80], claims.OPEN),  # none in common
])
def test_a_difference_is_judged_by_the_interval_over_common_seeds(tiny: Paper, asgd: List[float], ssgd: List[float],
                                                                  verdict: str) -> None:
    item = tiny.items["figure-1"]
    runs = {("figure-1", "small"): ran(item, asgd=asgd, ssgd=ssgd)}
    assert claims.ruling(tiny, item, item.claims[1], runs).verdict == verdict, "the difference is below 30 points"


def test_a_claim_holds_only_if_all_of_it_does(tiny: Paper) -> None:
    item = tiny.items["figure-1"]
    both = dataclasses.replace(item.claims[0], tests=item.claims[0].tests + item.claims[1].tests)
    runs = {("figure-1", "small"): ran(item, asgd=[0.9] * 2, ssgd=[0.1] * 2)}
    verdicts = [claims.ruling(tiny, item, claim, runs).verdict for claim in (item.claims[0], item.claims[1], both)]
    assert verdicts == [claims.HOLDS, claims.FAILS, claims.FAILS]
    assert claims.ruling(tiny, item, item.claims[2], runs) == claims.Ruling(claims.OPEN, "not run")


def test_one_of_many_comparisons_speaks_against_a_claim_only_if_it_is_surer(tiny: Paper) -> None:
    item = tiny.items["figure-1"]
    runs = {("figure-1", "small"): ran(item, asgd=(0.9, 0.82, 0.98), ssgd=(0.7, 0.2, 0.2))}
    # 20, 62 and 78 points: 53.3, and 17.3 from seed to seed by the root of three. Student's t is 4.30 at 95 %, so the
    # interval begins at -21.1; at 98.33 % it is 7.65, and the interval begins at -79.
    surely = dataclasses.replace(item.claims[1].tests[0], below=-24)
    alone = dataclasses.replace(item.claims[1], tests=(surely,))
    among = dataclasses.replace(item.claims[1], tests=(surely, *item.claims[0].tests * 2))
    assert claims.ruling(tiny, item, alone, runs).verdict == claims.FAILS
    open_one = claims.ruling(tiny, item, among, runs)
    assert open_one.verdict == claims.OPEN and open_one.lacks == "no run is planned"
    said = words.interval(open_one.findings[0])
    assert said == "+53.33 (-78.95 to +185.62 at 98.3 % confidence)", "not the one that is outside"


@pytest.mark.parametrize("by, above, found", [("minus", 2, "8"), ("over", 1, "1.111")])
def test_a_comparison_may_be_against_another(tmp_path: Path, by: str, above: float, found: str) -> None:
    same = "tests: [{of: asgd.accuracy, minus: ssgd.accuracy, below: 30}]"
    more = (f"tests: [{{of: asgd.accuracy, {by}: ssgd.accuracy, than: {{of: asgd.early_accuracy, {by}: "
            f"ssgd.early_accuracy}}, above: {above}}}]")
    paper = declared(tmp_path, TINY.replace(same, more))
    item = paper.items["figure-1"]
    runs = {("figure-1", "small"): ran(item, asgd=[(0.4, 0.8)] * 2, ssgd=[(0.4, 0.72)] * 2)}
    ruled = claims.ruling(paper, item, item.claims[1], runs)
    words = "(ASGD) - (SSGD) against (ASGD) - (SSGD)" if by == "minus" else "(ASGD) / (SSGD) against (ASGD) / (SSGD)"
    finding, = ruled.findings
    assert finding.name == words and f"{finding.mean:.4g}" == found and ruled.verdict == claims.HOLDS


def test_seeds_that_suggested_a_claim_do_not_tell_it(tiny: Paper) -> None:
    item, verdicts = tiny.items["figure-1"], {}
    runs = {("figure-1", "small"): ran(item, asgd=[0.9] * 5)}
    for first in (0, 3, 4, 5):
        claim = dataclasses.replace(item.claims[0], from_seed={"small": first})
        verdicts[first] = claims.ruling(tiny, item, claim, runs)
    assert [one.verdict for one in verdicts.values()] == [claims.HOLDS, claims.HOLDS, claims.OPEN, claims.OPEN]
    assert verdicts[3].findings[0].estimate.seeds == 2 and verdicts[3].scale == "small" and not verdicts[3].planned
    later = dataclasses.replace(item.claims[0], from_seed={"small": 3})
    assert pages._by(later, verdicts[3]) == "scale small, seeds from 3 on"


def test_what_keeps_a_claim_from_being_told_is_said(tmp_path: Path) -> None:
    def ruled(plan: str, *asgd: float) -> Any:
        paper = declared(tmp_path, TINY.replace("small: {", f"small: {{plan: [{plan}], "))
        item = paper.items["figure-1"]
        claim = dataclasses.replace(item.claims[1], from_seed={"small": 3})
        found = claims.ruling(paper, item, claim, {("figure-1", "small"): ran(item, asgd=asgd)})
        return found.why, found.lacks
    assert ruled('{turn: 1, cells: "*", seeds: 5}', 0.9) == (
        "later runs will decide, not those that suggested it", "0 of 4 planned runs so far")
    assert ruled("{turn: 1, cells: asgd, seeds: 5}") == ("not run", "no plan for 1 of its 2 cells")


def test_runs_are_compared_within_a_framework(tiny: Paper) -> None:
    item = tiny.items["figure-1"]
    asgd, ssgd = ran(item, asgd=[0.9] * 2, ssgd=[0.9] * 2).values()
    asgd[0] = dataclasses.replace(asgd[0], versions={"odsgd": "1", "torch": "2.11"})
    found = claims.compared(item, item.claims[1].tests[0], {"asgd": asgd, "ssgd": ssgd})
    assert found.estimate.seeds == 1 and claims.paired(asgd, ssgd) == [1]


def test_a_claim_may_be_told_at_one_scale_only(tiny: Paper) -> None:
    item = tiny.items["figure-1"]
    claim, runs = dataclasses.replace(item.claims[0], scale="paper"), {("figure-1", "small"): ran(item, asgd=[0.9] * 2)}
    assert claims.ruling(tiny, item, claim, runs) == claims.Ruling(
        claims.OPEN, "not run at scale `paper`, which alone decides", lacks="no run is planned")


def test_a_number_that_is_not_finite_settles_nothing(tiny: Paper) -> None:
    item = tiny.items["figure-1"]
    runs = {("figure-1", "small"): ran(item, asgd=[(None,)] * 2)}
    assert claims.ruling(tiny, item, item.claims[0], runs).verdict == claims.OPEN


@pytest.fixture
def planned(tmp_path: Path) -> Paper:
    return declared(tmp_path, TINY.replace("scales: {small: {", 'scales: {medium: {plan: [{turn: 2, cells: "*", seeds: '
                                           '2}, {turn: 1, cells: asgd, seeds: 3}]}, small: {'))


def test_the_plan_is_run_by_turns(planned: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "papers", lambda: [planned])
    assert [(trial.scale.name, trial.cell.name, trial.seed) for trial in cli.planned()] == [
        ("medium", "asgd", 0), ("medium", "asgd", 1), ("medium", "asgd", 2), ("medium", "ssgd", 0),
        ("medium", "ssgd", 1)]


def test_a_claim_is_told_when_its_plan_is_full_and_by_the_seeds_of_the_plan(planned: Paper) -> None:
    item = planned.items["figure-1"]
    learns, same, _ = item.claims

    def ruled(claim: Any, asgd: Sequence[float], ssgd: Sequence[float]) -> claims.Ruling:
        return claims.ruling(planned, item, claim, {
            ("figure-1", "medium"): ran(item, "medium", asgd=asgd, ssgd=ssgd),
            ("figure-1", "small"): ran(item, asgd=[0.4] * 2, ssgd=[0.1] * 2)})
    early = ruled(learns, [0.9, 0.9], [])
    assert early.verdict == claims.FAILS
    assert pages._by(learns, early) == "scale small; 2 of 3 planned runs so far (scale medium)"
    full = ruled(learns, [0.9, 0.9, 0.9, 0.1, 0.1], [])
    assert full.verdict == claims.HOLDS and pages._by(learns, full) == "scale medium, as planned"
    assert full.planned and full.findings[0].estimate.seeds == 3
    assert ruled(same, [0.9, 0.9, 0.9], [0.9]).lacks == "4 of 5 planned runs so far (scale medium)"
    assert ruled(same, [0.9, 0.5, 0.9], [0.9, 0.1]).verdict == claims.OPEN  # though the smaller scale would tell
    later = dataclasses.replace(learns, from_seed={"medium": 1})
    assert ruled(later, [0.1, 0.9, 0.9], []).findings[0].estimate.seeds == 2
    none = ruled(dataclasses.replace(learns, from_seed={"medium": 3}), [0.9] * 9, [])
    assert (none.scale, none.planned) == ("small", False)


def test_what_was_there_before_the_plan_tells_until_the_plan_is_full(tmp_path: Path) -> None:
    paper = declared(tmp_path, TINY.replace("small: {", 'small: {plan: [{turn: 1, cells: asgd, seeds: 4, had: 2}], '))
    item = paper.items["figure-1"]
    ruled = [claims.ruling(paper, item, item.claims[0], {("figure-1", "small"): ran(item, asgd=accuracies)})
             for accuracies in ([0.4, 0.4], [0.4, 0.4, 0.9], [0.4, 0.4, 0.9, 0.9])]
    assert [one.verdict for one in ruled] == [claims.FAILS, claims.FAILS, claims.OPEN]
    assert [(one.planned, one.findings[0].estimate.seeds) for one in ruled] == [(False, 2), (False, 2), (True, 4)]
    assert ruled[1].lacks == "3 of 4 planned runs so far"


def test_a_cell_may_show_the_runs_of_another(tmp_path: Path) -> None:
    text = TINY + ("  gap-a: {caption: c, state: own, measures: [accuracy], scales: {medium: {}}, "
                   "options: {dataset: digits}, cells: {a: {label: 'A, 1', same_as: figure-1/small/asgd}, "
                   "b: {label: B}}, pictures: [{kind: lengths, over: {a: [b]}}]}\n")
    paper = declared(tmp_path, text)
    assert [trial.cell.name for trial in paper.items["gap-a"].trials("medium", 1)] == ["b"]
    plan = text.replace("medium: {}", 'medium: {plan: [{turn: 1, cells: "*", seeds: 2}]}').replace(
        "small: {", "small: {plan: [{turn: 2, cells: asgd, seeds: 3}], ")
    assert [(turn, trial.cell.name, trial.seed) for turn, trial in declared(tmp_path, plan).planned()] == [
        (1, "asgd", 0), (1, "b", 0), (1, "asgd", 1), (1, "b", 1), (2, "asgd", 2)], "each of them once"
    keep(tmp_path, paper.items["figure-1"], asgd=(0.5, 0.7))
    keep(tmp_path, paper.items["gap-a"], "medium", b=(0.6, 0.9))
    page = pages.pages([paper], tmp_path)[tmp_path / "tiny.md"]
    assert "## Gap a\n" in page and "| A, 1 | 60.00 ± 14.14 | 2 |" in page
    assert "\nMade by 4 runs: 0.00 hours of" in page, "each of them counts once"
    from matplotlib.figure import Figure
    axes: Any = Figure().add_subplot()
    gap = paper.items["gap-a"]
    pictures._lengths(axes, gap, gap.pictures[0], {"b": "B"}, pages.load(paper, tmp_path)["gap-a", "medium"],
                      {"B": ("C0", "-")})
    points = axes.containers[0].lines[0]
    assert list(points.get_ydata()) == pytest.approx([15]) and list(points.get_xdata()) == [10]


def test_cells_that_show_the_runs_of_others_are_declared_alike() -> None:
    for item in ITEMS:
        for cell in item.cells.values():
            if cell.same_as:
                of, scale, name = cell.same_as.split("/")
                shown = paper_called(item.paper).trial(of, scale, name, 0)
                assert shown and {**shown.asked["options"], **item.options} == shown.asked["options"], cell
                assert {**shown.asked["cluster"], **item.cluster} == shown.asked["cluster"], cell


# --- runs -------------------------------------------------------------------------------------------------------------

def in_folders(folder: Path) -> run.Folders:
    return run.Folders(None, folder / "results", folder / "runs")


def all_of(item: Item, folders: run.Folders, seeds: int = 1) -> run.Counts:
    said: List[str] = []
    counts = run.run(list(item.trials("small", seeds)), folders, 2, time.monotonic() + 200, said.append)
    assert counts.failed == 0, said
    return counts


@pytest.mark.slow
def test_a_cell_that_was_killed_goes_on_to_the_numbers_of_one_that_was_not(tmp_path: Path, tiny: Paper,
                                                                          trial: Trial) -> None:
    folders, said = in_folders(tmp_path), [""]
    started = run._start(trial, folders, said.append)
    assert started and started.process.poll() is None
    while not list(started.folder.glob("checkpoints/*/manifest.json")):
        assert started.process.poll() is None, (started.folder / "train.log").read_text()
        time.sleep(0.01)
    os.kill(started.process.pid, signal.SIGKILL)
    run._stop([started])
    assert trial.result(folders.results) is None
    assert all_of(tiny.items["figure-1"], folders) == run.Counts(2, 0, 0)
    result = trial.result(folders.results)
    assert result and result.starts == 2 and result.column("epoch") == [1, 2, 3, 4]
    assert result.config["lr"] == 0.05 and result.parameters > 1000 and result.staleness
    assert result.column("test_accuracy")[-1] > 0.5
    assert not (started.folder / "checkpoints").exists()
    assert all_of(tiny.items["figure-1"], folders) == run.Counts(0, 0, 0)  # all is there

    texts = pages.pages([tiny], folders.results)
    assert pages.write([tiny], folders.results) == [*texts]
    page = texts[folders.results / "tiny.md"]
    accuracy = f"{100 * result.column('test_accuracy')[-1]:.2f}"
    assert re.search(rf"\| ASGD \| 99.00 \| {accuracy} \| [\d.]+ \| 1 \|", page)
    shown = re.findall(r"!\[.*?\]\((.*?)\)", page)
    assert shown == ["pictures/tiny-figure-1.svg", "pictures/tiny-figure-2.svg"]
    assert all((folders.results / name).stat().st_size > 1000 for name in shown)
    assert "| The rest. | 3 | **open** | not run |" in page
    assert "1 of 1" not in page
    assert "Of 2 tables and figures, or parts of one: 2 runs here, smaller." in texts[folders.results / "README.md"]


@pytest.mark.slow
def test_a_cell_that_is_a_real_job_has_the_numbers_of_the_virtual_one(tmp_path: Path) -> None:
    paper = declared(tmp_path, TINY.replace("      ssgd: {label: SSGD, options: {kvstore: ssgd}}",
                                            "      ssgd: {label: SSGD, options: {kvstore: ssgd}}\n"
                                            "      job: {label: a job, options: {kvstore: ssgd}, real: true}"))
    trials = [paper.trial("figure-1", "small", name, 0) for name in ("ssgd", "job")]
    folders = in_folders(tmp_path)
    assert run.run([trial for trial in trials if trial], folders, 1, time.monotonic() + 200, print).finished == 2
    virtual, real = (trial.result(folders.results) for trial in trials if trial)
    assert virtual and real and virtual.asked["cluster"] != real.asked["cluster"]
    assert real.column("test_accuracy") == pytest.approx(virtual.column("test_accuracy"), abs=0.01)


@pytest.mark.slow
def test_a_result_is_run_again_and_compared(tmp_path: Path, tiny: Paper, monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "SOURCES", ("tiny",))
    monkeypatch.setattr(cli, "paper_called", lambda name: tiny)
    folders = in_folders(tmp_path)
    trial = tiny.trial("figure-1", "small", "ssgd", 0)
    assert trial is not None and run.run([trial], folders, 1, time.monotonic() + 200, print).finished == 1
    again = ["--again", "tiny/figure-1", "small", "ssgd", "0", "--results", str(folders.results)]
    assert cli.main(again) == 0
    assert capsys.readouterr().out.endswith("tiny/figure-1 ssgd, small, seed 0: the same numbers again\n")
    result = trial.result(folders.results)
    assert result
    result.rows[2][3] = 0.123
    results.add(result, folders.results / trial.file)
    assert cli.main(again) == EXIT_FAILURE
    said = capsys.readouterr().out
    other = "seed 0: other numbers than before, from epoch 3 on: train_accuracy 0.#, and 0.123 before\n"
    assert re.sub(r"0\.\d+, and", "0.#, and", said).endswith(other)
    elsewhere = dataclasses.replace(result, rows=[[*row[:3], 0.9, *row[4:]] for row in result.rows],
                                    machine={**result.machine, "vectors": "mmx"})
    assert run.differing(result, elsewhere).endswith(
        f"; processors add up in orders of their own (vectors: mmx, and {run.vectors()} before)")


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where folders go that are made for a while."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_second_run_that_fails_leaves_its_log(tmp_path: Path, scratch: Path) -> None:
    text = TINY.replace("model: mlp", "model: mlp, weights: /nonexistent")
    trial = next(declared(tmp_path, text).items["figure-1"].trials("small", 1))
    said: List[str] = []
    with pytest.raises(ConfigError, match="its second run failed"):
        run.again(trial, run.Folders(None, tmp_path, tmp_path), said.append)
    log = re.search(r"all of it is in `(.*)`", said[-1])
    assert log and log[1].startswith(str(scratch)) and "/nonexistent" in Path(log[1]).read_text()


@pytest.mark.parametrize("number, status", [(signal.SIGINT, EXIT_INTERRUPTED), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_second_run_can_be_stopped(tmp_path: Path, tiny: Paper, trial: Trial, scratch: Path, number: int,
                                     status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "SOURCES", ("tiny",))
    monkeypatch.setattr(cli, "paper_called", lambda name: tiny)
    monkeypatch.setattr(cli, "_say", lambda text: signal.raise_signal(number))
    results.add(made(trial, [0.5]), tmp_path / trial.file)
    assert cli.main(["--results", str(tmp_path), "--again", "tiny/figure-1", "small", "asgd", "0"]) == status
    assert not [*scratch.iterdir()]


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_servers_counted_does_its_last_epoch_again(
        tmp_path: Path, tiny: Paper, trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [("a1", "7e"), *[("b2", "8f")] * 2, ("a1", "7e")]
    monkeypatch.setattr(run, "source", lambda: sources.pop(0))
    folders, said = in_folders(tmp_path), [""]
    started = run._start(trial, folders, said.append)
    assert started and started.process.wait(300) == 0
    started.lock.close()
    whole = run.collected(trial, started.folder)
    metrics = started.folder / "metrics.jsonl"
    lines = [line for line in metrics.read_text().splitlines() if json.loads(line)["event"] not in ("staleness", "end")]
    metrics.write_text("\n".join(lines) + "\n")
    assert run.run([trial], folders, 1, time.monotonic() + 200, said.append).finished == 1
    result = trial.result(folders.results)
    assert result and result.numbers() == whole.numbers() and result.starts == 3
    assert (whole.versions["commit"], whole.versions["tree"]) == ("a1", "7e")
    assert (result.versions["commit"], result.versions["tree"]) == ("a1, b2", "7e, 8f")
    assert "Their source had 2 states" in pages.pages([tiny], folders.results)[folders.results / "tiny.md"]


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """By another command."""
    folder.mkdir(parents=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_a_trial_that_another_command_runs_is_left_to_it(tmp_path: Path, trial: Trial) -> None:
    folders, said = in_folders(tmp_path), [""]
    with held(folders.runs / trial.folder):
        assert run.run([trial], folders, 1, time.monotonic() + 100, said.append) == run.Counts(0, 0, 1)
    assert said[-1].endswith(f"left to the command that is running it in `{folders.runs / trial.folder}`")


def test_a_trial_that_another_command_finishes_meanwhile_is_not_left(tmp_path: Path, trial: Trial) -> None:
    folders = in_folders(tmp_path)
    with held(folders.runs / trial.folder):
        counts = run.run([trial], folders, 1, time.monotonic() + 100,
                         lambda text: (results.add(made(trial, [0.5]), folders.results / trial.file), None)[1])
    assert counts == run.Counts(0, 0, 0)


@pytest.mark.slow
def test_two_commands_run_nothing_twice(tmp_path: Path, tiny: Paper) -> None:
    folders, said = in_folders(tmp_path), [""]
    trials = list(tiny.items["figure-1"].trials("small", 1))
    others: List[run.Counts] = []

    def say(text: str) -> None:
        said.append(text)
        if text.endswith("asgd, small, seed 0: begins") and not others:  # the other command meanwhile runs the rest
            others.append(run.run(trials, folders, 1, time.monotonic() + 100, said.append))
        if ": done: " in text:
            with open(folders.runs / trials[0].folder / "lock") as lock, pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    assert run.run(trials, folders, 1, time.monotonic() + 100, say) == run.Counts(1, 0, 0)
    assert others == [run.Counts(1, 0, 1)]
    assert said[-1] == "tiny/figure-1 ssgd, small, seed 0: another command has finished it"


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=folder, check=True,
                          stdout=subprocess.PIPE, text=True).stdout


def test_a_result_names_its_commit_and_a_tree_that_survives_a_rebase(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    for name in run.DEPENDS_ON:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.py").write_text(name)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    commit, tree = SOURCE(tmp_path / "odsgd")
    assert commit == git(tmp_path, "rev-parse", "--short", "HEAD").strip()
    listed = git(tmp_path, "ls-tree", "HEAD", *run.DEPENDS_ON)
    assert hashlib.sha256(listed.encode()).hexdigest().startswith(tree) and len(tree) == 16
    (tmp_path / "README").write_text("results, docs")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "two")
    assert SOURCE(tmp_path)[0] != commit and SOURCE(tmp_path)[1] == tree
    (tmp_path / "notes").write_text("not of the packages")
    assert SOURCE(tmp_path)[1] == tree
    (tmp_path / "kvstore" / "b.py").write_text("new")
    with pytest.raises(ConfigError, match=r"names the commit that ran, and `kvstore/b\.py` is in none; commit it"):
        SOURCE(tmp_path)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "three")
    assert SOURCE(tmp_path)[1] != tree


def test_what_is_in_no_repository_makes_no_results(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"git knows none of .*: fatal: not a git repository.*; run this in a clone"):
        SOURCE(tmp_path)


LOST = {("5709844f", "0e8d7d14ceee3a0c")}
"""What ran on a GPU names a commit that was lost with its machine (docs/how-to/reproduce.md)."""


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="these files are in no repository")
def test_trees_of_results_are_those_of_their_commits() -> None:
    files = (ROOT / "docs/results/data").glob("*/*.jsonl")
    sources = {(result.versions["commit"], result.versions["tree"]) for path in files
               for result in results.read(path).values() if "tree" in result.versions} - LOST
    shallow = git(ROOT, "rev-parse", "--is-shallow-repository").strip() == "true"
    for commit, tree in sources if not shallow else ():
        trees = [hashlib.sha256(git(ROOT, "ls-tree", "--full-tree", one, *run.DEPENDS_ON).encode()).hexdigest()[:16]
                 for one in commit.split(", ")]
        assert ", ".join(dict.fromkeys(trees)) == tree, commit


def test_no_time_is_no_run(tmp_path: Path, tiny: Paper) -> None:
    trials = list(tiny.items["figure-1"].trials("small", 3))
    assert [trial.seed for trial in trials] == [0, 0, 1, 1, 2, 2]
    assert run.run(trials, in_folders(tmp_path), 2, time.monotonic(), print) == run.Counts(0, 0, 6)


def test_a_run_that_fails_is_named_with_its_reason(tmp_path: Path) -> None:
    text = TINY.replace("model: mlp", "model: mlp, weights: /nonexistent")
    trial = next(declared(tmp_path, text).items["figure-1"].trials("small", 1))
    said: List[str] = []
    assert run.run([trial], in_folders(tmp_path), 1, time.monotonic() + 100, said.append) == run.Counts(0, 1, 0)
    assert re.search(r"tiny/figure-1 asgd, small, seed 0: failed: .*/nonexistent.*train.log", said[-1])


# --- the pages that are there -----------------------------------------------------------------------------------------

def test_the_pages_are_those_that_the_files_make() -> None:
    """To write them anew: scripts/reproduce --report."""
    for path, text in pages.pages(papers(), ROOT / "docs" / "results").items():
        assert path.read_text(encoding="utf-8") == text, path.name


def test_how_soon_methods_reach_an_accuracy_stands_side_by_side(tmp_path: Path) -> None:
    paper = declared(tmp_path, TINY.replace("[accuracy, staleness]", "[accuracy, seconds90]"))
    keep(tmp_path, paper.items["figure-1"], asgd=[(0.8, 1.0)] * 2, ssgd=[0.7, 0.6, 1.0])
    text = pages.pages([paper], tmp_path)[tmp_path / "tiny.md"]
    assert "| ASGD | **54.00** (100.00) |\n| SSGD | - (65.00) |" in text


def test_methods_without_a_seed_in_common_have_nothing_side_by_side(tmp_path: Path) -> None:
    paper = declared(tmp_path, TINY.replace("[accuracy, staleness]", "[accuracy, seconds90]"))
    keep(tmp_path, paper.items["figure-1"], asgd=[0.95], ssgd=[None, 0.95])
    assert "| ASGD |  |\n| SSGD |  |" in pages.pages([paper], tmp_path)[tmp_path / "tiny.md"]


def test_a_curve_over_time_is_the_mean_of_its_seeds_at_the_epochs_that_all_have(tiny: Paper, trial: Trial) -> None:
    from matplotlib.figure import Figure
    fast, slow = (made(trial, accuracies) for accuracies in ([0.5, 0.7], [0.7, 0.9, 0.95]))
    for row in slow.rows:
        row[-1] = 3 * float(row[-1] or 0)
    for seeds in ({0: fast, 1: slow}, {0: slow, 1: fast}):
        axes: Any = Figure().add_subplot()
        pictures._curves(axes, trial.item, trial.item.pictures[0], {"asgd": "ASGD"}, {"asgd": seeds},
                         {"ASGD": ("C0", "-")})
        line = axes.lines[0]
        assert list(line.get_xdata()) == pytest.approx([72, 144])  # means of 36 and 108 s, of 72 and 216 s
        assert list(line.get_ydata()) == pytest.approx([60, 80])


def test_panels_that_show_the_same_at_a_scale_have_one_axis(tiny: Paper, trial: Trial) -> None:
    from matplotlib.figure import Figure
    high, low = (made(trial, accuracies) for accuracies in ([0.8, 0.9, 0.9, 0.9, 0.9], [0.1, 0.8, 0.8, 0.8, 0.85]))
    curve, colours = dataclasses.replace(trial.item.pictures[0], kind="curve", y="accuracy"), {"ASGD": ("C0", "-")}
    every: Any = Figure().subplots(3)
    panels = [pictures.Panel(curve, scale, {"asgd": {0: run}}) for run, scale in ((high, "small"), (low, "small"),
                                                                                 (high, "paper"))]
    names = [{"asgd": "ASGD"}] * 3
    for axes, one in zip(every, panels):
        pictures._curves(axes, trial.item, curve, names[0], one.cells, colours)
    pictures._heights(trial.item, panels, every, names, colours)
    assert every[0].get_ylim() == every[1].get_ylim() != every[2].get_ylim()
    first, last = every[0].get_ylim()
    assert 10 < first < 80 < 90 < last, "without the steep beginning"
    assert [axes.get_title(loc="right") for axes in every] == ["", "", "the paper: 99.0 ↑"]
    assert [len(axes.lines) for axes in every] == [2, 2, 1], "the paper's 99 is near only in the first two"


def test_the_overview_tells_the_papers_scale_from_a_smaller_one(tmp_path: Path) -> None:
    text = TINY.replace("scales: {small:", "scales: {paper: {}, small:") + (
        "  figure-3: {caption: c, state: run, scales: {small: {}}, options: {dataset: digits, kvstore: ssgd}, "
        "cells: {a: {label: A}}}\n")
    paper = declared(tmp_path, text)
    for scale in ("paper", "small"):
        keep(tmp_path, paper.items["figure-1"], scale, asgd=[0.5])
    keep(tmp_path, paper.items["figure-3"], a=[0.5])
    overview = pages.pages([paper], tmp_path)[tmp_path / "README.md"]
    assert ("Of 3 tables and figures, or parts of one: 2 runs here, a part at the paper's scale, 1 runs here, smaller."
            ) in overview


def test_how_large_an_item_runs_follows_from_what_has_run(tmp_path: Path) -> None:
    paper = declared(tmp_path, TINY.replace("scales: {small:", "scales: {paper: {}, medium: {}, small:"))
    item, said = paper.items["figure-1"], []
    for scale, cell in (("small", ""), ("small", "asgd"), ("small", "ssgd"), ("paper", "asgd"), ("paper", "ssgd")):
        keep(tmp_path, item, scale, **({cell: [0.5]} if cell else {}))
        said.append(words.state_of(paper, item, pages.load(paper, tmp_path)))
    assert said == ["to be run here", "runs here, a part smaller", "runs here, smaller",
                    "runs here, smaller, a part at the paper's scale", "runs here, at the paper's scale"]


def test_what_diverged_says_so(tmp_path: Path, tiny: Paper) -> None:
    for trial in tiny.items["figure-1"].trials("small", 1):
        result = made(trial, [0.1])
        result.rows[-1][2] = None if trial.cell.name == "asgd" else 0.1
        results.add(result, tmp_path / trial.file)
    page = pages.pages([tiny], tmp_path)[tmp_path / "tiny.md"]
    assert "| ASGD | 99.00 | 10.00 (diverged) |" in page and "| SSGD |  | 10.00 |" in page


def test_a_smaller_scale_says_what_differs_at_every_scale_too(tmp_path: Path) -> None:
    paper = declared(tmp_path, TINY.replace("scales: {small:", "scales: {paper: {differs: [the data]}, small:"))
    text = pages.pages([paper], tmp_path)[tmp_path / "tiny.md"]
    assert "- all of it\n\nAnd, unless these say otherwise, what differs at every scale:\n\n- the data\n" in text


def test_every_picture_is_on_a_page() -> None:
    folder = ROOT / "docs" / "results"
    texts = [page.read_text(encoding="utf-8") for page in folder.glob("*.md")]
    shown = {name for text in texts for name in re.findall(r"\((pictures/.*?)\)", text)}
    assert shown == {f"pictures/{path.name}" for path in (folder / "pictures").iterdir()}


def test_a_verdict_about_times_is_the_simulators_and_stands_with_its_size(tmp_path: Path) -> None:
    text = TINY.replace("      rest: {", """\
      fast: {says: Fast., where: "4", tests: [{of: asgd.speed, above: 0, paper: 7}]}
      sure: {says: Sure., where: "5", certain: true, tests: [{of: asgd.hours, above: 0}]}
      rest: {""")
    paper = declared(tmp_path, text.replace("    state: run\n", "    state: run\n    examples: 9600\n", 1))
    keep(tmp_path, paper.items["figure-1"], asgd=[0.9] * 2)
    texts = pages.pages([paper], tmp_path)
    page, overview = texts[tmp_path / "tiny.md"], texts[tmp_path / "README.md"]
    assert "| Fast. | 4 | **reproduced in the simulator** |" in page and "| It learns. | 1 | **holds** |" in page
    assert "| Sure. | 5 | **reproduced in the simulator, where it cannot fail** |" in page
    row = next(line for line in overview.splitlines() if "Fast." in line)
    assert row.startswith("| [Figure 1](tiny.md#figure-1): Fast. | 7 |") and row.endswith("| 2 | ✓ |")
    assert next(line for line in overview.splitlines() if "It learns." in line).endswith(" % | 2 | ✓ |")


def test_predictions_have_an_error_and_what_was_fitted_says_so(tmp_path: Path) -> None:
    text = TINY.replace("    measures: [accuracy, staleness]\n", "    measures: [accuracy]\n    fitted: ssgd\n")
    paper = declared(tmp_path, text.replace("SSGD, options", "SSGD, paper: {accuracy: 50}, options"))
    keep(tmp_path, paper.items["figure-1"], asgd=[0.495], ssgd=[0.495])
    page = pages.pages([paper], tmp_path)[tmp_path / "tiny.md"]
    assert "| ASGD | 99.00 | 49.50 | -50 % | 1 |\n| SSGD | 50.00 | 49.50 | -1 %, fitted | 1 |" in page
    assert "Of the 1 numbers that were fitted the median error is 1 %, at most 1 %; of the 1 predictions 50 %" in page


def test_a_text_has_numbers_of_ours_that_are_worked_out(tmp_path: Path, tiny: Paper) -> None:
    place = "{tiny/figure-1/small: asgd.accuracy%s}"
    text = " | ".join([*(place % rest for rest in ("", " - ssgd.accuracy", " / ssgd.accuracy of seed 1")), "{a: b}",
                       "{other/figure-1/small: asgd.accuracy}", "{tiny/figure-1/paper: asgd.accuracy}"])
    keep(tmp_path, tiny.items["figure-1"], asgd=(0.5, 0.8), ssgd=(0.4, 0.4))
    # differences of 10 and 40 points: 25, and 21.21 by the root of two, times Student's 12.71
    assert words.filled(text, [tiny], {"tiny": pages.load(tiny, tmp_path)}) == (
        "65.00 | +25.00 (-165.59 to +215.59) | × 2 | {a: b} | not run | not run")


def test_numbers_in_the_texts_of_the_declarations_are_there() -> None:
    loaded = {paper.name: pages.load(paper, ROOT / "docs" / "results") for paper in papers()}
    texts = [path.read_text(encoding="utf-8") for path in declarations.FOLDER.glob("*.yaml")]
    found = [place[0] for text in [*texts, front.LEAD] for place in words.NUMBER.finditer(text)]
    assert len(found) > 10
    assert not [place for place in found if words.filled(place, papers(), loaded) in (place, "not run")]


def test_a_comparison_stands_at_every_scale_and_a_length_without_a_claim(tmp_path: Path) -> None:
    paper = declared(tmp_path, TINY.replace("scales: {small:", "scales: {paper: {}, small:").replace(
        "{kind: bars}", "{kind: lengths, over: {asgd: [ssgd]}}"))
    for scale, seeds in (("paper", 1), ("small", 2)):
        keep(tmp_path, paper.items["figure-1"], scale, asgd=[0.9] * seeds, ssgd=[0.9] * seeds)
    page = pages.pages([paper], tmp_path)[tmp_path / "tiny.md"]
    assert "| 1 | ASGD | test accuracy, % | above 50 | 99 | 90 (one seed) | 1 | paper, does not decide |" in page
    assert "| 1 | ASGD | test accuracy, % | above 50 | 99 | 90 | 2 | small |" in page
    assert "|  | (SSGD) - (ASGD) | test accuracy, % |  |  | +0.00 | 2 | small, does not" in page


def test_curves_of_a_larger_scale_stand_before_those_of_most_cells(tmp_path: Path) -> None:
    more = "      ssgd: {label: SSGD, options: {kvstore: ssgd}}\n"
    paper = declared(tmp_path, TINY.replace("scales: {small:", "scales: {paper: {}, medium: {}, small:").replace(
        more, more + "      third: {label: Third}\n"))
    for scale, cells in (("paper", ("asgd",)), ("medium", ("asgd", "ssgd")), ("small", ("asgd", "ssgd", "third"))):
        for cell in cells:
            trial = paper.trial("figure-1", scale, cell, 0)
            assert trial
            results.add(made(trial, [0.5], {"mean": 1, "max": 1, "histogram": {"1": 1}}), tmp_path / trial.file)
    drawn = pages._drawn(paper, paper.items["figure-1"], pages.load(paper, tmp_path))
    assert [(one.scale, one.picture.kind) for one in drawn] == [
        ("medium", "curve"), ("small", "curve"), ("small", "histogram"), ("small", "bars")]
    assert pages._sizes(paper.items["figure-1"], drawn) == "scale medium; 1 seed; scale small; 1 seed"


def test_another_number_in_a_file_is_another_page(tmp_path: Path, tiny: Paper, trial: Trial) -> None:
    texts = []
    for accuracy in (0.5, 0.5001):
        results.add(made(trial, [accuracy]), tmp_path / trial.file)
        texts.append(pages.pages([tiny], tmp_path)[tmp_path / "tiny.md"])
    assert texts[0] != texts[1] and "50.00" in texts[0] and "50.01" in texts[1]


def test_bars_can_be_divided_by_those_of_another_cell(tmp_path: Path) -> None:
    paper = declared(tmp_path, TINY.replace("{kind: bars}", "{kind: bars, over: {ssgd: [asgd]}}").replace(
        "SSGD, options: {kvstore: ssgd}", "SSGD, options: {kvstore: ssgd}, paper: {accuracy: 66}"))
    item = paper.items["figure-1"]
    picture, cells = item.pictures[2], ran(item, asgd=(0.9, 0.8), ssgd=(0.6,))
    assert picture.cells == ("asgd",)
    # seed 1 has no other to be divided by, so it is by the mean
    assert [pictures._base(picture, "asgd", cells, seed) for seed in (0, 1)] == pytest.approx([60, 60])
    assert pictures._papers_own(picture, item, "asgd") == 1.5
    assert pictures._papers_own(picture, item, "ssgd") == 66
    drawn = []
    for name in ("once.svg", "again.svg"):
        pictures.draw("Bars", "small", item, [pictures.Panel(picture, "small", cells)], tmp_path / name)
        drawn.append((tmp_path / name).read_text(encoding="utf-8"))
    assert drawn[0] == drawn[1] and "the paper&#39;s" in drawn[0].replace("the paper's", "the paper&#39;s")


# --- the command ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("flags, complaint", [
    ("od-sgd/tabel-2", "unknown table or figure `od-sgd/tabel-2`; did you mean `od-sgd/table-2`? "
     "`scripts/reproduce --list` lists all"),
    ("", "expected tables or figures to run, as od-sgd/table-2; or --plan, --list, --report"),
    ("od-sgd/table-3", "od-sgd/table-3 has nothing to run: preset"),
    ("sasgd/figure-8", "sasgd/figure-8 has nothing to run: The data are the authors' own"),
    ("od-sgd/table-4 --scale paper", "od-sgd/table-4 has no scale `paper`; it has small"),
    ("od-sgd/table-6 --cells wp9", "no cell is called `wp9`; there are sgd, ssgd, wp0"),
    ("od-sgd/table-6 --budget 2", "expected a time with its unit, as 90s, 30m or 2h, got `2`"),
    ("od-sgd/table-6 --seeds 0", "expected a whole number from 1 on, got `0`"),
    ("od-sgd/table-6 --scale tiny", "invalid choice: 'tiny'"),
    ("od-sgd/table-6", "dataset `cifar10` needs data_dir, the folder of its files (--data-dir DIR)"),
    ("od-sgd/table-1 --data-dir FOLDER", "FOLDER/train-images-idx3-ubyte"),
    ("od-sgd/table-6 --data-dir FOLDER/none", "no folder `FOLDER/none`"),
    ("--list od-sgd/table-6", "`od-sgd/table-6` is not used with --list; leave it out"),
    ("--report --seeds 3", "`--seeds` is not used with --report"),
    ("--report --list", "`--report` is not used with --list"),
    ("--again tiny/a small b 0 --cells x", "`--cells` is not used with --again"),
    ("--plan --seeds 2", "`--seeds` is not used with --plan"),
])
def test_a_mistake_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, complaint: str) -> None:
    words = [word.replace("FOLDER", str(tmp_path)) if "FOLDER" in word else word for word in flags.split()]
    words = [*words, "--results", str(tmp_path), "--runs", str(tmp_path / "runs")]
    assert cli.main(words) == EXIT_USAGE
    error = capsys.readouterr().err
    assert complaint.replace("FOLDER", str(tmp_path)) in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name, complaint", [
    ("od-sgd/table-1 small nag 0", "no cell is declared as od-sgd/table-1 small nag 0; expected PAPER/ITEM, scale"),
    ("od-sgd small ssgd 0", "no cell is declared as od-sgd small ssgd 0"),
    ("nobody/table-1 small ssgd 0", "no cell is declared as nobody/table-1 small ssgd 0"),
    ("od-sgd/table-1 small ssgd -", "no cell is declared as od-sgd/table-1 small ssgd -; expected PAPER/ITEM, scale"),
    ("od-sgd/table-1 small ssgd 0", "od-sgd/table-1 ssgd, small, seed 0: no result of it in"),
])
def test_a_result_that_is_not_there_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str,
                                                     complaint: str) -> None:
    assert cli.main(["--results", str(tmp_path), "--again", *name.split()]) == EXIT_USAGE
    assert complaint in capsys.readouterr().err


def test_the_list_has_every_table_and_figure_and_says_how_or_why(tmp_path: Path,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--list", "--results", str(tmp_path)]) == 0
    words: Dict[str, List[str]] = {}  # by item: its state, its line, and the one below
    state = ""
    for line in capsys.readouterr().out.splitlines():
        if re.match(r"  \S", line):
            words[line.split()[0]] = [state, line]
        elif line.startswith("   "):
            words[[*words][-1]].append(line.strip())
        else:
            state = line
    assert {*words} == {item.full_name for item in ITEMS}
    assert words["sasgd/figure-3"] == [
        "Runs here:", words["sasgd/figure-3"][1], "Caffe's CIFAR-10 network instead of the paper's, which "
        "computes five times as long"]
    assert words["od-sgd/figure-19"][2:] == ["the runs of table-6"]
    assert words["od-sgd/table-3"][0] == "Needs ImageNet or GPUs; a preset is ready:"
    assert words["od-sgd/table-3"][2:] == ["preset configs/imagenet_resnet50_k80.yaml"]
    assert words["sasgd/figure-8"][::2] == ["Cannot be run here:", "The data are the authors' own and not public."]
    assert all(len(words[item.full_name]) == 3 for item in ITEMS
               if item.state in ("preset", "none") or (item.state == "run" and "small" in item.scales))


def test_a_figure_that_shows_the_runs_of_another_runs_those() -> None:
    chosen = cli.chosen(named(["od-sgd/figure-19"]), "small", "wp[0-5]", 1)
    assert [trial.cell.name for trial in chosen] == [f"wp{n}" for n in range(6)]
    assert {trial.file for trial in chosen} == {"data/od-sgd/table-6-small.jsonl"}


def test_a_whole_paper_is_all_that_has_cells() -> None:
    assert {item.name for item in named(["delayed-update"])} == {"figure-5", "table-2", "table-3"}
