"""A job in one process: as many workers as the machine has threads for; waits that a stop does not end."""
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from kvstore.transports.in_process import Stage
from tests.jobs import ROOT, environment

# in a process of its own: the threads stay
MANY = """
import resource
import numpy as np
from kvstore.errors import ConfigError
from kvstore.transports.in_process import Stage

def workers(number):
    return Stage(number).run(lambda transport: transport.total(np.ones(1))[0])

assert workers(1001) == [1001] * 1001
with open("/proc/self/statm") as file:
    own = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (own + (1 << 26), resource.RLIM_INFINITY))
try:
    workers(2000)
except ConfigError as error:
    print(error)
    begun = int(str(error).split("has begun ")[1].split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert workers(begun + 1) == [begun + 1] * (begun + 1)  # one more than there were threads
"""


def test_a_thousand_workers_meet_and_more_than_the_machine_takes_are_refused() -> None:
    done = subprocess.run([sys.executable, "-c", MANY], cwd=ROOT, env=environment(), timeout=300, text=True,
                          capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("2000 workers in one process: this machine has begun ")


# worker 0 waits for worker 1, which waits for a line
SLOW = """
import sys
import numpy as np
from kvstore.transports.in_process import Stage

def work(transport):
    if transport.worker_rank == 1:
        print("computes", flush=True)
        sys.stdin.readline()
    return transport.total(np.ones(1))[0]

print(Stage(2, timeout_s=2).run(work))
"""


def test_time_in_which_the_process_is_stopped_is_no_waiting() -> None:
    with subprocess.Popen([sys.executable, "-c", SLOW], cwd=ROOT, env=environment(), text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        assert job.stdin is not None and job.stdout is not None
        assert job.stdout.readline() == "computes\n"
        job.send_signal(signal.SIGSTOP)
        time.sleep(2.5)
        job.send_signal(signal.SIGCONT)
        assert job.communicate("go on\n", timeout=60)[0] == "[2.0, 2.0]\n"


# the workers meet for ever
FOR_EVER = """
import faulthandler, sys, time
import numpy as np
from kvstore.transports.in_process import Stage

faulthandler.dump_traceback_later(120, exit=True)
ended = []

def work(transport):
    time.sleep(1)  # until the main thread waits for all
    print("runs", flush=True)
    try:
        while True:
            transport.total(np.ones(1))
    finally:
        ended.append(transport.worker_rank)

try:
    Stage(int(sys.argv[1])).run(work)
except KeyboardInterrupt:
    print(sorted(ended))
"""


@pytest.mark.parametrize("workers", [1, 3])
def test_an_interruption_ends_all_workers(workers: int) -> None:
    with subprocess.Popen([sys.executable, "-c", FOR_EVER, str(workers)], cwd=ROOT, env=environment(), text=True,
                          stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert [job.stdout.readline() for _ in range(workers)] == ["runs\n"] * workers
        job.send_signal(signal.SIGINT)
        assert job.communicate()[0] == f"{list(range(workers))}\n"


@pytest.mark.parametrize("part", ["rest", "idle"])
def test_an_error_in_the_stage_ends_the_run(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> bool:
        raise ZeroDivisionError(part)

    stage = Stage(2, timeout_s=9)
    monkeypatch.setattr(stage, part, fail)
    with pytest.raises(ZeroDivisionError, match=part):
        stage.run(lambda transport: transport.worker_rank or stage.wait_until(lambda: part == "rest", "nothing"))


EACH_ONE_MORE = """
import random
import threading
import time
import numpy as np
from kvstore.transports.in_process import Stage

def linger(frame, event, arg):
    if random.random() < 0.02:
        time.sleep(0.001)

threading.setprofile(linger)
for workers in range(1, 61):
    assert Stage(workers).run(lambda transport: transport.total(np.ones(1))[0]) == [workers] * workers
print("all met")
"""


def test_each_worker_of_many_runs_begins() -> None:
    """Whatever the threads do in between: Python's own pool, since 3.12, leaves some out, and the others wait on."""
    done = subprocess.run([sys.executable, "-c", EACH_ONE_MORE], cwd=ROOT, env=environment(), timeout=60, text=True,
                          capture_output=True)
    assert (done.stdout, done.stderr) == ("all met\n", "")
