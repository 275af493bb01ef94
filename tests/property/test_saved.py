"""What is saved of a session: by methods whose arrays come and go, bucket by bucket, and in whatever form.

`SCRIPT` says what a method does in each iteration to each bucket, so that no two buckets need be alike.
"""
import atexit
import collections
import contextlib
import copy
import functools
import io
import math
import os
import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Deque, Dict, Iterator, List, Optional, Tuple

import numpy as np

import kvstore
from kvstore.engine._mxnet import mx
from kvstore.messages.header import Header
from kvstore.messages.seam import Array, Pending, Saved, Transport
from kvstore.methods.contract import Step
from kvstore.methods.sync import SSGD, Synchronous, SyncRule
from kvstore.state.npz import write_npz
from kvstore.transports.in_process import Stage
from tests.methods import as_they_were
from tests.property import nasty
from tests.property.nasty import fed
from tests.property.test_readers import MEMORY, holds

SHAPES = {"a": (3,), "b": (2, 3), "c": (1,)}
BUCKET_NBYTES = 16
"""So that `b` lies in more than one bucket."""
STEPS = 6
LATE, TAKE, KEEP, GROW, LOCAL = 1, 2, 4, 8, 16
"""Put a gradient aside in a deque; take the oldest; make or drop an array; make a list longer; a local step."""

SCRIPT: Dict[str, List[int]] = {}
"""What is done in each iteration, by bucket; set before a run."""


class Changing(Synchronous):
    """A worker that keeps now this and now that."""

    arrays = {"late": "gradients put aside", "kept": "the last one, at times", "grown": "more and more", "own": "W_0"}
    facts = ("acts",)

    def start(self, w: Array) -> None:
        self.late: Deque[Pending] = collections.deque()
        self.kept: Optional[Array] = None
        self.grown: List[Array] = []
        self.own, self.acts = w.copy(), 0

    def iterate(self, grad: Array, step: Step) -> Array:
        does = SCRIPT[self.bucket.label][step.t - 1]
        self.acts, g = self.acts + does, grad * (1 + self.acts % 3)
        if does & LATE:
            self.late.append(Pending(grad.copy()))
        if does & TAKE and self.late:
            g = g + self.late.popleft().result()
        if self.kept is not None:
            g = g + self.kept
        if does & KEEP:
            self.kept = grad.copy() if self.kept is None else None
        if does & GROW:
            self.grown.append(grad.copy())
        for one in self.grown:
            g = g + 0.1 * one
        if does & LOCAL:
            assert self.local_optimizer is not None
            self.local_optimizer(self.own, g, step.lr)
        self.last_exchange = self.weights_holder.exchange(self.bucket, g + 0.1 * self.own, step.lr)
        return self.last_exchange.result()


class ChangingRule(SyncRule):
    """Its server likewise."""

    arrays: ClassVar = {"kept": "the last sum, at times", "grown": "more and more"}
    facts = ("seen", "acts")

    def start(self, w: np.ndarray) -> None:
        self.kept: Optional[np.ndarray] = None
        self.grown: List[np.ndarray] = []
        self.seen = self.acts = 0
        self.size = np.float32(np.abs(w).sum() > 0)  # not declared: a resumed run derives it again

    def receive(self, header: Header, total: np.ndarray, w: np.ndarray) -> None:
        self.seen += 1
        does = 3 * self.seen + self.index  # unlike from bucket to bucket
        self.acts += does
        total *= np.float32(1 + self.acts % 2) * self.size
        if self.kept is not None:
            total += self.kept
        if does & KEEP:
            self.kept = total.copy() if self.kept is None else None
        if does & GROW:
            self.grown.append(total.copy())
        for one in self.grown:
            total -= np.float32(0.1) * one
        super().receive(header, total, w)


class ChangingSGD(SSGD):
    """SSGD, but for what both sides keep."""

    name = "changing"
    worker, rule = Changing, ChangingRule
    transports = ("server",)

    @classmethod
    def local_optimizer(cls, options: Any) -> Optional[Tuple[str, Dict[str, Any]]]:
        return "adam", {}


@contextlib.contextmanager
def changing(does: Dict[str, List[int]]) -> Iterator[None]:
    """With this script."""
    with as_they_were():
        kvstore.register_method(ChangingSGD)
        SCRIPT.update(does)
        yield
        SCRIPT.clear()


def stepped(transport: Transport, steps: int, states: Optional[Tuple[Saved, Saved]] = None) -> Any:
    """A store that has gone on for some steps, and its weights."""
    store = kvstore.create("changing", transport, bucket_nbytes=BUCKET_NBYTES)
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.05, momentum=0.5))
    arrays = {name: mx.nd.ones(shape) for name, shape in SHAPES.items()}
    if states is not None:
        store.load_state(*states)
        arrays = {name: mx.nd.array(states[0][0][f"local/{name}"]) for name in SHAPES}
    store.broadcast(list(arrays), list(arrays.values()), list(arrays.values()))
    store.begin()
    for _ in range(steps):
        for name, array in arrays.items():
            store.pushpull(name, array - transport.worker_rank, array)
    store.wait()
    return store, [array.asnumpy() for array in arrays.values()]


def script(random: Random) -> Tuple[int, Dict[str, List[int]]]:
    """When a run is saved, and what is done in it."""
    labels = [f"{name}@{start}" for name, shape in SHAPES.items() for start in range(math.prod(shape))]
    return random.randint(1, STEPS - 1), {label: [random.randint(0, 31) for _ in range(STEPS)] for label in labels}


@fed(script)
def test_a_run_whose_buckets_keep_each_something_else_is_resumed_to_the_same_bits(case: Any) -> None:
    saved_after, does = case

    def whole(transport: Transport) -> Any:
        return stepped(transport, STEPS)[1]

    def first(transport: Transport) -> Any:
        store, _ = stepped(transport, saved_after)
        worker = store.worker_state()
        store.barrier()
        return worker, store.server_state()

    def second(transport: Transport) -> Any:
        return stepped(transport, STEPS - saved_after, states[transport.worker_rank])[1]

    with changing(does):
        straight = Stage(2).run(whole)
        states = Stage(2).run(first)
        resumed = Stage(2).run(second)
    for ours, theirs in zip(resumed, straight):
        for one, other in zip(ours, theirs):
            np.testing.assert_array_equal(one, other)


# -- in whatever form --------------------------------------------------------------------------------------------------

FILE = Path(tempfile.mkdtemp(dir=MEMORY if os.path.isdir(MEMORY) else None)) / "states"
atexit.register(shutil.rmtree, FILE.parent)


def a_store(name: str) -> Any:
    """A store of one worker, before its first step, that keeps something of each kind."""
    stage = Stage(1)
    options: Dict[str, Dict[str, Any]] = {"pipesgd": {"K": 3}, "odsgd": {"warmup": 0, "optimizer_local": "adam"}}
    transport = stage.ring_worker(0) if name == "pipesgd" else stage.worker(0)
    store = kvstore.create(name, transport, **options.get(name, {}))
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.25, momentum=0.5))
    return store


def begun(store: Any) -> Any:
    """The same after its first step has found its weights."""
    w = mx.nd.ones(3)
    store.broadcast("w", w, w)
    store.begin()
    return store


@functools.lru_cache(maxsize=None)
def good(name: str) -> Tuple[Saved, Saved]:
    """Its states after three steps."""
    store, w = begun(a_store(name)), mx.nd.ones(3)
    for _ in range(3):
        store.pushpull("w", w, w)
    return store.worker_state(), store.server_state()


def damaged(random: Random) -> Tuple[str, Saved, Saved]:
    """One of them with some parts replaced, renamed or gone."""
    name = random.choice(["odsgd", "pipesgd", "dcasgd_a", "softsync"])
    parts = copy.deepcopy(good(name))
    for _ in range(random.randint(0, 3)):
        arrays, meta = random.choice(parts)
        damage(random, random.choice((arrays, meta, meta)))
    return (name, *parts)


def damage(random: Random, inside: Any) -> None:
    """Change something somewhere below, if there is anything."""
    if not inside:
        return
    key = random.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
    if isinstance(inside[key], (dict, list)) and inside[key] and random.random() < 0.7:
        damage(random, inside[key])
    elif random.random() < 0.4:
        del inside[key]
    elif isinstance(inside[key], np.ndarray):
        inside[key] = random.choice((inside[key].reshape(-1)[:1], inside[key].astype(str), np.array(None),
                                     np.zeros((2, 3), int)))
    else:
        inside[key] = nasty.anything(random)


@fed(damaged)
def test_a_saved_state(case: Tuple[str, Saved, Saved]) -> None:
    name, worker, servers = case

    def resume() -> None:
        store = a_store(name)
        store.load_state(worker, servers)
        begun(store)

    holds(resume)


@fed(nasty.one_of(lambda random: npz_of(damaged(random)[2]), nasty.mutated(b""),
                  lambda random: nasty.mutated(npz_of(good("odsgd")[1]))(random)))
def test_a_file_of_an_optimizer_s_states(content: bytes) -> None:
    FILE.write_bytes(content)

    def load() -> None:
        store = a_store("odsgd")
        store.load_optimizer_states(str(FILE))
        begun(store)
        store.load_optimizer_states(str(FILE))

    holds(load)


def npz_of(saved: Saved) -> bytes:
    """As `save_optimizer_states` writes it, without arrays that no file can hold."""
    file, (arrays, facts) = io.BytesIO(), saved
    write_npz(file, {name: array for name, array in arrays.items() if array.dtype != object}, facts)
    return file.getvalue()
