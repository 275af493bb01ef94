"""A connection of our own between a worker and a server.

In a job on ps-lite it carries messages with a codec. There MXNet's server adds up the pushes of a round itself, but
codes cannot be added. In its asynchronous mode it answers each push before the round is whole. And an answer is as long
as its push. On this connection a server sees every push and answers when it will, and pushes and answers have different
forms. In a job on sockets it carries everything.

A connection begins with a challenge: the listener sends random bytes, and the caller signs them and its version with
the job's secret (`commands.Signer`).
"""
import contextlib
import errno
import math
import os
import queue
import socket
import threading
import time
import traceback
from typing import Any, Callable, Collection, Dict, List, Optional, Tuple

import numpy as np

from kvstore._version import VERSION
from kvstore.errors import EXIT_FAILURE, ConfigError, ProtocolError
from kvstore.job import commands, ending, environment
from kvstore.job.pulse import pulse
from kvstore.messages.header import FRAME

CHALLENGE_NBYTES = 32
HELLO_NBYTES = 1024  # at most
ACCEPT_AGAIN_S, CALL_AGAIN_S = 0.1, 0.05
WELCOME_S = 30.0  # a caller says within it who it is
MOST_UNPROVEN, UNDISTURBED_S = 256, 5.0
"""When so many callers have not said who they are, further ones wait, and those that are older than this are closed."""
LINK_DOWN, DOWN_WITHIN_S = (errno.EHOSTUNREACH, errno.ENETUNREACH), 60.0
"""Errors of a call whose link is down, and how long it may be down: a firewall that refuses us looks the same."""

Room = Callable[[int, int, float], np.ndarray]
"""Bucket, length and sender_code of a message -> the array to receive it in; an error unless that is as long."""
Arrived = Callable[[int, np.ndarray, np.ndarray], None]
"""Gets bucket and header of a message that is there, and the array it was received in."""


class Courier:
    """One end of a connection, with a thread each way. Each calls `disconnected(reason)` when the other end is gone."""

    def __init__(self, connection: socket.socket, room: Room, arrived: Arrived,
                 disconnected: Callable[[str], None]) -> None:
        self._connection, self._room, self._arrived, self._disconnected = connection, room, arrived, disconnected
        connection.settimeout(None)
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            environment.keep_alive(connection)
        self._outgoing: queue.SimpleQueue[Optional[Tuple[bytes, memoryview]]] = queue.SimpleQueue()
        self._at_work = ["sends", "receives"]
        for work in (self._send, self._receive):
            threading.Thread(target=self._guarded, args=(work,), name="kvstore-courier", daemon=True).start()

    def send(self, key: int, header: np.ndarray, message: np.ndarray) -> None:
        """Queue `message`, which must not change until the other end's next message of this bucket has come."""
        pulse.nbytes += message.nbytes
        self._outgoing.put((FRAME.pack(key, message.nbytes, *header), message.data.cast("B")))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except ConnectionError as error:  # another OSError is this process's own
            self._disconnected(str(error))
        except ConfigError as error:
            ending.die(str(error), EXIT_FAILURE)
        except BaseException:
            ending.die(traceback.format_exc(), EXIT_FAILURE)
        finally:
            self._outgoing.put(None)  # the thread that sends ends with the one that receives
            self._at_work.pop()
            if not self._at_work:
                self._connection.close()

    def _send(self) -> None:
        while True:
            parts: List[Any] = [*(self._outgoing.get() or ())]
            if not parts:
                return
            while parts:
                try:
                    sent = self._connection.sendmsg(parts)
                except OSError as error:
                    raise ConnectionError(error) from None
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if parts:
                    parts[0] = parts[0][sent:]

    def _receive(self) -> None:
        frame = bytearray(FRAME.size)
        while self._fill(memoryview(frame)):
            key, nbytes, *header = FRAME.unpack(frame)
            room = self._room(key, nbytes, header[-1])
            if room.nbytes != nbytes:
                raise ProtocolError(f"a message of {nbytes} bytes has come for bucket {key}, expected {room.nbytes}; "
                                    "all processes of a job must run the same version of odsgd with the same options")
            if nbytes and not self._fill(room.data.cast("B")):
                raise ConnectionError("it closed the connection in the middle of a message")
            self._arrived(key, np.array(header, np.float32), room)
        self._disconnected("it closed the connection")

    def _fill(self, room: memoryview) -> bool:
        """Fill `room`; False if the connection ends before the first byte."""
        filled = 0
        while filled < len(room):
            try:
                count = self._connection.recv_into(room[filled:], 0, socket.MSG_WAITALL)
            except OSError as error:
                raise ConnectionError(error) from None
            if not count:
                if filled:
                    raise ConnectionError("it closed the connection in the middle of a message")
                return False
            filled += count
        return True


def listen() -> socket.socket:
    """A server's socket, where the launcher has it listen: a file, DMLC_NODE_HOST, or the way to the scheduler."""
    path = os.environ.get("ODSGD_COURIERS")
    host = "" if path else os.environ.get("DMLC_NODE_HOST") or _address_towards(os.environ["DMLC_PS_ROOT_URI"])
    return listen_at(path or f"{host}:0")


def listen_at(address: str) -> socket.socket:
    """A socket at ``host:port``, or at a file."""
    if not address.startswith("/"):
        host, _, port = address.rpartition(":")
        return socket.create_server((host, int(port)), backlog=1024)
    listener = socket.socket(socket.AF_UNIX)
    with environment.private_files():
        listener.bind(address)
    listener.listen(1024)
    return listener


def _address_towards(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def _exactly(connection: socket.socket, nbytes: int, timeout_s: float) -> bytes:
    """`nbytes` bytes, which may come in pieces; OSError if they do not come within `timeout_s`."""
    deadline, received = time.monotonic() + timeout_s, b""
    while len(received) < nbytes:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        piece = connection.recv(nbytes - len(received))
        if not piece:
            raise ConnectionError("it closed the connection")
        received += piece
    return received


def call(address: str, sender: int, timeout_s: float, **said: Any) -> socket.socket:
    """Connect to ``host:port``, or to a file, and tell the listener what is `said`."""
    if address.startswith("/"):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        connection.connect(address)
    else:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout_s)
    signer = commands.Signer(sender, commands.job_key())
    challenge = _exactly(connection, CHALLENGE_NBYTES, timeout_s)
    hello = signer.sign("courier", {"challenge": challenge.hex(), "version": VERSION, **said})
    connection.sendall(hello.encode().ljust(HELLO_NBYTES))
    return connection


def call_again(address: str, sender: int, timeout_s: float, comes_later: Collection[int] = (), **said: Any
               ) -> socket.socket:
    """`call`, again and again: for a minute while the link is down, and after errors of `comes_later` until a deadline
    of the caller's."""
    down_since = math.inf
    while True:
        try:
            return call(address, sender, timeout_s, **said)
        except OSError as error:
            down_since = min(down_since, time.monotonic()) if error.errno in LINK_DOWN else math.inf
            if error.errno not in (*LINK_DOWN, *comes_later) or time.monotonic() - down_since > DOWN_WITHIN_S:
                raise
        time.sleep(CALL_AGAIN_S)


def take_calls(listener: socket.socket, timeout_s: float, called: Callable[[socket.socket, int, Dict[str, Any]], None]
               ) -> None:
    """Begin to take calls. `called` gets each connection of this job, with the caller's rank and what it said, on a
    thread of its own."""
    unproven: Dict[socket.socket, float] = {}  # with the time of the call, oldest first

    def serve(connection: socket.socket) -> None:
        found: Optional[Tuple[int, Dict[str, Any]]] = None
        with contextlib.suppress(OSError):
            found = welcome(connection, min(timeout_s, WELCOME_S))
        if not unproven.pop(connection, 0.0) or found is None:
            connection.close()
        else:
            called(connection, *found)

    def accept() -> None:
        while True:
            _make_room(unproven)
            try:
                connection, _ = listener.accept()
            except OSError:
                time.sleep(ACCEPT_AGAIN_S)  # this process has no descriptor left, or the caller has gone
                continue
            unproven[connection] = time.monotonic()
            try:
                threading.Thread(target=serve, args=(connection,), daemon=True).start()  # a stranger may be silent
            except RuntimeError:  # this user has no thread left
                del unproven[connection]
                connection.close()

    threading.Thread(target=accept, name="kvstore-calls", daemon=True).start()


def _make_room(unproven: Dict[socket.socket, float]) -> None:
    """Wait until there are fewer than `MOST_UNPROVEN`; meanwhile close old ones."""
    while len(unproven) >= MOST_UNPROVEN:
        time.sleep(ACCEPT_AGAIN_S)
        for connection, since in list(unproven.items()):
            if time.monotonic() - since > UNDISTURBED_S and unproven.pop(connection, 0.0):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # its thread then ends


def welcome(connection: socket.socket, timeout_s: float) -> Optional[Tuple[int, Dict[str, Any]]]:
    """The caller's rank, and what it said; None: it does not belong to this job.

    This process ends if the caller belongs to the job and has another version.
    """
    challenge = os.urandom(CHALLENGE_NBYTES)
    connection.settimeout(timeout_s)
    connection.sendall(challenge)
    text = _exactly(connection, HELLO_NBYTES, timeout_s).decode("ascii", "replace").rstrip()
    try:
        sender, name, payload = commands.Verifier(commands.job_key()).verify(text)
    except ProtocolError:
        return None
    if (name, payload.get("challenge")) != ("courier", challenge.hex()):
        return None
    theirs = payload.get("version")
    if theirs != VERSION:
        ending.die(f"a process of this job (rank {sender}) runs odsgd {theirs}, this one {VERSION}; install the same "
                   "version on all hosts", EXIT_FAILURE)
    return sender, payload
