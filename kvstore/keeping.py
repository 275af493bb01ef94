"""What lasts: the arrays and facts that a worker or a rule declares, for checkpoints and the memory report."""
import collections
import copy
from typing import Any, Dict, Mapping

import numpy as np

from kvstore.errors import ConfigError
from kvstore.wire.interfaces import Array, Pending


def arrays_of(owner: Any) -> Dict[str, Array]:
    """The declared arrays by name; those of a list or a deque are ``NAME/0``, ``NAME/1`` …

    Without the one that a worker returned last, which is kept as its weights.
    """
    found: Dict[str, Any] = {}
    for name in owner.arrays:
        value = getattr(owner, name)
        if isinstance(value, (list, collections.deque)):
            found.update({f"{name}/{i}": one for i, one in enumerate(value)})
        elif value is not None and name != getattr(owner, "returned", ""):
            found[name] = value
    return {name: one.result() if isinstance(one, Pending) else one for name, one in found.items()}


def facts_of(owner: Any) -> Dict[str, Any]:
    """The declared facts; they are JSON as they are."""
    return {name: copy.deepcopy(getattr(owner, name)) for name in owner.facts}


def put_back(owner: Any, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], like: Array = None) -> None:
    """The inverse of `arrays_of` and `facts_of`. `like`: of whose kind the arrays of a deque are made."""
    for name in owner.facts:
        setattr(owner, name, copy.deepcopy(facts[name]))  # one saved fact may serve several buckets
    for name in owner.arrays:
        value = getattr(owner, name)
        if isinstance(value, collections.deque):
            value.extend(Pending(like.copy()) for saved in arrays if saved.rpartition("/")[0] == name)
    fill(arrays_of(owner), arrays)


def fill(arrays: Mapping[str, Array], saved: Mapping[str, np.ndarray]) -> None:
    """Write what was saved into the arrays of the same names, whatever its shape."""
    for name, array in arrays.items():
        if name not in saved:
            raise ConfigError(f"no array `{name}` in the saved state; it belongs to another version or other options")
        array[:] = saved[name].reshape(array.shape)
