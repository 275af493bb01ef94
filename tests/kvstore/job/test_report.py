"""Reports on the launcher's pipe, and whether a script has failed, as it is known when the process ends."""
import json
import os
import subprocess
import sys
import threading
from typing import List

import pytest

from kvstore.job import report
from tests.jobs import ROOT


def test_a_report_is_a_line_on_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    monkeypatch.setenv("ODSGD_REPORT_FD", str(write))
    report.report("failed", error="x")
    assert os.read(read, 100) == b'\n{"error": "x", "event": "failed"}\n'
    os.close(read)
    os.close(write)
    report.report("done")  # a launcher that is gone is no error


def test_what_an_agent_had_no_room_for_comes_whole_with_the_next_report(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    monkeypatch.setenv("ODSGD_REPORT_FD", str(write))
    monkeypatch.setattr(report, "TOLD_WITHIN_S", 0.05)
    while not report._untold:
        report.report("beat", text="b" * 10_000)
    report.report("saved", iteration=7)
    report.report("beat", text="one too many")
    came = os.read(read, 1 << 20)
    report.report("done")
    came += os.read(read, 1 << 20)
    assert [json.loads(line) for line in came.split(b"\n") if line][-2:] == [
        {"event": "saved", "iteration": 7}, {"event": "done"}]
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("does, status, another", [
    ("ending.die('late', 75)", 75, True), ("ending.die('late', 70)", 70, False),
    ("ending.die_of_errors(); raise RuntimeError('Connection closed by peer [10.0.0.1]:4')", 70, True),
    ("ending.die_of_errors(); raise RuntimeError('nan')", 70, False),
    ("ending.end_well(lambda: 1 / 0)", 70, False),
    ("from kvstore.errors import ConfigError; ending.die_of_errors(); raise ConfigError('lr 0')", 64, False)])
def test_who_misses_a_deadline_or_a_peer_says_that_another_may_be_the_cause(
        does: str, status: int, another: bool) -> None:
    read, write = os.pipe()
    done = subprocess.run([sys.executable, "-c", f"from kvstore.job import ending; {does}"], pass_fds=[write],
                          env={**os.environ, "ODSGD_REPORT_FD": str(write)}, cwd=ROOT)
    assert done.returncode == status and json.loads(os.read(read, 1000))["consequence"] is another
    os.close(read)
    os.close(write)


FORKING = """
import os
from kvstore.job import report
write = os.write
def fork_and_write(descriptor, line):
    with memoryview(line):  # as the call itself holds it, while another thread forks
        child = os.fork()
    if not child:
        os._exit(len(report._untold))
    assert os.waitpid(child, 0)[1] == 0
    return write(descriptor, line)
os.write = fork_and_write
report.report("done")
"""


def test_a_process_that_is_forked_while_a_report_is_written_does_not_write_it_again() -> None:
    read, write = os.pipe()
    done = subprocess.run([sys.executable, "-c", FORKING], pass_fds=[write], capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, "ODSGD_REPORT_FD": str(write)})
    assert (done.returncode, done.stderr) == (0, "")
    assert os.read(read, 100) == b'\n{"event": "done"}\n'
    os.close(read)
    os.close(write)


def test_reports_of_many_threads_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    monkeypatch.setenv("ODSGD_REPORT_FD", str(write))
    monkeypatch.setattr(report, "TOLD_WITHIN_S", 60.0)

    def tell(name: int) -> None:
        for number in range(20):
            report.report("said", name=name, number=number, text="x" * 30_000)

    threads = [threading.Thread(target=tell, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    lines: List[bytes] = []
    rest = b""
    while len(lines) < 80:
        *whole, rest = (rest + os.read(read, 5_000)).split(b"\n")
        lines += filter(None, whole)
    for thread in threads:
        thread.join()
    said = [json.loads(line) for line in lines]
    assert all([one["number"] for one in said if one["name"] == name] == list(range(20)) for name in range(4))
    os.close(read)
    os.close(write)


SCRIPT = """
import atexit, sys
from kvstore.job import ending
ending.follow()
ending.follow()
atexit.register(lambda: print("failed" if ending.failed() else "well"))
def main():
    {}
main()
"""
WELL = ["pass", "sys.exit()", "sys.exit(0)", "sys.exit(None)", "raise SystemExit", "raise SystemExit(0)", "exit(0)"]
CAUGHT = "try: sys.exit(2)\n    except SystemExit: pass"
FAILED = ["sys.exit('bad data')", "sys.exit(3)", "raise SystemExit('bad data')", "exit(1)", "1 / 0",
          "print('no data', file=sys.stderr)\n    raise SystemExit('bad data')"]


@pytest.mark.parametrize("last, told", [*((last, "well") for last in [*WELL, CAUGHT]),
                                        *((last, "failed") for last in FAILED)])
def test_a_script_has_failed_unless_it_came_to_its_end_or_says_so_itself(last: str, told: str) -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT.format(last)], capture_output=True, text=True, timeout=300)
    assert ended.stdout == f"{told}\n"


@pytest.mark.parametrize("main, told", [
    ("return 0", "well"), ("return None", "well"), ("return 'bad data'", "failed"), ("1 / 0", "failed"),
    ("sys.exit(3)", "failed"), (CAUGHT, "well"), ("print('a warning', file=sys.stderr)\n    return 0", "well")])
def test_a_script_may_end_by_raising_the_status_of_its_main_function(main: str, told: str) -> None:
    script = SCRIPT.format(main).replace("\nmain()\n", "\nraise SystemExit(main())\n")
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert ended.stdout == f"{told}\n"
