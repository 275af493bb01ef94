"""What is open in a simulated process: pipes, a user's screen, and connections over links between hosts."""
import collections
import random
from typing import TYPE_CHECKING, Callable, Deque, List, Mapping, Optional, Tuple

if TYPE_CHECKING:
    from scripts.maintain.simulation.system import Host, Task, World

PIPE_NBYTES, AT_ONCE_NBYTES = 65536, 4096
"""Of a pipe, and so much room it has if it can be written to."""


class File:
    """An open file, pipe or socket, which several descriptors may share."""

    blocking = True
    streams = False  # a read may end anywhere

    def __init__(self, waiters: Optional[List["Task"]] = None) -> None:
        self.refs = 0
        self.waiters: List[Task] = [] if waiters is None else waiters
        self.queues = [self.waiters]  # where those stand who wait for a change

    def changed(self) -> None:
        for task in self.waiters:
            task.wake()

    def read(self, most: int) -> Optional[bytes]:
        """What is there; None: one would have to wait."""
        raise OSError(9, "Bad file descriptor")

    def write(self, data: bytes) -> Optional[int]:
        """How much is taken; None: one would have to wait."""
        raise OSError(9, "Bad file descriptor")

    @property
    def readable(self) -> bool:
        return True

    @property
    def writable(self) -> bool:
        return True

    def release(self) -> None:
        """Nobody has it open any more."""


class Pipe:
    """Bytes from its writers to its readers."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.waiters: List[Task] = []
        self.reader, self.writer = ReadEnd(self), WriteEnd(self)
        self.read_open = self.write_open = True

    def changed(self) -> None:
        self.reader.changed()


class ReadEnd(File):
    streams = True

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(pipe.waiters)
        self.pipe = pipe

    def read(self, most: int) -> Optional[bytes]:
        data = bytes(self.pipe.data[:most])
        if data or not self.pipe.write_open:
            del self.pipe.data[:most]
            self.changed()
            return data
        return None

    @property
    def readable(self) -> bool:
        return bool(self.pipe.data) or not self.pipe.write_open

    def release(self) -> None:
        self.pipe.read_open = False
        self.changed()


class WriteEnd(File):
    def __init__(self, pipe: Pipe) -> None:
        super().__init__(pipe.waiters)
        self.pipe = pipe

    def write(self, data: bytes) -> Optional[int]:
        if not self.pipe.read_open:
            raise BrokenPipeError(32, "Broken pipe")
        room = PIPE_NBYTES - len(self.pipe.data)
        if room <= 0 or (len(data) <= AT_ONCE_NBYTES and room < len(data)):  # a short write is whole or waits
            return None
        self.pipe.data += data[:room]
        self.changed()
        return min(room, len(data))

    @property
    def writable(self) -> bool:
        return len(self.pipe.data) <= PIPE_NBYTES - AT_ONCE_NBYTES or not self.pipe.read_open

    def release(self) -> None:
        self.pipe.write_open = False
        self.changed()


class Sink(File):
    """Where a user reads: lines with their time. While `blocked` nobody reads; little room is left then."""

    def __init__(self, world: "World", label: str) -> None:
        super().__init__()
        self.world, self.label = world, label
        self.blocked, self.gone = False, False
        self.waiting = 0
        self.lines: List[Tuple[float, str]] = []
        self._rest = b""

    def write(self, data: bytes) -> Optional[int]:
        if self.gone:
            raise BrokenPipeError(32, "Broken pipe")
        if self.blocked and self.waiting + len(data) > PIPE_NBYTES:
            return None
        self.waiting = self.waiting + len(data) if self.blocked else 0
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.lines.append((self.world.now, line.decode("utf-8", "replace")))
            self.world.note(f"{self.label}: {self.lines[-1][1]}")
        return len(data)

    @property
    def writable(self) -> bool:
        return self.gone or not self.blocked or self.waiting <= PIPE_NBYTES - AT_ONCE_NBYTES

    def block(self, blocked: bool) -> None:
        self.blocked, self.waiting = blocked, PIPE_NBYTES - AT_ONCE_NBYTES - 200
        self.changed()


class Node(bytearray):
    """What a file of a disk holds; `synced` of it outlasts a loss of power for sure. `locks`: by whom it is open."""

    synced = b""
    locks: Mapping[File, int] = {}

    def survives(self, draw: random.Random) -> bytes:
        """What is left after a loss of power: if not all has been synced, perhaps a part, or zeros."""
        if bytes(self) == self.synced:
            return self.synced
        return draw.choice((self.synced, bytes(self), bytes(self[:draw.randrange(len(self) + 1)]), bytes(len(self))))


class Null(File):
    def read(self, most: int) -> Optional[bytes]:
        return b""

    def write(self, data: bytes) -> Optional[int]:
        return len(data)


class Link:
    """The way from one host to another. While it is cut what was sent waits, as TCP sends it again."""

    def __init__(self, world: "World", source: str, target: str) -> None:
        self.world, self.source, self.target = world, source, target
        self.slow_s, self.cut = 0.0002, False
        self.waiting: List[Callable[[], None]] = []

    def carry(self, arrive: Callable[[], None]) -> None:
        """Have something arrive at the other end, when the link carries it."""
        self.world.after(self.slow_s * (0.5 + self.world.random.random()), lambda: self.deliver(arrive))

    def deliver(self, arrive: Callable[[], None]) -> None:
        """It has come to the other end, or to where the link is cut."""
        if self.cut:
            self.waiting.append(arrive)
        else:
            arrive()

    def heal(self) -> None:
        self.cut, self.slow_s = False, 0.0002
        waiting, self.waiting = self.waiting, []
        for arrive in waiting:
            arrive()


class Way:
    """One direction of a connection between hosts. Segments arrive in their order."""

    def __init__(self, world: "World", source: "Host", target: "Host") -> None:
        self.world, self.source, self.target = world, source, target
        self.boots = source.boot, target.boot
        self.data = bytearray()
        self.sent: Deque[bytes] = collections.deque()  # b"" is the end
        self.waiters: List[Task] = []
        self.in_flight, self.ended, self.error = 0, False, False
        self.reader, self.writer = WayReader(self), WayWriter(self)
        self.closed = False  # nobody reads any more

    def send(self, data: bytes) -> None:
        self.sent.append(data)
        self.in_flight += len(data)
        self.world.link(self.source.name, self.target.name).carry(self._arrive)

    def _arrive(self) -> None:
        if self.error or not self.target.up:
            return
        if self.target.boot != self.boots[1] or self.closed:  # nobody there: a reset comes back
            self.world.link(self.target.name, self.source.name).carry(self.reset)
            return
        data = self.sent.popleft()
        self.in_flight -= len(data)
        self.data += data
        self.ended = self.ended or not data
        self.reader.changed()

    def reset(self) -> None:
        self.error = True
        self.reader.changed()


class WayReader(File):
    streams = True

    def __init__(self, way: Way) -> None:
        super().__init__(way.waiters)
        self.way = way

    def read(self, most: int) -> Optional[bytes]:
        way = self.way
        data = bytes(way.data[:most])
        if data or way.ended:
            del way.data[:most]
            self.changed()
            return data
        if way.error:
            raise ConnectionResetError(104, "Connection reset by peer")
        return None

    @property
    def readable(self) -> bool:
        return bool(self.way.data) or self.way.ended or self.way.error

    def release(self) -> None:
        self.way.closed = True


class WayWriter(File):
    def __init__(self, way: Way) -> None:
        super().__init__(way.waiters)
        self.way = way

    def write(self, data: bytes) -> Optional[int]:
        way = self.way
        if way.error:
            raise ConnectionResetError(104, "Connection reset by peer")
        room = 4 * PIPE_NBYTES - way.in_flight - len(way.data)
        if room <= 0:
            return None
        way.send(bytes(data[:room]))
        return min(room, len(data))

    @property
    def writable(self) -> bool:
        return self.way.error or self.way.in_flight + len(self.way.data) < 4 * PIPE_NBYTES

    def release(self) -> None:
        if not self.way.error:
            self.way.send(b"")
