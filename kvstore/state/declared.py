"""The arrays and facts that a worker or a rule declares, for checkpoints and the memory report."""
import collections
import copy
from typing import Any, Dict, Mapping, Tuple

import numpy as np

from kvstore.errors import ConfigError, shown
from kvstore.messages.seam import Array, Pending


def arrays_of(owner: Any) -> Dict[str, Array]:
    """The declared arrays by name; a list or a deque gives ``NAME/0``, ``NAME/1`` …

    Without the array that a worker returned last, which is saved as its weights.
    """
    found: Dict[str, Any] = {}
    for name in owner.arrays:
        value = getattr(owner, name)
        if isinstance(value, (list, collections.deque)):
            found.update({f"{name}/{i}": one for i, one in enumerate(value)})
        elif value is not None and name != getattr(owner, "returned", ""):
            found[name] = value
    return {name: one.result() if isinstance(one, Pending) else one for name, one in found.items()}


def check(owner: Any, like: Array) -> None:
    """ConfigError if it has an array such as `like` by a name that is neither declared nor begins with `_`. Small ones
    are not checked: an array of one number, or of one for each worker, may be as long as a small bucket.
    """
    if like.shape[0] <= max(1, owner.num_workers):
        return
    for name, value in vars(owner).items():
        told = name in owner.arrays or name.startswith("_")
        if not told and isinstance(value, type(like)) and (value.shape, value.dtype) == (like.shape, like.dtype):
            raise ConfigError(f"{type(owner).__name__} has an array in `{name}`, which no checkpoint would keep; "
                              f"declare it in its `arrays`, or call it `_{name}` if nothing of it lasts")


def saved(owner: Any) -> Tuple[Dict[str, Array], Dict[str, Any]]:
    """The declared arrays, and the declared facts as JSON has them."""
    return arrays_of(owner), {name: _plain(getattr(owner, name), f"{type(owner).__name__}.{name}")
                              for name in owner.facts}


def _plain(value: Any, where: str) -> Any:
    """A copy of a fact as JSON has it."""
    if isinstance(value, dict):
        return {_scalar(key, where): _plain(one, where) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one, where) for one in value]
    return _scalar(value, where)


def _scalar(value: Any, where: str) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    if not isinstance(value, (str, int, float, type(None))):
        raise ConfigError(f"fact {where}: expected numbers, text, lists or dictionaries of them, got "
                          f"`{shown(value)}`; arrays are declared in `arrays`")
    return value


def restore(owner: Any, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], like: Array) -> None:
    """The inverse of `saved`. Arrays that `start` did not make become arrays of the kind of `like`."""
    restore_facts(owner, facts)
    for name in owner.arrays:
        _make(owner, name, arrays, like)
    fill(arrays_of(owner), arrays)


def restore_facts(owner: Any, facts: Mapping[str, Any]) -> None:
    for name in owner.facts:
        if name not in facts:
            raise ConfigError(f"no fact `{name}` in the saved state; it belongs to another version or other options")
        setattr(owner, name, copy.deepcopy(facts[name]))  # one saved fact may serve several buckets


def _make(owner: Any, name: str, saved: Mapping[str, np.ndarray], like: Array) -> None:
    """Make the saved arrays of this attribute that `start` did not make."""
    value, number = getattr(owner, name), sum(one.rpartition("/")[0] == name for one in saved)
    if isinstance(value, collections.deque):
        value.clear()
        value.extend(Pending(like.copy()) for _ in range(number))
    elif isinstance(value, list):
        value.extend(like.copy() for _ in range(len(value), number))
    elif value is None and name in saved:
        setattr(owner, name, like.copy())


def fill(arrays: Mapping[str, Array], saved: Mapping[str, np.ndarray]) -> None:
    """Write what was saved into the arrays of the same names, whatever its shape."""
    for name, array in arrays.items():
        if name not in saved:
            raise ConfigError(f"no array `{name}` in the saved state; it belongs to another version or other options")
        array[:] = saved[name].reshape(array.shape)
