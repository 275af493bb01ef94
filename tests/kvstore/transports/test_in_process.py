"""A job in one process has as many workers as the machine has threads for."""
import subprocess
import sys

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
