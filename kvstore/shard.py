"""What one server owns and does: arrays and commands in, arrays out; no sockets, no threads, no clock.

`server.py` puts it on ps-lite, `inprocess.py` into a test. A shard serves every store of the job: their buckets differ
in number. Commands come from workers, through `control.Verifier` where there is a network.
"""
import base64
import io
import json
from typing import Any, Callable, Dict

import numpy as np

from . import engine
from ._mxnet import NDArray, mx
from .algorithms import STORES
from .errors import ProtocolError
from .messages import HEADER, VERSION_MODULUS
from .updaters import build, elementwise, progress, set_progress, state_arrays


class _Entry:
    """One bucket of this server: its rule, and how many of its floats are weights."""

    def __init__(self, size: int, rule: Any) -> None:
        self.size, self.rule = size, rule


class Shard:
    """The buckets of one server.

    Invariants
      1. a bucket's rule is made once, by `open`, before the first push to it.
      2. the last floats of a bucket's stored array are its header; the rule never sees them.
    """

    def __init__(self, server_rank: int, num_workers: int) -> None:
        self.server_rank, self.num_workers = server_rank, num_workers
        self._entries: Dict[int, _Entry] = {}
        self._incoming = io.BytesIO()  # a saved state on its way in
        self._commands: Dict[str, Callable[..., None]] = {
            "open": self._open, "import": self._import}

    def command(self, name: str, payload: Dict[str, Any]) -> None:
        """Carry out a worker's command."""
        if name not in self._commands:
            raise ProtocolError(f"server {self.server_rank} got command `{name}`, which this version does not know; "
                                "all processes of a job must run the same version of odsgd")
        self._commands[name](**payload)

    # -- rounds ----------------------------------------------------------------------------------------------

    def update(self, key: int, pushed: NDArray, stored: NDArray) -> None:
        """All workers have pushed bucket `key`; `pushed` is their sum. Brings `stored` to the next version."""
        if key not in self._entries:
            raise ProtocolError(f"server {self.server_rank} got a push for bucket {key}, which no store has opened")
        entry = self._entries[key]
        pushed.wait_to_read()
        version_sum, lr_high, lr_low = engine.floats(pushed, entry.size, entry.size + HEADER)
        entry.rule.optimizer.lr = lr_high + lr_low
        entry.rule.push_all(pushed[:entry.size], stored[:entry.size], int(version_sum), VERSION_MODULUS)
        # The update writes the weights before it; whoever sends `stored` waits for the update.
        engine.floats(stored, entry.size, entry.size + 1)[0] = entry.rule.version % VERSION_MODULUS

    # -- commands --------------------------------------------------------------------------------------------

    def _open(self, store: str, optimizer: Dict[str, Any], buckets: Dict[str, Dict[str, Any]]) -> None:
        """A store begins: one optimizer for all its buckets that live here."""
        mine = {int(key): entry for key, entry in buckets.items() if entry["server_rank"] == self.server_rank}
        taken = sorted(set(mine) & set(self._entries))
        if taken:
            raise ProtocolError(f"store {store} opens bucket {taken[0]}, which another store has")
        applied = build(optimizer)
        applied.rescale_grad = 1.0 / self.num_workers
        applied.set_lr_mult({key: entry["lr_mult"] for key, entry in mine.items()})
        applied.set_wd_mult({key: entry["wd_mult"] for key, entry in mine.items()})
        for key, entry in mine.items():
            shape = None if elementwise(applied) else entry["shape"]
            rule = STORES[store].rule(key, shape, self.num_workers, applied)
            rule.start(mx.nd.zeros(entry["size"]))
            self._entries[key] = _Entry(entry["size"], rule)

    def export(self) -> bytes:
        """The optimizer state of every bucket here, as an .npz file: `<bucket>/<i>` arrays, `<bucket>/meta` JSON."""
        arrays: Dict[str, np.ndarray] = {}
        for key, entry in self._entries.items():
            for i, array in enumerate(state_arrays(entry.rule.state)):
                arrays[f"{key}/{i}"] = array.asnumpy().reshape(-1)
            arrays[f"{key}/meta"] = text_array(progress(entry.rule.optimizer, key))
        return npz(arrays)

    def _import(self, piece: str, last: bool, server_rank: int) -> None:
        """The next piece of a saved state; the last one puts it in place."""
        if server_rank != self.server_rank:
            return
        self._incoming.write(base64.b64decode(piece))
        if last:
            self.restore(un_npz(self._incoming.getvalue()))
            self._incoming = io.BytesIO()

    def restore(self, arrays: Dict[str, np.ndarray]) -> None:
        """Put back what `export` gave, in its arrays and names."""
        for name, array in arrays.items():
            key, part = name.split("/")
            rule = self._entries[int(key)].rule
            if part == "meta":
                set_progress(rule.optimizer, int(key), array_text(array))
            else:
                mine = state_arrays(rule.state)[int(part)]
                mine[:] = array.reshape(mine.shape)


def npz(arrays: Dict[str, np.ndarray]) -> bytes:
    """`arrays` as the bytes of an .npz file."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def un_npz(data: bytes) -> Dict[str, np.ndarray]:
    """The inverse of `npz`; never unpickles."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def text_array(value: Any) -> np.ndarray:
    """JSON as an array of bytes."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def array_text(array: np.ndarray) -> Any:
    """The inverse of `text_array`."""
    return json.loads(array.tobytes().decode())
