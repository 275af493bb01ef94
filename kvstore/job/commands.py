"""Signed commands: a worker's line of text to the servers, which is sender, counter, signature, JSON.

The signature is an HMAC over all the rest under the job's secret; the counter of each sender only grows, so a recorded
command cannot be played again. A server acts on nothing else.
A foreign tracker gives no secret. Then commands are signed with a key that anyone on the network could derive, and
servers take only optimizers and methods of MXNet's and this package's (`trusted`).
"""
import hashlib
import hmac
import json
import os
import re
from typing import Any, Dict, Tuple

from kvstore.errors import ProtocolError

SIGNED = re.compile("([0-9]{1,18}) ([0-9]{1,18}) ([0-9a-f]{64}) (.*)", re.DOTALL)


def trusted() -> bool:
    """Whether this job has a secret of its own."""
    return bool(os.environ.get("ODSGD_SECRET"))


def job_key() -> bytes:
    """The key of this attempt of the job; where all attempts have one secret, the launcher has numbered them."""
    secret = os.environ.get("ODSGD_SECRET", "") + os.environ.get("ODSGD_ATTEMPT", "")
    if not trusted():
        secret = ":".join(os.environ.get(name, "") for name in ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"))
    return secret.encode()


class Signer:
    """Signs one sender's commands, each with the next number; the first comes `after` this one."""

    def __init__(self, sender: int, key: bytes, after: int = 0) -> None:
        self._sender, self._key, self._counter = sender, key, after

    def sign(self, name: str, payload: Dict[str, Any]) -> str:
        self._counter += 1
        text, said = json.dumps([name, payload]), f"{self._sender} {self._counter}"
        return f"{said} {_signature(self._key, f'{said} {text}')} {text}"


class Verifier:
    """Checks commands; the other half of `Signer`."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._last: Dict[int, int] = {}

    def verify(self, message: str) -> Tuple[int, str, Dict[str, Any]]:
        """Sender, name and payload of `message`; ProtocolError unless it is signed and new."""
        match = SIGNED.fullmatch(message)
        if match is None:
            raise ProtocolError("an unsigned command reached this server and was not executed; "
                                "is a stock MXNet worker (or a stranger) connected to this job?")
        sender, counter, text = int(match[1]), int(match[2]), match[4]
        if not hmac.compare_digest(match[3], _signature(self._key, f"{match[1]} {match[2]} {text}")):
            raise ProtocolError(f"a command from worker {sender} is not signed with this job's secret "
                                "(ODSGD_SECRET) and was not executed; workers and servers must come from one launch")
        if counter <= self._last.get(sender, 0):
            raise ProtocolError(f"command {counter} of worker {sender} came a second time and was not executed")
        self._last[sender] = counter
        try:
            name, payload = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            name = payload = None
        if not isinstance(name, str) or not isinstance(payload, dict):
            raise ProtocolError(f"command {counter} of worker {sender} is signed, and is not a name and its arguments; "
                                "workers and servers must run the same version")
        return sender, name, payload


def _signature(key: bytes, said: str) -> str:
    return hmac.new(key, said.encode(), hashlib.sha256).hexdigest()
