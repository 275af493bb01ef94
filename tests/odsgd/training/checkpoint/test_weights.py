"""Files of named weights: what MXNet writes is read as MXNet reads it; the rest is one line."""
import struct
from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest

from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError
from odsgd.training.checkpoint import weights


def arrays() -> Dict[str, np.ndarray]:
    draw = np.random.RandomState(0)
    return {f"{dtype} {axes}": (draw.rand(*range(2, 2 + axes)) * 100).astype(dtype)
            for dtype in weights.DTYPES if dtype != "bool" for axes in (1, 2, 4)}


def test_what_mxnet_has_written_is_read_as_mxnet_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "a.params"
    mx.nd.save(str(path), {name: mx.nd.array(array, dtype=array.dtype) for name, array in arrays().items()})
    found, expected = weights.read(path), mx.nd.load(str(path))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array.asnumpy())


def test_arrays_of_mx_np_are_read_scalars_and_truths_too(tmp_path: Path) -> None:
    path = tmp_path / "a.params"
    with mx.util.np_shape(True), mx.util.np_array(True):
        mx.npx.save(str(path), {"scalar": mx.np.array(3.5), "truths": mx.np.array([True, False], dtype="bool"),
                                "empty": mx.np.zeros((0, 3))})
    found = weights.read(path)
    assert found["scalar"] == np.float32(3.5) and found["scalar"].shape == ()
    assert found["truths"].tolist() == [True, False] and found["empty"].shape == (0, 3)


def sparse() -> Any:
    return {"w": mx.nd.ones((4, 2)).tostype("row_sparse")}


@pytest.mark.parametrize("make, said", [
    (lambda path: path.write_bytes(b""), "empty"), (lambda path: path.write_bytes(b"x" * 40), "it begins otherwise"),
    (lambda path: path.mkdir(), "Is a directory"), (lambda path: None, "No such file"),
    (lambda path: mx.nd.save(str(path), sparse()), "sparse"),
    (lambda path: mx.nd.save(str(path), [mx.nd.ones(2)]), "1 arrays and 0 names"),
    (lambda path: path.write_bytes(struct.pack("<QQQ", weights.LIST, 0, 1 << 27)), "134217728 parts announced"),
])
def test_another_file_is_told_in_one_line(tmp_path: Path, make: Any, said: str) -> None:
    path = tmp_path / "a.params"
    make(path)
    with pytest.raises(ConfigError) as caught:
        weights.read(path)
    assert str(caught.value).startswith(f"`{path}`: expected a file of named weights") and said in str(caught.value)
