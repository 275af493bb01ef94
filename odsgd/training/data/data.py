"""What a worker trains and evaluates on: batches on its devices, a fair share of every epoch.

    for xs, ys in load(config, worker_rank, num_workers, contexts).train(epoch, start=0):
        ...                     # lists, one NDArray for each device of the worker; of NumPy where the device is None

docs/reference/data.md says how an epoch is divided. A resumed run asks for `train(epoch, start=i)` and gets the same
bits. No process is forked, no thread kept: fork() would stop MXNet's engine with an exchange in flight.
"""
import dataclasses
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from kvstore.errors import ConfigError
from odsgd.config.train import TrainConfig
from odsgd.training.data import datasets

Batch = Tuple[List[Any], List[Any]]
PAD = 4
"""Pixels that augmentation may shift an image by."""


def load(config: TrainConfig, worker_rank: int, num_workers: int, contexts: Sequence[Any],
         arrays: Optional[datasets.Arrays] = None) -> Any:
    """The data of one worker; ConfigError for a file that is missing or damaged, or too few examples for everyone.

    The result has `num_examples`, `batches_per_epoch`, `train(epoch, start=0, offset=0)` and `test()`. `contexts`:
    the devices. `arrays`: what `in_memory` has read, where several workers of a process have it in common.
    """
    arrays = arrays or in_memory(config)
    if arrays is None:
        from odsgd.training.data.records import RecordData  # its reader is MXNet's
        return RecordData(config, worker_rank, num_workers, contexts)
    shards = Shards(len(arrays.train.labels), num_workers, config.worker_batch_size, config.seed)
    return ArrayData(arrays, shards, worker_rank, contexts, config.augment)


def in_memory(config: TrainConfig) -> Optional[datasets.Arrays]:
    """The data of all workers; None for a set that is read from files as it is needed."""
    if config.dataset == "imagenet":
        return None
    if config.dataset == "synthetic":
        return datasets.synthetic(config.input_shape, config.classes, config.num_examples or 1)
    if config.dataset == "digits":
        whole = datasets.digits(shuffled=bool(config.num_examples or config.holdout))
    else:
        whole = (datasets.mnist if config.dataset == "mnist" else datasets.cifar10)(str(config.data_dir))
    return _part(whole, config.num_examples, config.holdout or 0)


def _part(whole: datasets.Arrays, count: Optional[int], holdout: int) -> datasets.Arrays:
    """Training on the first `count` examples; with the last `holdout` ones as the test, if any."""
    (images, labels), test = whole.train, whole.test
    there = len(labels)
    if holdout + (count or 1) > there:
        asked = f"holdout is {holdout}" if count is None else f"num_examples is {count} and holdout {holdout}"
        raise ConfigError(f"{asked}, and there are {there} training examples; take fewer")
    count = there - holdout if count is None else count
    if holdout:
        test = datasets.Examples(images[-holdout:], labels[-holdout:])
    return dataclasses.replace(whole, train=datasets.Examples(images[:count], labels[:count]), test=test)


@dataclasses.dataclass(frozen=True)
class Shards:
    """The examples that each worker takes in each iteration of an epoch; numbers only."""

    num_examples: int
    num_workers: int
    worker_batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if not self.batches_per_epoch:
            raise ConfigError(f"{self.num_examples} training examples are not enough for one batch of "
                              f"{self.worker_batch_size} on each of {self.num_workers} workers; lower batch_size")

    @property
    def batches_per_epoch(self) -> int:
        """Iterations of one epoch, on every worker."""
        return self.num_examples // (self.num_workers * self.worker_batch_size)

    def order(self, epoch: int) -> np.ndarray:
        """All examples in the order of `epoch`. RandomState's stream is frozen: the same in every NumPy."""
        return np.random.RandomState([self.seed, epoch]).permutation(self.num_examples)

    def batch(self, order: np.ndarray, index: int, worker_rank: int, offset: int = 0) -> np.ndarray:
        """The examples of worker `worker_rank` in iteration `index` of the epoch with `order`, from `offset` on."""
        start = offset + (index * self.num_workers + worker_rank) * self.worker_batch_size
        return order[start:start + self.worker_batch_size]


class ArrayData:
    """One worker's view of a data set in memory."""

    def __init__(self, arrays: datasets.Arrays, shards: Shards, worker_rank: int, contexts: Sequence[Any],
                 augment: bool) -> None:
        self.arrays, self.shards, self.worker_rank = arrays, shards, worker_rank
        self.contexts, self.augment, self.batches_per_epoch = contexts, augment, shards.batches_per_epoch
        self.num_examples = shards.num_examples
        self._mean = np.array(arrays.mean, np.float32)[:, None, None]
        self._scale = 1 / np.array(arrays.std, np.float32)[:, None, None]

    def train(self, epoch: int, start: int = 0, offset: int = 0) -> Iterator[Batch]:
        """The batches of `epoch` from the `start`-th on, each `offset` examples later than it would be."""
        order = self.shards.order(epoch)
        for index in range(start, self.batches_per_epoch):
            examples = self.shards.batch(order, index, self.worker_rank, offset)
            images = self.arrays.train.images[examples]
            if self.augment:
                images = shift_and_mirror(images, random_bits(self.shards.seed, epoch, examples))
            yield self._place(images, self.arrays.train.labels[examples])

    def test(self) -> Iterator[Batch]:
        """The test set in its own order; the last batch is as short as it has to be."""
        images, labels = self.arrays.test
        step = self.shards.worker_batch_size
        for start in range(0, len(labels), step):
            yield self._place(images[start:start + step], labels[start:start + step])

    def _place(self, images: np.ndarray, labels: np.ndarray) -> Batch:
        """Normalise, and give every device its part (an even one in training; a short test batch may use fewer)."""
        pixels = images.astype(np.float32)
        pixels -= self._mean
        pixels *= self._scale
        count = min(len(self.contexts), len(labels))
        parts = zip(self.contexts, np.array_split(pixels, count), np.array_split(labels, count))
        placed = [(_placed(x, context), _placed(y, context)) for context, x, y in parts]
        return [x for x, _ in placed], [y for _, y in placed]


def _placed(array: np.ndarray, context: Any) -> Any:
    if context is None:
        return array
    from kvstore.engine._mxnet import mx
    return mx.nd.array(array, context)


def random_bits(seed: int, epoch: int, examples: np.ndarray) -> np.ndarray:
    """64 random bits for each example: splitmix64 of (seed, epoch, example), so that order and worker do not matter."""
    bits = np.full(len(examples), seed, np.uint64)
    for part in (np.full(len(examples), epoch), examples):
        bits = _mix(bits + np.uint64(0x9E3779B97F4A7C15) * (part.astype(np.uint64) + np.uint64(1)))
    return bits


def _mix(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def shifts(bits: np.ndarray) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each example, how far the crop is down and to the right, and whether it is mirrored."""
    span = np.uint64(2 * PAD + 1)
    return (bits >> np.uint64(8)) % span, (bits >> np.uint64(32)) % span, bits & np.uint64(1)


def shift_and_mirror(images: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """CIFAR's usual augmentation: pad with black, crop the old size at a random place, mirror every other image."""
    height, width = images.shape[2:]
    padded = np.pad(images, ((0, 0), (0, 0), (PAD, PAD), (PAD, PAD)))
    down, right, mirror = shifts(bits)
    result = np.empty_like(images)
    for number, (y, x, flip) in enumerate(zip(down.tolist(), right.tolist(), mirror.tolist())):
        crop = padded[number, :, y:y + height, x:x + width]
        result[number] = crop[:, :, ::-1] if flip else crop
    return result
