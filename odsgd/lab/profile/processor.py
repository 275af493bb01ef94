"""What processors take for the floats of a bucket: gather, step, scatter and each store's own lines on a worker, each
store's rule on a server.

Each is done on buckets of several sizes, over more memory than caches hold, and a line laid through the times: so much
per call, so much per megabyte.
"""
import itertools
import time
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Type

import numpy as np

from kvstore import methods
from kvstore.engine import engine
from kvstore.engine._mxnet import NDArray, mx
from kvstore.fronts.gluon.lanes import Keyed, Lane
from kvstore.messages.buckets import WIRE_DTYPE, Bucket, Parameter, Segment
from kvstore.messages.codecs import CODECS, Codec, codec
from kvstore.messages.header import HEADER
from kvstore.messages.seam import Setup, TrafficSettings
from kvstore.methods.contract import Method, Step
from kvstore.optimizers import described
from kvstore.optimizers.apply import QueuedOptimizer
from kvstore.weights.servers.shard import Shard
from odsgd.config.train import TrainConfig
from odsgd.virtual.description import TRANSPORTS
from odsgd.virtual.programs import ProgramRecorder

SIZES = (2 ** 14, 2 ** 16, 2 ** 18, 2 ** 19)  # floats
SPREAD_NBYTES = 32e6
REPEAT = 5
MEGABYTE = 1e6 / WIRE_DTYPE.itemsize  # floats
LITTLE = 20e-6
"""Seconds per megabyte; if a worker's own lines take less, they count as free."""

OF_A_JOB = ("T", "n", "quorum", "replay")
"""Options that one worker without a job cannot have, or that change no price."""


class Price(NamedTuple):
    """Seconds of processor time per call and per megabyte."""

    call: float
    megabyte: float


def price(sizes: Sequence[int], seconds: Sequence[float]) -> Price:
    """The line through these times, on which a small bucket counts as much as a large one; nothing is negative.

    >>> price([250_000, 500_000], [0.003, 0.005])
    Price(call=0.001, megabyte=0.002)
    """
    x, y = np.array(sizes) / MEGABYTE, np.array(seconds)
    slope, intercept = np.polyfit(x, y, 1, w=1 / y)
    if min(slope, intercept) < 0:
        slope, intercept = np.sum(x / y) / np.sum((x / y) ** 2), 0.0
    return Price(round(float(intercept), 12), round(float(slope), 12))


def _timed(operations: Sequence[Callable[[], Any]]) -> float:
    """Seconds of one of these, which run in a row: by the fastest of several rows, which nothing else held up."""
    best = float("inf")
    for _ in range(REPEAT):
        mx.nd.waitall()
        began = time.perf_counter()
        for operation in operations:
            operation()
        mx.nd.waitall()
        best = min(best, time.perf_counter() - began)
    return best / len(operations)


def _copies(floats: int) -> range:
    return range(min(max(int(SPREAD_NBYTES / WIRE_DTYPE.itemsize / floats), 4), 200))


def optimizer(config: TrainConfig, plain: bool = False) -> mx.optimizer.Optimizer:
    """U; `plain`: SGD without momentum, for stores that allow no other."""
    arguments = {"learning_rate": 1e-6} if plain else {**config.optimizer_arguments(), "learning_rate": 1e-6}
    return mx.optimizer.create("sgd" if plain else config.optimizer, **arguments)


def of_worker(config: TrainConfig) -> Dict[str, Price]:
    """gather, step, scatter."""
    local = config.method.local_optimizer(config.options)
    applied = optimizer(config)
    if local:
        applied = described.create_local(local[0], {**local[1], "wd": local[1].get("wd") or 0.0}, applied)
    seconds: Dict[str, List[float]] = {"gather": [], "step": [], "scatter": []}
    for floats in SIZES:
        lanes = [_lane(number, floats) for number in _copies(floats)]
        flats = [mx.nd.ones(floats) for _ in lanes]
        seconds["gather"].append(_timed([partial(lane.gather, 1.0, flat) for lane, flat in zip(lanes, flats)]))
        seconds["scatter"].append(_timed([partial(lane.show, flat) for lane, flat in zip(lanes, flats)]))
        seconds["step"].append(_timed([_step(applied, number, flat) for number, flat in enumerate(flats)]))
    return {what: price(SIZES, times) for what, times in seconds.items()}


def of_lines() -> Dict[str, Price]:
    """The prices of stores whose worker does more in an iteration than to gather, send, step and scatter a bucket."""
    prices = {name: price(SIZES, [_lines(method, floats) for floats in SIZES])
              for name, method in methods.METHODS.items() if method.transports[0] in TRANSPORTS}
    return {name: one for name, one in prices.items() if one.megabyte >= LITTLE}


def _lines(method: Type[Method], floats: int) -> float:
    """Seconds of an iteration, the mean from one exchange to the next."""
    options, ring = method.fitted(method.Options().in_iterations(), 1), method.transports[0] == "ring"
    buckets = [_bucket(number, floats) for number in _copies(floats)]
    grad, answer = mx.nd.ones(floats), mx.nd.ones(floats)
    every = max(method.intervals(options))
    due = [t for t in range(every + 1, 2 * every + 1) if method.due(options, t, 0)]  # what it asked for comes later
    recorder = ProgramRecorder(buckets, ring, answer)
    workers = [recorder.worker(method, options, 2, bucket, mx.nd.ones(floats)) for bucket in buckets]
    return _timed([_iterated(worker, grad, itertools.count(t, every)) for t in due for worker in workers]
                  ) * len(due) / every


def _iterated(worker: Any, grad: NDArray, ts: Iterator[int]) -> Callable[[], Any]:
    """An iteration, each time a later one."""
    return lambda: worker.iterate(grad, Step(next(ts), 1e-6, 1e-6))


def _bucket(number: int, floats: int) -> Bucket:
    return Bucket(number, 0, (Segment(Parameter(number, f"p{number}", (floats,)), 0, floats, 0),))


def _lane(number: int, floats: int) -> Lane:
    bucket = _bucket(number, floats)
    one = Keyed(bucket.first, [mx.nd.ones(floats)])
    one.grads = [mx.nd.ones(floats)]
    return Lane(bucket, [one])


def _step(applied: mx.optimizer.Optimizer, number: int, w: NDArray) -> Callable[[], Any]:
    step, grad, out = QueuedOptimizer(applied, number, w.shape), mx.nd.ones(w.shape), mx.nd.zeros(w.shape)
    step.start(w)
    return lambda: step(w, grad, 1e-6, out=out)


def of_codecs() -> Dict[str, Price]:
    """What a codec takes to encode or to decode, the mean of both."""
    return {name: price(SIZES, [_coded(codec(name), floats) / 2 for floats in SIZES])
            for name in CODECS if name != "none"}


def _coded(one: Codec, floats: int) -> float:
    values = [np.linspace(-1, 1, floats, dtype=WIRE_DTYPE) for _ in _copies(floats)]
    message = np.zeros(one.nbytes(floats), np.uint8)

    def there_and_back(array: np.ndarray) -> None:
        one.encode(array, message)
        one.decode(message, array)

    return _timed([partial(there_and_back, array) for array in values])


def of_server(config: TrainConfig) -> Dict[str, Price]:
    """The price of each store's rule, for a push, or for the sum of all workers' pushes."""
    return {name: price(SIZES, [_rule(config, name, method, floats) for floats in SIZES])
            for name, method in methods.METHODS.items() if "server" in method.transports}


def _rule(config: TrainConfig, name: str, method: Type[Method], floats: int) -> float:
    shard, keys = Shard(0, 1, trusted=True), list(_copies(floats))
    options = {option: getattr(config.options, option) for option in method.option_names()
               if name == config.kvstore and option not in OF_A_JOB}
    made = method.Options(**options).in_iterations(batches_per_epoch=1)
    outer = method.outer_sgd(made)
    applied = optimizer(config, plain=bool(method.plain_sgd)) if outer is None else described.outer_sgd(*outer)
    setup = Setup(methods.where(method), made.plain(), described.describe(applied),
                      [_bucket(key, floats) for key in keys], TrafficSettings())
    shard.command("open", setup.command())
    pushed, stored = ([mx.nd.zeros(floats + HEADER) for _ in keys] for _ in range(2))

    def push(key: int) -> None:
        version = engine.view(stored[key])[floats]
        engine.memory(pushed[key])[-HEADER:] = version, 1e-6, 0, 1
        shard.handle_push(key, pushed[key], stored[key])

    mx.nd.waitall()
    return _timed([partial(push, key) for key in keys])
