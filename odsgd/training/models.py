"""Networks by name: ``mlp``, ``lenet``, Gluon's model zoo, and GluonCV's.

docs/reference/data.md says what they make of small and of grey images.
"""
from __future__ import annotations

import warnings
from typing import Any

from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError
from odsgd.config.names import GLUON_MODELS
from odsgd.config.train import TrainConfig
from odsgd.training import devices

nn = mx.gluon.nn


def create(config: TrainConfig) -> Any:
    """The network on the worker's devices, its shapes known and its weights drawn (Xavier) from the seed.

    Every worker gets the same weights and the same parameter names, whatever was made in the process before. MXNet's
    random numbers are reseeded.
    """
    contexts = devices.contexts(config)
    with mx.name.NameManager():  # counts layers from 0, so that names do not depend on earlier networks
        net = _network(config)
    mx.random.seed(config.seed)
    net.initialize(mx.init.Xavier(), ctx=contexts)
    _settle_shapes(net, config, contexts[0])
    if config.hybridize:
        net.hybridize(static_alloc=True)
    return net


def _network(config: TrainConfig) -> Any:
    if config.model == "mlp":
        return mlp(config.classes)
    if config.model == "lenet":
        return lenet(config.classes, pad=min(config.input_shape[1:]) < 16)
    return _from_gluon(config) if config.model in GLUON_MODELS else _from_gluoncv(config)


def mlp(classes: int) -> Any:
    """Two hidden layers, 128 and 64 wide."""
    net = nn.HybridSequential(prefix="mlp_")
    with net.name_scope():
        net.add(nn.Flatten(), nn.Dense(128, activation="relu"), nn.Dense(64, activation="relu"), nn.Dense(classes))
    return net


def lenet(classes: int, pad: bool = False) -> Any:
    """LeNet as in MXNet's examples; `pad` keeps images below 16 pixels large enough for its 5x5 windows."""
    net = nn.HybridSequential(prefix="lenet_")
    padding = 2 if pad else 0
    with net.name_scope():
        for channels in (20, 50):
            net.add(nn.Conv2D(channels, 5, padding=padding, activation="relu"), nn.MaxPool2D(2, 2))
        net.add(nn.Flatten(), nn.Dense(500, activation="relu"), nn.Dense(classes))
    return net


def _from_gluon(config: TrainConfig) -> Any:
    """With `thumbnail` a ResNet begins with a 3x3 convolution of stride 1 and no pooling, an option of Gluon's."""
    option = {"thumbnail": True} if config.thumbnail and config.model.startswith("resnet") else {}
    net = mx.gluon.model_zoo.vision.get_model(config.model, classes=config.classes, **option)
    if config.thumbnail and not option:
        net.features[0]._kwargs["stride"] = (1, 1)  # a MobileNet's first layer; Gluon has no option for it
    return net


def _from_gluoncv(config: TrainConfig) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its optional dependencies
            from gluoncv.model_zoo import get_model
    except ImportError as error:
        raise ConfigError(f"model `{config.model}` comes from GluonCV, which cannot be imported ({error}); "
                          "install it beside MXNet with: pip install 'gluoncv==0.10.5.post0' 'numpy<2' "
                          "'opencv-python-headless<4.12'") from None
    net = get_model(config.model, classes=config.classes)
    first = next(parameter for parameter in net.collect_params().values() if len(parameter.shape) == 4)
    return Grey(net) if config.input_shape[0] == 1 and first.shape[1] == 3 else net


class Grey(mx.gluon.HybridBlock):
    """A network for colour images, shown a grey one in all three channels."""

    def __init__(self, net: Any) -> None:
        super().__init__(prefix="")
        self.net = net

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        """`net` of the image three times over."""
        return self.net(F.repeat(x, repeats=3, axis=1))


def _settle_shapes(net: Any, config: TrainConfig, context: Any) -> None:
    """Run one black image through, which makes Gluon draw the weights whose shape it did not know."""
    try:
        net(mx.nd.zeros((1, *config.input_shape), ctx=context)).wait_to_read()
    except (mx.MXNetError, ValueError, AssertionError) as error:
        shape = "x".join(map(str, config.input_shape))
        reason = str(error).strip().splitlines()[-1].split("Check failed: ")[-1]
        raise ConfigError(f"model `{config.model}` does not take the {shape} images of dataset `{config.dataset}`: "
                          f"{reason}. Take a model for small images (lenet, resnet18_v2, cifar_resnet20_v1 ...) "
                          "or larger images") from None
