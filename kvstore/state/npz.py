"""Saved state as bytes: arrays as .npz, JSON as an array of bytes. Nothing is ever unpickled."""
import io
import json
from pathlib import Path
from typing import Any, BinaryIO, Dict, Tuple, Union

import numpy as np

from kvstore.errors import ConfigError, shown
from kvstore.messages.seam import State


def npz(arrays: Dict[str, np.ndarray]) -> bytes:
    """`arrays` as the bytes of an .npz file."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def un_npz(data: Union[bytes, bytearray]) -> Dict[str, np.ndarray]:
    """The inverse of `npz`."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def text_array(value: Any) -> np.ndarray:
    """JSON as an array of bytes."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def array_text(array: np.ndarray) -> Any:
    """The inverse of `text_array`."""
    return json.loads(array.tobytes().decode())


def write_npz(file: BinaryIO, arrays: Dict[str, np.ndarray], meta: Any) -> None:
    """Arrays and, under the name `meta`, JSON."""
    np.savez(file, **arrays, meta=text_array(meta))


def read_npz(path: Union[str, Path]) -> Tuple[Dict[str, np.ndarray], Any]:
    """The inverse of `write_npz`; OSError for what cannot be opened, ConfigError in one line for what is no such file.
    """
    with open(path, "rb") as opened:  # NumPy leaves a broken one open
        try:
            with np.load(opened, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            return arrays, array_text(arrays.pop("meta"))
        except Exception as error:  # a broken zip file, header or compressed array, in the words of many a library
            raise ConfigError(f"`{path}`: expected arrays and their `meta`, got {type(error).__name__} "
                              f"({shown(str(error))})") from None


def by_bucket(arrays: Dict[str, np.ndarray]) -> State:
    """``{"7/meta": …}`` as ``{7: {"meta": …}}``."""
    state: State = {}
    for name, array in arrays.items():
        bucket, _, part = name.partition("/")
        state.setdefault(int(bucket), {})[part] = array
    return state


def below(prefix: str, parts: Dict[str, np.ndarray]) -> Dict[str, np.ndarray]:
    """The parts whose names begin with `prefix`, by the rest of their names."""
    return {name[len(prefix):]: array for name, array in parts.items() if name.startswith(prefix)}
