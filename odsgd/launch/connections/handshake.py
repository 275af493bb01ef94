"""How an agent that another program has started finds its launcher; both sides.

mpirun and srun mix the output of their ranks and forward stdin only to the first one, so they carry only the launcher's
address and the job's secret, in an environment variable; a pod of Kubernetes has both from its manifest. An agent
connects to the launcher, gets a random number, and answers with its rank, a proof that it knows the secret, and a
random number of its own. It gets its orders, without the secret, with a proof that they come from the launcher and
answer this call; from then on the connection is a `Channel`.
"""
import base64
import contextlib
import dataclasses
import hashlib
import hmac
import json
import os
import secrets
import socket
import sys
import time
from typing import Any, Collection, Dict, Optional, Sequence, Tuple

from kvstore.job.environment import keep_alive
from odsgd.launch.messages import Orders, SealedOrders, of_json

VARIABLE = "ODSGD_AGENT_JOBS"
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
NODE = "SLURMD_NODENAME"
CONNECTED_WITHIN_S = 30.0
MAX_ANSWER, MAX_ORDERS = 1024, 1 << 24


def pack(told: Dict[str, Any]) -> str:
    """What mpirun or srun carries to all agents, as an environment variable."""
    return base64.b64encode(json.dumps(told).encode()).decode()


def call_as_told(packed: str) -> Tuple[Orders, int]:
    """The agent's side, by what mpirun or srun has carried: its orders, and the descriptor of the connection."""
    told = json.loads(base64.b64decode(packed))
    called = call(tuple(told["launcher"]), told["secret"], _rank(told["nodes"]))
    if called is None:
        raise ConnectionAbortedError("the launcher has hung up; it does not wait for this agent")
    os.chdir(told["directory"])
    return called


def _rank(nodes: Sequence[str]) -> int:
    """Which agent this one is: by its node where the nodes are known, else by its MPI rank."""
    if nodes:
        if os.environ.get(NODE) in nodes:
            return nodes.index(os.environ[NODE])
        sys.exit(f"odsgd agent: srun has not said which of {', '.join(nodes)} this is; {NODE} is "
                 f"{os.environ.get(NODE, 'not set')}")
    rank = next((int(os.environ[name]) for name in RANKS if os.environ.get(name, "").isdigit()), None)
    if rank is None:
        sys.exit(f"odsgd agent: mpirun has not said which rank this is; looked for {', '.join(RANKS)}")
    return rank


def call(launcher: Tuple[str, int], secret: str, rank: int) -> Optional[Tuple[Orders, int]]:
    """The agent's side: its orders, and the descriptor of the connection.

    None if the launcher has hung up, since it does not expect this agent; OSError if nobody is there.
    """
    with socket.create_connection(launcher, timeout=CONNECTED_WITHIN_S) as connection:
        nonce, own = _read_line(connection), secrets.token_hex(16)
        answer = {"rank": rank, "proof": _proof(secret, f"agent {rank} {nonce}"), "nonce": own}
        connection.sendall(json.dumps(answer).encode() + b"\n")
        keep_alive(connection)
        orders = receive_orders(connection, secret, own)
        return (orders, connection.detach()) if orders else None


class UnprovenConnection:
    """The launcher's side: a connection until its caller has proved that it is an agent. Never waits."""

    def __init__(self, connection: socket.socket, secret: str) -> None:
        self.connection, self._since, self._secret = connection, time.monotonic(), secret
        self._nonce, self._line = secrets.token_hex(16), bytearray()
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # the caller has gone, as `heard` will find
            connection.send(self._nonce.encode() + b"\n")

    def heard(self, expected: Collection[int], within_s: float) -> Optional[Tuple[int, str]]:
        """The agent's rank and its random number; None: its answer is not complete yet.

        OSError if it is not complete `within_s` after the call, or the caller is no agent of this job, or has called
        before.
        """
        while not self._line.endswith(b"\n"):
            try:
                byte = self.connection.recv(1)  # one by one: the bytes after the line are the channel's
            except BlockingIOError:
                if time.monotonic() - self._since > within_s:
                    raise TimeoutError("no answer") from None
                return None
            if not byte or len(self._line) >= MAX_ANSWER:
                raise ConnectionAbortedError("no answer")
            self._line += byte
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
            answer = json.loads(self._line)
            rank, given, nonce = int(answer["rank"]), str(answer["proof"]), str(answer["nonce"])
            proof = _proof(self._secret, f"agent {rank} {self._nonce}")
            if rank in expected and hmac.compare_digest(given.encode(), proof.encode()):
                return rank, nonce
        raise ConnectionRefusedError("not an agent that this job waits for")


def seal(orders: Orders, secret: str, nonce: str) -> SealedOrders:
    """The launcher's side: orders for the agent that has sent this number; the secret, which it has, is left out."""
    env = {name: value for name, value in orders.env.items() if name != "ODSGD_SECRET"}
    text = json.dumps(dataclasses.replace(orders, env=env), default=vars)
    return SealedOrders(text, _proof(secret, f"orders {nonce} {text}"))


def receive_orders(connection: socket.socket, secret: str, nonce: str) -> Optional[Orders]:
    """The agent's side; None if the launcher has hung up, since it does not expect this agent.

    OSError for orders that are not the launcher's.
    """
    line = _read_line(connection, MAX_ORDERS)
    if not line:
        return None
    proven = False
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        sealed = json.loads(line)
        text, given = str(sealed["orders"]), str(sealed["proof"])
        proven = hmac.compare_digest(given.encode(), _proof(secret, f"orders {nonce} {text}").encode())
    if not proven:
        raise OSError("what answers in the launcher's place does not know the job's secret")
    orders: Orders = of_json(Orders, json.loads(text))
    orders.env["ODSGD_SECRET"] = secret
    return orders


def _proof(secret: str, text: str) -> str:
    return hmac.new(bytes.fromhex(secret), text.encode(), hashlib.sha256).hexdigest()


def _read_line(connection: socket.socket, most: int = MAX_ANSWER) -> str:
    """A line, read byte by byte, since the file has no buffer: the bytes after it are the channel's."""
    with connection.makefile("rb", buffering=0) as file:
        return file.readline(most).decode("ascii", "replace").strip()
