"""`odsgd train` of which one process is killed at an iteration, the first time: hit.py VICTIM ITERATION train …

VICTIM is `worker 1`, `server 0` …: a worker kills itself, and a server is killed by worker 0.
"""
import os
import signal
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(sys.path[0])  # beside this script lie the tests of kvstore, under that name
    import tests.lean  # noqa: F401

import odsgd  # noqa: F401  comes first, as in every script

# isort: split
from kvstore.job.pulse import Pulse
from odsgd.cli import main
from tests.integration.launching import MARK, pid_of


def hit_at(victim: str, iteration: int) -> None:
    """Have this worker kill `victim` when it has come to `iteration`, if it is its turn to."""
    mine = f"worker {os.environ['ODSGD_WORKER_RANK']}"
    if "ODSGD_RESTARTS" in os.environ or mine != (victim if victim.startswith("worker") else "worker 0"):
        return
    moved = Pulse.moved

    def move_or_hit(self: Pulse, at: int) -> None:
        moved(self, at)
        if at == iteration:
            os.kill(os.getpid() if mine == victim else pid_of(os.environ[MARK], victim), signal.SIGKILL)

    Pulse.moved = move_or_hit  # type: ignore[method-assign]


if __name__ == "__main__":
    hit_at(sys.argv[1], int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
