"""Signed commands and deadlines."""
import itertools
import json
import os
import subprocess
import sys
import threading
from typing import Any, List, Tuple

import pytest

from kvstore.errors import EXIT_DEADLINE, ProtocolError
from kvstore.job import control
from kvstore.job.control import Signer, Verifier, Watch
from tests.jobs import ROOT

KEY = b"the secret of the job"


def test_a_signed_command_is_opened() -> None:
    assert Verifier(KEY).open(Signer(3, KEY).sign("open", {"x": [1, "é"]})) == (3, "open", {"x": [1, "é"]})


def test_a_message_survives_as_a_c_string() -> None:
    message = Signer(0, KEY).sign("open", {"text": "a\0b é"})
    assert message.isascii() and "\0" not in message


@pytest.mark.parametrize("message", ["", "\x80\x03csomething", "cos\nsystem\n(S'id'\ntR.", "a b c d", "1 2"])
def test_an_unsigned_command_is_refused(message: str) -> None:
    with pytest.raises(ProtocolError, match="unsigned command"):
        Verifier(KEY).open(message)


def test_another_secret_is_refused() -> None:
    with pytest.raises(ProtocolError, match="worker 1 is not signed with this job's secret"):
        Verifier(KEY).open(Signer(1, b"another").sign("open", {}))


@pytest.mark.parametrize("what", ["sender", "counter", "text"])
def test_no_part_of_a_command_can_be_changed(what: str) -> None:
    sender, counter, signature, text = Signer(1, KEY).sign("open", {"n": 1}).split(" ", 3)
    changed = {"sender": f"2 {counter} {signature} {text}", "counter": f"{sender} 9 {signature} {text}",
               "text": f"{sender} {counter} {signature} {text.replace('1', '2')}"}[what]
    with pytest.raises(ProtocolError, match="not signed"):
        Verifier(KEY).open(changed)


def test_a_command_cannot_be_played_again() -> None:
    signer, verifier = Signer(0, KEY), Verifier(KEY)
    first, second = signer.sign("open", {}), signer.sign("open", {})
    verifier.open(first)
    verifier.open(second)
    for again in (first, second):
        with pytest.raises(ProtocolError, match="a second time"):
            verifier.open(again)


def test_senders_count_for_themselves() -> None:
    verifier = Verifier(KEY)
    for rank in (0, 1, 2):
        verifier.open(Signer(rank, KEY).sign("open", {}))


def test_without_a_secret_the_job_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ODSGD_SECRET", raising=False)
    monkeypatch.setenv("DMLC_PS_ROOT_URI", "10.0.0.1")
    assert not control.trusted()
    monkeypatch.setenv("ODSGD_SECRET", "ab" * 32)
    assert control.trusted() and control.job_key() == b"ab" * 32


def test_a_report_is_a_line_on_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    monkeypatch.setenv("ODSGD_REPORT_FD", str(write))
    control.report("failed", error="x")
    assert os.read(read, 100) == b'\n{"error": "x", "event": "failed"}\n'
    os.close(read)
    os.close(write)
    control.report("done")  # a launcher that is gone is no error


DYING = """
import os, sys, threading
from kvstore.job import control
while fill == "report" and not control._untold:
    control.report("beat", at=1)
if fill == "stderr":
    threading.Thread(target=lambda: sys.stderr.write("x" * (1 << 20)), daemon=True).start()
control.watch.begin("wait", 0.5, "nobody came")
threading.Event().wait()
"""


@pytest.mark.parametrize("fill", ["report", "stderr"])
def test_a_deadline_ends_a_process_whose_agent_reads_no_more(fill: str) -> None:
    agents = [os.pipe(), os.pipe()]  # as of one that is stopped: it has the other ends and does not look at them
    (_, report), (_, stderr) = agents
    process = subprocess.Popen([sys.executable, "-c", f"fill = {fill!r}\n{DYING}"], stderr=stderr, pass_fds=[report],
                               env={**os.environ, "PYTHONPATH": str(ROOT), "ODSGD_REPORT_FD": str(report)})
    try:
        assert process.wait(60) == EXIT_DEADLINE
    finally:
        process.kill()
        process.wait()
        for fd in (fd for pipe in agents for fd in pipe):
            os.close(fd)


def test_what_an_agent_had_no_room_for_comes_whole_with_the_next_report(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    monkeypatch.setenv("ODSGD_REPORT_FD", str(write))
    monkeypatch.setattr(control, "TOLD_WITHIN_S", 0.05)
    while not control._untold:
        control.report("beat", text="b" * 10_000)
    control.report("saved", iteration=7)
    control.report("beat", text="one too many")
    came = os.read(read, 1 << 20)
    control.report("done")
    came += os.read(read, 1 << 20)
    assert [json.loads(line) for line in came.split(b"\n") if line][-2:] == [
        {"event": "saved", "iteration": 7}, {"event": "done"}]
    os.close(read)
    os.close(write)


def test_reports_of_many_threads_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    monkeypatch.setenv("ODSGD_REPORT_FD", str(write))
    monkeypatch.setattr(control, "TOLD_WITHIN_S", 60.0)

    def tell(name: int) -> None:
        for number in range(20):
            control.report("said", name=name, number=number, text="x" * 30_000)

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


def watched() -> Tuple[Watch, List[str], threading.Event]:
    overdue: List[str] = []
    called = threading.Event()

    def on_overdue(message: str) -> None:
        overdue.append(message)
        called.set()
    return Watch(on_overdue), overdue, called


def test_a_wait_that_is_overdue_is_told_by_its_message() -> None:
    watch, overdue, called = watched()
    watch.begin("long", 1000, "not this one")
    watch.begin("late", 0.01, "this one")
    assert called.wait(60) and overdue == ["this one"]


def test_a_wait_that_ended_in_time_is_not() -> None:
    watch, overdue, called = watched()
    with watch.deadline(0.05, "ended"):
        pass
    watch.begin("late", 0.3, "second")
    assert called.wait(60) and overdue == ["second"]


def raises(*_: object) -> None:
    raise LookupError("on purpose")


def test_deadlines_outlive_a_look_that_fails() -> None:
    watch, overdue, called = watched()
    watch.follow("broken", 1000, raises, lambda: "not this one")
    watch.begin("late", 0.5, "this one")
    assert called.wait(60) and overdue == ["this one"]


@pytest.mark.parametrize("state, message, told", [
    (raises, lambda: "late", "late (the last look at it failed: LookupError: on purpose)"),
    (lambda: 1, raises, "nothing that is awaited has moved for 0.1 s, and what it is cannot be told: "
                        "LookupError: on purpose")])
def test_a_wait_that_cannot_be_looked_at_or_told_of_is_overdue_all_the_same(state: Any, message: Any, told: str
                                                                            ) -> None:
    watch, overdue, called = watched()
    watch.follow("broken", 0.1, state, message)
    assert called.wait(60) and overdue == [told]


def test_a_look_that_fails_once_does_not_make_a_wait_overdue() -> None:
    watch, overdue, called = watched()
    looks = itertools.count()
    watch.follow("busy", 1000, lambda: raises() if next(looks) == 0 else None, lambda: "not this one")
    watch.begin("late", 0.5, "this one")
    assert called.wait(60) and overdue == ["this one"] and watch.waiting() is not None
