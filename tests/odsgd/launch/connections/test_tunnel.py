"""The tunnel: what comes through it, whom it turns away, and remote sockets. Both ends are on this machine."""
import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Iterator, List, NamedTuple, Tuple

import numpy as np
import pytest

from kvstore.errors import ConfigError
from odsgd.launch import messages
from odsgd.launch.connections import tunnel
from odsgd.launch.connections.tunnel import Tunnel, new_certificate
from odsgd.launch.messages import Channel, Message, RemoteSocket
from odsgd.launch.plan import new_ports
from tests.jobs import until

PATIENCE_S = 60.0
NUMBERS = ("1234567890", "1234567891")


@pytest.fixture(scope="module")
def certificate() -> str:
    return new_certificate(["openssl"])


@pytest.fixture
def folder() -> Iterator[Path]:
    """For sockets, whose paths are short."""
    path = Path(tempfile.mkdtemp(prefix="odsgd-test-"))
    yield path
    shutil.rmtree(path)


@contextlib.contextmanager
def serving(*tunnels: Tunnel) -> Iterator[List[Channel]]:
    """Meanwhile these tunnels do their work; the agents' ends of their channels."""
    pairs = [socket.socketpair() for _ in tunnels]
    threads = [threading.Thread(target=one.serve, args=(Channel(end.fileno(), end.fileno()),), daemon=True)
               for one, (_, end) in zip(tunnels, pairs)]
    for thread in threads:
        thread.start()
    try:
        yield [Channel(end.fileno(), end.fileno()) for end, _ in pairs]
    finally:
        for (ours, theirs), thread in zip(pairs, threads):
            ours.close()
            thread.join(PATIENCE_S)
            theirs.close()


def open_remote_sockets(channel: Channel, folder: Path, at: str) -> None:
    """Have the tunnel stand for both sockets, the second of which lasts."""
    sockets = [RemoteSocket(str(folder / number), at, number == NUMBERS[1]) for number in NUMBERS]
    channel.send(messages.OpenRemoteSockets(sockets))
    until(lambda: all((folder / number).exists() for number in NUMBERS))


class Ends(NamedTuple):
    """Both ends of a tunnel."""

    orders: Channel  # to the tunnel here, which has two remote sockets
    at: str  # of the tunnel there
    listening: List[socket.socket]  # there, what the remote sockets stand for


@pytest.fixture
def ends(certificate: str, folder: Path) -> Iterator[Ends]:
    (folder / "there").mkdir()
    listening = [socket.socket(socket.AF_UNIX) for _ in NUMBERS]
    for number, listener in zip(NUMBERS, listening):
        listener.bind(str(folder / "there" / number))
        listener.listen()
        listener.settimeout(PATIENCE_S)
    there = Tunnel(certificate, [str(folder / "there" / number) for number in NUMBERS], "127.0.0.1")
    with serving(Tunnel(certificate, [], "127.0.0.1"), there) as (orders, _):
        open_remote_sockets(orders, folder, there.at)
        yield Ends(orders, there.at, listening)
    assert not (folder / NUMBERS[1]).exists()
    for listener in listening:
        listener.close()


def through(remote: Path, listener: socket.socket) -> Tuple[socket.socket, socket.socket]:
    """A connection through a remote socket; its end here and its end there."""
    near = socket.socket(socket.AF_UNIX)
    near.connect(str(remote))
    far, _ = listener.accept()
    for end in (near, far):
        end.settimeout(PATIENCE_S)
    return near, far


def all_of(end: socket.socket) -> bytes:
    """Until the other side closes."""
    return b"".join(iter(lambda: end.recv(1 << 16), b""))


def test_bytes_come_through_both_ways_at_once_and_so_does_the_end(ends: Ends, folder: Path) -> None:
    near, far = through(folder / NUMBERS[0], ends.listening[0])
    sent = {end: np.random.RandomState(seed).bytes((1 << 22) + seed) for seed, end in enumerate((near, far))}
    got = {}

    def take(end: socket.socket, nbytes: int) -> None:
        pieces = b""
        while len(pieces) < nbytes:
            pieces += end.recv(nbytes - len(pieces))
        got[end] = pieces

    threads = [threading.Thread(target=take, args=(near, len(sent[far]))),
               threading.Thread(target=take, args=(far, len(sent[near]))),
               *(threading.Thread(target=end.sendall, args=(data,)) for end, data in sent.items())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert got == {near: sent[far], far: sent[near]}
    near.sendall(b"last words")
    near.close()
    assert all_of(far) == b"last words"
    far.close()


def test_each_remote_socket_leads_to_its_socket_for_this_user_alone(ends: Ends, folder: Path) -> None:
    for number, listener in zip(NUMBERS, ends.listening):
        assert os.stat(folder / number).st_mode & 0o077 == 0
        near, far = through(folder / number, listener)
        near.sendall(number.encode())
        near.close()
        assert all_of(far) == number.encode()
        far.close()


@contextlib.contextmanager
def led(certificate: str, here: str, there: str) -> Iterator[Channel]:
    """A remote socket here for a socket there. Both are on this machine: one is a file, the other at a port."""
    far = Tunnel(certificate, [there], "127.0.0.1")
    with serving(Tunnel(certificate, [], "127.0.0.1"), far) as (orders, _):
        orders.send(messages.OpenRemoteSockets([RemoteSocket(here, far.at, lasting=True)]))
        said: List[Message] = []
        until(lambda: said.extend(orders.receive()) or messages.RemoteSocketsOpen() in said)
        yield orders


def test_a_remote_socket_at_a_port_leads_on_for_this_user_and_for_no_other(certificate: str, folder: Path) -> None:
    (port,) = new_ports(1)
    with socket.socket(socket.AF_UNIX) as listener, led(certificate, f"127.0.0.1:{port}", str(folder / str(port))):
        listener.bind(str(folder / str(port)))
        listener.listen()
        listener.settimeout(PATIENCE_S)
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as near:
            near.sendall(b"mine")
            with listener.accept()[0] as far:
                assert far.recv(4) == b"mine"
        if os.geteuid():
            pytest.skip("only root can be another user")
        call = f"import socket; print(socket.create_connection(('127.0.0.1', {port}), {PATIENCE_S}).recv(1))"
        python = shutil.which("python3", path=os.defpath) or pytest.skip("no Python that other users may run")
        said = subprocess.run([python, "-I", "-c", call], stdout=subprocess.PIPE, timeout=PATIENCE_S,
                              preexec_fn=lambda: os.setuid(65534))
        assert said.stdout == b"b''\n"
        listener.settimeout(0.2)
        with pytest.raises(socket.timeout):
            listener.accept()


def test_a_caller_that_has_closed_is_not_taken_for_root() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, \
            socket.create_connection(listener.getsockname()) as near, listener.accept()[0] as far:
        assert tunnel._is_mine(far)
        near.close()
        assert not tunnel._is_mine(far)


def test_a_port_is_kept_by_the_tunnel_until_its_process_listens(certificate: str,
                                                                                 folder: Path) -> None:
    (port,) = new_ports(1)
    name = f"127.0.0.1:{port}"
    with tunnel.bound(name), socket.socket() as listener, led(certificate, str(folder / str(port)), name), \
            socket.socket(socket.AF_UNIX) as near:
        near.connect(str(folder / str(port)))
        near.sendall(b"early")
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as libfabric does
        listener.bind(("127.0.0.1", port))
        listener.listen()
        listener.settimeout(PATIENCE_S)
        with listener.accept()[0] as far:
            assert far.recv(5) == b"early"


def test_a_port_that_somebody_has_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        name = "127.0.0.1:{}".format(taken.getsockname()[1])
        with pytest.raises(SystemExit, match=f"cannot have {name} for this job: Address already in use; start the job"):
            tunnel.bound(name)


def test_when_all_have_met_only_lasting_sockets_are_left(ends: Ends, folder: Path) -> None:
    near, far = through(folder / NUMBERS[0], ends.listening[0])
    ends.orders.send(messages.AllMet())
    until(lambda: not (folder / NUMBERS[0]).exists())
    assert (folder / NUMBERS[1]).exists()
    near.sendall(b"as before")  # who is in stays in
    near.close()
    assert all_of(far) == b"as before"
    far.close()


def strangers(at: str) -> Iterator[socket.socket]:
    """Visitors who lack the certificate: without TLS, with TLS alone, with the certificate of another job."""
    host, _, port = at.rpartition(":")
    plain = socket.create_connection((host, int(port)), PATIENCE_S)
    plain.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    yield plain
    for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), tunnel._contexts(new_certificate(["openssl"]))[1]):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        yield context.wrap_socket(socket.create_connection((host, int(port)), PATIENCE_S))


def test_nobody_comes_in_without_the_jobs_certificate(ends: Ends) -> None:
    for stranger in strangers(ends.at):
        with stranger, contextlib.suppress(OSError):
            stranger.sendall(int(NUMBERS[0]).to_bytes(8, "big"))
            assert all_of(stranger) == b""
    ends.listening[0].settimeout(0.2)
    with pytest.raises(socket.timeout):
        ends.listening[0].accept()


def test_silent_callers_hold_nobody_up(ends: Ends, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "MOST_UNPROVEN", 2)
    monkeypatch.setattr(tunnel, "UNDISTURBED_S", 0.1)
    host, _, port = ends.at.rpartition(":")
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S)) for _ in range(3)]
        assert silent[0].recv(1) == silent[1].recv(1) == b""  # they had to go
        near, far = (stack.enter_context(end) for end in through(folder / NUMBERS[0], ends.listening[0]))
        near.sendall(b"came in")
        assert far.recv(7) == b"came in"


def test_more_processes_of_the_job_than_may_come_at_once_all_come_in(ends: Ends, folder: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "MOST_UNPROVEN", 4)
    words = {f"process {number}".encode() for number in range(40)}
    with contextlib.ExitStack() as stack:
        for word in words:
            near = stack.enter_context(socket.socket(socket.AF_UNIX))
            near.connect(str(folder / NUMBERS[0]))
            near.sendall(word)
        far = [stack.enter_context(ends.listening[0].accept()[0]) for _ in words]
        for end in far:
            end.settimeout(PATIENCE_S)
        assert {end.recv(100) for end in far} == words


def test_a_process_that_is_turned_away_at_first_loses_nothing(certificate: str, folder: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "AGAIN_S", 0.0)
    taking = tunnel._contexts(certificate)[0]
    with contextlib.ExitStack() as stack:
        there = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        there.settimeout(PATIENCE_S)
        (orders,) = stack.enter_context(serving(Tunnel(certificate, [], "127.0.0.1")))
        open_remote_sockets(orders, folder, "127.0.0.1:{}".format(there.getsockname()[1]))
        near = stack.enter_context(socket.socket(socket.AF_UNIX))
        near.connect(str(folder / NUMBERS[0]))
        near.sendall(b"my word")
        there.accept()[0].close()
        for let_in in (False, True):
            far = stack.enter_context(taking.wrap_socket(there.accept()[0], server_side=True))
            assert far.recv(8) == int(NUMBERS[0]).to_bytes(8, "big")
            far.sendall(tunnel.LET_IN) if let_in else far.close()
        assert far.recv(100) == b"my word"


def test_a_tunnel_is_led_to_nobody_who_cannot_show_the_certificate(certificate: str, folder: Path) -> None:
    other = Tunnel(new_certificate(["openssl"]), [], "127.0.0.1")
    with serving(Tunnel(certificate, [], "127.0.0.1"), other) as (orders, _), socket.socket(socket.AF_UNIX) as near:
        open_remote_sockets(orders, folder, other.at)
        near.settimeout(PATIENCE_S)
        near.connect(str(folder / NUMBERS[0]))
        assert all_of(near) == b""


def test_a_host_that_cannot_be_reached_is_told_once(certificate: str, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = "127.0.0.1:{}".format(taken.getsockname()[1])
    words: List[str] = []
    with serving(Tunnel(certificate, [], "127.0.0.1")) as (channel,):
        open_remote_sockets(channel, folder, at)
        for number in NUMBERS:
            with socket.socket(socket.AF_UNIX) as near:
                near.settimeout(PATIENCE_S)
                near.connect(str(folder / number))
                assert all_of(near) == b""
        until(lambda: words.extend(message.text for message in channel.receive()
                                if isinstance(message, messages.HostWarning)) or words)
    assert len(words) == 1 and words[0].startswith(f"no way to the tunnel at {at}: ")


def test_without_openssl_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--secure: cannot run .*no-such: No such file"):
        new_certificate([str(tmp_path / "no-such")])
    with pytest.raises(ConfigError, match=r"--secure: false has made no certificate \(exit code 1\)"):
        new_certificate(["false"])
