"""The campaign of faults: its cases follow from a seed, and broken promises are seen as such."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest

from scripts.maintain import chaos, docs_tables

KILLED: Dict[str, Any] = {"victim": "worker 1", "fault": "kill", "hit": True, "code": 137, "left": 0, "damaged": [],
                          "restarts": 0, "restarted": False, "finished": False, "named_s": 0.9, "accuracy": None,
                          "traceback": False, "moment": "training", "store": "odsgd"}
RESTARTED = {**KILLED, "code": 0, "restarts": 2, "restarted": True, "finished": True, "accuracy": 0.98}


def test_a_campaign_is_the_same_again_and_meets_every_victim_and_fault() -> None:
    cases = [chaos.case(1, number) for number in range(300)]
    assert cases == [chaos.case(1, number) for number in range(300)]
    assert cases != [chaos.case(2, number) for number in range(300)]
    assert {case.victim.split()[0] for case in cases} == set(chaos.VICTIMS)
    assert {case.fault for case in cases} == {*chaos.FAULTS_OF_PROCESSES, *sum(chaos.FAULTS.values(), ())}
    assert {case.moment for case in cases} == set(chaos.MOMENTS)
    assert {case.wire for case in cases} == {"ps-lite", "sockets", ""}
    assert all(case.servers or case.victim.split()[0] not in ("server", "scheduler") for case in cases)
    assert all(case.workers == 2 for case in cases if case.victim in chaos.ON_TWO_HOSTS)


@pytest.mark.parametrize("seen, same_bits, broken", [
    (KILLED, None, []),
    ({**KILLED, "named_s": 20.0}, None, ["worker 1 was not named within 15 s"]),
    ({**KILLED, "named_s": None}, None, ["worker 1 was not named within 15 s"]),
    ({**KILLED, "fault": "stop", "named_s": 20.0}, None, []),
    ({**KILLED, "traceback": True}, None, ["a traceback"]),
    ({**KILLED, "left": 2}, None, ["2 processes left"]),
    ({**KILLED, "code": None}, None, ["not ended within 240 s"]),
    ({**KILLED, "damaged": ["x"]}, None, ["a checkpoint that counts is damaged"]),
    ({**KILLED, "restarts": 2}, None, ["not finished (exit code 137)"]),
    (RESTARTED, True, []), (RESTARTED, False, ["other bits"]), (RESTARTED, None, []),
    ({**RESTARTED, "accuracy": 0.5}, None, ["accuracy 0.5"]),
    ({**RESTARTED, "fault": "slow", "restarts": 0, "restarted": False, "named_s": None}, True, []),
    ({**KILLED, "victim": "launcher", "code": -9, "named_s": None}, None, []),
    ({**KILLED, "victim": "disk", "fault": "full", "named_s": 20.0}, None, ["disk was not named within 15 s"]),
    ({**KILLED, "victim": "disk", "fault": "full", "named_s": 20.0, "moment": "start-up"}, None, []),
    ({**KILLED, "victim": "link", "fault": "down", "named_s": 20.0}, None, []),
    ({**KILLED, "victim": "tunnel", "named_s": 20.0}, None, ["tunnel was not named within 15 s"]),
    ({**KILLED, "victim": "clock", "fault": "forward"}, None, ["not finished (exit code 137)"]),
    ({**KILLED, "victim": "link", "fault": "blip"}, None, ["not finished (exit code 137)"]),
    ({**KILLED, "victim": "link", "fault": "down", "restarts": 2}, None, ["not finished (exit code 137)"]),
    ({**KILLED, "victim": "link", "fault": "down", "restarts": 2, "moment": "start-up", "store": "sasgd"}, None, []),
])
def test_broken_promises_are_seen(seen: Dict[str, Any], same_bits: Any, broken: List[str]) -> None:
    assert chaos.judge(seen, same_bits) == broken


def test_the_tables_have_a_line_for_each_victim_and_fault_and_for_each_moment() -> None:
    results = [{**KILLED, "same_bits": None, "broken": []}, {**RESTARTED, "same_bits": True, "broken": ["x"]}]
    by_victim, by_moment = chaos.table(results).split("\n\n")
    counted = "2 | 2 | 0.9, 0.9 | 0 | 0 | 1 | 1 | 1 of 1 | 1 |"
    assert by_victim.splitlines()[2:] == [f"| worker | kill | {counted}"]
    assert by_moment.splitlines()[2:] == [f"| training | {counted}"]


def test_the_table_takes_its_place_in_a_page() -> None:
    page = "a\n<!-- one -->\nold\n<!-- end -->\nb\n<!-- two -->\n<!-- end -->\n"
    new = docs_tables.put(page, "<!-- one -->", "new\n")
    assert new == page.replace("old", "new") == docs_tables.put(new, "<!-- one -->", "new\n")
    for lacking in ("<!-- end -->\n", "<!-- one -->\nold\n"):
        with pytest.raises(SystemExit, match="expected `<!-- one -->` in the page, and `<!-- end -->` behind it"):
            docs_tables.put(lacking, "<!-- one -->", "new\n")


@pytest.mark.skipif(not shutil.which("cc"), reason="no compiler of C here")
def test_the_clock_of_a_job_jumps_and_its_waits_do_not(tmp_path: Path) -> None:
    env = chaos.jumping(tmp_path / "run")
    script = ("import sys, threading, time\nwall, steady = time.time(), time.monotonic()\nsys.stdout.write('.')\n"
              "sys.stdout.flush()\nsys.stdin.readline()\ntime.sleep(0.1)\nthreading.Event().wait(0.1)\n"
              "print(round(time.time() - wall - (time.monotonic() - steady)))")
    with subprocess.Popen([sys.executable, "-c", script], env={**os.environ, **env}, text=True, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.read(1) == "."
        chaos.jump(tmp_path / "run", -3600)
        assert process.communicate("\n", timeout=300)[0] == "-3600\n"


def test_only_what_is_shown_or_written_down_goes_by_the_wall_clock() -> None:
    wall = re.compile(r"\btime\.time(_ns)?\(|\bfrom time import|\bdatetime\.(now|utcnow|today)\(|CLOCK_REALTIME")
    asking = {str(path.relative_to(chaos.ROOT)) for package in ("kvstore", "odsgd")
              for path in (chaos.ROOT / package).rglob("*.py") if wall.search(path.read_text(encoding="utf-8"))}
    assert asking == {"odsgd/board.py", "odsgd/training/run_log.py", "odsgd/launch/supervisor.py",
                      "odsgd/launch/view/watch.py", "kvstore/tracing/recorder.py", "odsgd/virtual/timeline.py"}


@pytest.mark.again
@pytest.mark.slow
def test_a_job_is_hit_and_ends_as_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "EPOCHS", 16)
    case = chaos.Case(0, "ssgd", 2, 1, "worker 1", "kill", "training", 0.1, 1, "sockets")
    seen = chaos.run(case, tmp_path)
    assert seen["hit"] and seen["restarted"], seen
    assert chaos.judge(seen, seen["weights"] == chaos.reference(case, tmp_path)) == []
