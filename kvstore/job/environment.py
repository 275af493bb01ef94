"""This process's place in its job, as environment variables tell it; settings of the process and of connections."""
import contextlib
import importlib.util
import os
import socket
import sys
import time
from typing import Iterator, List, Optional, Set

serving = False  # this process is a server or scheduler already, whatever it may import from here on

INSTALL_MXNET = ("in a clone of odsgd pip install '.[cpu]', or for GPUs '.[cu112]' (also cu110, cu102, cu101, cu100), "
                 f"on Linux x86-64 with Python 3.8 to 3.12 (this is {sys.version.split()[0]}); a later Python trains "
                 "with PyTorch (odsgd.torch)")
NO_MXNET = ("this job is on ps-lite, and this process has no MXNet, which that is a part of; start the job with --wire "
            f"sockets, or install MXNet on this host: {INSTALL_MXNET}")


@contextlib.contextmanager
def job_folder_first() -> Iterator[None]:
    """Inside, a server imports the job's own modules as workers do: from the job's folder, whatever is installed, and
    without its role, with which an `import mxnet` in them would not return."""
    folder = [os.environ["ODSGD_MODULES"]] if serving and "ODSGD_MODULES" in os.environ else []
    role = os.environ.pop("DMLC_ROLE", None) if serving else None
    sys.path[:0] = folder
    try:
        yield
    finally:
        del sys.path[:len(folder)]
        if role is not None:
            os.environ["DMLC_ROLE"] = role


def launched() -> bool:
    """Whether our launcher started this process."""
    return "ODSGD_REPORT_FD" in os.environ


def has_mxnet() -> bool:
    """Whether this Python has MXNet; it is not imported for that."""
    return importlib.util.find_spec("mxnet") is not None


def in_job() -> bool:
    """Whether this process knows of a scheduler, whoever started it."""
    return "DMLC_PS_ROOT_URI" in os.environ


def who() -> str:
    """This process, as log lines and errors call it."""
    role = os.environ.get("DMLC_ROLE", "worker")
    rank = os.environ.get(f"ODSGD_{role.upper()}_RANK")
    if rank is None and by_torchrun():
        rank = os.environ.get("RANK")
    return role if rank is None else f"{role} {rank}"


def by_torchrun() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def restarts() -> int:
    """How often the launcher has started this job again after a failure (`--max-restarts`)."""
    return int(os.environ.get("ODSGD_RESTARTS") or 0)


def saved_iteration() -> int:
    """The last checkpoint that the launcher has heard of, when it has started this job again; 0: none."""
    return int(os.environ.get("ODSGD_SAVED") or 0)


def has_begun() -> bool:
    """Whether worker 0 has looked for a checkpoint in an earlier attempt of this job: later ones are the job's own."""
    return "ODSGD_SAVED" in os.environ


def most_workers() -> Optional[int]:
    """MAX of ``-n MIN:MAX``; None: the number of workers is fixed."""
    most = os.environ.get("ODSGD_MOST_WORKERS")
    return int(most) if most else None


def stand_in() -> str:
    """The store of ``odsgd launch --store`` as it was written; empty: there is none."""
    return os.environ.get("ODSGD_STORE", "")


HEARD_WITHIN_S = 10.0
"""How much later than other hosts a host may hear of a loss: its agent, or the way to it, may be held up."""


def all_lost(ranks: Set[int]) -> bool:
    """Whether the job has lost all these workers; waits until this host must have heard of it."""
    until = time.monotonic() + (HEARD_WITHIN_S if "ODSGD_LOST" in os.environ else 0.0)
    while ranks - lost_workers():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def lost_workers() -> Set[int]:
    """Ranks whose worker takes no part in sums over the workers any more: the launcher has given it up
    (`--on-worker-loss continue`), or it was not there at the start. Asynchronous jobs only."""
    return {int(line) for line in _losses_and_joins()}


def absent_workers() -> Set[int]:
    """Those of `lost_workers` in whose place no worker has joined (`odsgd join`)."""
    absent: Set[int] = set()
    for line in _losses_and_joins():
        (absent.discard if line.startswith("+") else absent.add)(int(line))
    return absent


def _losses_and_joins() -> List[str]:
    """The lines of the file ODSGD_LOST, oldest first: the rank of a lost worker, or `+` and the rank of a joiner."""
    path = os.environ.get("ODSGD_LOST")
    if not path:
        return []
    with contextlib.suppress(FileNotFoundError), open(path) as file:
        return file.readlines()
    return []


def joined() -> int:
    """This worker's number among the workers that have joined the running job, from 1 on; 0: it began with the job.

    It takes no part in sums over the workers: nobody waits for it there.
    """
    return int(os.environ.get("ODSGD_JOINED") or 0)


def joined_at() -> int:
    """The iteration that the job had come to when the launcher started this worker, which joins it."""
    return int(os.environ.get("ODSGD_JOINED_AT") or 0)


def on_sockets() -> bool:
    """Whether workers and servers of this job talk over sockets of our own (`--wire sockets`), and not by ps-lite."""
    return os.environ.get("ODSGD_WIRE") == "sockets"


def secure() -> bool:
    """Whether the job talks only to hosts that ssh knows (`--secure`)."""
    return bool(os.environ.get("ODSGD_SECURE"))


SWITCH_S = 1e-4
"""Python's longest switch interval while our threads wait for its lock. The ring's thread asks for the lock some
thousand times a second: beside one thread of plain Python, 16.8 MB at 1 Gbit/s took 1100 ms with the usual 5 ms, and
260 ms with this."""


def shorten_switch_interval() -> None:
    """Give Python's lock soon to a thread that wants it, whatever the script computes."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Inside, new files and sockets belong to this user only."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 60}
"""After so many seconds without data the kernel asks the other end, and then again and again."""


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel send something on a silent connection of TCP, which a firewall or a NAT would forget."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in ALIVE.items():
        if hasattr(socket, name):  # Linux's
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
