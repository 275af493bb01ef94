"""ImageNet, or any images packed by MXNet's im2rec: train.rec, train.idx, val.rec and val.idx in one folder.

docs/reference/data.md says how they are divided, cropped and augmented. Each epoch has an iterator of its own, whose
order and augmentation follow from seed and epoch; `train(epoch, start)` decodes and drops the first `start` batches.
"""
import re
import struct
from pathlib import Path
from typing import Any, Dict, Iterator, Sequence, Tuple

import numpy as np

from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError, shown
from kvstore.job.pulse import pulse
from odsgd.config.files import read_text
from odsgd.config.train import TrainConfig
from odsgd.training.data import datasets
from odsgd.training.data.data import Batch, random_bits

NORMALISE = {"mean_r": 123.68, "mean_g": 116.779, "mean_b": 103.939, "std_r": 58.393, "std_g": 57.12, "std_b": 57.375}
AUGMENT = {"random_resized_crop": True, "min_random_area": 0.08, "max_random_area": 1.0, "min_aspect_ratio": 3 / 4,
           "max_aspect_ratio": 4 / 3, "rand_mirror": True}
MAGIC = 0xCED7230A
"""First word of a record."""
MOST_INDEX_NBYTES = 1 << 28
LINE = re.compile(r"[0-9]{1,18}\s+([0-9]{1,18})(?:\s.*)?")
"""A line of an index: the record's number and its offset."""


class RecordData:
    """One worker's view of record files; the same calls as data.ArrayData."""

    def __init__(self, config: TrainConfig, worker_rank: int, num_workers: int, contexts: Sequence[Any]) -> None:
        self.config, self.contexts = config, contexts
        self.worker_rank, self.num_workers = worker_rank, num_workers
        folder = datasets.folder_of(str(config.data_dir), "imagenet")
        self.train_files, self.test_files = (_files(folder, part) for part in ("train", "val"))
        self.num_examples = records = count_records(*self.train_files)
        self._test_batch_size = min(config.worker_batch_size, count_records(*self.test_files))
        smallest = records - (num_workers - 1) * -(-records // num_workers)
        self.batches_per_epoch = max(0, smallest) // config.worker_batch_size
        if not self.batches_per_epoch:
            raise ConfigError(f"{records} training images are not enough for one batch of {config.worker_batch_size} "
                              f"on each of {num_workers} workers; lower batch_size")

    def train(self, epoch: int, start: int = 0, offset: int = 0) -> Iterator[Batch]:
        """The batches of `epoch` from the `start`-th on. Parts are fixed, so none begins at an `offset`.

        MXNet draws the crop of an image from `seed_aug` plus its place in the batch.
        """
        seed = (self.config.seed * 1_000_003 + epoch) % (2 ** 31)
        crops = int(random_bits(self.config.seed, epoch, np.array([self.worker_rank]))[0]) % (2 ** 30)
        options: Dict[str, Any] = {"shuffle": True, "seed": seed, "seed_aug": crops, "part_index": self.worker_rank,
                                   "num_parts": self.num_workers}
        batches = self._iterator(self.train_files, self.config.worker_batch_size, **options,
                                 **(AUGMENT if self.config.augment else {}))
        for index in range(self.batches_per_epoch):
            batch = batches.next()
            if index >= start:
                yield self._place(batch, self.train_files[0])
            else:
                pulse.substep = index + 1  # or this would be taken for standing still

    def test(self) -> Iterator[Batch]:
        batches = self._iterator(self.test_files, self._test_batch_size)
        return (self._place(batch, self.test_files[0]) for batch in batches)

    def _iterator(self, files: Tuple[Path, Path], batch_size: int, **options: Any) -> Any:
        shape = self.config.input_shape
        if "random_resized_crop" not in options:
            options["resize"] = round(min(shape[1:]) * 256 / 224)
        return mx.io.ImageRecordIter(path_imgrec=str(files[0]), path_imgidx=str(files[1]), data_shape=shape,
                                     batch_size=batch_size, verbose=False,
                                     preprocess_threads=self.config.data_threads, **NORMALISE, **options)

    def _place(self, batch: Any, rec: Path) -> Batch:
        count = batch.data[0].shape[0] - (batch.pad or 0)
        classes, found = self.config.classes, batch.label[0][:count].asnumpy()
        wrong = found[~((found >= 0) & (found < classes))]
        if wrong.size:
            raise ConfigError(f"`{rec}`: expected labels 0 to {classes - 1}, got {wrong[0]:g} (num_classes)")
        contexts = self.contexts[:count]
        images, labels = (mx.gluon.utils.split_and_load(array[:count], contexts, even_split=False)
                          for array in (batch.data[0], batch.label[0]))
        return images, labels


def _files(folder: Path, part: str) -> Tuple[Path, Path]:
    for path in (folder / f"{part}.rec", folder / f"{part}.idx"):
        if not path.is_file():
            raise ConfigError(f"no `{path}`: imagenet needs train.rec, train.idx, val.rec and val.idx, "
                              "made with MXNet's tools/im2rec.py")
    return folder / f"{part}.rec", folder / f"{part}.idx"


def count_records(rec: Path, idx: Path) -> int:
    """How many records the index lists, after a look at whether the last of them is whole."""
    text = read_text(idx, "an index of records", MOST_INDEX_NBYTES, "ascii")
    lines = text.splitlines()
    if not lines:
        raise ConfigError(f"`{idx}`: expected at least one record, got an empty file")
    matches = list(map(LINE.fullmatch, lines))
    if None in matches:
        wrong = matches.index(None)
        raise ConfigError(f"`{idx}`, line {wrong + 1}: got `{shown(lines[wrong])}`, expected number and offset, as "
                          "im2rec writes them")
    offsets = [int(match[1]) for match in matches if match]
    try:
        size, last = rec.stat().st_size, max(offsets)
        if last >= size:
            raise ConfigError(f"`{rec}`: {size} bytes, and `{idx.name}` has a record at byte {last}; it is cut short, "
                              "or the two files do not belong together")
        with open(rec, "rb") as file:
            file.seek(last)
            header = file.read(8)
    except OSError as error:
        raise ConfigError(f"cannot read `{rec}`: {error.strerror}") from None
    magic, length = struct.unpack("<II", header) if len(header) == 8 else (MAGIC, 0)
    end = last + 8 + (length & 0x1FFFFFFF)  # the upper 3 bits say whether a record was divided
    if magic != MAGIC:
        raise ConfigError(f"`{rec}`: expected a record at byte {last}, where `{idx.name}` has the last one; "
                          "the two files do not belong together")
    if end > size:
        raise ConfigError(f"`{rec}`: expected at least {end} bytes, got {size}; it is cut short. Copy it again")
    return len(offsets)
