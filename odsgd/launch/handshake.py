"""How an agent that something else has started finds its launcher; both sides.

mpirun and srun mix the output of their ranks and forward stdin to the first only, so they carry nothing but the orders
of all agents, in an environment variable. An agent connects to the launcher, is given a number, and answers with its
rank and a proof that it knows the job's secret; from then on the connection is a `Channel`.

A pod of Kubernetes has the secret and no orders. It sends a number of its own as well, and is sent its orders with a
proof that they come from the launcher and answer this very call.
"""
import base64
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import sys
import time
import zlib
from typing import Any, Collection, Dict, Optional, Sequence, Tuple

from odsgd.launch.channel import Message

VARIABLE = "ODSGD_AGENT_JOBS"
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
NODE = "SLURMD_NODENAME"
CONNECTED_WITHIN_S, ANSWERED_WITHIN_S = 30.0, 5.0
MAX_ANSWER, MAX_ORDERS = 1024, 1 << 24


def pack(orders: Dict[str, Any]) -> str:
    """The orders of all agents as one environment variable; Linux allows 128 KiB for it."""
    return base64.b64encode(zlib.compress(json.dumps(orders).encode())).decode()


def unpack(text: str) -> Dict[str, Any]:
    """The reverse of `pack`."""
    orders: Dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    return orders


def arrive(packed: str) -> Tuple[Message, int]:
    """The agent's side: our orders, by our rank or node, and the descriptor of the connection."""
    orders = unpack(packed)
    rank = _rank(orders["nodes"])
    connection, _ = knock(tuple(orders["launcher"]), orders["secret"], rank)
    return {**orders["common"], **orders["ranks"][rank]}, connection.detach()


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


def knock(launcher: Tuple[str, int], secret: str, rank: int) -> Tuple[socket.socket, str]:
    """The agent's side of the connection, and the number that it has sent; OSError if nobody is there."""
    connection = socket.create_connection(launcher, timeout=CONNECTED_WITHIN_S)
    nonce, own = _read_line(connection), secrets.token_hex(16)
    answer = {"rank": rank, "proof": _proof(secret, f"agent {rank} {nonce}"), "nonce": own}
    connection.sendall(json.dumps(answer).encode() + b"\n")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connection, own


def admit(connection: socket.socket, secret: str, expected: Collection[int]) -> Optional[Tuple[int, str]]:
    """The launcher's side: the rank of an agent that has come, and its number.

    None if it is none of ours, or one that has been here. Takes a while if the visitor does not answer.
    """
    nonce = secrets.token_hex(16)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        connection.settimeout(ANSWERED_WITHIN_S)
        connection.sendall(nonce.encode() + b"\n")
        answer = json.loads(_read_line(connection, within_s=ANSWERED_WITHIN_S))
        rank, shown, own = int(answer["rank"]), str(answer["proof"]), str(answer["nonce"])
        if rank in expected and hmac.compare_digest(shown.encode(), _proof(secret, f"agent {rank} {nonce}").encode()):
            return rank, own
    return None


def seal(orders: Message, secret: str, nonce: str) -> Message:
    """The launcher's side: orders for the agent that has sent this number."""
    text = json.dumps(orders)
    return {"orders": text, "proof": _proof(secret, f"orders {nonce} {text}")}


def receive_orders(connection: socket.socket, secret: str, nonce: str) -> Optional[Message]:
    """The agent's side; None if the launcher has hung up, as it does on one that it does not expect.

    OSError for orders that are not the launcher's.
    """
    line = _read_line(connection, MAX_ORDERS)
    if not line:
        return None
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        sealed = json.loads(line)
        text, shown = str(sealed["orders"]), str(sealed["proof"])
        if hmac.compare_digest(shown.encode(), _proof(secret, f"orders {nonce} {text}").encode()):
            orders: Message = json.loads(text)
            return orders
    raise OSError("what answers in the launcher's place does not know the job's secret")


def _proof(secret: str, text: str) -> str:
    return hmac.new(bytes.fromhex(secret), text.encode(), hashlib.sha256).hexdigest()


def _read_line(connection: socket.socket, most: int = MAX_ANSWER, within_s: Optional[float] = None) -> str:
    """All of it, if `within_s` says so, in that time; byte by byte, since what is behind it is the channel's."""
    line = bytearray()
    deadline = None if within_s is None else time.monotonic() + within_s
    while len(line) < most and not line.endswith(b"\n"):
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        byte = connection.recv(1)
        if not byte:
            break
        line += byte
    return line.decode().strip()
