"""``odsgd join``: another worker for a running job, started and watched over by the launcher of that job."""
import time
from typing import List

from kvstore.errors import ConfigError
from odsgd.config.flags import Parser
from odsgd.launch.view import status_file, watch

ANSWERED_WITHIN_S = 30.0


def main(argv: List[str]) -> int:
    """Ask the launcher, and say which worker it has started."""
    parser = Parser("; `odsgd join --help` says how", prog="odsgd join",
                    description="Start another worker of a running job, in the place of one that is lost or was left "
                    "out by `odsgd launch --spare`. It takes the job's weights and begins; no other worker stops. Run "
                    "this on the machine and as the user that launched the job. The job trains with `decoupled` or "
                    "`async_diloco` on sockets, with --on-worker-loss continue.")
    parser.add_argument("job", metavar="RUN-or-JOB", nargs="?",
                        help="the folder of its run, or the number of its launcher's process; may be left out where "
                        "only one job runs")
    job = watch.found(parser.parse_args(argv).job)
    before = _joiners(job)
    status_file.ask(job)
    until = time.monotonic() + ANSWERED_WITHIN_S
    while time.monotonic() < until:
        time.sleep(0.1)
        started = _joiners(job)[len(before):]
        if started:
            print(f"{started[0]} of job {job} starts; the job's launcher says when it has joined")
            return 0
    raise ConfigError(f"job {job}: its launcher has not answered for {ANSWERED_WITHIN_S:g} s; is it stopped?")


def _joiners(job: int) -> List[str]:
    """Those that have joined the job so far; ConfigError if nobody may now."""
    facts = status_file.read(job)
    if facts is None:
        raise ConfigError(f"job {job} has ended")
    closed = facts.get("closed", "its launcher is of another version of odsgd")
    if closed:
        raise ConfigError(f"nobody can join job {job}: {closed}")
    joiners: List[str] = facts["joiners"]
    return joiners
