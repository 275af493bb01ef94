"""The modules of Python's library that touch a system, over the simulated one: `os`, `time`, `signal`, `subprocess` …

They have what the project uses of them, in the same forms; anything else is an AttributeError, so that nothing reaches
the real system unseen. The world is the one that runs; the process is the one whose code calls.
"""
import ctypes as real_ctypes
import errno
import posixpath
import signal as real_signal
import sys as real_sys
import types
from typing import Any, Dict, Iterator, Tuple

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


def missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "No such file or directory", path)


# time

def monotonic() -> float:
    if not world.clocks_differ or world.current is None:
        return world.now
    host = world.current.process.host
    return host.started_s + world.now * host.pace


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


def resolved(path: Any) -> str:
    return posixpath.normpath(posixpath.join(world.process().cwd, str(path)))


# os

def os_read(fd: int, most: int) -> bytes:
    world.call()
    file = opened(fd)
    while True:
        data = file.read(world.part(most) if file.streams else most)
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


def fstat(fd: int) -> Any:
    return types.SimpleNamespace(st_dev=1, st_ino=id(opened(fd)), st_rdev=0, st_mode=0o100600)


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


def alarm(seconds: int) -> None:
    process = world.process()
    if process.alarm:
        process.alarm[2] = None
    process.alarm = world.after(seconds, lambda: process.signal(real_signal.SIGALRM)) if seconds else None


signal = types.SimpleNamespace(
    **{name: getattr(real_signal, name) for name in dir(real_signal) if name.startswith("SIG") or name == "Signals"},
    signal=set_signal, set_wakeup_fd=set_wakeup_fd, alarm=alarm,
    getsignal=lambda number: world.call().handlers.get(number, real_signal.SIG_DFL))


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
    **{name: getattr(real_sys, name) for name in ("exit", "maxsize", "platform", "version", "version_info", "_getframe",
                                                   "getrefcount", "excepthook", "__excepthook__")},
    executable="python", modules={},  # no MXNet
    stdout=stdout, stderr=stderr, __stdout__=stdout, __stderr__=stderr, argv=["odsgd", "launch"],
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


ctypes = types.SimpleNamespace(CDLL=lambda name: types.SimpleNamespace(prctl=_prctl), Array=real_ctypes.Array,
                               c_float=real_ctypes.c_float)
atexit = types.SimpleNamespace(register=lambda call: call)  # a program here says itself how it leaves
faulthandler = types.SimpleNamespace(register=faulthandler_register)
resource = types.SimpleNamespace(RLIM_INFINITY=-1, RLIMIT_NOFILE=7, getrlimit=lambda which: (1 << 20, 1 << 20),
                                 setrlimit=lambda which, limits: None)
