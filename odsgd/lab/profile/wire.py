"""Links, and what a message costs at both of its ends: measured in a job, with nothing else on the way.

Two workers send to each other as fast as TCP does: the goodput. Then only worker 0 exchanges buckets with a server: one
by one, which takes all delays together, and many at a time, where the slowest part sets the pace.
"""
import contextlib
import os
import statistics
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

import kvstore
from kvstore.engine._mxnet import mx
from kvstore.fronts import choice
from kvstore.job import agreement
from kvstore.messages.seam import Transport
from kvstore.transports.servers import ParameterServers
from kvstore.weights.servers import courier
from odsgd.lab.cluster import goodput
from odsgd.lab.profile.processor import Price, price

SIZES = (2 ** 12, 2 ** 14, 2 ** 16, 2 ** 18)  # floats
MANY, REPEAT = 16, 25
SECONDS = 1.0
STORE = "asgd"
"""Its servers answer a worker without waiting for the others."""


class Exchanges(NamedTuple):
    """What exchanges of buckets with one server cost: one by one; each of many; each in processor time of a worker."""

    alone: Price
    together: Price
    worker: Price


def join(timeout_s: float) -> Transport:
    """This worker's place in the job: with its servers, if it has any, or else on a ring."""
    if int(os.environ.get("DMLC_NUM_SERVER") or 0):
        return choice.connect(STORE, "server", timeout_s)
    from kvstore.transports.ring import MpiRing
    return MpiRing(timeout_s)


def exchanges(transport: Transport) -> Optional[Exchanges]:
    """Collective: worker 0 exchanges, the others wait for it. None without servers."""
    if not isinstance(transport, ParameterServers):
        return None
    measured = [(_exchange(transport, 1, floats), _exchange(transport, MANY, floats)) for floats in SIZES]
    alone = [one for (one, _), _ in measured]
    return Exchanges(price(SIZES, alone),
                     price(SIZES, [max(many - one, many / MANY / 2) / (MANY - 1)
                                   for (one, _), (many, _) in measured]),
                     price(SIZES, [cpu / MANY for _, (_, cpu) in measured]))


def _exchange(transport: ParameterServers, count: int, floats: int) -> Tuple[float, float]:
    """Seconds in which `count` buckets are exchanged at once, and processor time of this process.

    The fastest round counts, since one that a busy machine holds up says nothing of links and servers.
    """
    store = kvstore.create(STORE, transport, bucket_nbytes=4 * floats)
    store.set_optimizer(mx.optimizer.SGD(learning_rate=1e-6))
    weights, grads = ([mx.nd.zeros(floats) for _ in range(count)] for _ in range(2))
    store.broadcast(list(range(count)), weights, weights)
    took: List[float] = []
    used: List[float] = []
    for _ in range(REPEAT if transport.worker_rank == 0 else 1):  # all begin: the store waits for that
        began, before = time.perf_counter(), time.process_time()
        for key in range(count):
            store.pushpull(key, grads[key], out=weights[key])
        for weight in weights:
            weight.wait_to_read()
        took.append(time.perf_counter() - began)
        used.append(time.process_time() - before)
    transport.total(np.zeros(1))
    return min(took), statistics.median(used)


def goodput_nbytes(transport: Transport) -> Optional[float]:
    """Bytes per second between workers 0 and 1, each way while both send. Collective; None for one worker."""
    if transport.num_workers == 1:
        return None
    mine = 0.0
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(courier.listen()) if transport.worker_rank == 0 else None
        address = "{}:{}".format(*listener.getsockname()[:2]) if listener else ""
        host, _, port = agreement.from_worker_0(transport, address.encode()).decode().rpartition(":")
        if transport.worker_rank < 2:
            mine = goodput.both_ways(listener, (host, int(port)), SECONDS)
    return float(transport.total(np.array([mine / 1e6]))[0]) / 2 * 1e6


def described(found: Exchanges, goodput_nbytes: Optional[float], arrays: Sequence[Price], update: Price
              ) -> Dict[str, Dict[str, Any]]:
    """`links`, `worker` and `server` of the description. `arrays`: gather and scatter; `update`: this store's rule.

    The slowest part sets the pace of buckets that are on their way together; for small buckets it is the server's
    thread. What remains of the time of a single bucket, both ways, is latency.
    """
    at_worker = found.worker.call / 2
    latency = max(found.alone.call - 2 * at_worker - found.together.call, 0.0) / 2
    link = 1e6 / goodput_nbytes if goodput_nbytes else found.together.megabyte
    copies = sum(one.megabyte for one in arrays)
    server = found.alone.megabyte - 2 * link - copies
    # Of a worker's processor time per megabyte, what is not copies is sending a megabyte and receiving one.
    return {"links": {"goodput": 1e6 / link, "latency": latency, "message": 0.0,
                      "processor": max(found.worker.megabyte - copies, 0.0)},
            "worker": {"message": at_worker},
            "server": {"message": found.together.call, "receive": max(server - update.megabyte, 0.0)}}
