"""Networks by name, on small images, the same on every worker."""
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Tuple

import numpy as np
import pytest

from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError
from odsgd.config.train import TrainConfig
from odsgd.config.train_options import GLUON_MODELS, GLUONCV_MODELS, PAPERS_MODELS
from odsgd.training import models, randomness
from odsgd.training.models import PAPERS

pytestmark = pytest.mark.usefixtures("gives_memory_back")


def config(model: str, shape: Tuple[int, int, int] = (3, 32, 32), **options: Any) -> TrainConfig:
    return TrainConfig(model=model, dataset="synthetic", image_shape=shape, num_classes=7, **options)


def weights(net: Any) -> Dict[str, np.ndarray]:
    return {name: parameter.data(parameter.list_ctx()[0]).asnumpy() for name, parameter in net.collect_params().items()}


@pytest.mark.parametrize("model, shape", [
    ("mlp", (1, 8, 8)), ("lenet", (1, 8, 8)), ("lenet", (1, 28, 28)), ("mobilenet0.25", (1, 28, 28)),
    ("mobilenetv2_0.25", (3, 32, 32)), ("resnet18_v2", (3, 32, 32)), ("resnet18_v1", (1, 28, 28)),
    ("cifar_resnet20_v1", (3, 32, 32)), ("cifar_resnet20_v1", (1, 28, 28)), ("resnet18_v1b", (1, 28, 28)),
])
def test_a_model_takes_small_images_grey_or_in_colour(model: str, shape: Tuple[int, int, int]) -> None:
    net = models.create(config(model, shape))
    assert net(mx.nd.ones((2, *shape))).shape == (2, 7)


@pytest.mark.parametrize("model, shape, classes, parameters, shapes", [
    ("mlp_500", (1, 28, 28), 10, 648_010, {"dense0": (500, 784), "dense1": (500, 500), "dense2": (10, 500)}),
    ("caffe_cifar10", (3, 32, 32), 10, 89_578, {"conv2": (64, 32, 5, 5), "dense0": (10, 4 * 4 * 64)}),  # "90 K"
    ("caffe_cifar10_pixels", (3, 32, 32), 10, 89_578, {"conv2": (64, 32, 5, 5), "dense0": (10, 4 * 4 * 64)}),
    ("sasgd_cnn", (3, 32, 32), 10, 506_378, {"conv3": (128, 256, 2, 2), "dense0": (10, 128)}),  # "about 0.5 million"
    ("vgg_f", (3, 224, 224), 1000, 60_834_536 + 2 * (64 + 4 * 256 + 2 * 4096),  # "243 MB", and BatchNorm
     {"conv0": (64, 3, 11, 11), "dense0": (4096, 6 * 6 * 256), "dense2": (1000, 4096)}),
    ("alexnet", (3, 224, 224), 1000, 61_100_840, {}),  # Gluon's; one paper's has "~72 million"
])
def test_the_papers_networks_have_the_papers_sizes(model: str, shape: Tuple[int, int, int], classes: int,
                                                   parameters: int, shapes: Dict[str, Tuple[int, ...]]) -> None:
    net = models._network(TrainConfig(model=model, dataset="synthetic", image_shape=shape, num_classes=classes))
    net.infer_shape(mx.nd.zeros((1, *shape)))  # without the half gigabyte of weights and gradients
    learning = [one for one in net.collect_params().values() if one.grad_req != "null"]
    assert sum(int(np.prod(one.shape)) for one in learning) == parameters
    for layer, expected in shapes.items():
        assert net.collect_params()[f"{model}_{layer}_weight"].shape == expected


def test_pooling_of_caffes_network_keeps_the_windows_that_the_edge_cuts() -> None:
    """Caffe: 32 -> 16 -> 8 -> 4, and a mean is that of the pixels there are."""
    net = models.create(config("caffe_cifar10", hybridize=False))
    sizes, x = [], mx.nd.ones((1, 3, 32, 32))
    for layer in list(net)[:-1]:
        x = layer(x)
        sizes.append(x.shape[2])
    assert sizes == [32, 16, 16, 16, 8, 8, 4]
    np.testing.assert_array_equal(net[4](mx.nd.ones((1, 1, 16, 16))).asnumpy(), 1)


def test_caffes_network_on_pixels_has_their_scale_and_caffes_weights() -> None:
    mx.random.seed(0)
    net = models.create(config("caffe_cifar10_pixels", hybridize=False))
    np.testing.assert_array_equal(net[0](mx.nd.array([[-1.5, 2]])).asnumpy(), [[-96, 128]])
    net(mx.nd.ones((1, 3, 32, 32)))
    deviations = [float(np.std(one.data().asnumpy())) for name, one in net.collect_params(".*weight").items()]
    np.testing.assert_allclose(deviations, [0.0001, 0.01, 0.01, 0.01], rtol=0.05)


def test_dropout_of_the_sasgd_network_drops_half_and_is_seeded_anew_in_every_iteration() -> None:
    net = models.create(config("sasgd_cnn"))
    assert [layer._rate for layer in net if isinstance(layer, mx.gluon.nn.Dropout)] == [0.5] * 4
    assert randomness.draws(net) and not randomness.draws(models.create(config("caffe_cifar10")))


@pytest.mark.parametrize("model", ["mlp", "resnet18_v2", "mobilenetv2_0.25", "squeezenet1.0", "cifar_resnet20_v1",
                                   "resnet18_v1b", "vgg11_bn"])
def test_the_layer_that_learns_alone_is_the_one_that_computes_the_classes(model: str) -> None:
    shape = (3, 224, 224) if model == "squeezenet1.0" else (3, 32, 32)
    options = config(model, shape, trainable="last")
    net = models.create(options)
    learning = [one for one in net.collect_params().values() if one.grad_req != "null"]
    assert {one.shape[0] for one in learning} == {7} and 1 <= len(learning) <= 2
    assert set(models.frozen(net, options)) == set(net.collect_params()) - {one.name for one in learning}


def test_weights_are_read_but_for_a_last_layer_of_another_shape(tmp_path: Path) -> None:
    file = str(tmp_path / "weights.params")
    there = models.create(config("lenet", (1, 8, 8), seed=1))
    there.save_parameters(file)
    same = models.create(config("lenet", (1, 8, 8), weights=file))
    assert all(np.array_equal(one, other) for one, other in zip(weights(there).values(), weights(same).values()))
    fewer = TrainConfig(model="lenet", dataset="synthetic", image_shape=(1, 8, 8), num_classes=5, weights=file)
    ours = weights(models.create(fewer))
    assert ours["lenet_dense1_weight"].shape == (5, 500)
    assert all(np.array_equal(ours[name], array) for name, array in weights(there).items() if "dense1" not in name)


@pytest.mark.parametrize("model, content, said", [
    ("mlp", None, "expected a file of named weights"), ("mlp", b"no weights", "expected a file of named weights"),
    ("lenet", "mlp", "is of another network: `0.weight` is missing there and (20, 1, 5, 5) in model `lenet`; only"),
    ("resnet18_v1", "resnet34_v1", "is of another network: model `resnet18_v1` has no `features.4.2.body.0.weight`"),
    ("mlp_500", "mlp", "is of another network: `1.weight` is (128, 64) there and (500, 64) in model `mlp_500`; only"),
])
def test_weights_that_do_not_go_with_the_model_are_told_in_one_line(tmp_path: Path, model: str, content: Any,
                                                                    said: str) -> None:
    file = tmp_path / "weights.params"
    if isinstance(content, str):
        models.create(config(content, (1, 8, 8))).save_parameters(str(file))
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        models.create(config(model, (1, 8, 8), weights=str(file)))
    assert str(caught.value).startswith(f"`{file}`") and said in str(caught.value) and "\n" not in str(caught.value)


def test_weights_follow_from_the_seed_whatever_was_made_before() -> None:
    first = weights(models.create(config("lenet", seed=3)))
    models.create(config("lenet", seed=4))
    again = weights(models.create(config("lenet", seed=3)))
    assert list(first) == list(again) and all(np.array_equal(first[name], again[name]) for name in first)
    other = weights(models.create(config("lenet", seed=4)))
    assert not np.array_equal(first["lenet_conv0_weight"], other["lenet_conv0_weight"])


@pytest.mark.parametrize("model", ["resnet18_v2", "cifar_resnet20_v1", "mlp"])
def test_parameter_names_do_not_depend_on_networks_made_before(model: str) -> None:
    assert list(models.create(config(model)).collect_params()) == list(models.create(config(model)).collect_params())


def test_every_device_gets_the_same_weights() -> None:
    net = models.create(config("mlp", num_cpus=2))
    for parameter in net.collect_params().values():
        one, two = (array.asnumpy() for array in parameter.list_data())
        assert np.array_equal(one, two)


@pytest.mark.parametrize("hybridize", [True, False])
def test_a_network_can_be_trained_compiled_or_not(hybridize: bool) -> None:
    net = models.create(config("lenet", (1, 8, 8), hybridize=hybridize))
    with mx.autograd.record():
        loss = net(mx.nd.ones((4, 1, 8, 8))).sum()
    loss.backward()
    assert all(np.isfinite(parameter.grad().asnumpy()).all() for parameter in net.collect_params().values())


@pytest.mark.parametrize("model", ["resnet18_v2", "mobilenet0.25", "mobilenetv2_0.25"])
def test_thumbnail_leaves_more_of_a_small_image_to_the_last_layers(model: str) -> None:
    def size_before_pooling(net: Any) -> int:
        features = mx.nd.ones((1, 3, 32, 32))
        for layer in net.features:
            if isinstance(layer, mx.gluon.nn.GlobalAvgPool2D):
                break
            features = layer(features)
        size: int = features.shape[2]
        return size
    plain, thumbnail = (models.create(config(model, thumbnail=value, hybridize=False)) for value in (False, True))
    assert (size_before_pooling(plain), size_before_pooling(thumbnail)) in [(1, 2), (1, 4)]


def test_a_model_that_needs_larger_images_says_so() -> None:
    with pytest.raises(ConfigError) as caught:
        models.create(config("alexnet", (1, 28, 28)))
    assert str(caught.value).startswith("model `alexnet` does not take the 1x28x28 images of dataset `synthetic`")
    assert "\n" not in str(caught.value)


def test_a_network_that_has_other_classes_whatever_it_is_asked_for_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As GluonCV's hrnet_... are."""
    monkeypatch.setattr(models, "_from_gluoncv", lambda config: mx.gluon.nn.Dense(1000))
    with pytest.raises(ConfigError) as caught:
        models.create(TrainConfig(model="hrnet_w18_c"))
    assert str(caught.value) == ("model `hrnet_w18_c` always tells 1000 classes apart, and dataset `digits` has 10; "
                                 "take another model")


def test_a_missing_gluoncv_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gluoncv.model_zoo", None)
    with pytest.raises(ConfigError, match="model `cifar_resnet20_v1` comes from GluonCV, which cannot be imported"):
        models.create(config("cifar_resnet20_v1"))


def test_gluoncv_is_imported_only_for_its_own_models() -> None:
    code = ("from odsgd.config.train import TrainConfig; from odsgd.training import models;"
            "models.create(TrainConfig(model='mlp')); import sys; sys.exit('gluoncv' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


# --- names known without importing anything ---------------------------------------------------------------------------

def test_the_papers_networks_are_those_listed() -> None:
    assert tuple(PAPERS) == PAPERS_MODELS


@pytest.mark.parametrize("name", GLUON_MODELS)
def test_gluon_has_every_model_listed(name: str) -> None:
    assert f"'{name}'" in inspect.getsource(mx.gluon.model_zoo.vision.get_model)


def test_gluoncv_has_every_model_listed() -> None:
    with models._without_torch():
        from gluoncv.model_zoo import model_zoo
    assert not set(GLUONCV_MODELS) - set(model_zoo._models)


# --- networks that draw random numbers --------------------------------------------------------------------------------

nn = mx.gluon.nn


@pytest.mark.parametrize("layer, random", [(nn.Dropout(0.5), True), (nn.Dropout(0), False), (nn.BatchNorm(), False),
                                           (nn.Lambda(lambda x: mx.nd.Dropout(x, mode="always")), True),
                                           (nn.HybridLambda(lambda F, x: x + F.random.normal(shape=(2, 2))), True),
                                           (nn.HybridLambda(lambda F, x: F.LeakyReLU(x, act_type="rrelu")), True)])
def test_networks_that_draw_are_told_from_those_that_do_not(layer: Any, random: bool) -> None:
    net = nn.HybridSequential() if isinstance(layer, mx.gluon.HybridBlock) else nn.Sequential()
    net.add(nn.Dense(2), layer)
    assert randomness.draws(net) is random


@pytest.mark.parametrize("model, random", [("mlp", False), ("resnet18_v2", False), ("squeezenet1.0", True),
                                           ("cifar_resnet20_v1", False)])
def test_models_of_the_zoos(model: str, random: bool) -> None:
    assert randomness.draws(models._network(TrainConfig(model=model))) is random


def draw() -> Tuple[float, ...]:
    return tuple(mx.nd.Dropout(mx.nd.ones(64), mode="always").asnumpy())


def drawn(seed: int, iteration: int, worker_rank: int) -> Tuple[float, ...]:
    randomness.seed_iteration(seed, iteration, worker_rank)
    return draw()


def test_draws_follow_from_seed_iteration_and_rank() -> None:
    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 11, 1), (0, 1, 11)]
    first = [drawn(*place) for place in places]
    draw()
    assert [drawn(*place) for place in places] == first and len(set(first)) == len(places)
