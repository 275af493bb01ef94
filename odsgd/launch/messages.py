"""The messages between the launcher and its agents: a line of JSON each, over two pipes or a socket.

Each kind of message is a class here; a line has the class's name beside the fields. A tunnel (`tunnel.py`) talks to its
agent in the same way, and the agent passes messages between tunnel and launcher.
"""
import functools
import json
import os
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Union, get_type_hints

from odsgd.launch.lines import CHUNK

MOST_NOISE = 4096

@dataclass(frozen=True)
class Message:
    """Any message; each class below this one is a kind."""


# The first line to an agent: its orders, the job's secret included.

@dataclass(frozen=True)
class ProcessOrders:
    """A process that the agent starts; its `env` comes on top of the `env` of the agent's `Orders`."""

    name: str
    command: List[str]
    env: Dict[str, str]


@dataclass(frozen=True)
class TunnelOrders(Message):
    """The orders to the tunnel of a host."""

    certificate: str
    port: int
    towards: str  # the launcher's address
    address: Optional[str]  # the host's own; None: the one from which it reaches `towards`
    hang_timeout_s: float
    sockets: List[str]  # of this host's processes


@dataclass(frozen=True)
class Orders(Message):
    """The orders to an agent."""

    processes: List[ProcessOrders]
    env: Dict[str, str]
    drop: List[str]  # variables that no process inherits from the agent
    grace_s: float
    silence_s: Optional[float]  # the agent ends after this silence of the launcher; None: never
    tells_losses: bool  # lost workers are noted in the ODSGD_LOST file
    sockets: Dict[str, bool]  # files, and whether each is still used when all have met
    tunnel: Optional[TunnelOrders] = None


@dataclass(frozen=True)
class SealedOrders(Message):
    """Orders as JSON, with a proof that they come from the launcher (`handshake.py`)."""

    orders: str
    proof: str


# To an agent

@dataclass(frozen=True)
class Ping(Message):
    """The launcher is there, and asks for a `Pong`."""

    at: float


@dataclass(frozen=True)
class Stop(Message):
    """End all processes: SIGTERM, and SIGKILL after the grace."""

    grace_s: float


@dataclass(frozen=True)
class WorkersChanged(Message):
    """Lines for the ODSGD_LOST file: the rank of a lost worker, or `+` and the rank of one that joined in its place."""

    lines: List[str]


@dataclass(frozen=True)
class EndHung(Message):
    """A process hangs: have it print its stacks, then kill it."""

    process: str


@dataclass(frozen=True)
class AllMet(Message):
    """All workers have met all servers: nobody else is to connect."""


@dataclass(frozen=True)
class MpiAnswer(Message):
    """The answer to a line of a process's MPI (`pmi.py`); None: cut the process off."""

    process: str
    line: Optional[str]


@dataclass(frozen=True)
class RemoteSocket:
    """A socket of another host that the tunnel here stands for (`tunnel.py`)."""

    name: str
    tunnel: str  # the address of the tunnel beside the socket
    lasting: bool  # it is still used when all have met


@dataclass(frozen=True)
class OpenRemoteSockets(Message):
    """The tunnel is to open these."""

    sockets: List[RemoteSocket]


# From an agent

@dataclass(frozen=True)
class Hello(Message):
    """The agent runs, on the host of this name."""

    host: str


@dataclass(frozen=True)
class Beats(Message):
    """Every second: the last beat of each process that has a pulse, with its age (`silent_s`). A tunnel sends {}."""

    beats: Dict[str, Any]


@dataclass(frozen=True)
class Pong(Message):
    """The host has sent all that it knew when the ping of this time came."""

    at: float


@dataclass(frozen=True)
class AgentSignalled(Message):
    """Somebody other than the launcher ends the agent, e.g. Slurm."""

    signal: int


@dataclass(frozen=True)
class TunnelListens(Message):
    """The tunnel's address. Agents of the same `socket_namespace` share the folder or network of their sockets."""

    address: str
    socket_namespace: str


@dataclass(frozen=True)
class RemoteSocketsOpen(Message):
    """The tunnel has opened its remote sockets."""


@dataclass(frozen=True)
class HostWarning(Message):
    """A warning for the user."""

    text: str


@dataclass(frozen=True)
class Noise(Message):
    """A line that is no message: the greeting of a login shell, the last words of an agent."""

    text: str


@dataclass(frozen=True)
class Ended(Message):
    """Nothing of the job is left on this host."""


@dataclass(frozen=True)
class ProcessMessage(Message):
    """A message about one process."""

    process: str


@dataclass(frozen=True)
class Started(ProcessMessage):
    """The process exists."""

    pid: int


@dataclass(frozen=True)
class Unstartable(ProcessMessage):
    """The process could not be started."""

    error: str


@dataclass(frozen=True)
class Output(ProcessMessage):
    """A line that the process printed, or a frame of its progress bar."""

    stream: str
    text: str
    progress: bool


@dataclass(frozen=True)
class Report(ProcessMessage):
    """A line that the process wrote to ODSGD_REPORT_FD."""

    report: Dict[str, Any]


@dataclass(frozen=True)
class MpiRequest(ProcessMessage):
    """A line of the process's MPI (`pmi.py`)."""

    line: str


@dataclass(frozen=True)
class Exit(ProcessMessage):
    """The process has ended, and all its output has been sent; a negative code is the signal that ended it."""

    code: int


MESSAGES = {kind.__name__: kind for kind in (*Message.__subclasses__(), *ProcessMessage.__subclasses__())}


def of_json(kind: Any, value: Any) -> Any:
    """A value of JSON as an object of this type; LookupError or TypeError if it has another form."""
    origin, inner = getattr(kind, "__origin__", None), tuple(getattr(kind, "__args__", ()))
    if origin is Union:  # Optional
        return None if value is None else of_json(inner[0], value)
    if hasattr(kind, "__dataclass_fields__"):
        return kind(**{name: of_json(field, value[name]) for name, field in _types(kind).items()})
    expected: Any = (int, float) if kind is float else origin or kind
    if not isinstance(value, expected):
        raise TypeError
    return [of_json(inner[0], one) for one in value] if origin is list else value


_types = functools.lru_cache(None)(get_type_hints)


def first_orders(kind: Any) -> Any:
    """The orders, of this kind, in the first line of standard input; None: whoever gives them has gone."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # the bytes after the line are the channel's
        line = stdin.readline()
    return of_json(kind, json.loads(line)) if line.endswith(b"\n") else None


class Channel:
    """The launcher's or the agent's end. Reading and writing never wait, so that a stop is heard at any time."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd, self.write_fd = read_fd, write_fd
        self.backlog = bytearray()
        self.partial = b""
        self.open = True
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    def send(self, message: Message) -> None:
        """Queue one message, and write as much as can be written."""
        if self.open:
            line = json.dumps({"message": type(message).__name__, **vars(message)}, default=vars)
            self.backlog += line.encode() + b"\n"
            self.flush()

    def flush(self) -> None:
        """Write as much as the other side takes."""
        try:
            while self.backlog:
                del self.backlog[:os.write(self.write_fd, self.backlog[:CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def receive(self) -> List[Message]:
        """The messages that have come; at the end of the stream `open` becomes false."""
        try:
            data = os.read(self.read_fd, CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.close()
        *whole, self.partial = (self.partial + data).split(b"\n")
        return [_message(line) for line in whole if line.strip()]

    def close(self) -> None:
        """Read and write no more: the other side has gone."""
        self.open = False
        self.backlog.clear()


def _message(line: bytes) -> Message:
    try:
        message = json.loads(line[max(line.find(b'{"message": '), 0):])  # a shell may have begun the line with a title
        return of_json(MESSAGES[message["message"]], message)
    except (ValueError, RecursionError, LookupError, TypeError):
        return Noise(line[:MOST_NOISE].decode("utf-8", "replace"))
