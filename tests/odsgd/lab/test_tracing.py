"""Timelines: a real job's, and hand-made ones with shares, clocks and accidents that are known."""
from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import pytest

from kvstore.tracing.trace import Bar
from odsgd.cli import main
from odsgd.timeline.draw import COLOURS, GREY, figure
from odsgd.timeline.summary import begins_of, shares, table
from odsgd.timeline.timeline import MERGED, Timeline, Track, read_timeline
from odsgd.training.step import virtual
from tests.jobs import launch
from tests.odsgd.training.runs import records, tiny

Stretch = Tuple[str, float, float, Dict[str, Any]]
"""Stage, start, end and arguments of a bar."""

STAGES_OF = {"worker": {"compute", "gather", "exchange", "copy", "local update", "scatter"},
            "server": {"merge", "update"}}


def track(role: str = "worker", rank: int = 0, boot: str = "a", job: str = "j", bars: Sequence[Stretch] = ()) -> Track:
    about = {"role": role, "rank": rank, "host": boot, "boot": boot, "job": job, "wall_s": 1000.0, "monotonic_s": 10.0}
    return Track(about, [Bar(stage, stage, start, end, args) for stage, start, end, args in bars])


def leave(folder: Path, *tracks: Track) -> Path:
    """Files as recorders leave them."""
    folder.mkdir(exist_ok=True, parents=True)
    for pid, one in enumerate(tracks):
        events: List[Dict[str, Any]] = [{"ph": "M", "name": "odsgd", "pid": pid, "tid": 0, "args": one.about}]
        events += [{"ph": "X", "name": bar.name, "cat": bar.stage, "pid": pid, "tid": 0, "ts": 1e6 * bar.start_s,
                    "dur": 1e6 * (bar.end_s - bar.start_s), "args": bar.args} for bar in one.bars]
        text = "[\n" + ",\n".join(map(json.dumps, events)) + "\n]\n"
        (folder / f"{one.about['role']}-{one.about['rank']}.json").write_text(text)
    return folder


def ten_seconds(iteration: int, exchange: Tuple[float, float]) -> List[Stretch]:
    """One iteration: compute in two parts, for 6 of 10 s, and an exchange."""
    start = 10.0 * iteration
    return [("compute", start, start + 4, {"iteration": iteration}),
            ("compute", start + 4, start + 6, {"iteration": iteration}),
            ("exchange", start + exchange[0], start + exchange[1], {"bucket": 1, "bytes": 4, "round": iteration}),
            ("gather", start, start + 10, {"bucket": 1, "bytes": 4, "round": iteration})]


KNOWN = track(bars=[bar for t in range(4) for bar in ten_seconds(t, (5, 8))] + [
    ("exchange", 12.0, 15.5, {"bucket": 2, "bytes": 4, "round": 0}),
    ("exchange", 29.0, 33.0, {"bucket": 2, "bytes": 4, "round": 1})])


# --- summary ----------------------------------------------------------------------------------------------------------

def test_the_shares_of_a_known_timeline(tmp_path: Path) -> None:
    # Iterations 1 and 2, seconds 10 to 30: compute 12; exchanges 12-18, 25-28, 29-30: 10, of which 5 beside compute.
    share, = shares(read_timeline(leave(tmp_path, KNOWN)))
    assert share.iterations == 2 and share.iteration_s == pytest.approx(10)
    assert (share.compute, share.hidden, share.exposed, share.idle) == pytest.approx((0.6, 0.25, 0.25, 0.15))


def test_one_iteration_can_be_looked_at(tmp_path: Path) -> None:
    share, = shares(read_timeline(leave(tmp_path, KNOWN)), 2, 3)  # 5-8 and 9-10 of 10 seconds
    assert share.iterations == 1
    assert (share.compute, share.hidden, share.exposed, share.idle) == pytest.approx((0.6, 0.1, 0.3, 0.1))


def test_the_summary_is_a_table_and_names_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "summary", str(leave(tmp_path / "known", KNOWN))]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "known", "worker  iterations  ms each  compute  hidden  exposed    idle",
        "0                2  10000.0   60.0 %  25.0 %   25.0 %  15.0 %"]


def test_timelines_of_folders_of_the_same_name_are_told_apart(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [leave(tmp_path / name / "traces", KNOWN) for name in ("one", "two")]
    assert main(["trace", "summary", *map(str, folders)]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "traces" in line] == ["one/traces", "two/traces"]
    monkeypatch.chdir(folders[0])
    for here in (".", "worker-0.json"):
        assert main(["trace", "summary", here]) == 0
        assert capsys.readouterr().out.startswith("traces\n")


def test_a_share_of_nothing_is_not_less_than_nothing() -> None:
    """Sums of floats come out at -1e-16 here."""
    bars = [bar for t in range(9) for bar in [("compute", t, t + 0.22, {"iteration": t}),
                                              ("exchange", t + 0.22, t + 0.6, {"bucket": 1})]]
    share, = shares(Timeline("one", [track(bars=bars)], []))
    assert share.hidden == 0 and "22.0 %   0.0 %   38.0 %  40.0 %" in table([share])


@pytest.mark.parametrize("arguments, message", [
    (["summary", "{}", "--iterations", "2:9"], "worker 0: iterations 2:9 are not in the trace, which has 0 to 3"),
    (["summary", "{}", "--iterations", "2"], "expected FIRST:STOP"),
    (["summary", "{}/nothing"], "cannot read"),
    (["merge", "{}/empty"], "no trace in"),
    *((["summary", f"{{}}/{name}"], "is no trace of odsgd")
      for name in ("other.json", "object.json", "metrics.jsonl", "list.json", "figure.png")),
    (["merge", "{}", "-o", "{}/nowhere/x.json"], "nowhere/x.json: No such file"),
    (["sumary"], "did you mean `summary`?")])
def test_what_is_wrong_is_said_in_a_line(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: List[str], message: str) -> None:
    leave(tmp_path, KNOWN)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    (tmp_path / "object.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"event": "start"}\n{"event": "epoch"}\n')
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "figure.png").write_bytes(b"\x89PNG\xff")
    assert main(["trace", *(word.format(tmp_path) for word in arguments)]) == 64
    complaint = capsys.readouterr().err
    assert message in complaint and complaint.count("\n") == 1


# --- files ------------------------------------------------------------------------------------------------------------

def test_a_merged_file_reads_like_its_parts(tmp_path: Path) -> None:
    update = track("server", 0, bars=[("update", 7.0, 7.5, {"bucket": 1, "bytes": 4, "round": 0})])
    folder = leave(tmp_path, KNOWN, update)
    assert main(["trace", "merge", str(folder), "-o", str(tmp_path / "one.json")]) == 0
    merged, parts = read_timeline(tmp_path / "one.json"), read_timeline(folder)
    assert [one.name for one in merged.tracks] == ["worker 0", "server 0"]
    assert [one.about for one in merged.tracks] == [one.about for one in parts.tracks]
    assert shares(merged) == shares(parts)


def test_workers_come_in_the_order_of_their_ranks(tmp_path: Path) -> None:
    workers = [track(rank=rank) for rank in range(12)]
    assert [one.about["rank"] for one in read_timeline(leave(tmp_path, *workers)).workers] == list(range(12))


def test_a_killed_process_loses_only_its_last_line(tmp_path: Path) -> None:
    path = leave(tmp_path, KNOWN) / "worker-0.json"
    path.write_text(path.read_text()[:-30])
    assert len(read_timeline(tmp_path).tracks[0].bars) == len(KNOWN.bars) - 1


def test_a_process_that_was_killed_at_once_is_left_out(tmp_path: Path) -> None:
    (leave(tmp_path, KNOWN) / "server-0.json").touch()
    assert [one.name for one in read_timeline(tmp_path).tracks] == ["worker 0"]


def test_what_an_earlier_job_left_is_not_mixed_in(tmp_path: Path) -> None:
    leave(tmp_path, KNOWN, track(rank=1, job="another", bars=[("compute", 0.0, 1.0, {"iteration": 0})]))
    assert [one.name for one in read_timeline(tmp_path).tracks] == ["worker 0"]


def test_workers_of_an_earlier_job_of_the_same_name_are_not_mixed_in(tmp_path: Path) -> None:
    """torchrun's jobs are called alike."""
    leave(tmp_path, track(), track(rank=1), track(rank=2), track("server", 2))
    timeline = read_timeline(leave(tmp_path, *(Track({**track(rank=rank).about, "workers": 2}, []) for rank in (0, 1))))
    assert [one.name for one in timeline.tracks] == ["worker 0", "worker 1", "server 2"]


# --- clocks -----------------------------------------------------------------------------------------------------------

def rounds(latency: float, lag: float = 0.0) -> List[Stretch]:
    """A worker's exchanges: round t begins at t and takes as long as two messages and the update between them."""
    return [("exchange", t + lag, t + lag + 2 * latency + 0.01, {"bucket": 1, "round": t}) for t in range(5)]


def test_another_host_s_clock_is_set_by_what_comes_before_what(tmp_path: Path) -> None:
    ahead = 500.0
    update = [("update", start + ahead + 0.002, start + ahead + 0.012, {"bucket": 1, "round": t})
              for t, start in enumerate([0.0, 1.0, 2.0, 3.0, 4.0])]
    worker = track(bars=rounds(0.002))
    job = read_timeline(leave(tmp_path, worker, track("server", 0, boot="b", bars=update)))
    moved = job.tracks[1].of("update")[0]
    assert moved.start_s == pytest.approx(0.002, abs=1e-5)  # both ways take as long: the middle is exact
    assert job.remarks == ["clock of b: within 2 ms, from 5 rounds"]


def test_workers_of_two_hosts_are_compared_directly(tmp_path: Path) -> None:
    other = track(rank=1, boot="b", bars=[(stage, start + 77, end + 77, args)
                                             for stage, start, end, args in rounds(0.003, lag=0.004)])
    job = read_timeline(leave(tmp_path, track(bars=rounds(0.005)), other))
    assert abs(job.tracks[1].of("exchange")[0].start_s - 0.004) < 0.02


def test_without_rounds_in_common_wall_clocks_have_to_do(tmp_path: Path) -> None:
    other = track(rank=1, boot="b", bars=[("compute", 30.0, 31.0, {"iteration": 0})])
    other.about["monotonic_s"] = 33.0  # started 23 s earlier than the first host
    job = read_timeline(leave(tmp_path, KNOWN, other))
    assert job.tracks[1].bars[0].start_s == pytest.approx(30 - 23)
    assert job.remarks == ["clock of b: as the hosts' wall clocks are set"]


# --- figures ----------------------------------------------------------------------------------------------------------

def test_a_figure_shows_one_panel_per_trace(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "figure.png"
    folders = [str(leave(tmp_path / name, KNOWN)) for name in ("one", "two")]
    assert main(["trace", "draw", *folders, "--iterations", "1:3", "-o", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_figure_ends_where_the_worker_that_came_least_far_does(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    slower = track(rank=1, bars=[bar for t in range(3) for bar in ten_seconds(t, (5, 8))])
    assert main(["trace", "draw", str(leave(tmp_path, KNOWN, slower)), "-o", str(tmp_path / "figure.png")]) == 0


def test_an_exchange_is_drawn_by_its_iteration_and_an_evaluations_by_none(tmp_path: Path,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Round 0 is iteration 1's, as with a store that exchanges in every second one."""
    axes = pytest.importorskip("matplotlib.axes")
    drawn: Dict[str, List[Any]] = {"barh": [], "text": []}
    monkeypatch.setattr(axes.Axes, "barh", lambda self, y, width, **more: drawn["barh"].append((y, more["color"])))
    monkeypatch.setattr(axes.Axes, "text", lambda self, x, y, text, **more: drawn["text"].append((y, text)))
    bars: List[Stretch] = [("compute", t, t + 0.5, {"iteration": t}) for t in range(5)]
    bars += [("exchange", 1.5, 1.9, {"bucket": 0, "round": 0, "iteration": 1}),
             ("exchange", 2.5, 2.9, {"bucket": 0, "round": 1})]
    figure([Timeline("one", [track(bars=bars)], [])], [(1, 4)], tmp_path / "figure.png")
    assert [one for one in drawn["barh"] if one[0] == -1] == [(-1, COLOURS[1]), (-1, GREY)]
    assert [text for y, text in drawn["text"] if y == -1] == ["1"]
    del bars[-2][3]["iteration"], drawn["barh"][:]  # as earlier versions left them
    figure([Timeline("one", [track(bars=bars)], [])], [(1, 4)], tmp_path / "figure.png")
    assert [one for one in drawn["barh"] if one[0] == -1] == [(-1, COLOURS[0]), (-1, COLOURS[1])]


def test_a_figure_of_an_asynchronous_job_which_has_no_rounds(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bars = [Bar(bar.stage, bar.name, bar.start_s, bar.end_s,
                {name: value for name, value in bar.args.items() if name != "round"}) for bar in KNOWN.bars]
    folder = leave(tmp_path / "asgd", Track(KNOWN.about, bars))
    assert main(["trace", "draw", str(folder), "-o", str(tmp_path / "figure.png")]) == 0


@pytest.mark.parametrize("out", ["figure.foo", "nowhere/figure.png"])
def test_a_figure_that_cannot_be_written_is_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                           out: str) -> None:
    pytest.importorskip("matplotlib")
    assert main(["trace", "draw", str(leave(tmp_path, KNOWN)), "-o", str(tmp_path / out)]) == 64
    complaint = capsys.readouterr().err
    assert out in complaint and complaint.count("\n") == 1


def test_without_matplotlib_a_line_says_what_to_install(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["trace", "draw", str(leave(tmp_path, KNOWN)), "-o", "figure.png"]) == 64
    assert "pip install matplotlib" in capsys.readouterr().err


# --- a real job -------------------------------------------------------------------------------------------------------

def test_a_job_leaves_a_timeline_of_all_its_processes(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    done = launch(2, 1, [sys.executable, "-m", "odsgd", "train", "--emulate-compute", "20ms", "--iterations", "12",
                         "--warmup", "2", "--optimizer-local", "dcasgd_c", "--bucket-nbytes", "20000",
                         "--out", str(tmp_path / "run"), "--trace", str(folder)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"timeline of worker 0, worker 1, server 0 in {folder / MERGED}" in done.stdout
    check_structure(json.loads((folder / MERGED).read_text()))
    timeline = read_timeline(folder / MERGED)
    assert not timeline.remarks
    for one in timeline.tracks:
        assert one.about["workers"] == 2
        assert {bar.stage for bar in one.bars} == STAGES_OF[one.about["role"]]
    for share in shares(timeline):
        assert share.iterations == 10 and share.iteration_s > 0.019 and share.compute > 0
        assert share.compute + share.exposed + share.idle == pytest.approx(1) and share.hidden <= share.compute
    check_rounds(timeline)
    assert all(bar.args["iteration"] == bar.args["round"] for one in timeline.workers for bar in one.of("exchange"))


# --- a virtual run ----------------------------------------------------------------------------------------------------

def test_a_virtual_run_leaves_the_same_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one process, in virtual seconds: to the nanosecond as long as metrics.jsonl says."""
    folder, cluster = tmp_path / "traces", tmp_path / "cluster.yaml"
    cluster.write_text("links: {goodput: 50mbit}\ncompute: {iteration: 20ms, draws: 'lognormal:0.4'}\n")
    assert virtual.run(tiny(tmp_path / "run", kvstore="odsgd", warmup=2, bucket_nbytes=20000, batch_size=4, epochs=2,
                            workers=3, cluster=str(cluster), trace=str(folder))) == 0
    assert f"timeline of worker 0, worker 1, worker 2, server 0 in {folder / MERGED}" in capsys.readouterr().out
    check_structure(json.loads((folder / MERGED).read_text()))
    timeline = read_timeline(folder / MERGED)
    for one in timeline.tracks:
        assert {bar.stage for bar in one.bars} == STAGES_OF[one.about["role"]] - {"copy"}  # which SGD does without
        assert 0 <= time.time() - one.about["wall_s"] < 300
    check_rounds(timeline)
    assert all(bar.args["iteration"] == bar.args["round"] for one in timeline.workers for bar in one.of("exchange"))
    epoch = records(tmp_path / "run", "epoch")[-1]
    last_s = max(bar.end_s for one in timeline.tracks for bar in one.bars)
    assert last_s == pytest.approx(epoch["virtual_seconds"], abs=1e-6)
    for share in shares(timeline, 0, 6):  # the first epoch's
        assert share.compute + share.exposed + share.idle == pytest.approx(1) and share.hidden > share.compute / 2


def test_a_virtual_run_that_goes_on_counts_its_timeline_s_iterations_from_there(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("compute: {iteration: 20ms}\n")
    begun = tiny(tmp_path / "run", kvstore="odsgd", warmup=2, batch_size=4, epochs=1, workers=2, cluster=str(cluster))
    assert virtual.run(begun) == 0
    goes_on = dataclasses.replace(begun, epochs=2, resume=True, trace=str(tmp_path / "traces"))
    assert virtual.run(goes_on) == 0
    for worker in read_timeline(tmp_path / "traces" / MERGED).workers:
        assert sorted(begins_of(worker)) == list(range(10))


# --- what both have ---------------------------------------------------------------------------------------------------

def check_structure(trace: Dict[str, Any]) -> None:
    """What the trace event format asks for: complete events with their times, rows and processes with names."""
    events = trace["traceEvents"]
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    rows = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    bars = [event for event in events if event["ph"] == "X"]
    assert bars and {event["ph"] for event in events} == {"X", "M"}
    for event in bars:
        assert event["pid"] in named and (event["pid"], event["tid"]) in rows
        assert event["ts"] >= 0 and event["dur"] >= 0


def check_rounds(timeline: Timeline) -> None:
    """Every exchange of both workers is answered by the update of its round, and not before."""
    updates = {(bar.args["bucket"], bar.args["round"]): bar for bar in timeline.tracks[-1].of("update")}
    assert len({bucket for bucket, _ in updates}) > 1
    for worker in timeline.workers:
        exchanges = worker.of("exchange")
        assert len(exchanges) == len(updates) and all(bar.args["bytes"] > 0 for bar in exchanges)
        for bar in exchanges:
            assert updates[bar.args["bucket"], bar.args["round"]].end_s < bar.end_s
