"""`selectors`, `select`, `subprocess` and `socket` over the simulated system."""
import errno
import functools
import selectors as real_selectors
import signal as real_signal
import socket as real_socket
import subprocess as real_subprocess
import types
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

from scripts.maintain.simulation import stdlib
from scripts.maintain.simulation.disk import Raw
from scripts.maintain.simulation.files import File, Null, Pipe, Way
from scripts.maintain.simulation.stdlib import os_close, os_read, os_write, resolved
from scripts.maintain.simulation.system import Host, Process


class Selector:
    """`selectors.DefaultSelector`: what is ready comes in any order, as epoll gives it."""

    def __init__(self) -> None:
        self._keys: Dict[int, Any] = {}

    def register(self, file: Any, events: int, data: Any = None) -> Any:
        fd = file if isinstance(file, int) else file.fileno()
        if fd in self._keys:
            raise KeyError(f"{fd} is already registered")
        stdlib.opened(fd)
        self._keys[fd] = real_selectors.SelectorKey(file, fd, events, data)
        return self._keys[fd]

    def unregister(self, file: Any) -> Any:
        return self._keys.pop(file if isinstance(file, int) else file.fileno())

    def get_map(self) -> Dict[int, Any]:
        return self._keys

    def close(self) -> None:
        self._keys.clear()

    def select(self, timeout: Optional[float] = None) -> List[Tuple[Any, int]]:
        fds = stdlib.world.call().fds
        until = None if timeout is None else stdlib.world.now + max(0.0, timeout)
        while True:
            files, ready = [], []
            for fd, key in self._keys.items():
                if fd in fds:
                    file, events = fds[fd], key.events
                    files.append(file)
                    mask = (events & 1 and file.readable and 1) | (events & 2 and file.writable and 2)
                    if mask:
                        ready.append((key, mask))
            if ready or (until is not None and stdlib.world.now >= until):
                if len(ready) > 1:
                    stdlib.world.random.shuffle(ready)
                return ready
            stdlib.world.wait(files, until)


def select_select(read: Iterable[Any], write: Iterable[Any], other: Iterable[Any], timeout: Optional[float] = None
                  ) -> Tuple[List[Any], List[Any], List[Any]]:
    selector = Selector()
    for fd, events in [(fd, 1) for fd in read] + [(fd, 2) for fd in write]:
        selector.register(fd, events)
    ready = selector.select(timeout)
    return ([key.fileobj for key, mask in ready if mask & 1], [key.fileobj for key, mask in ready if mask & 2], [])


selectors = types.SimpleNamespace(DefaultSelector=Selector, BaseSelector=Selector, EVENT_READ=1)
select = types.SimpleNamespace(select=select_select)


# subprocess

class Popen:
    """A child that runs one of the world's programs."""

    def __class_getitem__(cls, item: object) -> "type[Popen]":
        return cls

    def __init__(self, args: Sequence[str], bufsize: int = -1, stdin: Any = None, stdout: Any = None,
                 stderr: Any = None, env: Any = None, cwd: Optional[str] = None, pass_fds: Sequence[int] = (),
                 start_new_session: bool = False, preexec_fn: Optional[Callable[[], object]] = None) -> None:
        parent = stdlib.world.call()
        main = stdlib.world.programs(args)
        fds: Dict[int, File] = {fd: parent.fds[fd] for fd in pass_fds}
        ours: List[Any] = []
        for number, given in enumerate((stdin, stdout, stderr)):
            pipe = Pipe() if given == real_subprocess.PIPE else None
            fds[number] = ((pipe.writer if number else pipe.reader) if pipe else
                           parent.fds[given] if isinstance(given, int) and given >= 0 else
                           Null() if given == real_subprocess.DEVNULL else parent.fds[number])
            ours.append(Raw(parent.install(pipe.reader if number else pipe.writer)) if pipe else None)
        self.stdin, self.stdout, self.stderr = ours
        self.args, self.returncode = args, None  # type: Sequence[str], Optional[int]
        start_s = 0.02 + 0.3 * stdlib.world.random.random()
        self._child = Process(parent.host, parent, args, main, parent.env if env is None else env, fds, start_s)
        self._parent, self.pid = parent, self._child.pid
        self._child.cwd = resolved(cwd) if cwd else parent.cwd
        if start_new_session:
            self._child.pgid = self.pid
        if preexec_fn:
            task, stdlib.world.current = stdlib.world.current, self._child.tasks[0]
            preempted, stdlib.world.preempted = stdlib.world.preempted, 0.0
            try:
                preexec_fn()
            finally:
                stdlib.world.current, stdlib.world.preempted = task, preempted
        stdlib.world.note(f"{parent.label} starts {' '.join(args)[:60]} as pid {self.pid} on {parent.host.name}")

    def poll(self) -> Optional[int]:
        stdlib.world.call()
        if self.returncode is None and self._child.code is not None:
            self._child.forget()
            self.returncode = self._child.code
        return self.returncode

    def wait(self, timeout: Optional[float] = None) -> int:
        until = None if timeout is None else stdlib.world.now + timeout
        while self.poll() is None:
            if until is not None and stdlib.world.now >= until:
                raise real_subprocess.TimeoutExpired(self.args, timeout or 0.0)
            stdlib.world.wait([self._parent.reaped], until)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, input: Optional[bytes] = None, timeout: Optional[float] = None) -> Tuple[bytes, bytes]:
        until = None if timeout is None else stdlib.world.now + timeout
        kept = self.__dict__.setdefault("_said", {1: b"", 2: b""})
        for number, pipe in ((1, self.stdout), (2, self.stderr)):
            while pipe:
                left = None if until is None else until - stdlib.world.now
                if not select_select([pipe], [], [], left)[0]:
                    raise real_subprocess.TimeoutExpired(self.args, timeout or 0.0)
                data = os_read(pipe.fileno(), 65536)
                if not data:
                    break
                kept[number] += data
        self.wait(None if until is None else until - stdlib.world.now)
        return kept[1], kept[2]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            self._child.signal(number)

    def kill(self) -> None:
        self.send_signal(real_signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(real_signal.SIGTERM)

    def __enter__(self) -> "Popen":
        return self

    def __exit__(self, *error: Any) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe:
                pipe.close()
        self.wait()


subprocess = types.SimpleNamespace(
    Popen=Popen, PIPE=real_subprocess.PIPE, DEVNULL=real_subprocess.DEVNULL, STDOUT=real_subprocess.STDOUT,
    TimeoutExpired=real_subprocess.TimeoutExpired, SubprocessError=real_subprocess.SubprocessError)


# socket

class Both(File):
    """An end of a connection: what it reads from, and what it writes to."""

    streams = True

    def __init__(self, reader: File, writer: File) -> None:
        super().__init__()
        self.reader, self.writer = reader, writer
        self.shut = False
        self.queues = [self.waiters, *reader.queues, *writer.queues]

    def read(self, most: int) -> Optional[bytes]:
        return b"" if self.shut else self.reader.read(most)

    def write(self, data: bytes) -> Optional[int]:
        return self.writer.write(data)

    @property
    def readable(self) -> bool:
        return self.shut or self.reader.readable

    @property
    def writable(self) -> bool:
        return self.writer.writable

    def shutdown(self) -> None:
        self.shut = True
        self.writer.release()
        self.changed()

    def release(self) -> None:
        self.reader.release()
        if not self.shut:
            self.writer.release()


class Socket:
    """`socket.socket`, as far as it is used."""

    def __init__(self, family: int = 2, kind: int = 1, proto: int = 0, fileno: Optional[int] = None) -> None:
        self._fd = stdlib.world.call().install(Null()) if fileno is None else fileno
        self._name: Any = ("127.0.0.1", 0)
        self.family, self._timeout_s = family, None  # type: int, Optional[float]

    def fileno(self) -> int:
        return self._fd

    def detach(self) -> int:
        fd, self._fd = self._fd, -1
        return fd

    def close(self) -> None:
        if self._fd >= 0:
            os_close(self.detach())

    def __enter__(self) -> "Socket":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def setblocking(self, blocking: bool) -> None:
        stdlib.opened(self._fd).blocking = blocking

    def setsockopt(self, *option: Any) -> None:
        stdlib.world.call()

    def settimeout(self, timeout_s: Optional[float]) -> None:
        self._timeout_s = timeout_s

    def bind(self, address: Any) -> None:
        self._name = address if isinstance(address, str) else (
            address[0] or "0.0.0.0", address[1] or 20000 + stdlib.world.random.randrange(10000))

    def getsockname(self) -> Any:
        return self._name

    def _becomes(self, file: File) -> None:
        process = stdlib.world.process()
        process.close(self._fd)
        process.install(file, self._fd)

    def connect(self, address: Any) -> None:
        """A datagram socket sends nothing. A stream socket is connected to the listener at `address`."""
        here = stdlib.world.call().host
        if isinstance(address, str):
            self._becomes(_dialled(here, here, address, self._timeout_s))
        self._name = (here.name, 9)

    def listen(self, backlog: int = 0) -> None:
        host = stdlib.world.call().host
        self._becomes(Listener(host, self._name if isinstance(self._name, str) else self._name[1]))

    def accept(self) -> "Tuple[Socket, Any]":
        listener = stdlib.opened(self._fd)
        assert isinstance(listener, Listener)
        self._until(lambda: bool(listener.calls) or None)
        return Socket(self.family, fileno=stdlib.world.process().install(listener.calls.pop(0))), ("", 0)

    def _until(self, ready: Callable[[], Any]) -> Any:
        """What `ready` gives, once that is not None; TimeoutError when it is late."""
        world = stdlib.world
        world.call()
        until = None if self._timeout_s is None else world.now + self._timeout_s
        found = ready()
        while found is None:
            if not stdlib.opened(self._fd).blocking:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            if until is not None and world.now >= until:
                raise TimeoutError("timed out")
            world.wait([stdlib.opened(self._fd)], until)
            found = ready()
        return found

    def recv_into(self, room: Any, most: int = 0, flags: int = 0) -> int:
        """With MSG_WAITALL as much as fits, as a rule: a signal may end it early."""
        count, file = 0, stdlib.opened(self._fd)
        while count < len(room):
            data = self._until(functools.partial(file.read, len(room) - count))
            room[count:count + len(data)] = data
            count += len(data)
            if not data or not flags or stdlib.world.random.random() < 0.1:
                break
        return count

    def sendmsg(self, parts: Sequence[Any]) -> int:
        data, file = b"".join(bytes(part) for part in parts), stdlib.opened(self._fd)
        if stdlib.world.random.random() < 0.1:  # the kernel has room for a part
            data = data[:1 + stdlib.world.random.randrange(len(data))]
        return int(self._until(lambda: file.write(data)))

    def makefile(self, mode: str) -> "Socket":
        return self

    def read(self) -> bytes:
        """All that comes, to the end."""
        data = b""
        while True:
            more = self.recv(65536)
            if not more:
                return data
            data += more

    def send(self, data: bytes) -> int:
        return os_write(self._fd, data)

    def sendall(self, data: bytes) -> None:
        while data:
            data = data[os_write(self._fd, data):]

    def recv(self, most: int) -> bytes:
        file = stdlib.opened(self._fd)
        return bytes(self._until(lambda: file.read(stdlib.world.part(most))))

    def shutdown(self, how: int) -> None:
        file = stdlib.opened(self._fd)
        assert isinstance(file, Both)
        file.shutdown()


class Listener(File):
    """A socket that takes calls. Who calls is connected before anybody accepts it."""

    def __init__(self, host: Host, at: Any) -> None:
        super().__init__()
        self.host, self.at = host, at
        self.calls: List[Both] = []
        if at in host.listeners:
            raise OSError(98, "Address already in use")
        host.listeners[at] = self

    def release(self) -> None:
        del self.host.listeners[self.at]
        for call in self.calls:
            call.release()


def _dialled(here: Host, there: Host, at: Any, timeout_s: Optional[float]) -> Both:
    """This end of a new connection."""
    world = stdlib.world
    out, began = world.link(here.name, there.name), world.now
    stdlib.sleep(out.slow_s)
    while out.cut or not there.up:
        if timeout_s is not None and world.now - began > timeout_s:
            raise TimeoutError("timed out")
        if world.now - began > 3.0 and world.random.random() < 0.5:  # by then some routers say so
            raise OSError(errno.EHOSTUNREACH, "No route to host")
        stdlib.sleep(0.5)
    listener = there.listeners.get(at)
    if not isinstance(listener, Listener):
        raise FileNotFoundError(2, "No such file") if isinstance(at, str) else ConnectionRefusedError(111, "refused")
    mine, theirs = connected(here, there)
    listener.calls.append(theirs)
    listener.changed()
    return mine


def create_server(address: Tuple[str, int], backlog: int = 0) -> Socket:
    listener = Socket()
    listener.bind(address)
    listener.listen()
    return listener


def create_connection(address: Tuple[str, int], timeout: Optional[float] = None) -> Socket:
    here = stdlib.world.call().host
    mine = _dialled(here, stdlib.world.host(address[0]), address[1], timeout)
    connection = Socket(fileno=stdlib.world.process().install(mine))
    connection.settimeout(timeout)
    return connection


def socketpair() -> Tuple[Socket, Socket]:
    one, other, process = Pipe(), Pipe(), stdlib.world.call()
    return (Socket(fileno=process.install(Both(one.reader, other.writer))),
            Socket(fileno=process.install(Both(other.reader, one.writer))))


def connected(source: Any, target: Any) -> Tuple[Both, Both]:
    """Both ends of a connection between two hosts."""
    there, back = Way(stdlib.world, source, target), Way(stdlib.world, target, source)
    return Both(back.reader, there.writer), Both(there.reader, back.writer)


def getaddrinfo(name: str, *more: Any) -> List[Any]:
    """Names of hosts are addresses here."""
    return [(2, 1, 6, "", (name, 0))]


socket = types.SimpleNamespace(
    socket=Socket, socketpair=socketpair, getaddrinfo=getaddrinfo, gethostname=lambda: stdlib.world.process().host.name,
    **{name: getattr(real_socket, name) for name in ("AF_INET", "AF_UNIX", "SOCK_STREAM", "SOCK_DGRAM", "SOL_SOCKET",
                                                     "SO_REUSEADDR", "SO_KEEPALIVE", "SHUT_RDWR", "inet_aton",
                                                     "IPPROTO_TCP", "TCP_NODELAY", "MSG_WAITALL")},
    create_server=create_server, create_connection=create_connection)
