"""The modules of Python's library that touch a system, over the simulated one: `os`, `time`, `signal`, `subprocess` …

They have what the project uses of them, in the same forms; anything else is an AttributeError, so that nothing reaches
the real system unseen. The world is the one that runs; the process is the one whose code calls.
"""
import contextlib
import errno
import io
import os as real_os
import posixpath
import signal as real_signal
import stat as real_stat
import struct
import sys as real_sys
import types
from pathlib import PurePosixPath
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from scripts.maintain.simulation.files import File, Pipe
from scripts.maintain.simulation.system import Process, World

world: World = World(0)


def use(one: World) -> None:
    """From now on this is the world."""
    global world
    world = one


def opened(fd: int) -> File:
    try:
        return world.process().fds[fd]
    except KeyError:
        raise OSError(errno.EBADF, "Bad file descriptor") from None


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "No such file or directory", path)


# time

def monotonic() -> float:
    return world.now


def wall() -> float:
    """The wall clock of this host, which may jump."""
    host = world.process().host if world.current else None
    return (host.wall_s if host else 1.7e9) + world.now


def sleep(seconds: float) -> None:
    world.call()
    until = world.now + max(0.0, seconds)
    while world.wait((), until):
        pass
    world.call()


time = types.SimpleNamespace(monotonic=monotonic, time=wall, sleep=sleep, perf_counter=monotonic)


# files

def resolved(path: Any) -> str:
    return posixpath.normpath(posixpath.join(world.process().cwd, str(path)))


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
        if self.append:
            self.at = len(self.data)
        self.data[self.at:self.at + len(data)] = data
        self.at += len(data)
        return len(data)


def _proc(path: str) -> Optional[bytes]:
    """A file of /proc; None if there is none."""
    parts = path.split("/")
    process = world.process().host.processes.get(int(parts[2])) if parts[2].isdigit() else None
    if process is None or len(parts) != 4:
        return None
    if parts[3] == "maps":
        return b""
    parent = process.parent.pid if process.parent else 1
    fields = [process.state, str(parent), str(process.pgid), *["0"] * 16, str(int(process.began * 100))]
    return f"{process.pid} (p) {' '.join(fields)}\n".encode()


def os_open(path: Any, flags: int, mode: int = 0o777) -> int:
    process = world.call()
    full, files = resolved(path), process.host.files
    if full.startswith("/proc/"):
        data = _proc(full)
        if data is None:
            raise _missing(full)
        return process.install(Disk(bytearray(data), False, full))
    there = files.get(full)
    if full in files and there is None:
        raise IsADirectoryError(errno.EISDIR, "Is a directory", full)
    if there is None:
        if not flags & real_os.O_CREAT or files.get(posixpath.dirname(full), b"") is not None:
            raise _missing(full)
        there = files[full] = bytearray()
    elif flags & real_os.O_CREAT and flags & real_os.O_EXCL:
        raise FileExistsError(errno.EEXIST, "File exists", full)
    if flags & real_os.O_TRUNC:
        there = files[full] = bytearray()
    return process.install(Disk(there, bool(flags & real_os.O_APPEND), full))


class Raw(io.RawIOBase):
    """A file object over a descriptor."""

    def __init__(self, fd: int, closefd: bool = True) -> None:
        self._fd, self._closefd, self._process = fd, closefd, world.process()

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
        line, file = b"", opened(self._fd)
        while not line.endswith(b"\n"):
            there: bytes = (getattr(file, "pipe", None) and file.pipe.data) or b""  # type: ignore[attr-defined]
            data = os_read(self._fd, there.find(b"\n") + 1 or len(there) or 1)
            if not data:
                break
            line += data
        return line

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
            if self._closefd and world.current and world.process() is self._process and not self._process.dead:
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
    buffered: Any = io.BufferedReader(raw) if mode.startswith("r") else io.BufferedWriter(raw)
    return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)


# os

def os_read(fd: int, most: int) -> bytes:
    world.call()
    file = opened(fd)
    while True:
        data = file.read(most)
        if data is not None:
            return data
        if not file.blocking:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        world.wait([file], None)


def os_write(fd: int, data: Any) -> int:
    world.call()
    file = opened(fd)
    while True:
        try:
            count = file.write(bytes(data))
        except BrokenPipeError:
            process = world.process()
            if process.handlers.get(real_signal.SIGPIPE) == real_signal.SIG_DFL:
                process.signal(real_signal.SIGPIPE)
            raise
        if count is not None:
            return count
        if not file.blocking:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        world.wait([file], None)


def os_close(fd: int) -> None:
    world.call().close(fd)


def os_pipe() -> Tuple[int, int]:
    process, pipe = world.call(), Pipe()
    return process.install(pipe.reader), process.install(pipe.writer)


def os_dup(fd: int) -> int:
    return world.call().install(opened(fd))


def set_blocking(fd: int, blocking: bool) -> None:
    world.call()
    opened(fd).blocking = blocking


def _target(pid: int) -> Process:
    found = world.call().host.processes.get(pid)
    if found is None:
        raise ProcessLookupError(errno.ESRCH, "No such process")
    return found


def os_kill(pid: int, number: int) -> None:
    target = _target(pid)
    if number:
        target.signal(number)
    world.call()


def killpg(pgid: int, number: int) -> None:
    group = world.call().host.group(pgid)
    if not group:
        raise ProcessLookupError(errno.ESRCH, "No such process")
    for process in group:
        process.signal(number)
    world.call()


def waitid(which: int, number: int, options: int) -> Any:
    process = world.call()
    if not process.children:
        raise ChildProcessError(errno.ECHILD, "No child processes")
    ended = next((child for child in process.children if child.code is not None), None)
    return types.SimpleNamespace(si_pid=ended.pid) if ended else None


def waitpid(pid: int, options: int) -> Tuple[int, int]:
    process = world.call()
    child = next((one for one in process.children if one.pid == pid), None)
    if child is None:
        raise ChildProcessError(errno.ECHILD, "No child processes")
    while child.code is None:
        world.wait([process.reaped], None)
    child.forget()
    return pid, child.code


def os_exit(code: int) -> None:
    process = world.call()
    process.end(code & 255)
    world.call()


def listdir(path: Any) -> List[str]:
    process = world.call()
    if str(path) == "/proc":
        return [str(pid) for pid in process.host.processes]
    if process.host.files.get(resolved(path), b"") is not None:
        raise _missing(str(path))
    return [posixpath.basename(one) for one in process.host.below(resolved(path))]


def unlink(path: Any) -> None:
    files, full = world.call().host.files, resolved(path)
    if files.get(full) is None:
        raise _missing(full)
    del files[full]


def replace(source: Any, target: Any) -> None:
    files = world.call().host.files
    if resolved(source) not in files:
        raise _missing(str(source))
    files[resolved(target)] = files.pop(resolved(source))


def mkdir(path: Any, mode: int = 0o777) -> None:
    files, full = world.call().host.files, resolved(path)
    if full in files:
        raise FileExistsError(errno.EEXIST, "File exists", full)
    if files.get(posixpath.dirname(full), b"") is not None:
        raise _missing(full)
    files[full] = None


def fstat(fd: int) -> Any:
    return types.SimpleNamespace(st_dev=1, st_ino=id(opened(fd)), st_rdev=0)


def umask(mask: int) -> int:
    process = world.call()
    process.umask, before = mask, process.umask
    return before


def chdir(path: Any) -> None:
    world.call().cwd = resolved(path)


def terminal_size(fd: int) -> Any:
    raise OSError(errno.ENOTTY, "Inappropriate ioctl for device")


class _Environ(Dict[str, str]):
    """The environment of the process whose code runs."""

    def _its(self) -> Dict[str, str]:
        return world.process().env

    def __getitem__(self, name: str) -> str:
        return self._its()[name]

    def __setitem__(self, name: str, value: str) -> None:
        self._its()[name] = value

    def __contains__(self, name: object) -> bool:
        return name in self._its()

    def __iter__(self) -> Iterator[str]:
        return iter(self._its())

    def __len__(self) -> int:
        return len(self._its())

    def get(self, name: str, default: Any = None) -> Any:
        return self._its().get(name, default)

    def items(self) -> Any:
        return self._its().items()

    def keys(self) -> Any:
        return self._its().keys()

    def pop(self, name: str, *default: Any) -> Any:
        return self._its().pop(name, *default)

    def setdefault(self, name: str, default: str = "") -> str:
        return self._its().setdefault(name, default)


path = types.SimpleNamespace(
    **{name: getattr(posixpath, name) for name in ("join", "basename", "dirname", "isabs", "splitext", "relpath")},
    abspath=lambda one: resolved(one), expanduser=lambda one: one, realpath=lambda one: resolved(one),
    exists=lambda one: resolved(one) in world.call().host.files,
    isfile=lambda one: world.call().host.files.get(resolved(one)) is not None,
    isdir=lambda one: str(one) == "/proc" or world.call().host.files.get(resolved(one), b"") is None)

os = types.SimpleNamespace(
    **{name: getattr(real_os, name) for name in (
        "O_NONBLOCK", "O_NOFOLLOW", "O_RDONLY", "O_WRONLY", "O_CREAT", "O_TRUNC", "O_APPEND", "O_EXCL", "P_ALL",
        "WEXITED", "WNOHANG", "WNOWAIT", "X_OK", "W_OK", "sep", "pathsep", "pardir", "fspath", "PathLike")},
    path=path, environ=_Environ(), open=os_open, read=os_read, write=os_write, close=os_close, pipe=os_pipe, dup=os_dup,
    set_blocking=set_blocking, kill=os_kill, killpg=killpg, waitid=waitid, waitpid=waitpid, _exit=os_exit,
    listdir=listdir, unlink=unlink, remove=unlink, replace=replace, mkdir=mkdir, fstat=fstat, umask=umask, chdir=chdir,
    getcwd=lambda: world.process().cwd, getpid=lambda: world.process().pid, getuid=lambda: 1000,
    getppid=lambda: getattr(world.process().parent, "pid", 1), access=lambda one, mode: True,
    sched_getaffinity=lambda pid: {0, 1}, register_at_fork=lambda **calls: None, get_terminal_size=terminal_size)


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
        files, full = world.call().host.files, resolved(self)
        if full not in files:
            raise _missing(full)
        kind = real_stat.S_IFDIR if files[full] is None else real_stat.S_IFREG
        return types.SimpleNamespace(st_mode=kind | 0o700, st_uid=1000)

    def unlink(self, missing_ok: bool = False) -> None:
        unlink(self)


# signal

def set_signal(number: int, handler: Any) -> Any:
    process = world.call()
    before = process.handlers.get(number, real_signal.SIG_DFL)
    process.handlers[number] = handler
    return before


def set_wakeup_fd(fd: int, warn_on_full_buffer: bool = True) -> int:
    process = world.call()
    process.wakeup_fd, before = fd, process.wakeup_fd
    return before


signal = types.SimpleNamespace(
    **{name: getattr(real_signal, name) for name in dir(real_signal) if name.startswith("SIG") or name == "Signals"},
    signal=set_signal, set_wakeup_fd=set_wakeup_fd,
    getsignal=lambda number: world.call().handlers.get(number, real_signal.SIG_DFL))


# What lasts a moment: tempfile, shutil, secrets

def mkdtemp(suffix: str = "", prefix: str = "tmp", dir: str = "/tmp") -> str:
    name = f"{dir}/{prefix}{world.random.randrange(16 ** 8):08x}{suffix}"
    mkdir(name)
    return name


def mkstemp(suffix: str = "", prefix: str = "tmp", dir: str = "/tmp") -> Tuple[int, str]:
    name = f"{dir}/{prefix}{world.random.randrange(16 ** 8):08x}{suffix}"
    return os_open(name, real_os.O_CREAT | real_os.O_EXCL), name


def rmtree(folder: str, ignore_errors: bool = False) -> None:
    files, full = world.call().host.files, resolved(folder)
    for one in [one for one in files if one == full or one.startswith(full + "/")]:
        del files[one]


tempfile = types.SimpleNamespace(mkdtemp=mkdtemp, mkstemp=mkstemp)
shutil = types.SimpleNamespace(rmtree=rmtree, which=lambda name: f"/usr/bin/{name}")
secrets = types.SimpleNamespace(
    token_hex=lambda nbytes=32: "%0*x" % (2 * nbytes, world.random.getrandbits(8 * nbytes)),
    randbelow=lambda most: world.random.randrange(most))


# sys

class Text:
    """sys.stdout or sys.stderr of the process whose code runs."""

    encoding = "utf-8"

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return bool(getattr(world.process().fds.get(self._fd), "terminal", False))

    def write(self, text: str) -> int:
        data = text.encode("utf-8", "backslashreplace")
        while data:
            data = data[os_write(self._fd, data):]
        return len(text)

    def flush(self) -> None:
        world.call()


stdout, stderr = Text(1), Text(2)
sys = types.SimpleNamespace(
    **{name: getattr(real_sys, name) for name in ("exit", "maxsize", "platform", "version_info", "_getframe")},
    executable="python", stdout=stdout, stderr=stderr, __stdout__=stdout, __stderr__=stderr, argv=["odsgd", "launch"],
    getswitchinterval=lambda: 0.005, setswitchinterval=lambda seconds: None)


def builtin_print(*words: Any, sep: str = " ", end: str = "\n", file: Any = None, flush: bool = False) -> None:
    """`print`."""
    (file or stdout).write(sep.join(map(str, words)) + end)


# The rest of a kernel

def _prctl(option: int, value: int = 0, *rest: int) -> int:
    process = world.call()
    if option == 1:
        process.death_signal = value
    elif option == 36:
        process.subreaper = bool(value)
    return 0


def faulthandler_register(number: int, file: int = 2, all_threads: bool = True) -> None:
    def dump(process: Process) -> None:
        process.complain("Current thread 0x1 (most recent call first):\n")
    dump.native = True  # type: ignore[attr-defined]
    world.call().handlers[number] = dump


ctypes = types.SimpleNamespace(CDLL=lambda name: types.SimpleNamespace(prctl=_prctl))
fcntl = types.SimpleNamespace(ioctl=lambda fd, request, given: struct.pack("iP", 0, 0))  # no interface is known
faulthandler = types.SimpleNamespace(register=faulthandler_register)
resource = types.SimpleNamespace(RLIM_INFINITY=-1, RLIMIT_NOFILE=7, getrlimit=lambda which: (1 << 20, 1 << 20),
                                 setrlimit=lambda which, limits: None)
