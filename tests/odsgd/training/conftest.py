"""Tiny files in the formats of the real data sets, and a network that keeps more than weights."""
import gzip
import struct
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest

from kvstore.engine._mxnet import mx
from odsgd.training import models
from odsgd.training.data import datasets


def write(path: Path, content: bytes, packed: bool = False) -> Path:
    """`content` at `path`, or gzipped beside it."""
    if packed:
        path = path.with_name(path.name + ".gz")
        content = gzip.compress(content)
    path.write_bytes(content)
    return path


def idx_bytes(array: np.ndarray) -> bytes:
    """`array` as an idx file of unsigned bytes."""
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def cifar_bytes(count: int, seed: int) -> bytes:
    """`count` records of CIFAR-10."""
    records = np.random.RandomState(seed).randint(0, 256, (count, 3073)).astype(np.uint8)
    records[:, 0] %= 10
    return records.tobytes()


@pytest.fixture
def mnist_folder(tmp_path: Path) -> Path:
    """MNIST of 12 + 5 images, half of its files gzipped."""
    random = np.random.RandomState(0)
    for count, names in zip((12, 5), datasets.MNIST_FILES.values()):
        write(tmp_path / names[0], idx_bytes(random.randint(0, 256, (count, 28, 28)).astype(np.uint8)), packed=True)
        write(tmp_path / names[1], idx_bytes(random.randint(0, 10, count).astype(np.uint8)))
    return tmp_path


@pytest.fixture
def cifar_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CIFAR-10 of six files with 4 records each, in the folder that its archive has."""
    monkeypatch.setattr(datasets, "CIFAR_RECORDS", 4)
    (tmp_path / "cifar-10-batches-bin").mkdir()
    for number, name in enumerate(datasets.CIFAR_FILES["train"] + datasets.CIFAR_FILES["test"]):
        write(tmp_path / "cifar-10-batches-bin" / name, cifar_bytes(4, seed=number), packed=number % 2 == 0)
    return tmp_path


@pytest.fixture
def dropout_and_batchnorm(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the mlp, a network with everything that could be forgotten in a checkpoint."""
    def layers(classes: int) -> List[Any]:
        return [mx.gluon.nn.Flatten(), mx.gluon.nn.Dense(12, activation="relu"), mx.gluon.nn.BatchNorm(),
                mx.gluon.nn.Dropout(0.5), mx.gluon.nn.Dense(classes)]
    monkeypatch.setattr(models, "_mlp", layers)
