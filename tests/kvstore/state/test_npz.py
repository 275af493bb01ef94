"""Files of arrays: what is written is read back, and a full disk is one error."""
import gc
import sys
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.state.npz import read_npz, write_npz

ARRAYS = {"worker/7/w": np.arange(100_000, dtype=np.float32), "step": np.array(3), "none": np.zeros((0, 2))}


def test_arrays_and_facts_are_read_back_by_us_and_by_numpy(tmp_path: Path) -> None:
    with open(tmp_path / "file.npz", "wb") as file:
        write_npz(file, ARRAYS, {"a": [1, None]})
    arrays, meta = read_npz(tmp_path / "file.npz")
    assert meta == {"a": [1, None]} and arrays.keys() == ARRAYS.keys()
    with open(tmp_path / "numpys.npz", "wb") as file:
        np.savez(file, **ARRAYS)
    with np.load(tmp_path / "numpys.npz") as theirs:
        for name, array in arrays.items():
            assert array.dtype == theirs[name].dtype and np.array_equal(array, theirs[name])


def test_a_small_file_does_not_fill_the_memory(tmp_path: Path) -> None:
    with open(tmp_path / "small.npz", "wb") as file:
        np.savez_compressed(file, w=np.zeros(1 << 20, np.uint8), meta=np.frombuffer(b"{}", np.uint8))
    with pytest.raises(ConfigError, match=r"small\.npz`: expected .*\(\d+ bytes of arrays in a file of \d+; no store"):
        read_npz(tmp_path / "small.npz")


def test_a_full_disk_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ignored: List[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    with pytest.raises(OSError, match="No space left"), open("/dev/full", "wb") as file:
        write_npz(file, ARRAYS, {})
    gc.collect()
    assert not ignored
