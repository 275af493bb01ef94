"""Saved state as bytes: arrays as .npz, JSON as an array of bytes. Nothing is ever unpickled."""
import io
import json
from typing import Any, Dict

import numpy as np

from kvstore.wire.interfaces import State


def npz(arrays: Dict[str, np.ndarray]) -> bytes:
    """`arrays` as the bytes of an .npz file."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def un_npz(data: bytes) -> Dict[str, np.ndarray]:
    """The inverse of `npz`."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def text_array(value: Any) -> np.ndarray:
    """JSON as an array of bytes."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def array_text(array: np.ndarray) -> Any:
    """The inverse of `text_array`."""
    return json.loads(array.tobytes().decode())


def by_bucket(arrays: Dict[str, np.ndarray]) -> State:
    """``{"7/meta": …}`` as ``{7: {"meta": …}}``."""
    state: State = {}
    for name, array in arrays.items():
        bucket, _, part = name.partition("/")
        state.setdefault(int(bucket), {})[part] = array
    return state


def by_name(state: State) -> Dict[str, np.ndarray]:
    """The inverse of `by_bucket`."""
    return {f"{bucket}/{part}": array for bucket, parts in state.items() for part, array in parts.items()}
