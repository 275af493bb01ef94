"""Services of Linux for the agent; on other systems they do nothing, or find nothing, and `cores` fails (macOS)."""
import ctypes
import os
import re
import resource
import signal
import sys
from pathlib import Path
from typing import Dict, List, Sequence, Set, Tuple

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else lambda *_: 0
MPI_FILE = re.compile(rb" (/dev/shm/mpich_\w+)$", re.MULTILINE)
"""A file of memory that MPICH's processes share, as /proc/PID/maps lists it. It outlives a killed process. Workers
remove it when they have met (kvstore/transports/mpi.py); until then the agent remembers it."""

CPU_LIMITS = (("/sys/fs/cgroup/cpu.max",),
              ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"))
"""Files with a container's processor time and the period for it, by cgroup's two versions."""


def python_words(module: str) -> Tuple[str, str]:
    """Python's arguments that run a module's `main`. Unlike with -m, a kvstore.py or yaml.py in the current folder is
    not found in the place of the module that we mean."""
    return "-c", f"import sys; sys.path[:] = filter(None, sys.path); from {module} import main; sys.exit(main())"


def cores() -> int:
    """How many processors this process may use at a time, by its affinity and its container's limit."""
    return max(1, min(len(os.sched_getaffinity(0)), *map(_limit, CPU_LIMITS)))


def _limit(files: Sequence[str]) -> int:
    """The limit by one version of cgroup; a huge number if it sets none."""
    try:
        quota, period = " ".join(Path(path).read_text(encoding="ascii") for path in files).split()
        return int(quota) // int(period) if int(quota) > 0 else sys.maxsize
    except (OSError, ValueError, ZeroDivisionError):  # not this version, or `max`
        return sys.maxsize


def allow_files(number: int) -> bool:
    """Raise the limit of open files to this number, as far as allowed; returns whether it is reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most == number


def adopt_orphans() -> None:
    """Make this process the parent of every process below it whose own parent ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with(parent: int, by: int = signal.SIGKILL) -> None:
    """In a new process: have the kernel send it a signal when its parent dies."""
    _prctl(PR_SET_PDEATHSIG, by, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def descendants(ancestor: int) -> List[int]:
    """Every living process below `ancestor`; zombies do not count."""
    children: Dict[int, List[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if entry.isdigit():
            fields = stat(int(entry))
            if fields and fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(entry))
    below = list(children.get(ancestor, ()))
    for pid in below:  # the list grows meanwhile
        below += children.get(pid, ())
    return below


def state(pid: int) -> str:
    """The kernel's letter for the state of a process: R, S, D, T (stopped) ...; empty if the process is gone."""
    return (stat(pid) or [""])[0]


def start_time(pid: int) -> str:
    """When a process was started, in the kernel's ticks; empty if it is gone, or a zombie."""
    fields = stat(pid)
    return fields[19] if fields and fields[0] not in "ZX" else ""


def stat(pid: int) -> List[str]:
    """The fields of /proc/PID/stat from the state on; empty if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def mpi_files(pid: int) -> Set[str]:
    """Files of shared memory that MPI has made for a process, and that must be removed after it."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as maps:
            return {path.decode() for path in MPI_FILE.findall(maps.read())}
    except OSError:  # it has ended
        return set()
