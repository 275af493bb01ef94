"""What one server owns and does: arrays and commands in, arrays out; no sockets, no threads, no clock.

`server.py` puts it on ps-lite, `inprocess.py` into a test. A shard serves every store of the job: their buckets differ
in number. Commands come from workers, through `control.Verifier` where there is a network.
"""
import base64
import io
import json
from typing import Any, Callable, Dict

import numpy as np

from kvstore.algorithms import STORES
from kvstore.algorithms.program import Rule
from kvstore.engine import engine
from kvstore.engine._mxnet import NDArray, mx
from kvstore.engine.updaters import build, elementwise
from kvstore.errors import ProtocolError
from kvstore.job import control
from kvstore.wire.interfaces import by_bucket
from kvstore.wire.messages import ASYNC_MODULUS, FETCH, HEADER, SYNC_MODULUS, Header


class _Entry:
    """One bucket of this server.

    size    : how many of its floats are weights
    modulus : how its versions are counted
    marks   : how many workers' marks a push carries
    """

    def __init__(self, size: int, rule: Rule, modulus: int, marks: int) -> None:
        self.size, self.rule, self.modulus, self.marks = size, rule, modulus, marks
        self._started = False

    def start(self, stored: NDArray) -> None:
        """Before the first push: the rule's memory may begin as a copy of the weights."""
        if not self._started:
            self._started = True
            self.rule.start(stored[:self.size])


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
        """Bucket `key` has been pushed, by all workers (`pushed` is their sum) or by one. Makes `stored` the answer."""
        if key not in self._entries:
            raise ProtocolError(f"server {self.server_rank} got a push for bucket {key}, which no store has opened")
        entry = self._entries[key]
        pushed.wait_to_read()
        version, lr_high, lr_low, mark = engine.floats(pushed, entry.size, entry.size + HEADER)
        if mark != FETCH:
            entry.start(stored)
            header = Header(int(version), lr_high + lr_low, int(mark) - entry.marks)
            entry.rule.receive(header, pushed[:entry.size], stored[:entry.size])
        # The update writes the weights before it; whoever sends `stored` waits for the update.
        engine.floats(stored, entry.size, entry.size + 1)[0] = entry.rule.version % entry.modulus

    # -- commands --------------------------------------------------------------------------------------------

    def _open(self, store: str, optimizer: Dict[str, Any], rule_options: Dict[str, Any],
              buckets: Dict[str, Dict[str, Any]]) -> None:
        """A store begins: one optimizer for all its buckets that live here."""
        mine = {int(key): entry for key, entry in buckets.items() if entry["server_rank"] == self.server_rank}
        taken = sorted(set(mine) & set(self._entries))
        if taken:
            raise ProtocolError(f"store {store} opens bucket {taken[0]}, which another store has")
        applied = build(optimizer, control.trusted())
        applied.set_lr_mult({key: entry["lr_mult"] for key, entry in mine.items()})
        applied.set_wd_mult({key: entry["wd_mult"] for key, entry in mine.items()})
        program = STORES[store]
        for key, entry in mine.items():
            shape = None if elementwise(applied) else entry["shape"]
            rule = program.rule(key, shape, self.num_workers, applied, **rule_options)
            self._entries[key] = (_Entry(entry["size"], rule, SYNC_MODULUS, self.num_workers) if program.synchronous
                                  else _Entry(entry["size"], rule, ASYNC_MODULUS, 1))

    def export(self) -> bytes:
        """The optimizer state of every bucket here, as an .npz file: `<bucket>/<i>` arrays, `<bucket>/meta` JSON."""
        arrays: Dict[str, np.ndarray] = {}
        for key, entry in self._entries.items():
            arrays.update({f"{key}/{part}": array for part, array in saved(entry.rule).items()})
        return npz(arrays)

    def statistics(self) -> bytes:
        """What every bucket's rule has counted, as JSON."""
        return json.dumps({key: entry.rule.statistics() for key, entry in self._entries.items()}).encode()

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
        for key, parts in by_bucket(arrays).items():
            self._entries[key].start(mx.nd.zeros(self._entries[key].size))
            put_back(self._entries[key].rule, parts)


def saved(rule: Rule) -> Dict[str, np.ndarray]:
    """What a checkpoint keeps of one bucket: arrays `0`, `1` …, and `meta`, which is JSON."""
    arrays = {str(i): (array if isinstance(array, np.ndarray) else array.asnumpy()).reshape(-1)
              for i, array in enumerate(rule.memory())}
    return {**arrays, "meta": text_array(rule.progress())}


def put_back(rule: Rule, parts: Dict[str, np.ndarray]) -> None:
    """The inverse of `saved`, on a rule that has started."""
    rule.resume(array_text(parts["meta"]))
    for part, mine in enumerate(rule.memory()):
        mine[:] = parts[str(part)].reshape(mine.shape)


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
