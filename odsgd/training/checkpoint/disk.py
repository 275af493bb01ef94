"""Files that are whole or absent, folders of one job at a time, and one line for a full disk."""
import contextlib
import errno
import fcntl
import hmac
import os
import socket
import sys
import time
from pathlib import Path
from typing import IO, Iterator, Optional

from kvstore.errors import ConfigError, RoundTimeoutError, shown
from kvstore.job import commands, environment

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
LOCK, FREE_WITHIN_S, FREE_AGAIN_WITHIN_S, SAID_AFTER_S = ".lock", 3.0, 330.0, 10.0
"""The file in a run's folder; how long a job tries to get a folder that another job has; how long a job that was
started again tries; and when it says so. Behind a broken link processes of the attempt before end by themselves, after
five minutes of silence (`odsgd/launch/hosts/ssh.py`).
"""


@contextlib.contextmanager
def held(folder: Path, rank: int = 0) -> Iterator[None]:
    """Keep other jobs out of this folder of a run meanwhile. All workers of one job share it.

    ConfigError if another job has it; RoundTimeoutError in a job started again, which may try once more.

    The kernel's lock goes with the process, however it ends; the file stays. Without a secret a worker cannot say which
    job it belongs to, and only worker 0 takes the lock. A file system without locks refuses nobody.
    """
    if rank and not commands.trusted():
        yield
        return
    mine = f"{socket.gethostname()} pid {os.getpid()}"
    job = hmac.new(commands.job_key(), b"folder", "sha256").hexdigest() if commands.trusted() else mine
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a+", opener=lambda name, flags: os.open(name, flags, 0o622)) as file:
        _keep_readers_out(file)
        within_s = FREE_AGAIN_WITHIN_S if environment.restarts() else FREE_WITHIN_S
        began, said = time.monotonic(), False
        while not _share(file, job, mine):
            waited_s = time.monotonic() - began
            if waited_s > within_s:
                raise _refusal(folder, _holder(file), within_s)
            if waited_s > SAID_AFTER_S and not said:
                said = True
                print(f"{environment.who()}: {_still_held(folder, _holder(file))}; waiting up to {within_s:g} s until "
                      "that process ends", file=sys.stderr)
            time.sleep(0.1)
        yield


def _keep_readers_out(file: IO[str]) -> None:
    """Let only those read the file who may write it: who can read it can lock it."""
    with contextlib.suppress(OSError):  # it is another user's of our group
        writers = os.fstat(file.fileno()).st_mode & 0o222
        os.fchmod(file.fileno(), writers | writers << 1)


def _holder(file: IO[str]) -> str:
    file.seek(0)
    return shown(file.read().partition("\n")[2].strip()) or "starting"


def _still_held(folder: Path, first: str) -> str:
    return f"`{folder}`: host {first}, or a worker beside it, still has it, from the attempt before or another job"


def _refusal(folder: Path, other: str, within_s: float) -> Exception:
    if environment.restarts():  # each attempt has a secret of its own
        return RoundTimeoutError(f"{_still_held(folder, other)}, after {within_s:g} s; end that process")
    return ConfigError(f"`{folder}`: another job trains there (host {other}); take another folder, or wait until that "
                       "one has ended")


def _share(file: IO[str], job: str, mine: str) -> bool:
    """Whether `job` has the file now: it is the first to lock it, or the one that has."""
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            file.write(f"{job}\n{mine}\n")
            file.flush()
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return True
    file.seek(0)
    shared = file.readline().strip() == job
    if not shared:
        fcntl.flock(file, fcntl.LOCK_UN)
    return shared


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write to; afterwards `path` is the new file, on disk, or unchanged."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise
    flush_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder, if it is not there; its name, and that of the one that it is in, are durable."""
    folder.mkdir(parents=True, exist_ok=True)
    for place in (folder.parent, folder.parent.parent):
        flush_folder(place)


def flush_folder(folder: Path) -> None:
    """Make the names in `folder` as durable as the contents, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def remove_for_good(path: Path) -> None:
    """Remove a file, if it is there; no loss of power brings it back, though a process that was killed removed it."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.remove(path)
    try:
        flush_folder(path.parent)
    except OSError as error:  # another worker has removed the folder, too
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise


def full(error: OSError, folder: str) -> Optional[str]:
    """What to say of a file below `folder` that could not be written for want of room; None: that is not why."""
    if error.errno not in FULL:
        return None
    return (f"cannot write `{shown(error.filename or folder)}`: {error.strerror}. Make room there and start again, "
            "from the last checkpoint (--resume) if one is complete")
