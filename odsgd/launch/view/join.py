"""``odsgd join``: another worker for a running job, started and watched over by the launcher of that job."""
import time
from typing import List, Optional

from kvstore.errors import ConfigError
from odsgd.launch.view import status_file, watch

ANSWERED_WITHIN_S = 30.0


def main(argv: List[str]) -> int:
    """Ask the launcher, and say which worker it starts, and where."""
    parser = watch.parser_of("join", "Start another worker of a running job, in the place of one that is lost or was "
                             "left out by `odsgd launch --spare`. It takes the job's weights and begins; no other "
                             "worker stops. Run this on the machine and as the user that launched the job. The job "
                             "trains with `decoupled` or `async_diloco` on sockets, with --on-worker-loss continue.")
    job = watch.found(parser.parse_args(argv).job)
    _place(job, "")
    until = time.monotonic() + ANSWERED_WITHIN_S
    with status_file.requested(job) as request:
        while time.monotonic() < until:
            time.sleep(0.1)
            place = _place(job, request)
            if place:
                worker, host = place
                print(f"{worker} of job {job}: {host} has been asked to start it; the job's launcher says when it has "
                      "joined, or why it has not")
                return 0
    raise ConfigError(f"job {job}: its launcher has not answered for {ANSWERED_WITHIN_S:g} s; is it stopped?")


def _place(job: int, request: str) -> Optional[List[str]]:
    """The worker that the launcher starts for a request, and its host; ConfigError if there is none and nobody may
    join now.
    """
    facts = status_file.read(job)
    if facts is None:
        raise ConfigError(f"job {job} has ended")
    closed = facts.get("closed", "its launcher is of another version of odsgd")
    place: Optional[List[str]] = facts.get("joiners", {}).get(request)
    if closed and place is None:
        raise ConfigError(f"nobody can join job {job}: {closed}")
    return place
