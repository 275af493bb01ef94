"""A running job's status for `odsgd watch`: a file that its launcher writes anew every second.

It lies on the launching machine, in a folder that only its user can write, and has the launcher's process number as its
name. The launcher removes it when the job has ended. If the file cannot be written the job runs on.
"""
import contextlib
import json
import os
import stat
import uuid
from pathlib import Path
from typing import Any, Dict, Iterator, Optional

from kvstore.job.aside import without_waiting
from odsgd.launch import linux

Facts = Dict[str, Any]
MOST_NBYTES = 1 << 22
SHARED = "/tmp"


def folder() -> Path:
    """This user's folder: the same for a launcher and for `odsgd watch`, whatever their environments."""
    return Path(SHARED) / f"odsgd-{os.getuid()}"


class StatusFile:
    """The file of this process."""

    def __init__(self) -> None:
        self._path = folder() / f"{os.getpid()}.json"
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._ours = self._path.parent.is_dir() and not taken()
        self._born = linux.start_time(os.getpid())
        while self.take_request():  # of a killed launcher, whose process had the same number
            pass

    def write(self, facts: Facts) -> None:
        """Replace the status. Does not wait, even if a pipe lies there; OSError if it cannot be written."""
        if self._ours:
            draft = self._path.with_suffix(".new")
            with open(draft, "w", encoding="utf-8", opener=without_waiting) as file:
                file.write(json.dumps({**facts, "start_time": self._born}))
            os.replace(draft, self._path)

    def take_request(self) -> Optional[str]:
        """The name of a request that a worker join the job (`requested`), once; None: there is no other."""
        for path in sorted(self._path.parent.glob(f"{os.getpid()}.*.join")) if self._ours else ():
            with contextlib.suppress(OSError):
                path.unlink()
                return path.name
        return None

    def close(self) -> None:
        """Remove the file, even if a signal raises SystemExit meanwhile."""
        try:
            self._remove()
        finally:
            self._remove()

    def _remove(self) -> None:
        for path in (self._path, self._path.with_suffix(".new")):
            with contextlib.suppress(OSError):
                path.unlink()


@contextlib.contextmanager
def requested(job: int) -> Iterator[str]:
    """Inside, the launcher of a job is asked that another worker join it; the request's name."""
    path = folder() / f"{job}.{uuid.uuid4().hex}.join"
    path.touch(mode=0o600)
    try:
        yield path.name
    finally:
        path.unlink(missing_ok=True)


def read(job: int) -> Optional[Facts]:
    """The status of a job; None if it has ended."""
    path = folder() / f"{job}.json"
    if taken():
        return None
    try:
        with path.open(encoding="utf-8") as file:
            facts = json.loads(file.read(MOST_NBYTES))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and _runs(job, facts) else None


def running() -> Dict[int, Facts]:
    """The status of this user's jobs on this machine, by the number of the launcher's process."""
    jobs = sorted(int(path.stem) for path in folder().glob("*.json") if path.stem.isdigit())
    return {job: facts for job, facts in zip(jobs, map(read, jobs)) if facts is not None}


def taken() -> Optional[str]:
    """A warning that this user's jobs cannot be watched, since something else has the folder's name; None: they can."""
    try:
        status = folder().lstat()
    except OSError:
        return None
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
        return None
    return (f"`odsgd watch` and `odsgd join` cannot reach this user's jobs: `{folder()}` belongs to user "
            f"{status.st_uid} ({stat.filemode(status.st_mode)}), expected a folder that only user {os.getuid()} can "
            "write; have it removed, and start the job again")


def _runs(pid: int, facts: Facts) -> bool:
    """Whether the launcher still runs. A killed one leaves its file, and another process may have its number now."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return facts.get("start_time") == linux.start_time(pid)
