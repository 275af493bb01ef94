"""Server and scheduler of a job on sockets (`odsgd launch --wire sockets`): no MXNet between workers and servers.

The scheduler listens at the address that all processes know from the launcher. Each server says where it listens; when
the last one has, the scheduler tells all that ask. Then workers call the servers (`courier`); `Hub` gets all pushes.
"""
import contextlib
import errno
import json
import os
import socket
import threading
from types import SimpleNamespace
from typing import Any, Dict, List

from kvstore.errors import EXIT_FAILURE, KVStoreError, ProtocolError
from kvstore.job import ending
from kvstore.job.deadlines import deadlines
from kvstore.job.pulse import connecting
from kvstore.job.report import report
from kvstore.options import DEFAULT_TIMEOUT_S
from kvstore.weights.servers import courier, server
from kvstore.weights.servers.hub import Hub
from kvstore.weights.servers.server import Server, fatal

COMES_LATER = (errno.ECONNREFUSED, errno.ENOENT)
"""Errors of a call to the scheduler, which may start later than this process."""


def _scheduler_address() -> str:
    port = os.environ["DMLC_PS_ROOT_PORT"]
    local = os.environ.get("DMLC_LOCAL") == "1"
    return f"/tmp/{port}" if local else f"{os.environ['DMLC_PS_ROOT_URI']}:{port}"


def introduce() -> None:
    """Be the scheduler, until the launcher ends it."""
    servers: Dict[int, str] = {}
    count, changed = int(os.environ["DMLC_NUM_SERVER"]), threading.Condition()

    def called(connection: socket.socket, sender: int, said: Dict[str, Any]) -> None:
        with changed:
            if "listens" in said:
                servers[sender] = said["listens"]
                changed.notify_all()
            changed.wait_for(lambda: len(servers) == count)
        with connection, contextlib.suppress(OSError):  # the caller may have gone
            connection.sendall(json.dumps([servers[rank] for rank in range(count)]).encode())

    connecting()
    address = _scheduler_address()
    try:
        listener = courier.listen_at(address)
    except OSError as error:
        ending.die(f"the scheduler cannot listen at {address}: {error}; name another port with --port, or leave the "
                   "option out and a free one is chosen", EXIT_FAILURE)
    courier.take_calls(listener, DEFAULT_TIMEOUT_S, called)
    report("joined")
    threading.Event().wait()


def addresses(sender: int, timeout_s: float, **said: Any) -> List[str]:
    """Where the servers listen, by rank. Waits until all have said so."""
    late = (f"the job did not come up within {timeout_s:g} s: scheduler at {_scheduler_address()}, "
            f"{os.environ['DMLC_NUM_SERVER']} servers expected; check that each was started and can reach it")
    with deadlines.within(timeout_s, late):
        try:
            connection = courier.call_again(_scheduler_address(), sender, timeout_s, COMES_LATER, **said)
        except OSError as error:
            raise KVStoreError(f"no connection to the scheduler at {_scheduler_address()}: {error}; check that this "
                               "host can reach it (DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, a firewall)") from None
        with connection, connection.makefile("rb") as file:
            connection.settimeout(None)
            text = b""
            with contextlib.suppress(ConnectionError):
                text = file.read()
    if not text:
        raise ProtocolError(f"the scheduler at {_scheduler_address()} has hung up: see what it says; if nothing, this "
                            "process's ODSGD_SECRET is not the job's, and all processes of a job come from one launch")
    return json.loads(text)


class SocketServer(Server):
    """A server that has every message from its hub."""

    def __init__(self, rank: int, num_workers: int) -> None:
        super().__init__(SimpleNamespace(rank=rank))
        self._hub = Hub(num_workers, self._timeout_s, fatal(self._update),
                        fatal(lambda *asked: self._shard.may_answer_fetch(*asked)), self._lock, self._command)
        self.address = self._hub.address

    def _begin(self, **_: List[int]) -> None:
        """The hub, not MXNet, takes the messages."""

    def _answer(self, sender: int, name: str, number: int = 0, chunk: int = 0) -> bytes:
        return self._answer_to(name)


def serve() -> None:
    """Be a server, until the launcher ends it."""
    server.begin()
    rank = int(os.environ["ODSGD_SERVER_RANK"])
    listens = SocketServer(rank, int(os.environ["DMLC_NUM_WORKER"])).address
    addresses(rank, DEFAULT_TIMEOUT_S, listens=listens)
    threading.Event().wait()
