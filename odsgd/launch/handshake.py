"""How an agent that mpirun has started finds its launcher; both sides.

mpirun mixes the output of its ranks and forwards stdin to the first only, so it carries nothing but the orders of all
agents, in an environment variable. An agent connects to the launcher, is given a number, and answers with its MPI rank
and a proof that it knows the job's secret; from then on the connection is a `Channel`.
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
import zlib
from typing import Any, Collection, Dict, Optional, Tuple

from odsgd.launch.channel import Message

VARIABLE = "ODSGD_AGENT_JOBS"
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
CONNECTED_WITHIN_S, ANSWERED_WITHIN_S = 30.0, 5.0
MAX_ANSWER = 1024


def pack(orders: Dict[str, Any]) -> str:
    """The orders of all agents as one environment variable; Linux allows 128 KiB for it."""
    return base64.b64encode(zlib.compress(json.dumps(orders).encode())).decode()


def unpack(text: str) -> Dict[str, Any]:
    """The reverse of `pack`."""
    orders: Dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    return orders


def arrive(packed: str) -> Tuple[Message, int]:
    """The agent's side: our orders, by our MPI rank, and the descriptor of the connection."""
    orders = unpack(packed)
    rank = next((int(os.environ[name]) for name in RANKS if os.environ.get(name, "").isdigit()), None)
    if rank is None:
        sys.exit(f"odsgd agent: mpirun has not said which rank this is; looked for {', '.join(RANKS)}")
    connection = socket.create_connection(tuple(orders["launcher"]), timeout=CONNECTED_WITHIN_S)
    nonce = _read_line(connection)
    connection.sendall(json.dumps({"rank": rank, "proof": _proof(orders["secret"], nonce, rank)}).encode() + b"\n")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return {**orders["common"], **orders["ranks"][rank]}, connection.detach()


def admit(connection: socket.socket, secret: str, expected: Collection[int]) -> Optional[int]:
    """The launcher's side: the rank of an agent that has come; None if it is none of ours, or one that has been here.

    Takes a while if the visitor does not answer.
    """
    nonce = secrets.token_hex(16)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        connection.settimeout(ANSWERED_WITHIN_S)
        connection.sendall(nonce.encode() + b"\n")
        answer = json.loads(_read_line(connection))
        rank, shown = int(answer["rank"]), str(answer["proof"])
        if rank in expected and hmac.compare_digest(shown.encode(), _proof(secret, nonce, rank).encode()):
            return rank
    return None


def _proof(secret: str, nonce: str, rank: int) -> str:
    return hmac.new(bytes.fromhex(secret), f"agent {rank} {nonce}".encode(), hashlib.sha256).hexdigest()


def _read_line(connection: socket.socket) -> str:
    with connection.makefile("rb", buffering=0) as unbuffered:  # the bytes behind the line are the channel's
        return unbuffered.readline(MAX_ANSWER).decode().strip()
