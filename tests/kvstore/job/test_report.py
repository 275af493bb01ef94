"""Reports on the launcher's pipe."""
import json
import os
import threading
from typing import List

import pytest

from kvstore.job import report


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
