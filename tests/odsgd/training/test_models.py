"""Networks by name, on small images, the same on every worker."""
import gc
import inspect
import subprocess
import sys
from typing import Any, Dict, Iterator, Tuple

import numpy as np
import pytest

from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError
from odsgd.config import names
from odsgd.config.train import TrainConfig
from odsgd.training import models


@pytest.fixture(autouse=True)
def _no_network_outlives_its_test() -> Iterator[None]:
    """A network refers to itself, and ResNet-18 with its gradients takes 90 MB."""
    yield
    gc.collect()


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


def test_a_missing_gluoncv_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gluoncv.model_zoo", None)
    with pytest.raises(ConfigError, match="model `cifar_resnet20_v1` comes from GluonCV, which cannot be imported"):
        models.create(config("cifar_resnet20_v1"))


def test_gluoncv_is_imported_only_for_its_own_models() -> None:
    code = ("from odsgd.config.train import TrainConfig; from odsgd.training import models;"
            "models.create(TrainConfig(model='mlp')); import sys; sys.exit('gluoncv' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


# --- names known without importing anything ---------------------------------------------------------------------------

@pytest.mark.parametrize("name", names.GLUON_MODELS)
def test_gluon_has_every_model_listed(name: str) -> None:
    assert f"'{name}'" in inspect.getsource(mx.gluon.model_zoo.vision.get_model)


def test_gluoncv_has_every_model_listed() -> None:
    from gluoncv.model_zoo import model_zoo
    assert not set(names.GLUONCV_MODELS) - set(model_zoo._models)
