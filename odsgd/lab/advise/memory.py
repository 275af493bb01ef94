"""How many arrays of the model's size a store adds: counted on its own worker and rule, made for one number.

Besides what a method declares, a worker has per bucket

    servers    two buffers in turn; the gathered gradient where the method reads it after its exchange
    a ring     the gathered gradient, the sums in flight, two W where it exchanges, and U's state
    parts      the gathered gradient, the sum, two W, and U's state of its part

and the servers have W, what has been pushed, and U's state. U is SGD with momentum, whose state is one array. Codecs
add what they keep.
"""
from __future__ import annotations

from typing import Any, Type

import numpy as np

from kvstore.messages.codecs import CODECS
from kvstore.methods.contract import Method, Update
from kvstore.state import declared
from odsgd.virtual.programs import Programs


def of_worker(method: Type[Method], options: Any, workers: int, transport: str, programs: Programs) -> float:
    """Arrays beside the weights and gradients of a worker's network; `programs`: of the job, for a bucket of one float.
    """
    traffic, state = method(options, workers).traffic(whole=False), 0 if method.plain_sgd else 1
    if transport == "server":
        coded = CODECS[traffic.codec].residual + (traffic.codec_weights != "none")
        return programs.arrays() + 2 + (not method.worker.sends_gradient_in_place) + coded
    if transport == "sharded":
        return programs.arrays() + 4 + state / workers
    exchanges = any(op.update for op in programs.of(1)[0])
    return programs.arrays() + 1 + traffic.depth + 2 * exchanges + state


def of_servers(method: Type[Method], options: Any, workers: int) -> float:
    """Arrays of all servers together."""
    rule = method.rule(0, options, workers, Update())
    rule.start(np.zeros(1, np.float32))
    traffic, state = method(options, workers).traffic(whole=False), 0 if method.plain_sgd else 1
    shown = (workers if method.asynchronous else 1) * (traffic.codec_weights != "none")
    return 2 + state + shown + sum(array.size for array in declared.arrays_of(rule).values())
