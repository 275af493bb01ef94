"""Readers of the standard files: what they take, and what they say of a file that is missing or damaged."""
import gzip
import os
from pathlib import Path
from typing import Any, Callable, List

import numpy as np
import pytest

from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError
from kvstore.job.pulse import pulse
from odsgd.config.train import TrainConfig
from odsgd.training import devices
from odsgd.training.data import data, datasets

REAL = Path(os.environ.get("ODSGD_TEST_DATA", "/nonexistent"))


def message(function: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*map(str, args))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- mnist ------------------------------------------------------------------------------------------------------------

def test_mnist_is_read_with_and_without_gz(mnist_folder: Path) -> None:
    arrays = datasets.mnist(str(mnist_folder))
    assert (arrays.train.images.shape, arrays.test.labels.shape) == ((12, 1, 28, 28), (5,))
    content = gzip.decompress((mnist_folder / "train-images-idx3-ubyte.gz").read_bytes())
    assert arrays.train.images.tobytes() == content[16:]


def test_a_missing_folder_and_a_missing_file_are_named(mnist_folder: Path) -> None:
    assert message(datasets.mnist, mnist_folder / "no").startswith(f"no folder `{mnist_folder}/no`")
    (mnist_folder / "t10k-labels-idx1-ubyte").unlink()
    assert message(datasets.mnist, mnist_folder).startswith(
        f"no `{mnist_folder}/t10k-labels-idx1-ubyte` and no `t10k-labels-idx1-ubyte.gz` beside it")


def test_a_truncated_idx_file_is_an_error_with_both_sizes(mnist_folder: Path) -> None:
    path = mnist_folder / "train-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-3])
    assert f"`{path}`: expected 20 bytes, got 17; it is cut short" in message(datasets.mnist, mnist_folder)


def test_a_truncated_gzip_file_and_one_that_is_none_in_spite_of_its_name_are_errors(mnist_folder: Path) -> None:
    path = mnist_folder / "train-images-idx3-ubyte.gz"
    for content in (path.read_bytes()[:100], b"<!doctype html>"):
        path.write_bytes(content)
        assert f"`{path}`: expected a whole gzip file" in message(datasets.mnist, mnist_folder)


@pytest.mark.parametrize("content, said", [
    (b"", "expected an idx file that begins with 00000801 and 1 lengths, got nothing"),
    (b"<!doctype html>", "expected an idx file that begins with 00000801 and 1 lengths, got 3c21646f"),
])
def test_a_file_of_another_kind_is_an_error(mnist_folder: Path, content: bytes, said: str) -> None:
    (mnist_folder / "train-labels-idx1-ubyte").write_bytes(content)
    assert said in message(datasets.mnist, mnist_folder)


def test_labels_that_do_not_match_their_images_are_an_error(mnist_folder: Path) -> None:
    os.replace(mnist_folder / "t10k-labels-idx1-ubyte", mnist_folder / "train-labels-idx1-ubyte")
    assert "expected 12 labels, one for each image of `train-images-idx3-ubyte.gz`, got 5" in \
        message(datasets.mnist, mnist_folder)


# --- cifar10 ----------------------------------------------------------------------------------------------------------

def test_cifar10_is_read_from_its_own_folder_or_the_one_above(cifar_folder: Path) -> None:
    arrays = datasets.cifar10(str(cifar_folder))
    assert (arrays.train.images.shape, arrays.test.images.shape) == ((20, 3, 32, 32), (4, 3, 32, 32))
    below = datasets.cifar10(str(cifar_folder / "cifar-10-batches-bin"))
    assert np.array_equal(arrays.train.images, below.train.images)
    second = (cifar_folder / "cifar-10-batches-bin" / "data_batch_2.bin").read_bytes()
    assert arrays.train.labels[4] == second[0] and arrays.train.images[4].tobytes() == second[1:3073]


def test_a_truncated_or_missing_cifar_file_is_an_error_with_its_path(cifar_folder: Path) -> None:
    path = cifar_folder / "cifar-10-batches-bin" / "data_batch_4.bin"
    path.write_bytes(path.read_bytes()[:-3073])
    assert f"`{path}`: expected 12292 bytes, got 9219; it is cut short" in message(datasets.cifar10, cifar_folder)
    path.unlink()
    assert f"no `{path}` and no `data_batch_4.bin.gz` beside it" in message(datasets.cifar10, cifar_folder)


def test_labels_out_of_range_are_an_error(cifar_folder: Path) -> None:
    path = cifar_folder / "cifar-10-batches-bin" / "data_batch_2.bin"
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    assert f"`{path}`: expected labels 0 to 9, got 255" in message(datasets.cifar10, cifar_folder)


def test_a_cifar_file_of_another_length_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1.bin").write_bytes(bytes(3073 * 3))
    assert "expected 30730000 bytes, got 9219" in message(datasets.cifar10, tmp_path)


# --- imagenet ---------------------------------------------------------------------------------------------------------

def write_records(folder: Path, part: str, count: int, alike: bool = False) -> None:
    """`count` images of 20x24 pixels, perhaps all `alike`; the label of each is its number."""
    import cv2
    file = mx.recordio.MXIndexedRecordIO(str(folder / f"{part}.idx"), str(folder / f"{part}.rec"), "w")
    for number in range(count):
        image = np.random.RandomState(0 if alike else number).randint(0, 255, (20, 24, 3), dtype=np.uint8)
        header, jpeg = mx.recordio.IRHeader(0, float(number), number, 0), cv2.imencode(".jpg", image)[1].tobytes()
        file.write_idx(number, mx.recordio.pack(header, jpeg))
    file.close()


@pytest.fixture(scope="module")
def record_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """41 training images and 7 for the test."""
    folder = tmp_path_factory.mktemp("imagenet")
    write_records(folder, "train", 41)
    write_records(folder, "val", 7)
    return folder


def imagenet(folder: Path, worker_rank: int = 0, num_workers: int = 1, **options: Any) -> Any:
    config = TrainConfig(**{**dict(dataset="imagenet", data_dir=str(folder), image_shape="3,16,16", num_classes=41,
                                   batch_size=4, data_threads=1), **options})
    return data.load(config, worker_rank, num_workers, devices.contexts(config))


def labels(batches: Any) -> List[List[int]]:
    return [[int(label) for y in ys for label in y.asnumpy()] for _, ys in batches]


def pixels(batches: Any) -> np.ndarray:
    return np.concatenate([x.asnumpy() for xs, _ in batches for x in xs])


def test_record_shards_are_disjoint_and_of_equal_length(record_folder: Path) -> None:
    taken = [labels(imagenet(record_folder, rank, 4).train(0)) for rank in range(4)]  # parts of 11, 11, 11 and 8
    assert [len(batches) for batches in taken] == [2] * 4
    flat = [label for batches in taken for batch in batches for label in batch]
    assert len(set(flat)) == len(flat) == 32


@pytest.mark.parametrize("augment", [False, True])
def test_records_of_an_epoch_come_again_with_the_same_bits_from_any_batch(record_folder: Path, augment: bool) -> None:
    whole = pixels(imagenet(record_folder, augment=augment).train(2))
    assert np.array_equal(pixels(imagenet(record_folder, augment=augment).train(2, start=3)), whole[12:])
    assert not np.array_equal(pixels(imagenet(record_folder, augment=augment).train(3)), whole)


def test_other_epochs_and_other_workers_crop_otherwise(tmp_path: Path) -> None:
    write_records(tmp_path, "train", 32, alike=True)
    write_records(tmp_path, "val", 1)
    crops = [{crop.tobytes() for crop in pixels(imagenet(tmp_path, rank, 2, augment=True).train(epoch))}
             for rank in (0, 1) for epoch in (0, 1)]
    assert sum(map(len, crops)) == len(set.union(*crops)) == 16  # one for each place in a batch


def test_batches_that_a_resumed_epoch_drops_are_told_of_so_that_it_is_not_taken_for_hung(record_folder: Path) -> None:
    pulse.substep = 0
    next(imagenet(record_folder).train(2, start=3))
    assert pulse.substep == 3


def test_the_order_of_records_differs_from_epoch_to_epoch_and_seed_to_seed(record_folder: Path) -> None:
    orders = [labels(imagenet(record_folder, seed=seed).train(epoch)) for seed, epoch in [(0, 0), (0, 1), (1, 0)]]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_the_test_records_are_whole_and_in_order_on_several_devices(record_folder: Path) -> None:
    assert labels(imagenet(record_folder, num_cpus=2, batch_size=2).test()) == [[0, 1, 2, 3], [4, 5, 6]]


def test_there_may_be_fewer_test_records_than_a_batch_has(record_folder: Path) -> None:
    assert labels(imagenet(record_folder, batch_size=32).test()) == [list(range(7))]


def test_a_label_that_is_no_class_is_an_error(record_folder: Path) -> None:
    for part, classes in (("train", 20), ("val", 6)):
        data = imagenet(record_folder, num_classes=classes)
        with pytest.raises(ConfigError, match=rf"{part}.rec`: expected labels 0 to {classes - 1}, got [0-9]+ "):
            list(data.train(0) if part == "train" else data.test())


def test_too_few_records_for_everyone_is_an_error(record_folder: Path) -> None:
    with pytest.raises(ConfigError, match="41 training images are not enough for one batch of 4 on each of 12 workers"):
        imagenet(record_folder, 0, 12)


def test_a_missing_index_is_named(tmp_path: Path) -> None:
    write_records(tmp_path, "train", 1)
    assert message(imagenet, tmp_path).startswith(f"no `{tmp_path}/val.rec`: imagenet needs train.rec, train.idx")


@pytest.mark.parametrize("damage, said", [
    (lambda rec, idx: rec.write_bytes(rec.read_bytes()[:-40]), "it is cut short"),
    (lambda rec, idx: rec.write_bytes(rec.read_bytes()[:100]), "it is cut short"),
    (lambda rec, idx: idx.write_text("0\t4\n"), "the two files do not belong together"),
    (lambda rec, idx: idx.write_text("0 zero\n"), "line 1: got `0 zero`, expected number and offset"),
    (lambda rec, idx: idx.write_text(""), "expected at least one record"),
])
def test_a_damaged_record_file_is_an_error_with_its_path(tmp_path: Path, damage: Callable[[Path, Path], Any],
                                                         said: str) -> None:
    write_records(tmp_path, "train", 5)
    write_records(tmp_path, "val", 1)
    damage(tmp_path / "train.rec", tmp_path / "train.idx")
    complaint = message(imagenet, tmp_path)
    assert said in complaint and f"`{tmp_path}/train." in complaint


# --- the real files ---------------------------------------------------------------------------------------------------

@pytest.mark.skipif(not (REAL / "mnist").is_dir(), reason="ODSGD_TEST_DATA names no folder with mnist/")
def test_the_real_mnist() -> None:
    arrays = datasets.mnist(str(REAL / "mnist"))
    assert (len(arrays.train.images), len(arrays.test.images)) == (60000, 10000)
    assert arrays.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert arrays.train.images.mean() == pytest.approx(arrays.mean[0], abs=0.01)
    assert arrays.train.images.std() == pytest.approx(arrays.std[0], abs=0.01)


@pytest.mark.skipif(not (REAL / "cifar10" / "cifar-10-batches-bin").is_dir() and
                    not (REAL / "cifar10" / "test_batch.bin").is_file(),
                    reason="ODSGD_TEST_DATA names no folder with the binary files of cifar10/")
def test_the_real_cifar10() -> None:
    arrays = datasets.cifar10(str(REAL / "cifar10"))
    assert (len(arrays.train.images), len(arrays.test.images)) == (50000, 10000)
    assert np.bincount(arrays.train.labels.astype(int)).tolist() == [5000] * 10
    assert arrays.train.images.mean(axis=(0, 2, 3)) == pytest.approx(arrays.mean, abs=0.5)
