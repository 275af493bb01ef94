"""Deadlines, and the end of a process that misses one."""
import itertools
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any, List, Tuple

import pytest

from kvstore.errors import EXIT_DEADLINE
from kvstore.job import deadlines as deadlines_module
from kvstore.job.deadlines import Deadlines
from tests.jobs import ROOT

DYING = """
import os, sys, threading
from kvstore.job import report
from kvstore.job.deadlines import deadlines
while fill == "report" and not report._untold:
    report.report("beat", at=1)
if fill == "stderr":
    threading.Thread(target=lambda: sys.stderr.write("x" * (1 << 20)), daemon=True).start()
deadlines.begin("wait", 0.5, "nobody came")
threading.Event().wait()
"""


CHILD = """
import os, threading
from kvstore.job.deadlines import deadlines
from kvstore.transports.in_process import Stage

def job():
    return Stage(2).run(lambda transport: transport.worker_rank)

deadlines.begin("the parent's", 1000, "not this one")
assert job() == [0, 1]
child = os.fork()
if not child:
    assert job() == [0, 1]
    deadlines.begin("the child's", 0.5, "this one")
    threading.Event().wait()
print(os.WEXITSTATUS(os.waitpid(child, 0)[1]))
"""


def test_a_child_that_was_forked_has_deadlines_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert (done.stdout, done.returncode) == (f"{EXIT_DEADLINE}\n", 0) and "this one" in done.stderr


@pytest.mark.parametrize("fill", ["report", "stderr"])
def test_a_deadline_ends_a_process_whose_agent_reads_no_more(fill: str) -> None:
    agents = [os.pipe(), os.pipe()]  # as of one that is stopped: it has the other ends and does not look at them
    (_, report), (_, stderr) = agents
    process = subprocess.Popen([sys.executable, "-c", f"fill = {fill!r}\n{DYING}"], stderr=stderr, pass_fds=[report],
                               env={**os.environ, "PYTHONPATH": str(ROOT), "ODSGD_REPORT_FD": str(report)})
    try:
        assert process.wait(300) == EXIT_DEADLINE
    finally:
        process.kill()
        process.wait()
        for fd in (fd for pipe in agents for fd in pipe):
            os.close(fd)


def told_of() -> Tuple[Deadlines, List[str], threading.Event]:
    overdue: List[str] = []
    called = threading.Event()

    def on_overdue(message: str) -> None:
        overdue.append(message)
        called.set()
    return Deadlines(on_overdue), overdue, called


def test_a_wait_that_is_overdue_is_told_by_its_message() -> None:
    deadlines, overdue, called = told_of()
    deadlines.begin("long", 1000, "not this one")
    deadlines.begin("late", 0.01, "this one")
    assert called.wait(300) and overdue == ["this one"]


def test_a_wait_that_ended_in_time_is_not() -> None:
    deadlines, overdue, called = told_of()
    with deadlines.within(0.05, "ended"):
        pass
    deadlines.begin("late", 0.3, "second")
    assert called.wait(300) and overdue == ["second"]


def raises(*_: object) -> None:
    raise LookupError("on purpose")


def test_deadlines_outlive_a_look_that_fails() -> None:
    deadlines, overdue, called = told_of()
    deadlines.follow("broken", 1000, raises, lambda: "not this one")
    deadlines.begin("late", 0.5, "this one")
    assert called.wait(300) and overdue == ["this one"]


def test_a_look_that_takes_long_holds_up_no_other_wait() -> None:
    deadlines, overdue, called = told_of()
    looking, looked = threading.Event(), threading.Event()

    def slow() -> None:
        looking.set()
        assert looked.wait(300)

    deadlines.follow("slow", 1000, slow, lambda: "not this one")
    assert looking.wait(300)
    other = threading.Thread(target=deadlines.begin, args=("late", 0.1, "this one"))
    other.start()
    other.join(10)
    began = not other.is_alive()
    looked.set()
    other.join()
    assert began and called.wait(300) and overdue == ["this one"]


def test_what_ends_while_it_is_looked_at_is_not_overdue() -> None:
    deadlines, overdue, called = told_of()

    def ends() -> None:
        deadlines.end("moving")
        raise LookupError("it is gone")

    deadlines.follow("moving", 0.0, ends, lambda: "not this one")
    deadlines.begin("late", 0.5, "this one")
    assert called.wait(300) and overdue == ["this one"]


@pytest.mark.parametrize("state, message, told", [
    (raises, lambda: "late", "late (the last look at it failed: LookupError: on purpose)"),
    (lambda: 1, raises, "nothing that is awaited has moved for 0.1 s, and what it is cannot be told: "
                        "LookupError: on purpose")])
def test_a_wait_that_cannot_be_looked_at_or_told_of_is_overdue_all_the_same(state: Any, message: Any, told: str
                                                                            ) -> None:
    deadlines, overdue, called = told_of()
    deadlines.follow("broken", 0.1, state, message)
    assert called.wait(300) and overdue == [told]


def test_a_look_that_fails_once_does_not_make_a_wait_overdue() -> None:
    deadlines, overdue, called = told_of()
    looks = itertools.count()
    deadlines.follow("busy", 1000, lambda: raises() if next(looks) == 0 else None, lambda: "not this one")
    deadlines.begin("late", 0.5, "this one")
    assert called.wait(300) and overdue == ["this one"] and deadlines.waiting() is not None


def test_a_process_that_was_stopped_puts_its_deadlines_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a time of its own: the first sleep of the thread lasts 100 s, as of one that was stopped.

    The threads that earlier tests left behind keep the clock of the machine: their sleeps would move this one.
    """
    now, overdue = [0.0], threading.Event()
    others = set(threading.enumerate()) - {threading.current_thread()}

    def monotonic() -> float:
        return time.monotonic() if threading.current_thread() in others else now[0]

    def sleep(seconds: float) -> None:
        if threading.current_thread() in others:
            time.sleep(seconds)
        else:
            now[0] += seconds if now[0] else 100.0 + seconds

    monkeypatch.setattr(deadlines_module, "time", SimpleNamespace(monotonic=monotonic, sleep=sleep))
    found_at: List[float] = []  # since its time goes on

    def find(message: str) -> None:
        found_at.append(now[0])
        overdue.set()

    waits = Deadlines(find)
    waits.begin("an answer", 50.0, "it has not come")
    assert overdue.wait(60) and 150.0 < found_at[0] < 151.0
