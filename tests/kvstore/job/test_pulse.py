"""What a process says of itself every second, and how its waits show in it."""
import itertools
import subprocess
import sys
import threading
import time
from typing import Any, Dict, List

import pytest

from kvstore.job.deadlines import Deadlines
from kvstore.job.pulse import Pulse
from tests.jobs import ROOT, until


def test_beats_come_from_a_thread_of_their_own() -> None:
    told: List[Dict[str, Any]] = []
    pulse = Pulse(lambda event, **fields: told.append(fields), lambda: None)
    pulse.EVERY_S = 0.01
    before = threads()
    pulse.start()
    pulse.start()
    pulse.moved(7)
    pulse.more["stale"] = lambda: [[1, 2, 3]]
    pulse.activity = "training"
    until(lambda: told and told[-1] == {"at": 7, "moves": 1, "substep": 0, "activity": "training",
                                        "asynchronous": False, "waits_s": None,
                                        "nbytes": 0, "stale": [[1, 2, 3]]}, 60)
    assert threads() == before + 2  # the other one looks


def threads() -> int:
    """Threads of pulses; those of earlier tests go on."""
    return sum(thread.name in ("kvstore-pulse", "kvstore-aside") for thread in threading.enumerate())


def test_a_pulse_goes_on_without_what_fails_and_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    told: List[Dict[str, Any]] = []
    calls = itertools.count()

    def tell(event: str, **fields: Any) -> None:
        if next(calls) == 0:
            raise LookupError("on purpose")
        told.append(fields)
    pulse = Pulse(tell, lambda: None)
    pulse.EVERY_S = 0.01
    pulse.more.update(raises=lambda: 1 // 0, circle=lambda: circle, unsayable=lambda: {1, 2}, well=lambda: 7)
    circle: List[Any] = []
    circle.append(circle)
    pulse.start()
    until(lambda: len(told) > 5, 60)
    assert told[-1]["well"] == 7 and not {"raises", "circle", "unsayable"} & set(told[-1])
    lines = capsys.readouterr().err.splitlines()
    assert sorted(line.partition(" failed")[0] for line in lines) == [
        f"warning: {name}" for name in ("`circle` of the pulse", "`raises` of the pulse", "`unsayable` of the pulse",
                                        "a beat of the pulse")]


def test_a_look_that_hangs_holds_up_no_beat() -> None:
    told: List[Dict[str, Any]] = []
    pulse, hangs = Pulse(lambda event, **fields: told.append(fields), lambda: None), threading.Event()
    pulse.EVERY_S = 0.01
    pulse.more["hangs"] = lambda: hangs.wait(300)
    pulse.start()
    until(lambda: len(told) > 5, 60)
    assert "hangs" not in told[-1]
    hangs.set()
    until(lambda: told[-1].get("hangs") is True, 60)


def test_an_activity_within_another() -> None:
    pulse = Pulse(lambda event, **fields: None, lambda: 1.0)
    with pulse.doing("training"), pulse.doing("checkpoint"):
        assert pulse.state()["activity"] == "checkpoint"
    assert pulse.state()["activity"] == ""


def test_serving_is_not_waiting() -> None:
    pulse = Pulse(lambda event, **fields: None, lambda: 1.04)
    assert pulse.state()["waits_s"] == 1.0
    pulse.activity = "serving"
    assert pulse.state()["waits_s"] is None


def test_waits_under_way_are_known_to_the_deadlines() -> None:
    deadlines = Deadlines(lambda message: None)
    assert deadlines.waiting() is None
    with deadlines.within(60.0, "late"):
        time.sleep(0.05)
        waited = deadlines.waiting()
        assert waited is not None and 0.05 <= waited < 60
    assert deadlines.waiting() is None


def test_what_is_followed_counts_as_a_wait_from_its_last_movement_on() -> None:
    deadlines = Deadlines(lambda message: None)
    deadlines.TICK_S = 0.01
    state: List[Any] = [None]
    deadlines.follow("answers", 60.0, lambda: state[0], lambda: "late")
    time.sleep(0.05)
    assert deadlines.waiting() is None
    state[0] = 1
    until(lambda: (deadlines.waiting() or 0) > 0.1, 60)
    state[0] = 2
    until(lambda: (deadlines.waiting() or 0) < 0.1, 60)
    state[0] = None
    until(lambda: deadlines.waiting() is None, 60)


def test_a_process_with_a_pulse_prints_its_stacks_when_told() -> None:
    program = ("import os, signal, time\nfrom kvstore.job import pulse\n"
               "pulse.Pulse(lambda event, **fields: None, lambda: None).start()\n"
               "def stuck():\n    os.kill(os.getpid(), pulse.STACKS)\n    print('goes on')\nstuck()\n")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "goes on\n"
    assert "in stuck" in done.stderr and "most recent call first" in done.stderr
