"""One server without its network: arrays and commands in, arrays out; no sockets, no threads, no clock.

`server.py` puts it on ps-lite, `in_process.py` into a test. A shard serves every store of the job; buckets of different
stores have different numbers. Commands come from workers, through `commands.Verifier` where there is a network.
"""
import base64
import io
import json
from typing import Any, Callable, Collection, Dict, Iterable, List, Optional, Tuple

import numpy as np

from kvstore import methods
from kvstore.engine import engine
from kvstore.engine.engine import NDArray
from kvstore.errors import DivergedError, ProtocolError
from kvstore.job import environment
from kvstore.messages import finite
from kvstore.messages.finite import Names
from kvstore.messages.header import ASYNC_MODULUS, FETCH, HEADER, SYNC_MODULUS, Header, is_look, rank_whose_round_ends
from kvstore.messages.seam import Saved, State
from kvstore.methods.contract import Rule
from kvstore.optimizers import described
from kvstore.optimizers.apply import ImmediateOptimizer
from kvstore.optimizers.described import Optimizer, context_of
from kvstore.state import declared
from kvstore.state.npz import below, from_bytes, to_bytes

MOST_WORKERS_IN_A_BEAT = 64
"""Workers that a beat has room for."""


class Entry:
    """One bucket of this server.

    size         : how many of its floats are weights
    asynchronous : whether `receive` gets each push by itself, or the sum of all workers'
    names        : its parameters
    """

    def __init__(self, size: int, optimizer: ImmediateOptimizer, rule: Rule, asynchronous: bool, names: Names) -> None:
        self.size, self.optimizer, self.rule, self.asynchronous, self.names = size, optimizer, rule, asynchronous, names
        self.modulus, self.pushes_summed = (ASYNC_MODULUS, 1) if asynchronous else (SYNC_MODULUS, rule.num_workers)
        self._optimizer_began = self._rule_began = False
        self._resumed: Optional[Saved] = None  # the rule's, until it starts
        self.extra_arrays: Dict[str, np.ndarray] = {}  # beside the rule's arrays and the optimizer's

    def bind(self, stored: NDArray, pushed: NDArray) -> Tuple[np.ndarray, np.ndarray]:
        """Weights and gradient as the rule sees them. Before the first push rule and optimizer start: their arrays may
        begin as a copy of the weights.
        """
        if not self._optimizer_began:
            self._optimizer_began = True
            self.optimizer.start(stored[:self.size])
        if not self._rule_began:
            self._rule_began = True
            w = engine.memory(stored[:self.size])
            self.rule.start(w)
            declared.check(self.rule, w)
            if self._resumed is not None:
                declared.restore(self.rule, *self._resumed, np.zeros(self.size, np.float32))
        return self.optimizer.bind(stored, pushed, self.size)

    def use(self, optimizer: Optimizer) -> None:
        """The next push is the first that this optimizer sees."""
        self.optimizer.use(optimizer)
        self._optimizer_began = False

    def receive(self, header: Header, pushed: NDArray, stored: NDArray) -> None:
        """One push, or the sum of all workers'."""
        w, grad = self.bind(stored, pushed)
        on_nan = self.rule.options.on_nan
        if on_nan == "skip" and finite.skips(f"{environment.who()}, {self._where(header)}", self.names, grad):
            self.rule.skip(header, w)
            return
        if on_nan in ("stop", "find"):
            self._check(header, grad)
        self.rule.receive(header, grad, w)

    def end_round(self, worker_rank: int, stored: NDArray) -> bool:
        """End the worker's round if the rule can. Whether the worker's fetch is answered now."""
        w, _ = self.bind(stored, stored)
        return self.rule.end_round(worker_rank, w)

    def look(self, stored: NDArray) -> None:
        """A worker evaluates the weights; before that the rule may end a round."""
        w, _ = self.bind(stored, stored)
        self.rule.look(w)

    def _check(self, header: Header, grad: np.ndarray) -> None:
        if not finite.finite(grad):
            which = "" if self.pushes_summed == 1 else "; on_nan `find` finds the worker"
            raise DivergedError(f"{self._where(header)}: {finite.wrong(grad, self.names)}{which}. {finite.ADVICE}")

    def _where(self, header: Header) -> str:
        if self.pushes_summed == 1:
            return f"worker {header.worker_rank}, at update {self.rule.version + 1}"
        return f"update {self.rule.version + 1} since its start, the sum over the workers"

    def saved(self) -> Saved:
        """What a checkpoint keeps: arrays ``optimizer/NAME``, ``rule/NAME`` and ``kept/NAME``, and facts of both.

        Before the first push the rule has nothing to keep.
        """
        if not self._optimizer_began:
            self.optimizer.start(engine.zeros(self.size, context_of(self.optimizer.optimizer)))
        of_rule, facts = declared.saved(self.rule) if self._rule_began else self._resumed or ({}, None)
        kept = {} if facts is None else self.extra_arrays
        arrays = {**{f"optimizer/{name}": array.asnumpy() for name, array in self.optimizer.arrays().items()},
                  **{f"rule/{name}": array for name, array in of_rule.items()},
                  **{f"kept/{name}": array for name, array in kept.items()}}
        return {name: array.reshape(-1) for name, array in arrays.items()}, {
            "optimizer": {**self.optimizer.facts(), "began": self._optimizer_began}, "rule": facts}

    def restore(self, saved: Saved) -> None:
        """The inverse of `saved`, or of the optimizer's part alone (`saving.optimizer_alone`)."""
        arrays, facts = saved
        if facts.get("rule", {}) is None and not facts["optimizer"].get("began"):
            return
        self.optimizer.start(engine.zeros(self.size, context_of(self.optimizer.optimizer)))
        self.optimizer.restore(below("optimizer/", arrays), facts["optimizer"])
        self._optimizer_began = facts["optimizer"].get("began", True)
        if facts.get("rule") is not None:  # else the rule goes on, or begins anew with the first push
            self._resumed = below("rule/", arrays), facts["rule"]
            declared.restore_facts(self.rule, facts["rule"])  # statistics may be asked for before the weights are here
            declared.fill(self.extra_arrays, below("kept/", arrays))


class Shard:
    """The buckets of one server. `trusted`: whether commands may name methods and optimizers of the user's own.

    Invariants
      1. a bucket's rule is made once, by `open`, before the first push to it.
      2. the last floats of a bucket's stored array are its header; the rule never sees them.
    """

    def __init__(self, server_rank: int, num_workers: int, trusted: bool) -> None:
        self.server_rank, self.num_workers, self._trusted = server_rank, num_workers, trusted
        self._entries: Dict[int, Entry] = {}
        self._opened: List[Dict[str, Any]] = []  # the arguments of each `_open`
        self._incoming = io.BytesIO()  # a saved state on its way in
        self._stale: Dict[int, Tuple[int, int]] = {}  # asynchronous: worker rank -> pushes, sum of their staleness

    def command(self, name: str, payload: Dict[str, Any]) -> None:
        """Carry out a worker's command."""
        commands: Dict[str, Callable[..., None]] = {"open": self._open, "use": self._use, "import": self._import,
                                                    "rest": self._rest}
        if name not in commands:
            raise ProtocolError(f"server {self.server_rank} got command `{name}`, which this version does not know; "
                                "all processes of a job must run the same version of odsgd")
        commands[name](**payload)

    # -- rounds ----------------------------------------------------------------------------------------------

    def handle_push(self, key: int, pushed: NDArray, stored: NDArray) -> None:
        """Bucket `key` has been pushed, by all workers (`pushed` is their sum) or by one. Makes `stored` the answer."""
        if key not in self._entries:
            raise ProtocolError(f"server {self.server_rank} got a push for bucket {key}, which no store has opened")
        entry = self._entries[key]
        floats = engine.memory(pushed)[-HEADER:]
        version, lr_high, lr_low, sender_code = floats.tolist()
        if sender_code != FETCH:
            header = Header(int(version), lr_high + lr_low, int(sender_code) - entry.pushes_summed)
            if entry.asynchronous:
                self._count(header, (entry.rule.version - header.version) % entry.modulus)
            entry.receive(header, pushed, stored)
        elif is_look(floats):
            entry.look(stored)
        # The update writes only the weights, which lie before the header. `stored` is sent after it.
        engine.view(stored)[-HEADER] = entry.rule.version % entry.modulus

    def may_answer_fetch(self, key: int, header: np.ndarray, stored: NDArray) -> bool:
        """Whether a fetch is answered now. One that is to end a round waits until the rule can end it."""
        worker_rank = rank_whose_round_ends(header)
        return worker_rank < 0 or self._entries[key].end_round(worker_rank, stored)

    def _count(self, header: Header, tau: int) -> None:
        pushes, taus = self._stale.get(header.worker_rank, (0, 0))
        self._stale[header.worker_rank] = pushes + 1, taus + tau

    def stale(self) -> List[Tuple[int, int, int]]:
        """Of an asynchronous job: each worker's pushes and the sum of their staleness. Empty for a large job, since
        a beat is a short message. On any thread."""
        counted = [(rank, *counts) for rank, counts in list(self._stale.items())]
        return counted if len(counted) <= MOST_WORKERS_IN_A_BEAT else []

    # -- commands --------------------------------------------------------------------------------------------

    def _open(self, method: str, options: Dict[str, Any], optimizer: Dict[str, Any],
              buckets: Dict[str, Dict[str, Any]], local_step: Dict[str, Any]) -> None:
        """A store begins: one optimizer for all its buckets that live here."""
        self._opened.append({"method": method, "options": options, "optimizer": optimizer, "buckets": buckets,
                             "local_step": local_step})
        mine = self._mine(buckets)
        taken = sorted(set(mine) & set(self._entries))
        if taken:
            raise ProtocolError(f"{method} opens bucket {taken[0]}, which another store has")
        built = described.build(optimizer, self._trusted)
        kind = methods.load(method, self._trusted)
        made = kind(kind.Options(**options), self.num_workers)
        for key, entry in mine.items():
            of_bucket = ImmediateOptimizer(built, key, entry["shape"])
            rule = made.rule(key, made.options, self.num_workers, of_bucket)
            self._entries[key] = Entry(entry["size"], of_bucket, rule, made.asynchronous, entry["names"])

    def _use(self, optimizer: Dict[str, Any], buckets: Dict[str, Dict[str, Any]], **_: Any) -> None:
        """A store goes on with another optimizer, which has seen nothing yet."""
        built = described.build(optimizer, self._trusted)
        for key in self._mine(buckets):
            self._entries[key].use(built)

    def buckets(self) -> List[int]:
        """The numbers of the open buckets."""
        return list(self._entries)

    def _rest(self, worker_rank: int, buckets: List[int]) -> None:
        """A worker sends nothing for these buckets before it has met all others, or it has left."""
        for key in buckets:
            if key in self._entries:
                self._entries[key].rule.rest(worker_rank)

    def _mine(self, buckets: Dict[str, Dict[str, Any]]) -> Dict[int, Dict[str, Any]]:
        return {int(key): entry for key, entry in buckets.items() if entry["server_rank"] == self.server_rank}

    def context(self, keys: Iterable[int]) -> Any:
        """Where the arrays of a store's buckets are."""
        return next((context_of(self._entries[key].optimizer.optimizer) for key in keys), None)

    def forget(self, keys: Collection[int]) -> None:
        """A store has ended: forget its buckets. Nobody can join it now."""
        gone = {str(key) for key in keys}
        self._opened = [store for store in self._opened if not store["buckets"].keys() <= gone]
        for key in keys:
            self._entries.pop(key, None)

    def add_to_export(self, weights: Dict[int, np.ndarray]) -> None:
        """Let `export` save these weights: with `codec_weights` workers have older ones, and get only changes."""
        for key, w in weights.items():
            self._entries[key].extra_arrays["w"] = w

    def export(self) -> bytes:
        """What a checkpoint keeps of every bucket here, as an .npz file."""
        return to_bytes({key: entry.saved() for key, entry in self._entries.items()})

    def statistics(self) -> bytes:
        """What every bucket's rule has counted, as JSON."""
        return json.dumps({key: entry.rule.statistics() for key, entry in self._entries.items()}).encode()

    def opened(self) -> bytes:
        """What each store has begun with, as JSON, for a worker that joins."""
        return json.dumps(self._opened).encode()

    def _import(self, piece: str, last: bool, server_rank: int) -> None:
        """The next piece of a saved state; the last one puts it in place."""
        if server_rank != self.server_rank:
            return
        self._incoming.write(base64.b64decode(piece))
        if last:
            self.restore(from_bytes(self._incoming.getvalue()))
            self._incoming = io.BytesIO()

    def restore(self, state: State) -> None:
        """Put back what `export` gave."""
        for key, saved in state.items():
            self._entries[key].restore(saved)
