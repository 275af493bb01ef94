"""Saved state as bytes: arrays as .npz, facts as JSON in an array of bytes. Nothing is ever unpickled."""
import io
import json
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, Dict, Tuple, Union

import numpy as np

from kvstore.errors import ConfigError, shown
from kvstore.messages.seam import State

META = "meta"
"""The name of the array that holds the facts."""


def _text_array(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _array_text(array: np.ndarray) -> Any:
    return json.loads(array.tobytes().decode())


def to_bytes(state: State) -> bytes:
    """A state as an .npz file with ``7/optimizer/state``, ``7/meta`` … for bucket 7."""
    file = io.BytesIO()
    np.savez(file, **{f"{bucket}/{name}": array for bucket, (arrays, facts) in state.items()
                      for name, array in {**arrays, META: _text_array(facts)}.items()})
    return file.getvalue()


def from_bytes(data: Union[bytes, bytearray]) -> State:
    """The inverse of `to_bytes`."""
    state: State = {}
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        for path in file.files:
            bucket, _, name = path.partition("/")
            arrays, facts = state.setdefault(int(bucket), ({}, {}))
            if name == META:
                facts.update(_array_text(file[path]))
            else:
                arrays[name] = file[path]
    return state


def write_npz(file: BinaryIO, arrays: Dict[str, np.ndarray], meta: Any) -> None:
    """Arrays and, under the name `meta`, JSON. As np.savez, which leaves its zip open if the disk is full: Python would
    try again to close it, and print a traceback.
    """
    with zipfile.ZipFile(file, "w") as opened:
        for name, array in {**arrays, META: _text_array(meta)}.items():
            with opened.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.save(entry, array, allow_pickle=False)


def read_npz(path: Union[str, Path]) -> Tuple[Dict[str, np.ndarray], Any]:
    """The inverse of `write_npz`. OSError: the file cannot be opened; ConfigError, in one line: it holds another thing.
    """
    with open(path, "rb") as opened:  # NumPy leaves a broken one open
        try:
            with np.load(opened, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            return arrays, _array_text(arrays.pop(META))
        except Exception as error:  # a broken zip file, header or compressed array, in the words of many a library
            raise ConfigError(f"`{path}`: expected arrays and their `meta`, as these stores save them, got "
                              f"{type(error).__name__} ({shown(str(error))})") from None


def below(prefix: str, arrays: Dict[str, np.ndarray]) -> Dict[str, np.ndarray]:
    """The arrays whose names begin with `prefix`, by the rest of their names."""
    return {name[len(prefix):]: array for name, array in arrays.items() if name.startswith(prefix)}
