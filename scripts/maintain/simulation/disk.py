"""Files of the simulated system: `open`, the calls of `os` that have a path, `pathlib.Path`, `tempfile`, `shutil`.

A disk is as forgetful as it may be. What a file holds is sure to outlast a loss of power when the file has been synced,
and a name when its folder has been. Else what is left is drawn: a name as it was or as it is, a part of the bytes.
"""
import contextlib
import errno
import fcntl as real_fcntl
import fnmatch
import io
import os as real_os
import posixpath
import stat as real_stat
import struct
import types
from pathlib import PurePosixPath
from typing import Any, Callable, Iterator, List, Optional, Tuple

from scripts.maintain.simulation import stdlib
from scripts.maintain.simulation.files import File, Node
from scripts.maintain.simulation.stdlib import missing, os_close, os_read, os_write, resolved


class Disk(File):
    """An open file of a disk."""

    def __init__(self, data: bytearray, append: bool, path: str) -> None:
        super().__init__()
        self.data, self.append, self.path, self.at = data, append, path, 0

    def read(self, most: int) -> Optional[bytes]:
        found = bytes(self.data[self.at:self.at + most])
        self.at += len(found)
        return found

    def write(self, data: bytes) -> Optional[int]:
        if stdlib.world.process().host.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.append:
            self.at = len(self.data)
        self.data[self.at:self.at + len(data)] = data
        self.at += len(data)
        return len(data)

    def release(self) -> None:
        _unlock(self)


def _proc(path: str) -> Optional[bytes]:
    """A file of /proc; None if there is none."""
    parts = path.split("/")
    process = stdlib.world.process().host.processes.get(int(parts[2])) if parts[2].isdigit() else None
    if process is None or len(parts) != 4:
        return None
    if parts[3] == "maps":
        return b""
    parent = process.parent.pid if process.parent else 1
    fields = [process.state, str(parent), str(process.pgid), *["0"] * 16, str(int(process.began * 100))]
    return f"{process.pid} (p) {' '.join(fields)}\n".encode()


def os_open(path: Any, flags: int, mode: int = 0o777) -> int:
    process = stdlib.world.call()
    full, files = resolved(path), process.host.files
    if full.startswith("/proc/"):
        data = _proc(full)
        if data is None:
            raise missing(full)
        return process.install(Disk(bytearray(data), False, full))
    there = files.get(full)
    if full in files and there is None:
        if not flags & (real_os.O_WRONLY | real_os.O_CREAT):
            return process.install(Folder(full))
        raise IsADirectoryError(errno.EISDIR, "Is a directory", full)
    if there is None:
        if not flags & real_os.O_CREAT or files.get(posixpath.dirname(full), b"") is not None:
            raise missing(full)
        there = files[full] = Node()
    elif flags & real_os.O_CREAT and flags & real_os.O_EXCL:
        raise FileExistsError(errno.EEXIST, "File exists", full)
    if flags & real_os.O_TRUNC:
        there = files[full] = Node()
    return process.install(Disk(there, bool(flags & real_os.O_APPEND), full))


class Folder(File):
    """An open folder, which can be synced."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path


def fsync(fd: int) -> None:
    """From here on a file's bytes, or a folder's names, outlast a loss of power."""
    host, file = stdlib.world.call().host, stdlib.opened(fd)
    if isinstance(file, Disk) and isinstance(file.data, Node):
        file.data.synced = bytes(file.data)
    elif isinstance(file, Folder):
        for one in {*host.below(file.path), *(name for name in host.names if posixpath.dirname(name) == file.path)}:
            if one in host.files:
                host.names[one] = host.files[one]
            else:
                host.names.pop(one, None)


def _unlock(file: Disk) -> bool:
    """Whether it had a lock."""
    node = file.data
    if not isinstance(node, Node) or file not in node.locks:
        return False
    node.locks = {one: how for one, how in node.locks.items() if one is not file}
    return True


def flock(file: Any, how: int) -> None:
    """As in the kernel a lock that is changed is given up first, and another may get it."""
    stdlib.world.call()
    mine: Any = stdlib.opened(file.fileno())
    if _unlock(mine):
        stdlib.world.call()
    if how & real_fcntl.LOCK_UN:
        return
    if real_fcntl.LOCK_EX in (how & ~real_fcntl.LOCK_NB, *mine.data.locks.values()) and mine.data.locks:
        raise BlockingIOError(errno.EWOULDBLOCK, "Resource temporarily unavailable")
    mine.data.locks = {**mine.data.locks, mine: how & ~real_fcntl.LOCK_NB}


class Raw(io.RawIOBase):
    """A file object over a descriptor."""

    def __init__(self, fd: int, closefd: bool = True) -> None:
        self._fd, self._closefd, self._process = fd, closefd, stdlib.world.process()

    def __del__(self) -> None:
        """Whoever drops it closes nothing: Python may find out when another process runs."""

    def fileno(self) -> int:
        return self._fd

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readline(self, size: Any = -1) -> bytes:
        """A line, as byte after byte would give it."""
        line, file = b"", stdlib.opened(self._fd)
        while not line.endswith(b"\n"):
            there: bytes = (getattr(file, "pipe", None) and file.pipe.data) or b""  # type: ignore[attr-defined]
            data = os_read(self._fd, there.find(b"\n") + 1 or len(there) or 1)
            if not data:
                break
            line += data
        return line

    def seekable(self) -> bool:
        return isinstance(stdlib.opened(self._fd), Disk)

    def seek(self, offset: int, whence: int = 0) -> int:
        file = stdlib.opened(self._fd)
        if not isinstance(file, Disk):
            raise io.UnsupportedOperation("seek")
        file.at = offset + (0, file.at, len(file.data))[whence]
        return file.at

    def truncate(self, size: Optional[int] = None) -> int:
        file: Any = stdlib.opened(self._fd)
        del file.data[size:]
        return len(file.data)

    def readinto(self, buffer: Any) -> Optional[int]:
        data = os_read(self._fd, len(buffer))
        buffer[:len(data)] = data
        return len(data)

    def write(self, data: Any) -> Optional[int]:
        return os_write(self._fd, bytes(data))

    def close(self) -> None:
        if not self.closed:
            with contextlib.suppress(ValueError):
                super().close()
            current = stdlib.world.current
            if self._closefd and current and current.process is self._process and not self._process.dead:
                os_close(self._fd)


FLAGS = {"r": real_os.O_RDONLY, "w": real_os.O_WRONLY | real_os.O_CREAT | real_os.O_TRUNC,
         "a": real_os.O_WRONLY | real_os.O_CREAT | real_os.O_APPEND,
         "x": real_os.O_WRONLY | real_os.O_CREAT | real_os.O_EXCL}


def builtin_open(file: Any, mode: str = "r", buffering: int = -1, encoding: Optional[str] = None,
                 errors: Optional[str] = None, newline: Optional[str] = None, closefd: bool = True,
                 opener: Optional[Callable[[str, int], int]] = None) -> Any:
    """`open`."""
    flags = FLAGS[mode.strip("bt+")]
    fd = file if isinstance(file, int) else opener(str(file), flags) if opener else os_open(file, flags)
    raw = Raw(fd, closefd)
    if buffering == 0:
        return raw
    kind: Any = io.BufferedRandom if "+" in mode else io.BufferedReader if mode.startswith("r") else io.BufferedWriter
    buffered = kind(raw)
    return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)


def listdir(path: Any) -> List[str]:
    process = stdlib.world.call()
    if str(path) == "/proc":
        return [str(pid) for pid in process.host.processes]
    if process.host.files.get(resolved(path), b"") is not None:
        raise missing(str(path))
    return [posixpath.basename(one) for one in process.host.below(resolved(path))]


def unlink(path: Any) -> None:
    files, full = stdlib.world.call().host.files, resolved(path)
    if files.get(full) is None:
        raise missing(full)
    del files[full]


def replace(source: Any, target: Any) -> None:
    files = stdlib.world.call().host.files
    if resolved(source) not in files:
        raise missing(str(source))
    files[resolved(target)] = files.pop(resolved(source))


def mkdir(path: Any, mode: int = 0o777) -> None:
    files, full = stdlib.world.call().host.files, resolved(path)
    if full in files:
        raise FileExistsError(errno.EEXIST, "File exists", full)
    if files.get(posixpath.dirname(full), b"") is not None:
        raise missing(full)
    files[full] = None


def rmdir(path: Any) -> None:
    files, full = stdlib.world.call().host.files, resolved(path)
    if listdir(path):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", full)
    del files[full]


path = types.SimpleNamespace(
    **{name: getattr(posixpath, name) for name in ("join", "basename", "dirname", "isabs", "relpath")},
    abspath=lambda one: resolved(one), expanduser=lambda one: one, realpath=lambda one: resolved(one),
    exists=lambda one: resolved(one) in stdlib.world.call().host.files,
    isfile=lambda one: stdlib.world.call().host.files.get(resolved(one)) is not None,
    isdir=lambda one: str(one) == "/proc" or stdlib.world.call().host.files.get(resolved(one), b"") is None)

os = types.SimpleNamespace(
    **{name: getattr(real_os, name) for name in (
        "O_NONBLOCK", "O_NOFOLLOW", "O_RDONLY", "O_WRONLY", "O_CREAT", "O_TRUNC", "O_APPEND", "O_EXCL", "P_ALL",
        "WEXITED", "WNOHANG", "WNOWAIT", "X_OK", "W_OK", "sep", "pathsep", "defpath", "pardir", "fspath", "PathLike")},
    path=path, open=os_open, read=os_read, write=os_write, close=os_close, listdir=listdir, unlink=unlink,
    remove=unlink, replace=replace, mkdir=mkdir, fsync=fsync, environ=stdlib._Environ(), pipe=stdlib.os_pipe,
    dup=stdlib.os_dup, set_blocking=stdlib.set_blocking, kill=stdlib.os_kill, killpg=stdlib.killpg,
    waitid=stdlib.waitid, waitpid=stdlib.waitpid, _exit=stdlib.os_exit, fstat=stdlib.fstat,
    fchmod=lambda fd, mode: None, umask=stdlib.umask,
    chdir=stdlib.chdir, get_terminal_size=stdlib.terminal_size, getcwd=lambda: stdlib.world.process().cwd,
    getpid=lambda: stdlib.world.process().pid, getuid=lambda: 1000,
    getppid=lambda: getattr(stdlib.world.process().parent, "pid", 1), access=lambda one, mode: True,
    urandom=lambda count: stdlib.world.random.getrandbits(8 * count).to_bytes(count, "big"),
    sched_getaffinity=lambda pid: {0, 1}, register_at_fork=lambda **calls: None)


class Path(PurePosixPath):
    """`pathlib.Path`, as far as it is used."""

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        if parents and str(self.parent) != str(self):
            self.parent.mkdir(mode, parents, True)
        try:
            mkdir(self, mode)
        except FileExistsError:
            if not exist_ok:
                raise

    def lstat(self) -> Any:
        files, full = stdlib.world.call().host.files, resolved(self)
        if full not in files:
            raise missing(full)
        kind = real_stat.S_IFDIR if files[full] is None else real_stat.S_IFREG
        return types.SimpleNamespace(st_mode=kind | 0o700, st_uid=1000)

    def unlink(self, missing_ok: bool = False) -> None:
        unlink(self)

    def rmdir(self) -> None:
        rmdir(self)

    def is_dir(self) -> bool:
        return bool(path.isdir(self))

    def is_file(self) -> bool:
        return bool(path.isfile(self))

    def exists(self) -> bool:
        return bool(path.exists(self))

    def iterdir(self) -> "Iterator[Path]":
        return (self / name for name in listdir(self))

    def glob(self, pattern: str) -> "Iterator[Path]":
        """Of a pattern for names, and of `*/NAME`."""
        pattern, _, name = pattern.partition("/")
        paths = list(self.iterdir()) if self.is_dir() else []
        found = [path / name for path in paths if fnmatch.fnmatch(path.name, pattern)]
        return iter([path for path in found if not name or path.exists()])

    def read_text(self, encoding: str = "utf-8") -> str:
        with builtin_open(self, encoding=encoding) as file:
            return str(file.read())

    def write_text(self, text: str, encoding: str = "utf-8", **other: Any) -> int:
        with builtin_open(self, "w", encoding=encoding) as file:
            return int(file.write(text))


# What lasts a moment

def mkdtemp(suffix: str = "", prefix: str = "tmp", dir: str = "/tmp") -> str:
    name = f"{dir}/{prefix}{stdlib.world.random.randrange(16 ** 8):08x}{suffix}"
    mkdir(name)
    return name


def mkstemp(suffix: str = "", prefix: str = "tmp", dir: str = "/tmp") -> Tuple[int, str]:
    name = f"{dir}/{prefix}{stdlib.world.random.randrange(16 ** 8):08x}{suffix}"
    return os_open(name, real_os.O_CREAT | real_os.O_EXCL), name


def copyfile(source: Any, target: Any) -> None:
    with builtin_open(source, "rb") as there, builtin_open(target, "wb") as here:
        here.write(there.read())


def rmtree(folder: str, ignore_errors: bool = False) -> None:
    files, full = stdlib.world.call().host.files, resolved(folder)
    for one in [one for one in files if one == full or one.startswith(full + "/")]:
        del files[one]


fcntl = types.SimpleNamespace(
    flock=flock, ioctl=lambda fd, request, given: struct.pack("iP", 0, 0),  # no interface is known
    **{name: getattr(real_fcntl, name) for name in ("LOCK_EX", "LOCK_SH", "LOCK_NB", "LOCK_UN")})
tempfile = types.SimpleNamespace(mkdtemp=mkdtemp, mkstemp=mkstemp)
shutil = types.SimpleNamespace(rmtree=rmtree, copyfile=copyfile, which=lambda name: f"/usr/bin/{name}")
