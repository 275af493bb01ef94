"""Sums of many arrays over the workers, several arrays in one sum, outside the training loop. All calls are collective
and wait; they give flat arrays by the same names.
"""
from typing import Any, Callable, Iterator, List, Mapping, Tuple

import numpy as np

from kvstore.job import agreement
from kvstore.messages.seam import Transport

TOGETHER = 4 * 1024 * 1024
"""Numbers in one sum."""


def over_workers(sizes: Mapping[Any, int], mine: Callable[[Any], np.ndarray],
                 total: Callable[[np.ndarray], np.ndarray]) -> Iterator[Tuple[Any, np.ndarray]]:
    """The `total` of what every worker has."""
    for keys in _together(sizes):
        flat = np.concatenate([np.asarray(mine(key), np.float32).reshape(-1) for key in keys])
        yield from zip(keys, np.split(total(flat), np.cumsum([sizes[key] for key in keys])[:-1]))


def from_worker_0(transport: Transport, sizes: Mapping[Any, int], mine: Callable[[Any], np.ndarray],
                  exact: Mapping[Any, np.ndarray]) -> Iterator[Tuple[Any, np.ndarray]]:
    """Worker 0's arrays: sums to which the others add 0. `exact`: arrays that single precision cannot represent, whose
    bytes travel.
    """
    yield from over_workers(sizes, mine if agreement.brings_own(transport) else lambda key: np.zeros(sizes[key]),
                            transport.total)
    for key, array in exact.items():
        yield key, np.frombuffer(agreement.from_worker_0(transport, array.tobytes()), array.dtype)


def _together(sizes: Mapping[Any, int]) -> Iterator[List[Any]]:
    """Groups of keys whose arrays travel in one sum."""
    keys, numbers = [], 0  # type: List[Any], int
    for key, size in sizes.items():
        if keys and numbers + size > TOGETHER:
            yield keys
            keys, numbers = [], 0
        keys.append(key)
        numbers += size
    if keys:
        yield keys
