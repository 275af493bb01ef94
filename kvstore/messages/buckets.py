"""Parameters and the flat buckets they travel in.

A bucket is one message to one server: small parameters share one, a large parameter spans several.

    Parameter   key, name, shape, dtype, multipliers           what a front end gives us
    Segment     elements [start, stop) of one parameter, at `offset` of one bucket
    Bucket      segments side by side, one float32 array; id = the key on the wire

`plan` is a pure function: the same parameters give the same buckets on every worker. Checkpoints are per parameter
(`split`, `join`), so they outlive a plan. docs/explanation/messages.md says which parameters share a bucket.
"""
import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from kvstore.errors import ConfigError

DEFAULT_NBYTES = 256 * 1024
WIRE_DTYPE = np.dtype("float32")  # half-precision parameters travel, and are updated, in single precision
TRAINABLE_DTYPES = ("float32", "float16")


@dataclass(frozen=True)
class Parameter:
    """What the plan needs to know of one parameter."""

    key: Any
    name: str
    shape: Tuple[int, ...]
    dtype: str = "float32"
    lr_mult: float = 1.0
    wd_mult: float = 1.0
    group: int = 0
    """Only parameters of one group share a bucket: each group may have another learning rate in every step."""
    fragment: int = 0
    """Only parameters of one fragment share a bucket: each fragment has turns of its own (`in_fragments`)."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of a parameter, which begin at `offset` of its bucket."""

    parameter: Parameter
    start: int
    stop: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.stop - self.start


@dataclass(frozen=True)
class Bucket:
    """One flat array on the wire."""

    id: int
    server_rank: int
    segments: Tuple[Segment, ...]

    @property
    def size(self) -> int:
        return self.segments[-1].end

    @property
    def first(self) -> Parameter:
        return self.segments[0].parameter

    @property
    def shape(self) -> Optional[Tuple[int, ...]]:
        """The shape of the parameter, where the bucket is exactly one."""
        whole = len(self.segments) == 1 and self.size == self.first.size
        return self.first.shape if whole else None

    @property
    def label(self) -> str:
        """The place where the bucket begins: a name for it that does not depend on numbers on the wire."""
        return f"{self.first.name}@{self.segments[0].start}"

    def __str__(self) -> str:
        names = [segment.parameter.name for segment in self.segments]
        shown = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        return f"bucket {self.id} ({shown})"


class Keys:
    """Numbers for buckets on the wire, such that MXNet sends each to the server it is meant for.

    MXNet sends key k to server (k * 9973) % num_servers, in 32-bit arithmetic: from key LIMIT on it would
    overflow. One instance serves all stores of a process, so that two trainers never share a number.
    """

    LIMIT = 2 ** 31 // 9973

    def __init__(self, num_servers: int, limit: float = math.inf) -> None:
        self.num_servers, self._limit = num_servers, limit
        self._next = sorted(range(num_servers), key=lambda key: key * 9973 % num_servers)  # by server

    def take(self, server_rank: int) -> int:
        key = self._next[server_rank]
        if key >= self._limit:
            raise ConfigError("the stores that this process has made, closed ones too, have used up the "
                              f"{self._limit:g} numbers that ps-lite has for buckets; make fewer stores, raise "
                              "`bucket_nbytes`, or take --wire sockets")
        self._next[server_rank] += self.num_servers
        return key


def plan(parameters: Sequence[Parameter], keys: Keys, nbytes: Optional[int] = None,
         whole: bool = False) -> List[Bucket]:
    """Lay `parameters` out in buckets of at most `nbytes`, spread over the servers by size; `whole`: a bucket for each.

    `parameters` are in the order of the network's layers; packed last first, as their gradients appear.
    """
    for parameter in parameters:
        if parameter.dtype not in TRAINABLE_DTYPES:
            raise ConfigError(f"parameter {parameter.name} is {parameter.dtype}; "
                              f"only {' and '.join(TRAINABLE_DTYPES)} can be trained")
    capacity = max(1, (nbytes or DEFAULT_NBYTES) // WIRE_DTYPE.itemsize)
    groups = [[Segment(parameter, 0, parameter.size, 0)] for parameter in reversed(parameters)] if whole \
        else list(_pack(reversed(parameters), capacity))
    servers = _balance([group[-1].end for group in groups], keys.num_servers)
    return [Bucket(keys.take(server), server, tuple(group)) for server, group in zip(servers, groups)]


def _pack(parameters: Iterable[Parameter], capacity: int) -> Iterator[List[Segment]]:
    """Fill one bucket after the other; a bucket is closed when it is full or the next parameter is of another kind.

    Buckets of different kinds are filled side by side, so that biases with a multiplier of their own do
    not break the rows of weights into small pieces.
    """
    filling: Dict[Tuple[str, float, float, int, int], List[Segment]] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.lr_mult, parameter.wd_mult, parameter.group, parameter.fragment)
        start = 0
        while start < parameter.size:
            group = filling.setdefault(kind, [])
            offset = group[-1].end if group else 0
            stop = min(parameter.size, start + capacity - offset)
            group.append(Segment(parameter, start, stop, offset))
            start = stop
            if group[-1].end == capacity:
                yield filling.pop(kind)
    yield from filling.values()


def in_fragments(parameters: Sequence[Parameter], number: int) -> List[Parameter]:
    """`parameters` dealt to `number` fragments of about equal bytes."""
    if number == 1:
        return list(parameters)
    if number > len(parameters):
        raise ConfigError(f"`fragments` is {number}, and the model has {len(parameters)} trained parameters; a "
                          "fragment has one at least")
    dealt = _balance([parameter.size for parameter in parameters], number)
    return [dataclasses.replace(parameter, fragment=fragment) for parameter, fragment in zip(parameters, dealt)]


def _balance(sizes: Sequence[int], number: int) -> List[int]:
    """A server, or a fragment, for each of `sizes`: the largest size first, to the one with the least load so far."""
    load = [0] * number
    chosen = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        chosen[index] = min(range(number), key=lambda s: (load[s], s))
        load[chosen[index]] += sizes[index]
    return chosen


def by_layer(parameters: Iterable[Parameter]) -> List[Parameter]:
    """`parameters` in the order of their layers, as far as names tell: conv2 before conv10."""
    def natural(parameter: Parameter) -> List[Any]:
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", parameter.name)]
    return sorted(parameters, key=natural)


def split(bucket: Bucket, flat: np.ndarray, into: Dict[str, np.ndarray], prefix: str = "") -> None:
    """Copy a bucket's array into arrays per parameter (made on first sight)."""
    for segment in bucket.segments:
        parameter = segment.parameter
        array = into.setdefault(prefix + parameter.name, np.zeros(parameter.shape, flat.dtype))
        array.reshape(-1)[segment.start:segment.stop] = flat[segment.offset:segment.end]


def join(bucket: Bucket, arrays: Dict[str, np.ndarray], prefix: str = "") -> np.ndarray:
    """The bucket's array from arrays per parameter: the inverse of `split`."""
    parts = []
    for segment in bucket.segments:
        name = prefix + segment.parameter.name
        if name not in arrays:
            raise ConfigError(f"no array `{name}` in the saved state; it belongs to another model or optimizer")
        if arrays[name].shape != segment.parameter.shape:
            raise ConfigError(f"`{name}` has shape {arrays[name].shape} in the saved state, "
                              f"the model expects {segment.parameter.shape}")
        parts.append(arrays[name].reshape(-1)[segment.start:segment.stop])
    return np.concatenate(parts)
