"""The tunnel: carries a job's connections between hosts (`odsgd launch --secure`); a process beside each agent.

No network reaches a process of such a job: processes meet by sockets in the file system, and MPI at ports of the
loopback interface. Their names are the same on all hosts (`plan.py`). For each socket of another host the tunnel here
makes a remote socket: a socket of that name. A connection to it goes by TLS to the tunnel there, and from there to the
socket itself.

    worker → /tmp/NUMBER, a remote socket → tunnel ═ TLS ═ tunnel → /tmp/NUMBER ← server
    worker → 127.0.0.1:PORT, a remote socket → tunnel ═ TLS ═ tunnel → 127.0.0.1:PORT ← worker

A remote socket serves only this user: a file by its mode, a port because the kernel knows the user at the other end.
At a worker's own port MPI listens, which checks nobody; so other users of that host reach it.

The tunnel's port is the only port of the job on its host that others reach. Both ends of a connection show the job's
certificate, and trust no other. Each start of a job makes a new one, signed by itself. Its key travels as the job's
secret does, by ssh to the agents' standard input. The cipher is TLS 1.3's, by OpenSSL in Python's `ssl`.

A connection has one thread, because two threads may not use a TLS object of OpenSSL's at the same time. Its bytes pass
outside Python's lock. The tunnel exchanges messages with its agent (`messages.py`), and ends when the agent does.
"""
import contextlib
import errno
import functools
import math
import os
import queue
import re
import resource
import select
import selectors
import socket
import ssl
import struct
import sys
import tempfile
import threading
import time
from typing import Callable, Dict, Optional, Sequence, Set, Tuple, Union

from kvstore.errors import ConfigError
from kvstore.job import environment
from odsgd.launch import messages
from odsgd.launch.addresses import LOOPBACK, own_address
from odsgd.launch.messages import Channel, RemoteSocket, TunnelOrders, first_orders
from odsgd.tools import ran

OPENSSL = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", "-",
           "-out", "-", "-subj", "/CN=job of odsgd", "-days", "36500")
IGNORE_CLOCKS = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME: a certificate lives as long as its job, whatever a host's clock says."""
MADE_WITHIN_S = 30.0
LOOK_EVERY_S, BEAT_EVERY_S = 0.2, 1.0
REACHED_WITHIN_S, SHOWN_WITHIN_S = 20.0, 10.0
"""How long a connection to another tunnel may take, and how long a caller may take to ask for a socket."""
THERE_WITHIN_S, THERE_EVERY_S = 60.0, 0.05
"""How long a socket may take to appear while its process still starts."""
MOST_UNPROVEN, UNDISTURBED_S = 64, 2.0
"""When this many callers have not shown the certificate, further callers wait. A caller of this age is then closed to
make room; a tunnel of this job calls again."""
ROOM_NBYTES = 128 * 1024
"""Most bytes received at a time; a record of TLS has 16 KiB."""
AGAIN_S = 1.0
"""The pause before a connection is tried again; ps-lite itself would try again at once."""
FULL_S = 0.05
"""The pause when there is no room for another caller, or no file descriptor."""
BACKLOG = 1024
CERTIFICATE = "-----BEGIN CERTIFICATE"
NUMBER_NBYTES = 8
"""Bytes of a socket's number, with which its name ends. They fit one record of TLS, so they are received whole."""
LET_IN = b"\1"
ESTABLISHED = "01"
"""A connection's state in the kernel's table."""

End = Union[socket.socket, ssl.SSLSocket]


def new_certificate(openssl: Sequence[str]) -> str:
    """A certificate for one job with its key, as PEM."""
    made = ran([*openssl, *OPENSSL], "--secure", MADE_WITHIN_S)
    if made.returncode or "PRIVATE KEY" not in made.stdout or CERTIFICATE not in made.stdout:
        said = made.stderr.strip().splitlines()
        raise ConfigError(f"--secure: {openssl[0]} has made no certificate (exit code {made.returncode})"
                          + (f": {said[-1]}" if said else "") + "; expected OpenSSL 1.1.1 or newer")
    return made.stdout


def socket_namespace(sockets: Sequence[str]) -> str:
    """A name for the folder or network of these sockets: agents with the same place need no tunnel between them."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        held_by = os.stat("/proc/self/ns/net" if any(map(_is_port, sockets)) else "/tmp")
        return f"{file.read().strip()} {held_by.st_dev} {held_by.st_ino}"
    return socket.gethostname()


class Tunnel:
    """One host's tunnel. Invariant: a caller reaches nothing but `sockets`, and only with the certificate."""

    def __init__(self, certificate: str, sockets: Sequence[str], address: str, port: int = 0) -> None:
        self._sockets = {_number(name): name for name in sockets}
        self._taking, self._calling = _contexts(certificate)
        self._listener = socket.create_server((address, port), backlog=BACKLOG)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._remote: Dict[str, Tuple[socket.socket, bool]] = {}
        """The remote sockets that listen here, and whether each is still used when all have met."""
        self._unproven: Dict[ssl.SSLSocket, float] = {}
        """Callers that have not shown the certificate, oldest first, with their time. Their threads remove them."""
        self._full = False
        self._warned: Set[str] = set()
        self._warnings: queue.SimpleQueue[str] = queue.SimpleQueue()

    @property
    def at(self) -> str:
        """The address and port at which the other tunnels reach this one."""
        return "{}:{}".format(*self._listener.getsockname())

    def serve(self, channel: Channel) -> None:
        """Take callers and the agent's messages until the agent hangs up."""
        self._selector.register(channel.read_fd, selectors.EVENT_READ, functools.partial(self._read_orders, channel))
        beat_at = -math.inf
        while channel.open:
            for key, _ in self._selector.select(FULL_S if self._full else LOOK_EVERY_S):
                try:
                    key.data()
                except OSError as error:  # else the caller has gone again
                    time.sleep(FULL_S if error.errno in (errno.EMFILE, errno.ENFILE) else 0)
            self._make_room()
            if time.monotonic() - beat_at >= BEAT_EVERY_S:
                beat_at = time.monotonic()
                channel.send(messages.Beats({}))
            while not self._warnings.empty():
                channel.send(messages.HostWarning(self._warnings.get()))
            channel.flush()
        self._close(lasting=True)
        self._selector.close()
        self._listener.close()

    def _read_orders(self, channel: Channel) -> None:
        for message in channel.receive():
            if isinstance(message, messages.OpenRemoteSockets):
                self._open(message.sockets)
                channel.send(messages.RemoteSocketsOpen())
            elif isinstance(message, messages.AllMet):
                self._close(lasting=False)

    def _open(self, remote_sockets: Sequence[RemoteSocket]) -> None:
        """Open these remote sockets, for this user only."""
        with environment.private_files():
            for remote in remote_sockets:
                listener = bound(remote.name)
                listener.listen(BACKLOG)
                self._remote[remote.name] = listener, remote.lasting
                accept = functools.partial(self._accept_at, listener, remote)
                self._selector.register(listener, selectors.EVENT_READ, accept)

    def _close(self, lasting: bool) -> None:
        """Close the remote sockets that nobody needs when all have met; or, with `lasting`, all of them."""
        for name in [name for name, (_, lasts) in self._remote.items() if lasting or not lasts]:
            listener, _ = self._remote.pop(name)
            if not _is_port(name):
                with contextlib.suppress(OSError):
                    os.unlink(name)
            self._selector.unregister(listener)
            listener.close()

    def _accept_at(self, listener: socket.socket, remote: RemoteSocket) -> None:
        plain, _ = listener.accept()
        _on_thread(self._carry_out, plain, remote)

    def _carry_out(self, plain: socket.socket, remote: RemoteSocket) -> None:
        """Carry a connection to the tunnel of the socket's host.

        No byte leaves before that tunnel has let us in, so nothing is lost if we have to call again.
        """
        deadline = time.monotonic() + THERE_WITHIN_S
        with plain, contextlib.suppress(OSError):
            guarded = None
            while guarded is None and time.monotonic() < deadline and _is_mine(plain):
                guarded = self._let_in(remote.tunnel, _number(remote.name))
            if guarded:
                with guarded:
                    carry(guarded, plain)

    def _connect(self, at: str) -> socket.socket:
        """A connection to another tunnel."""
        address, _, port = at.rpartition(":")
        try:
            return socket.create_connection((address, int(port)), REACHED_WITHIN_S)
        except OSError as error:
            self._warn(at, f"no way to the tunnel at {at}: {error}; a firewall? (--port N has all tunnels listen at "
                       "one port)")
            time.sleep(AGAIN_S)
            raise

    def _let_in(self, at: str, number: int) -> Optional[ssl.SSLSocket]:
        """A connection to a socket behind another tunnel; None if that tunnel had too many callers.

        OSError if it cannot be reached, or has another certificate.
        """
        way = self._connect(at)
        try:
            with contextlib.ExitStack() as closing:
                guarded = closing.enter_context(self._calling.wrap_socket(way))
                guarded.sendall(number.to_bytes(NUMBER_NBYTES, "big"))
                if guarded.recv(len(LET_IN)):
                    closing.pop_all()
                    return guarded
        except ssl.SSLCertVerificationError:
            self._warn(at, f"what answers at {at} has not this job's certificate")
            time.sleep(AGAIN_S)
            raise
        except OSError:
            pass
        time.sleep(AGAIN_S)
        return None

    def _accept(self) -> None:
        way, (caller, _) = self._listener.accept()
        way.settimeout(SHOWN_WITHIN_S)
        guarded = self._taking.wrap_socket(way, server_side=True, do_handshake_on_connect=False)
        self._unproven[guarded] = time.monotonic()
        if not _on_thread(self._carry_in, guarded, caller):
            del self._unproven[guarded]
        if len(self._unproven) >= MOST_UNPROVEN:
            self._full = True
            self._selector.unregister(self._listener)

    def _make_room(self) -> None:
        """Close old unproven callers if others wait."""
        if not self._full:
            return
        for guarded, since in list(self._unproven.items()):
            if time.monotonic() - since > UNDISTURBED_S and self._unproven.pop(guarded, 0.0):
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(guarded, socket.SHUT_RDWR)  # its thread then ends
        if len(self._unproven) < MOST_UNPROVEN:
            self._full = False
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _carry_in(self, guarded: ssl.SSLSocket, caller: str) -> None:
        """Connect a caller that shows the certificate to the socket that it asks for."""
        with guarded, contextlib.suppress(OSError):
            name = self._asked(guarded, caller)
            if name:
                with _reached(name) as plain:
                    carry(guarded, plain)

    def _asked(self, guarded: ssl.SSLSocket, caller: str) -> Optional[str]:
        """The socket that a caller asks for, once the caller is proven; None if it is turned away."""
        try:
            guarded.do_handshake()
            name = self._sockets.get(int.from_bytes(guarded.recv(NUMBER_NBYTES), "big"))
            if name and self._unproven.pop(guarded, 0.0):  # else it was closed to make room
                guarded.sendall(LET_IN)
                return name
        except ssl.SSLEOFError:  # it has gone
            pass
        except ssl.SSLError:
            self._warn("", f"{caller} came to the tunnel's port without this job's certificate, and was turned away")
        finally:
            self._unproven.pop(guarded, 0.0)
        return None

    def _warn(self, about: str, text: str) -> None:
        """Warn once of each thing."""
        if about not in self._warned:
            self._warned.add(about)
            self._warnings.put(text)


class Flow:
    """One direction of a connection. The ends do not block."""

    def __init__(self, source: End, sink: End) -> None:
        self.source, self.sink = source, sink
        self._room = memoryview(bytearray(ROOM_NBYTES))
        self.held = self._room[:0]
        """Received, and not sent on yet."""
        self.filled = self.ended = False

    def move(self) -> None:
        """Receive what is there, as far as there is room, and send what can be sent."""
        if not self.held and not self.ended:
            self._receive()
        with contextlib.suppress(BlockingIOError, ssl.SSLWantWriteError):
            while self.held:
                self.held = self.held[self.sink.send(self.held):]

    def _receive(self) -> None:
        count = 0
        with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
            while count < ROOM_NBYTES and not self.ended:
                received = self.source.recv_into(self._room[count:])
                self.ended = not received
                count += received
        self.held, self.filled = self._room[:count], count == ROOM_NBYTES


def carry(guarded: ssl.SSLSocket, plain: socket.socket) -> None:
    """Carry bytes both ways until one end is closed; all that it has sent is sent on before the other is closed.

    ZeroMQ, couriers and libfabric, which speak here, never close only one direction.
    """
    for end in (guarded, plain):
        end.setblocking(False)
        if end.family == socket.AF_INET:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    environment.keep_alive(guarded)
    flows, poll = (Flow(guarded, plain), Flow(plain, guarded)), select.poll()
    while True:
        for flow in flows:
            flow.move()
            if flow.ended and not flow.held:  # all that ever came has been sent on
                return
        # If there was no room left, OpenSSL may hold more bytes, which the kernel does not see.
        if not any(flow.filled and not flow.held for flow in flows):
            for flow, back in (flows, flows[::-1]):
                awaited = (0 if flow.held else select.POLLIN) | (select.POLLOUT if back.held else 0)
                if awaited:
                    poll.register(flow.source, awaited)
                else:  # otherwise `poll` would report again and again that it is closed
                    with contextlib.suppress(KeyError):
                        poll.unregister(flow.source)
            poll.poll()


def _on_thread(lead: Callable[..., None], end: End, *arguments: object) -> bool:
    """Run `lead` on a new thread; if none can start, close the connection and return false."""
    try:
        threading.Thread(target=lead, args=(end, *arguments), daemon=True).start()
    except RuntimeError:
        end.close()
        return False
    return True


def _contexts(certificate: str) -> Tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS for the end that is called, and for the calling end. Both show the certificate and trust no other."""
    contexts = []
    with tempfile.NamedTemporaryFile("w", prefix="odsgd-") as file:  # of mode 0600; OpenSSL reads keys from files only
        file.write(certificate)
        file.flush()
        for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(protocol)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.verify_flags |= ssl.VerifyFlags(IGNORE_CLOCKS)
            context.load_verify_locations(cadata=certificate[certificate.index(CERTIFICATE):])
            context.load_cert_chain(file.name)
            contexts.append(context)
    contexts[0].num_tickets = 0
    return contexts[0], contexts[1]


def _is_port(name: str) -> bool:
    """Whether a socket is at a port of the loopback interface, and not a file."""
    return not os.path.isabs(name)


def _number(name: str) -> int:
    return int(re.split("[/:]", name)[-1])


def _new_socket(name: str) -> Tuple[socket.socket, Union[str, Tuple[str, int]]]:
    """A new socket, and the address that this name stands for."""
    if not _is_port(name):
        return socket.socket(socket.AF_UNIX), name
    return socket.socket(), (LOOPBACK, _number(name))


def bound(name: str) -> socket.socket:
    """A socket bound to this name, not listening yet. Ends the process if the name is taken."""
    made, address = _new_socket(name)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # MPI may bind a port, too, while nobody listens there
    try:
        made.bind(address)
    except OSError as error:
        made.close()
        sys.exit(f"odsgd tunnel on {socket.gethostname()}: cannot have {name} for this job: {error.strerror}; start "
                 "the job again, it then takes another name")
    return made


def _is_mine(link: socket.socket) -> bool:
    """Whether the other end of a connection within this host belongs to this user; of a closed one the kernel says
    that it is root's."""
    if link.family == socket.AF_UNIX:
        return True
    ends = [_in_table(*link.getpeername()), _in_table(*link.getsockname())]
    with open("/proc/self/net/tcp", encoding="ascii") as table:
        rows = map(str.split, table)
        return any(row[1:4] == [*ends, ESTABLISHED] and row[7] == str(os.geteuid()) for row in rows)


def _in_table(address: str, port: int) -> str:
    """An address as the kernel writes it in its table."""
    return f"{struct.unpack('=I', socket.inet_aton(address))[0]:08X}:{port:04X}"


def _reached(name: str) -> socket.socket:
    """A connection to a socket of this host, whose process may not have made it yet."""
    deadline = time.monotonic() + THERE_WITHIN_S
    while True:
        plain, address = _new_socket(name)
        try:
            plain.connect(address)
            return plain
        except (FileNotFoundError, ConnectionRefusedError):
            plain.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(THERE_EVERY_S)


def main() -> int:
    """The tunnel's process, started by the agent."""
    orders: Optional[TunnelOrders] = first_orders(TunnelOrders)
    if orders is None:
        return 0  # the agent has gone
    held = [bound(name) for name in orders.sockets if _is_port(name)]  # until MPI listens there
    address = own_address(orders.address, orders.towards)
    try:
        tunnel = Tunnel(orders.certificate, orders.sockets, address, orders.port)
    except OSError as error:
        sys.exit(f"odsgd tunnel on {socket.gethostname()}: cannot listen at {address}, port {orders.port}: "
                 f"{error.strerror or error}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    channel = Channel(0, 1)
    channel.send(messages.TunnelListens(tunnel.at, socket_namespace(orders.sockets)))
    tunnel.serve(channel)
    for port in held:
        port.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
