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
from typing import Any, Dict, Tuple

from kvstore.errors import ProtocolError

MOST_DIGITS = 18
"""Of a sender or counter."""


def trusted() -> bool:
    """Whether this job has a secret of its own."""
    return bool(os.environ.get("ODSGD_SECRET"))


def job_key() -> bytes:
    secret = os.environ.get("ODSGD_SECRET")
    if not secret:
        secret = ":".join(os.environ.get(name, "") for name in ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"))
    return secret.encode()


class Signer:
    """Signs one sender's commands, each with the next number; the first comes `after` this one."""

    def __init__(self, sender: int, key: bytes, after: int = 0) -> None:
        self._sender, self._key, self._counter = sender, key, after

    def sign(self, name: str, payload: Dict[str, Any]) -> str:
        self._counter += 1
        text = json.dumps([name, payload], ensure_ascii=True)
        return f"{self._sender} {self._counter} {_signature(self._key, self._sender, self._counter, text)} {text}"


class Verifier:
    """Checks commands; the other half of `Signer`."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._last: Dict[int, int] = {}

    def verify(self, message: str) -> Tuple[int, str, Dict[str, Any]]:
        """Sender, name and payload of `message`; ProtocolError unless it is signed and new."""
        try:
            sender_text, counter_text, signature, text = message.split(" ", 3)
            if max(len(sender_text), len(counter_text)) > MOST_DIGITS:
                raise ValueError
            sender, counter = int(sender_text), int(counter_text)
            if [str(sender), str(counter)] != [sender_text, counter_text]:  # int() takes blanks, signs, other scripts
                raise ValueError
            expected = _signature(self._key, sender, counter, text).encode()
            given = signature.encode()
        except ValueError:
            raise ProtocolError("an unsigned command reached this server and was not executed; "
                                "is a stock MXNet worker (or a stranger) connected to this job?") from None
        if not hmac.compare_digest(given, expected):
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


def _signature(key: bytes, sender: int, counter: int, text: str) -> str:
    return hmac.new(key, f"{sender} {counter} {text}".encode(), hashlib.sha256).hexdigest()
