"""Buckets as the real transports lay them out, so that virtual messages are as large as real ones."""
from typing import List, Optional, Sequence

from kvstore.buckets import Bucket, Keys, Parameter, plan
from kvstore.transports import ps, rounds
from kvstore.wire.codecs import codec
from kvstore.wire.interfaces import Traffic


def on_servers(parameters: Sequence[Parameter], traffic: Traffic, keys: Keys, num_workers: int) -> List[Bucket]:
    """As `ps.ParameterServer.plan`."""
    nbytes = traffic.bucket_nbytes
    if nbytes is None and not traffic.asynchronous:
        nbytes = ps.even_nbytes(_floats(parameters), keys.num_servers, num_workers, traffic.waits)
    return plan(parameters, keys, nbytes, traffic.whole)


def on_ring(parameters: Sequence[Parameter], traffic: Traffic, keys: Keys, num_workers: int) -> List[Bucket]:
    """As `ring.MpiRing.plan`."""
    suits = rounds.bucket_nbytes(codec(traffic.codec), num_workers, _floats(parameters), traffic.waits)
    return plan(parameters, keys, traffic.bucket_nbytes or suits, traffic.whole)


def window(parameters: Sequence[Parameter], traffic: Traffic) -> Optional[float]:
    """Bytes that may be in flight to one server; None: an asynchronous job has no bound."""
    return None if traffic.asynchronous else ps.window_nbytes(_floats(parameters), traffic.waits)


def _floats(parameters: Sequence[Parameter]) -> int:
    return sum(parameter.size for parameter in parameters)
