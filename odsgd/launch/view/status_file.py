"""Where a running job says how it stands, for `odsgd watch`: a file that its launcher writes anew every second.

It lies in a folder that is its user's alone, on the launching machine, and is named by the launcher's process. It is
gone when the job has ended. A job runs on as well where it cannot be written.
"""
import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any, Dict, List, Optional

from kvstore.job.aside import without_waiting
from odsgd.launch import linux

Facts = Dict[str, Any]
MOST_NBYTES = 1 << 22
SHARED = "/tmp"


def folder() -> Path:
    """This user's; at one place, whatever the environment of a launcher and of one that watches."""
    return Path(SHARED) / f"odsgd-{os.getuid()}"


class StatusFile:
    """This process's."""

    def __init__(self) -> None:
        self._path = folder() / f"{os.getpid()}.json"
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._ours = _is_ours(self._path.parent)
        self._born = linux.start_time(os.getpid())

    def write(self, facts: Facts) -> None:
        """Say this from now on. Waits for no reader, whatever lies there; OSError where it cannot be written."""
        if self._ours:
            draft = self._path.with_suffix(".new")
            with open(draft, "w", encoding="utf-8", opener=without_waiting) as file:
                file.write(json.dumps({**facts, "start_time": self._born}))
            os.replace(draft, self._path)

    def close(self) -> None:
        """The job has ended."""
        for path in (self._path, self._path.with_suffix(".new")):
            with contextlib.suppress(OSError):
                path.unlink()


def read(job: int) -> Optional[Facts]:
    """What this job says; None if it has ended."""
    path = folder() / f"{job}.json"
    if not _is_ours(path.parent):
        return None
    try:
        with path.open(encoding="utf-8") as file:
            facts = json.loads(file.read(MOST_NBYTES))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and _runs(job, facts) else None


def running() -> List[int]:
    """The jobs of this user on this machine, by their launchers' processes."""
    if not _is_ours(folder()):
        return []
    jobs = [int(path.stem) for path in folder().glob("*.json") if path.stem.isdigit()]
    return sorted(job for job in jobs if read(job) is not None)


def _is_ours(path: Path) -> bool:
    """Whether nobody else can write there."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _runs(pid: int, facts: Facts) -> bool:
    """A launcher that was killed has left its file, and its number may be another process's by now."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return facts.get("start_time") == linux.start_time(pid)
