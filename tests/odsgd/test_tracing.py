"""Timelines: a real job's, and hand-made ones with shares, clocks and accidents that are known."""
import json
import sys

import pytest

from odsgd.cli import main
from odsgd.lab.tracing.files import MERGED, Process, Span, read_job
from odsgd.lab.tracing.summary import shares
from tests.jobs import launch

LANES_OF = {"worker": {"compute", "gather", "exchange", "copy", "local update", "scatter"},
            "server": {"merge", "update"}}


def process(role="worker", rank=0, boot="a", job="j", spans=()):
    about = {"role": role, "rank": rank, "host": boot, "boot": boot, "job": job, "wall_s": 1000.0, "monotonic_s": 10.0}
    return Process(about, [Span(lane, lane, start, end, args) for lane, start, end, args in spans])


def leave(folder, *processes):
    """Files as recorders leave them."""
    folder.mkdir(exist_ok=True)
    for pid, one in enumerate(processes):
        events = [{"ph": "M", "name": "odsgd", "pid": pid, "tid": 0, "args": one.about}]
        events += [{"ph": "X", "name": span.name, "cat": span.lane, "pid": pid, "tid": 0, "ts": 1e6 * span.start_s,
                    "dur": 1e6 * (span.end_s - span.start_s), "args": span.args} for span in one.spans]
        text = "[\n" + ",\n".join(map(json.dumps, events)) + "\n]\n"
        (folder / f"{one.about['role']}-{one.about['rank']}.json").write_text(text)
    return folder


def ten_seconds(iteration, exchange):
    """One iteration: compute in two parts, for 6 of 10 s, and an exchange."""
    start = 10.0 * iteration
    return [("compute", start, start + 4, {"iteration": iteration}),
            ("compute", start + 4, start + 6, {"iteration": iteration}),
            ("exchange", start + exchange[0], start + exchange[1], {"bucket": 1, "bytes": 4, "round": iteration}),
            ("gather", start, start + 10, {"bucket": 1, "bytes": 4, "round": iteration})]


KNOWN = process(spans=[bar for t in range(4) for bar in ten_seconds(t, (5, 8))] + [
    ("exchange", 12.0, 15.5, {"bucket": 2, "bytes": 4, "round": 0}),
    ("exchange", 29.0, 33.0, {"bucket": 2, "bytes": 4, "round": 1})])


# --- summary ----------------------------------------------------------------------------------------------------------

def test_the_shares_of_a_known_timeline(tmp_path):
    # Iterations 1 and 2, seconds 10 to 30: compute 12; exchanges 12-18, 25-28, 29-30: 10, of which 5 beside compute.
    row, = shares(read_job(leave(tmp_path, KNOWN)))
    assert (row.iterations, row.iteration_s) == (2, pytest.approx(10))
    assert (row.compute, row.hidden, row.exposed, row.idle) == pytest.approx((0.6, 0.25, 0.25, 0.15))


def test_one_iteration_can_be_looked_at(tmp_path):
    row, = shares(read_job(leave(tmp_path, KNOWN)), 2, 3)  # 5-8 and 9-10 of 10 seconds
    assert (row.iterations, row.compute, row.hidden, row.exposed, row.idle) == pytest.approx((1, 0.6, 0.1, 0.3, 0.1))


def test_the_summary_is_a_table_and_names_the_job(tmp_path, capsys):
    assert main(["trace", "summary", str(leave(tmp_path / "known", KNOWN))]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "known", "worker  iterations  ms each  compute  hidden  exposed    idle",
        "0                2  10000.0   60.0 %  25.0 %   25.0 %  15.0 %"]


@pytest.mark.parametrize("arguments, message", [
    (["summary", "{}", "--iterations", "2:9"], "worker 0: iterations 2:9 are not in the trace, which has 0 to 3"),
    (["summary", "{}", "--iterations", "2"], "expected FIRST:STOP"),
    (["summary", "{}/nothing"], "cannot read"),
    (["merge", "{}/empty"], "no trace in"),
    (["summary", "{}/other.json"], "is no trace of odsgd"),
    (["sumary"], "did you mean `summary`?")])
def test_what_is_wrong_is_said_in_a_line(tmp_path, capsys, arguments, message):
    leave(tmp_path, KNOWN)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.json").write_text("{}".replace("{}", '{"traceEvents": []}'))
    assert main(["trace", *(word.format(tmp_path) for word in arguments)]) == 64
    complaint = capsys.readouterr().err
    assert message in complaint and complaint.count("\n") == 1


# --- files ------------------------------------------------------------------------------------------------------------

def test_a_merged_file_reads_like_its_parts(tmp_path):
    update = process("server", 0, spans=[("update", 7.0, 7.5, {"bucket": 1, "bytes": 4, "round": 0})])
    folder = leave(tmp_path, KNOWN, update)
    assert main(["trace", "merge", str(folder), "-o", str(tmp_path / "one.json")]) == 0
    merged, parts = read_job(tmp_path / "one.json"), read_job(folder)
    assert [one.name for one in merged.processes] == ["worker 0", "server 0"]
    assert [one.about for one in merged.processes] == [one.about for one in parts.processes]
    assert shares(merged) == shares(parts)


def test_a_killed_process_loses_only_its_last_line(tmp_path):
    path = leave(tmp_path, KNOWN) / "worker-0.json"
    path.write_text(path.read_text()[:-30])
    assert len(read_job(tmp_path).processes[0].spans) == len(KNOWN.spans) - 1


def test_what_an_earlier_job_left_is_not_mixed_in(tmp_path):
    leave(tmp_path, KNOWN, process(rank=1, job="another", spans=[("compute", 0.0, 1.0, {"iteration": 0})]))
    assert [one.name for one in read_job(tmp_path).processes] == ["worker 0"]


# --- clocks -----------------------------------------------------------------------------------------------------------

def rounds(latency, lag=0.0):
    """A worker's exchanges: round t begins at t and takes as long as two messages and the update between them."""
    return [("exchange", t + lag, t + lag + 2 * latency + 0.01, {"bucket": 1, "round": t}) for t in range(5)]


def test_another_host_s_clock_is_set_by_what_comes_before_what(tmp_path):
    ahead = 500.0
    update = [("update", start + ahead + 0.002, start + ahead + 0.012, {"bucket": 1, "round": t})
              for t, start in enumerate([0.0, 1.0, 2.0, 3.0, 4.0])]
    worker = process(spans=rounds(0.002))
    job = read_job(leave(tmp_path, worker, process("server", 0, boot="b", spans=update)))
    moved = job.processes[1].lane("update")[0]
    assert moved.start_s == pytest.approx(0.002, abs=1e-5)  # both ways take as long: the middle is exact
    assert job.remarks == ["clock of b: within 2 ms, from 5 rounds"]


def test_workers_of_two_hosts_are_compared_directly(tmp_path):
    other = process(rank=1, boot="b", spans=[(lane, start + 77, end + 77, args)
                                             for lane, start, end, args in rounds(0.003, lag=0.004)])
    job = read_job(leave(tmp_path, process(spans=rounds(0.005)), other))
    assert abs(job.processes[1].lane("exchange")[0].start_s - 0.004) < 0.02


def test_without_rounds_in_common_wall_clocks_have_to_do(tmp_path):
    other = process(rank=1, boot="b", spans=[("compute", 30.0, 31.0, {"iteration": 0})])
    other.about["monotonic_s"] = 33.0  # started 23 s earlier than the first host
    job = read_job(leave(tmp_path, KNOWN, other))
    assert job.processes[1].spans[0].start_s == pytest.approx(30 - 23)
    assert job.remarks == ["clock of b: as the hosts' wall clocks are set"]


# --- figures ----------------------------------------------------------------------------------------------------------

def test_a_figure_shows_one_panel_per_trace(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "figure.png"
    folders = [str(leave(tmp_path / name, KNOWN)) for name in ("one", "two")]
    assert main(["trace", "draw", *folders, "--iterations", "1:3", "-o", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_line_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["trace", "draw", str(leave(tmp_path, KNOWN)), "-o", "figure.png"]) == 64
    assert "pip install 'odsgd[plot]'" in capsys.readouterr().err


# --- a real job -------------------------------------------------------------------------------------------------------

def test_a_job_leaves_a_timeline_of_all_its_processes(tmp_path):
    folder = tmp_path / "traces"
    done = launch(2, 1, [sys.executable, "-m", "odsgd", "train", "--emulate-compute", "20ms", "--iterations", "12",
                         "--warmup", "2", "--optimizer-local", "dcasgd_c", "--bucket-nbytes", "20000",
                         "--out", str(tmp_path / "run"), "--trace", str(folder)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"timeline of worker 0, worker 1, server 0 in {folder / MERGED}" in done.stdout
    check_structure(json.loads((folder / MERGED).read_text()))
    job = read_job(folder / MERGED)
    assert not job.remarks
    for one in job.processes:
        assert {span.lane for span in one.spans} == LANES_OF[one.about["role"]]
    for row in shares(job):
        assert row.iterations == 10 and row.iteration_s > 0.019 and row.compute > 0
        assert row.compute + row.exposed + row.idle == pytest.approx(1) and row.hidden <= row.compute
    check_rounds(job)


def check_structure(trace):
    """What the trace event format asks for: complete events with their times, rows and processes with names."""
    events = trace["traceEvents"]
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    rows = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    bars = [event for event in events if event["ph"] == "X"]
    assert bars and {event["ph"] for event in events} == {"X", "M"}
    for event in bars:
        assert event["pid"] in named and (event["pid"], event["tid"]) in rows
        assert event["ts"] >= 0 and event["dur"] >= 0


def check_rounds(job):
    """Every exchange of both workers is answered by the update of its round, and not before."""
    updates = {(span.args["bucket"], span.args["round"]): span for span in job.processes[-1].lane("update")}
    assert len({bucket for bucket, _ in updates}) > 1
    for worker in job.workers:
        exchanges = worker.lane("exchange")
        assert len(exchanges) == len(updates) and all(span.args["bytes"] > 0 for span in exchanges)
        for span in exchanges:
            assert updates[span.args["bucket"], span.args["round"]].end_s < span.end_s
