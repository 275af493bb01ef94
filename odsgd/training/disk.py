"""Files that are whole or not there, and a full disk told in one line."""
from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Iterator, Optional

from kvstore.errors import shown

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write to; afterwards `path` is the new file, on disk, or what it was before."""
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


def flush_folder(folder: Path) -> None:
    """Make the names in `folder` as durable as the contents."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def full(error: OSError, folder: str) -> Optional[str]:
    """What to say of a file below `folder` that could not be written for want of room; None: that is not why."""
    if error.errno not in FULL:
        return None
    return (f"cannot write `{shown(error.filename or folder)}`: {error.strerror}. Make room there and go on from the "
            "last checkpoint (--resume)")
