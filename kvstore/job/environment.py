"""This process's place in its job, as environment variables tell it, and settings of the process."""
import contextlib
import os
import sys
from typing import Iterator, Optional, Set

serving = False  # this process is a server or scheduler already, whatever it may import from here on
lean = False  # no script of a user's runs in this process, so MXNet is imported without what only scripts ask for


def launched() -> bool:
    """Whether our launcher started this process."""
    return "ODSGD_REPORT_FD" in os.environ


def who() -> str:
    """This process, as log lines and errors call it."""
    role = os.environ.get("DMLC_ROLE", "worker")
    rank = os.environ.get(f"ODSGD_{role.upper()}_RANK")
    return role if rank is None else f"{role} {rank}"


def restarts() -> int:
    """How often the launcher has started this job again after a failure (`--max-restarts`)."""
    return int(os.environ.get("ODSGD_RESTARTS") or 0)


def saved_iteration() -> int:
    """The last checkpoint that the launcher has heard of, when it has started this job again; 0: none."""
    return int(os.environ.get("ODSGD_SAVED") or 0)


def most_workers() -> Optional[int]:
    """How many workers the job is to have, where it may go on with fewer (``-n MIN:MAX``); None: there are as many."""
    most = os.environ.get("ODSGD_MOST_WORKERS")
    return int(most) if most else None


def lost_workers() -> Set[int]:
    """Ranks of workers that the launcher has given up (`--on-worker-loss continue`); asynchronous jobs only."""
    path = os.environ.get("ODSGD_LOST")
    if not path:
        return set()
    with contextlib.suppress(FileNotFoundError), open(path) as file:
        return {int(line) for line in file}
    return set()


def secure() -> bool:
    """Whether it tells nothing to hosts that ssh does not know (`--secure`)."""
    return bool(os.environ.get("ODSGD_SECURE"))


SWITCH_S = 1e-4
"""Python's switch interval, at most, where threads of ours wait for its lock. The ring's asks for it some thousand
times a second: beside one thread of plain Python, 16.8 MB at 1 Gbit/s took 1100 ms with the usual 5 ms, and 260 so."""


def share_python() -> None:
    """Let a thread that wants Python's lock have it soon, whatever the script computes beside."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Meanwhile files and sockets are made for this user alone."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
