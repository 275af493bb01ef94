"""Sharding, batches and augmentation: what a worker sees, and when."""
from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest

from kvstore.errors import ConfigError
from odsgd.config.train import TrainConfig
from odsgd.training import devices
from odsgd.training.data import data, datasets
from odsgd.training.data.data import Shards, in_memory, random_bits, shift_and_mirror

AWKWARD = [(1797, 4, 32), (1000, 3, 7), (12, 3, 4), (13, 3, 4), (101, 1, 100), (50, 7, 7)]


def load(config: TrainConfig, worker_rank: int, num_workers: int) -> Any:
    """The data of one worker on the devices that the configuration names."""
    return data.load(config, worker_rank, num_workers, devices.contexts(config))


def everyone(shards: Shards, epoch: int) -> List[List[np.ndarray]]:
    """Examples that each worker takes in `epoch`, worker by worker, batch by batch."""
    order = shards.order(epoch)
    return [[shards.batch(order, index, rank) for index in range(shards.batches_per_epoch)]
            for rank in range(shards.num_workers)]


# --- shards -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("examples, workers, batch", AWKWARD)
def test_every_worker_takes_as_many_full_batches_and_no_example_is_taken_twice(examples: int, workers: int,
                                                                               batch: int) -> None:
    shards = Shards(examples, workers, batch, seed=3)
    taken = everyone(shards, epoch=0)
    assert {len(batches) for batches in taken} == {examples // (workers * batch)}
    assert {len(one) for batches in taken for one in batches} == {batch}
    flat = np.concatenate([one for batches in taken for one in batches])
    assert len(set(flat.tolist())) == len(flat) > examples - workers * batch


def test_examples_left_over_in_one_epoch_come_in_another() -> None:
    shards = Shards(10, 2, 4, seed=0)
    seen = [one for epoch in range(20) for batches in everyone(shards, epoch) for one in batches]
    assert set(np.concatenate(seen).tolist()) == set(range(10))


def test_order_follows_from_seed_and_epoch_alone() -> None:
    orders = {key: tuple(Shards(100, workers, 5, seed).order(epoch))
              for seed, epoch, workers in [(1, 0, 2), (1, 1, 2), (2, 0, 2), (1, 0, 4)]
              for key in [(seed, epoch, workers)]}
    assert orders[1, 0, 2] == orders[1, 0, 4]
    assert len(set(orders.values())) == 3


def test_the_order_is_frozen_so_that_old_runs_can_be_resumed() -> None:
    assert Shards(6, 1, 2, seed=5).order(epoch=1).tolist() == [0, 4, 2, 1, 5, 3]


def test_two_workers_see_together_what_one_with_twice_the_batch_sees() -> None:
    two, one = Shards(100, 2, 8, seed=0), Shards(100, 1, 16, seed=0)
    for index in range(two.batches_per_epoch):
        halves = [two.batch(two.order(4), index, rank) for rank in range(2)]
        assert np.concatenate(halves).tolist() == one.batch(one.order(4), index, 0).tolist()


def test_too_few_examples_for_everyone_is_an_error_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="10 training examples are not enough for one batch of 4 on each of 3"):
        Shards(10, 3, 4, seed=0)


# --- batches ----------------------------------------------------------------------------------------------------------

def synthetic(**options: Any) -> TrainConfig:
    return TrainConfig(**{**dict(dataset="synthetic", num_examples=70, image_shape=(1, 5, 6), num_classes=3,
                                 batch_size=8), **options})


def values(batches: Any) -> List[Tuple[List[Any], List[Any]]]:
    return [([x.asnumpy() for x in xs], [y.asnumpy() for y in ys]) for xs, ys in batches]


def same(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a, b) for left, right in zip(one, other) for part in (0, 1)
        for a, b in zip(left[part], right[part]))


def test_an_epoch_can_be_entered_at_any_batch_with_the_same_bits() -> None:
    whole = values(load(synthetic(), 1, 2).train(epoch=3))
    assert len(whole) == 4
    for start in range(5):
        assert same(values(load(synthetic(), 1, 2).train(epoch=3, start=start)), whole[start:])


def test_workers_epochs_and_seeds_differ() -> None:
    runs = [values(load(synthetic(seed=seed), rank, 2).train(epoch)) for seed, rank, epoch in
            [(0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0)]]
    assert not any(same(runs[0], other) for other in runs[1:])


def test_a_batch_is_split_evenly_over_the_devices_in_order() -> None:
    one, two = (values(load(synthetic(num_cpus=count, batch_size=8 // count), 0, 1).train(0)) for count in (1, 2))
    assert [len(xs) for xs, _ in two] == [2] * len(one)
    assert all(np.array_equal(np.concatenate(xs), whole[0]) for (xs, _), (whole, _) in zip(two, one))
    xs, ys = next(load(synthetic(num_cpus=2), 0, 1).train(0))
    assert [str(x.context) for x in xs] == [str(y.context) for y in ys] == ["cpu(0)", "cpu(1)"]


def test_the_test_set_is_whole_and_its_last_batch_as_short_as_it_must_be() -> None:
    loaded = load(synthetic(num_cpus=2, batch_size=4), 1, 2)  # 17 examples in batches of 2 x 4
    assert [sum(len(y) for y in ys) for _, ys in loaded.test()] == [8, 8, 1]
    assert [len(xs) for xs, _ in loaded.test()] == [2, 2, 1]


def test_pixels_are_normalised() -> None:
    xs, _ = next(load(TrainConfig(batch_size=1000), 0, 1).train(0))
    assert abs(xs[0].asnumpy().mean()) < 0.02 and abs(xs[0].asnumpy().std() - 1) < 0.02


# --- digits and synthetic ---------------------------------------------------------------------------------------------

def test_digits_are_split_1437_to_360_with_every_class_in_proportion() -> None:
    arrays = datasets.digits()
    assert (arrays.train.images.shape, arrays.test.images.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    train, test = (np.bincount(labels.astype(int)) for labels in (arrays.train.labels, arrays.test.labels))
    assert all(abs(all_of_it / 5 - tested) < 1.5 for all_of_it, tested in zip(train + test, test))


def test_no_digit_is_in_both_parts() -> None:
    from sklearn.datasets import load_digits
    arrays = datasets.digits()
    both = np.concatenate([arrays.train.images, arrays.test.images]).reshape(1797, 64)
    assert sorted(map(bytes, both)) == sorted(bytes(image.astype(np.uint8)) for image in load_digits().data)


def test_synthetic_images_tell_their_class_and_are_the_same_every_time() -> None:
    one, two = (datasets.synthetic((3, 16, 12), classes=5, examples=200) for _ in range(2))
    assert np.array_equal(one.train.images, two.train.images)
    centres = np.stack([one.train.images[one.train.labels == label].mean(axis=0) for label in range(5)])
    distances = ((one.test.images[:, None] - centres[None]) ** 2).sum(axis=(2, 3, 4))
    assert (distances.argmin(axis=1) == one.test.labels).all() and len(one.test.labels) == 50


# --- augmentation -----------------------------------------------------------------------------------------------------

def test_random_bits_follow_the_example_wherever_it_is() -> None:
    examples = np.arange(1000)
    bits = random_bits(7, 2, examples)
    assert np.array_equal(random_bits(7, 2, examples[::-1]), bits[::-1])
    assert len(set(bits.tolist())) == 1000
    assert not (set(bits.tolist()) & set(random_bits(7, 3, examples).tolist()))
    assert 450 < int((bits & np.uint64(1)).sum()) < 550


def test_shift_and_mirror_moves_an_image_within_a_black_frame() -> None:
    image = np.arange(1, 65, dtype=np.uint8).reshape(1, 1, 8, 8)
    results = shift_and_mirror(np.repeat(image, 400, axis=0), random_bits(0, 0, np.arange(400)))
    padded = np.pad(image[0, 0], data.PAD)
    allowed = {bytes(np.ascontiguousarray(padded[y:y + 8, x:x + 8][:, ::step]))
               for y in range(9) for x in range(9) for step in (1, -1)}
    seen = {bytes(result[0]) for result in results}
    assert seen <= allowed and len(seen) > 140  # of 162


def test_augmentation_follows_seed_epoch_and_example_alone(cifar_folder: Path) -> None:
    def images(workers: int, epoch: int) -> Any:
        found: Dict[int, Any] = {}
        for rank in range(workers):
            loaded = load(TrainConfig(dataset="cifar10", data_dir=str(cifar_folder), augment=True, batch_size=5),
                          rank, workers)
            order = loaded.shards.order(epoch)
            for index, (xs, _) in enumerate(loaded.train(epoch)):
                found.update(zip(loaded.shards.batch(order, index, rank).tolist(), xs[0].asnumpy()))
        return found
    one, two, later = images(1, 0), images(2, 0), images(1, 1)
    assert one.keys() == two.keys() and all(np.array_equal(one[key], two[key]) for key in one)
    assert not all(np.array_equal(one[key], later[key]) for key in one)


def test_the_test_set_is_not_augmented(cifar_folder: Path) -> None:
    plain, augmented = (load(TrainConfig(dataset="cifar10", data_dir=str(cifar_folder), batch_size=5,
                                          augment=augment), 0, 1)
                        for augment in (False, True))
    assert same(values(plain.test()), values(augmented.test()))


# --- devices ----------------------------------------------------------------------------------------------------------

def test_cpu_devices_are_numbered() -> None:
    assert [str(context) for context in devices.contexts(TrainConfig(num_cpus=2))] == ["cpu(0)", "cpu(1)"]


@pytest.mark.parametrize("flags, missing", [(dict(num_gpus=1001), ", 1000 on"), (dict(gpus="999"), "999 on")])
def test_a_gpu_that_is_not_there_is_one_line(flags: Dict[str, Any], missing: str) -> None:
    with pytest.raises(ConfigError) as caught:
        devices.contexts(TrainConfig(**flags))
    assert missing in str(caught.value) and "\n" not in str(caught.value)


def test_a_part_of_the_examples_can_be_taken_and_the_last_ones_kept_for_a_test() -> None:
    def digits(**options: Any) -> datasets.Arrays:
        arrays = in_memory(TrainConfig(dataset="digits", **options))
        assert arrays is not None
        return arrays
    whole, part, held = digits(num_examples=1437), digits(num_examples=200), digits(num_examples=1000, holdout=144)
    assert np.array_equal(part.train.images, whole.train.images[:200]) and len(part.train.labels) == 200
    assert np.array_equal(part.test.images, digits().test.images) and len(held.train.labels) == 1000
    assert np.array_equal(held.test.images, whole.train.images[-144:]) and len(digits(holdout=37).train.labels) == 1400
    assert set(part.train.labels) == set(held.test.labels) == set(range(10))
    with pytest.raises(ConfigError, match="num_examples is 1300 and holdout 200, and there are 1437 training examples"):
        digits(num_examples=1300, holdout=200)
    with pytest.raises(ConfigError, match=r"^holdout is 1437, and there are 1437 training examples"):
        digits(holdout=1437)
