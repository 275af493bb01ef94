"""Files of named weights as MXNet writes them (`.params`), read without trust.

MXNet's own reader allocates what a file announces before it looks whether the file holds that much.
"""
import errno
import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any, Dict, Tuple

import numpy as np

from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError
from odsgd.training.checkpoint.disk import replacing

LIST = 0x112
V1, V2, V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
"""How an array begins in files of MXNet 0.12, of 1.0 and later, and of `mx.np`."""
DTYPES = ("float32", "float64", "float16", "uint8", "int32", "int8", "int64", "bool")
DENSE, MOST_AXES, MOST_NAME = 0, 32, 4096


def copied(net: Any) -> Dict[str, Any]:
    """The weights that the parameters hold on the first device, named as `net.load_parameters` wants them.

    Not `net.save_parameters`: that averages over the devices, which for three equal numbers need not give their value.
    """
    weights = {name: parameter.list_data()[0].copyto(mx.cpu())
               for name, parameter in net._collect_params_with_prefix().items()}
    for weight in weights.values():
        weight.wait_to_read()
    return weights


def write(path: Path, weights: Dict[str, Any]) -> None:
    """Weights as `net.load_parameters` reads them. MXNet does not say when a full disk cuts them short."""
    with replacing(path) as temporary:
        try:
            mx.nd.save(str(temporary), weights)
            whole = _ends_with(temporary, list(weights)[-1])
        except mx.base.MXNetError as error:
            if "FileStream.Write incomplete" not in str(error):
                raise
            whole = False
        if not whole:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _ends_with(path: Path, name: str) -> bool:
    """Whether a file of weights is whole: it ends with the name of the last weight."""
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - len(name.encode())))
        return file.read() == name.encode()


def read(path: Path) -> Dict[str, np.ndarray]:
    """The arrays by their names, which lie in the file until they are used; ConfigError for any other file."""
    try:
        with open(path, "rb") as file:
            return _Reader(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).named()
    except (OSError, ValueError, struct.error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"`{path}`: expected a file of named weights, e.g. a checkpoint's weights.params, and got "
                          f"another one ({why})") from None


class _Reader:
    """Goes through a file once; `struct.error` or `ValueError` where it is not of this form."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def named(self) -> Dict[str, np.ndarray]:
        if self._next("<QQ")[0] != LIST:
            raise ValueError("it begins otherwise")
        arrays = [self._array() for _ in range(self._count(each=4))]
        names = [self._name() for _ in range(self._count(each=8))]
        if not arrays or len(set(names)) != len(arrays):
            raise ValueError(f"{len(arrays)} arrays and {len(set(names))} names")
        return dict(zip(names, arrays))

    def _next(self, form: str) -> Tuple[int, ...]:
        values = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return values

    def _count(self, each: int) -> int:
        """How many parts follow; each takes at least `each` bytes."""
        (count,) = self._next("<Q")
        if count > (len(self._data) - self._at) // each:
            raise ValueError(f"{count} parts announced in {len(self._data)} bytes")
        return count

    def _array(self) -> np.ndarray:
        (form,) = self._next("<I")
        if form not in (V1, V2, V3) or (form != V1 and self._next("<i")[0] != DENSE):
            raise ValueError("an array that is sparse, or older than MXNet 0.12")
        (axes,) = self._next("<i")
        if not (1 if form != V3 else 0) <= axes <= MOST_AXES:
            raise ValueError(f"an array of {axes} axes")
        shape = self._next(f"<{axes}q")
        _device, _number, kind = self._next("<iii")
        if not 0 <= kind < len(DTYPES) or min(shape, default=0) < 0:
            raise ValueError(f"an array of type {kind} and shape {shape}")
        dtype, count = np.dtype(DTYPES[kind]), math.prod(shape)
        if count * dtype.itemsize > len(self._data) - self._at:
            raise ValueError("its end is missing")
        values = np.frombuffer(self._data, dtype, count, self._at).reshape(shape)
        self._at += values.nbytes
        return values

    def _name(self) -> str:
        (length,) = self._next("<Q")
        if length > MOST_NAME:
            raise ValueError(f"a name of {length} bytes")
        (name,) = self._next(f"<{length}s")
        return bytes(name).decode()
