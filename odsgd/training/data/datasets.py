"""Data sets that fit in memory, as NumPy arrays: digits, mnist, cifar10 and synthetic. Files are read by us.

Images stay bytes, as in the files; a batch is normalised when it is made: (pixel - mean) / std per channel, with
the statistics of the training set that everyone uses (below, in units of a pixel value, 0-255); digits, 0-16, with
those of all images.
Files are checked against the size that their format asks for.
"""
import dataclasses
import gzip
import importlib.util
import math
import struct
import zlib
from pathlib import Path
from typing import List, NamedTuple, Sequence, Tuple

import numpy as np

from kvstore.errors import ConfigError

MNIST_FILES = {"train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
               "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")}
CIFAR_FILES = {"train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test": ("test_batch.bin",)}
MOST_NBYTES = 1 << 28
"""Most bytes of an idx file; MNIST's largest has 47 million."""
CIFAR_RECORDS = 10_000
"""Records of one CIFAR-10 file, each a label byte and 3x32x32 pixels."""

DIGITS_TEST = 5
"""One example in five is for the test: 360 of 1797."""


class Examples(NamedTuple):
    """Images (examples, channels, height, width) as bytes, and their labels as the loss takes them, float32."""

    images: np.ndarray
    labels: np.ndarray


@dataclasses.dataclass(frozen=True)
class Arrays:
    """A data set, and the mean and deviation of a pixel for each channel."""

    train: Examples
    test: Examples
    mean: Tuple[float, ...]
    std: Tuple[float, ...]


def digits(shuffled: bool = False) -> Arrays:
    """scikit-learn's 1797 handwritten digits, 8x8: 1437 to train, 360 to test, each class in proportion.

    The split is fixed: after one shuffle, examples are sorted by class, and every fifth is a test example. `shuffled`:
    training examples are not sorted by class, so that a few of them have all classes.
    """
    # Its file is read here, since importing scikit-learn takes longer than the rest of a worker's start.
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise ConfigError("dataset `digits` comes with scikit-learn, which is not installed: "
                          "pip install scikit-learn")
    with gzip.open(Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        rows = np.loadtxt(file, delimiter=",")  # 64 pixels and the class
    images, labels = rows[:, :-1].astype(np.uint8).reshape(-1, 1, 8, 8), rows[:, -1].astype(np.float32)
    order = np.random.RandomState(0).permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]
    test, train = by_class[::DIGITS_TEST], np.delete(by_class, np.s_[::DIGITS_TEST])
    if shuffled:
        train = np.random.RandomState(0).permutation(train)
    return Arrays(Examples(images[train], labels[train]), Examples(images[test], labels[test]), (4.884,), (6.017,))


def mnist(data_dir: str) -> Arrays:
    """MNIST from its four idx files, with or without .gz, in `data_dir`."""
    folder = folder_of(data_dir, "mnist")
    train, test = (_mnist_part(*(find(folder, name, "mnist") for name in names)) for names in MNIST_FILES.values())
    return Arrays(train, test, mean=(33.318,), std=(78.566,))


def _mnist_part(images_path: Path, labels_path: Path) -> Examples:
    images, labels = read_idx(images_path, (28, 28)), read_idx(labels_path, ())
    if len(images) != len(labels):
        raise ConfigError(f"`{labels_path}`: expected {len(images)} labels, one for each image of "
                          f"`{images_path.name}`, got {len(labels)}")
    return Examples(images[:, None], _labels(labels, labels_path))


def read_idx(path: Path, item_shape: Tuple[int, ...]) -> np.ndarray:
    """The bytes of an idx file of unsigned bytes, one item of `item_shape` per example.

    The header is 0, 0, 8 (unsigned bytes), the number of axes, then their lengths, all big-endian.
    """
    axes = 1 + len(item_shape)
    start = 4 + 4 * axes
    content = _read(path, start)
    magic = bytes((0, 0, 8, axes))
    if content[:4] != magic or len(content) < start:
        raise ConfigError(f"`{path}`: expected an idx file that begins with {magic.hex()} and {axes} lengths, "
                          f"got {content[:4].hex() or 'nothing'}")
    shape = struct.unpack(f">{axes}I", content[4:start])
    if shape[1:] != item_shape:
        raise ConfigError(f"`{path}`: expected items of shape {item_shape}, got {shape[1:]}")
    expected = start + math.prod(shape)
    if expected > MOST_NBYTES:
        raise ConfigError(f"`{path}`: its header announces {expected} bytes; expected {MOST_NBYTES} at most. Fetch it "
                          "again")
    content = _read(path, expected + 1)
    _check_size(path, len(content), expected)
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def cifar10(data_dir: str) -> Arrays:
    """CIFAR-10 from its six binary files, with or without .gz, in `data_dir` or its cifar-10-batches-bin/."""
    folder = folder_of(data_dir, "cifar10")
    inner = folder / "cifar-10-batches-bin"
    folder = inner if inner.is_dir() else folder
    train, test = (_joined([read_cifar(find(folder, name, "cifar10")) for name in names])
                   for names in CIFAR_FILES.values())
    return Arrays(train, test, mean=(125.31, 122.95, 113.87), std=(62.99, 62.09, 66.70))


def _joined(files: Sequence[Examples]) -> Examples:
    return Examples(*(np.concatenate(column) for column in zip(*files)))


def read_cifar(path: Path) -> Examples:
    """Images and labels of one binary file."""
    expected = CIFAR_RECORDS * (1 + 3 * 32 * 32)
    content = _read(path, expected + 1)
    _check_size(path, len(content), expected)
    records = np.frombuffer(content, np.uint8).reshape(CIFAR_RECORDS, -1)
    return Examples(records[:, 1:].reshape(-1, 3, 32, 32), _labels(records[:, 0], path))


def synthetic(shape: Sequence[int], classes: int, examples: int) -> Arrays:
    """Images that a small network can learn: one coarse pattern for each class, half hidden in noise.

    The same on every worker and in every run: it depends only on the three arguments.
    """
    random = np.random.RandomState(0)
    channels, height, width = shape
    coarse = random.randint(0, 128, (classes, channels, 4, 4)).astype(np.uint8)
    patterns = coarse[:, :, np.arange(height) * 4 // height][:, :, :, np.arange(width) * 4 // width]
    parts: List[Examples] = []
    for count in (examples, max(1, examples // 4)):
        labels = random.permutation(np.arange(count) % classes)
        images = random.randint(0, 128, (count, *shape), dtype=np.uint8)
        images += patterns[labels]
        parts.append(Examples(images, labels.astype(np.float32)))
    return Arrays(parts[0], parts[1], mean=(127.0,) * channels, std=(52.3,) * channels)


def find(folder: Path, name: str, dataset: str) -> Path:
    """The file `name`, or `name`.gz, in `folder`."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise ConfigError(f"no `{folder / name}` and no `{name}.gz` beside it: data_dir is expected to hold the files "
                      f"of {dataset}")


def folder_of(data_dir: str, dataset: str) -> Path:
    """The folder `data_dir`, which has to be there."""
    folder = Path(data_dir).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"no folder `{folder}`: data_dir is expected to hold the files of {dataset}")
    return folder


def _read(path: Path, most: int) -> bytes:
    """The first bytes of a file, unpacked; no more, since a few packed ones can be gigabytes."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            return file.read(most)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"`{path}`: expected a whole gzip file: {error}. Fetch it again") from None
    except OSError as error:
        raise ConfigError(f"cannot read `{path}`: {error.strerror}") from None


def _check_size(path: Path, got: int, expected: int) -> None:
    if got != expected:
        unpacked = " after unpacking" if path.suffix == ".gz" else ""
        more = "more" if got > expected else str(got)
        raise ConfigError(f"`{path}`: expected {expected} bytes{unpacked}, got {more}; it is "
                          f"{'cut short' if got < expected else 'something else'}. Fetch it again")


def _labels(labels: np.ndarray, path: Path) -> np.ndarray:
    if labels.size and labels.max() > 9:
        raise ConfigError(f"`{path}`: expected labels 0 to 9, got {labels.max()}")
    return labels.astype(np.float32)
