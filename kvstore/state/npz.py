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


def to_bytes(state: State) -> bytes:
    """A state as an .npz file with ``7/optimizer/state`` … for bucket 7, and the facts by bucket."""
    file = io.BytesIO()
    write_npz(file, {f"{bucket}/{name}": array for bucket, (arrays, _) in state.items()
                     for name, array in arrays.items()}, {bucket: facts for bucket, (_, facts) in state.items()})
    return file.getvalue()


def from_bytes(data: Union[bytes, bytearray]) -> State:
    """The inverse of `to_bytes`."""
    arrays, meta = _read(io.BytesIO(data))
    return {int(bucket): (below(f"{bucket}/", arrays), facts) for bucket, facts in meta.items()}


def write_npz(file: BinaryIO, arrays: Dict[str, np.ndarray], meta: Any) -> None:
    """Arrays and, under the name `meta`, JSON. As np.savez, which leaves its zip open if the disk is full: Python would
    try again to close it, and print a traceback.
    """
    facts = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    with zipfile.ZipFile(file, "w") as opened:
        for name, array in {**arrays, META: facts}.items():
            with opened.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.save(entry, array, allow_pickle=False)


def _read(opened: BinaryIO) -> Tuple[Dict[str, np.ndarray], Any]:
    size = opened.seek(0, io.SEEK_END)
    opened.seek(0)
    with np.load(opened, allow_pickle=False) as file:
        held = sum(entry.file_size for entry in file.zip.infolist())
        if held > size:
            raise ValueError(f"{held} bytes of arrays in a file of {size}; no store compresses them")
        arrays = {name: file[name] for name in file.files}
    return arrays, json.loads(arrays.pop(META).tobytes().decode())


def read_npz(path: Union[str, Path]) -> Tuple[Dict[str, np.ndarray], Any]:
    """The inverse of `write_npz`. OSError: the file cannot be opened; ConfigError, in one line: it holds another thing.
    """
    with open(path, "rb") as opened:  # NumPy leaves a broken one open
        try:
            return _read(opened)
        except Exception as error:  # a broken zip file, header or compressed array, in the words of many a library
            raise ConfigError(f"`{path}`: expected arrays and their `meta`, as these stores save them, got "
                              f"{type(error).__name__} ({shown(str(error))})") from None


def below(prefix: str, arrays: Dict[str, np.ndarray]) -> Dict[str, np.ndarray]:
    """The arrays whose names begin with `prefix`, by the rest of their names."""
    return {name[len(prefix):]: array for name, array in arrays.items() if name.startswith(prefix)}
