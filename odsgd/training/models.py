"""Networks by name: ``mlp``, ``lenet``, the papers' own, Gluon's model zoo, and GluonCV's.

docs/reference/data.md says what they make of small and of grey images. The papers' own are for images of the size that
each was made for:

    mlp_500         Pipe-SGD, section 4, MNIST-MLP: 784-500-500-10; 648,010 parameters on MNIST
    caffe_cifar10   staleness-aware ASGD, section 4.1: Caffe's CIFAR-10 network, 3 convolutions; 89,578
    caffe_cifar10_pixels    the same, inputs and first weights scaled as Caffe does
    sasgd_cnn       SASGD, Table I, with dropout; 506,378
    vgg_f           delayed weight update, section 3.2.1, with batch normalization; 60.9 million, 243 MB

Where a paper leaves room, the function says what was chosen.
"""
import contextlib
import functools
import hashlib
import importlib
import sys
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence

from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError
from odsgd.config.train import TrainConfig
from odsgd.config.train_options import GLUON_MODELS
from odsgd.training import devices
from odsgd.training.checkpoint import weights

nn = mx.gluon.nn
amp: Any = importlib.import_module(f"{mx.__name__}.contrib.amp")


def create(config: TrainConfig) -> Any:
    """The network on the worker's devices, its shapes known and its weights drawn (Xavier) from the seed, or read.

    Every worker gets the same weights and the same parameter names, whatever was made in the process before. MXNet's
    random numbers are reseeded.
    """
    contexts = devices.contexts(config)
    with mx.name.NameManager():  # counts layers from 0, so that names do not depend on earlier networks
        net = _network(config)
    _freeze(net, config)  # before there is memory for gradients
    mx.random.seed(config.seed)
    net.initialize(mx.init.Xavier(), ctx=contexts)
    _settle_shapes(net, config, contexts[0])
    if config.weights is not None:
        _read_weights(net, config)
    if config.dtype == "float16":
        net.cast("float16")  # except BatchNorm's weights, whose sums need the range
        if contexts[0].device_type == "cpu":
            _products_in_single()
    if config.hybridize:
        net.hybridize(static_alloc=True)
    return net


@functools.lru_cache(maxsize=None)  # of the process
def _products_in_single() -> None:
    """MXNet has no products of matrices in half precision on a CPU: let those operators compute in single."""
    amp.init("float16", target_precision_ops=[], conditional_fp32_ops=[], fp32_ops=amp.list_lp16_ops("float16"))


def _network(config: TrainConfig) -> Any:
    padding = 2 if min(config.input_shape[1:]) < 16 else 0
    own: Dict[str, Callable[[int], List[Any]]] = {
        **PAPERS, "mlp": _mlp, "lenet": functools.partial(_lenet, padding=padding)}
    if config.model in own:
        net = nn.HybridSequential(prefix=f"{config.model}_")
        with net.name_scope():
            net.add(*own[config.model](config.classes))
        return net
    return _from_gluon(config) if config.model in GLUON_MODELS else _from_gluoncv(config)


def _mlp(classes: int) -> List[Any]:
    return [nn.Flatten(), nn.Dense(128, activation="relu"), nn.Dense(64, activation="relu"), nn.Dense(classes)]


def _lenet(classes: int, padding: int) -> List[Any]:
    """LeNet as in MXNet's examples; a padding of 2 keeps images below 16 pixels large enough for its 5x5 windows."""
    layers: List[Any] = []
    for channels in (20, 50):
        layers += [nn.Conv2D(channels, 5, padding=padding, activation="relu"), nn.MaxPool2D(2, 2)]
    return [*layers, nn.Flatten(), nn.Dense(500, activation="relu"), nn.Dense(classes)]


def _from_gluon(config: TrainConfig) -> Any:
    """With `thumbnail` a ResNet begins with a 3x3 convolution of stride 1 and no pooling, an option of Gluon's."""
    option = {"thumbnail": True} if config.thumbnail and config.model.startswith("resnet") else {}
    net = mx.gluon.model_zoo.vision.get_model(config.model, classes=config.classes, **option)
    if config.thumbnail and not option:
        net.features[0]._kwargs["stride"] = (1, 1)  # a MobileNet's first layer; Gluon has no option for it
    return net


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Imports inside find no PyTorch: GluonCV does without, but refuses one of 2.0 or newer."""
    loaded = {"torch": sys.modules["torch"]} if "torch" in sys.modules else {}
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]
        sys.modules.update(loaded)


def _from_gluoncv(config: TrainConfig) -> Any:
    try:
        with warnings.catch_warnings(), _without_torch():
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
        scores = net(mx.nd.zeros((1, *config.input_shape), ctx=context))
        scores.wait_to_read()
    except (mx.MXNetError, ValueError, AssertionError) as error:
        shape = "x".join(map(str, config.input_shape))
        reason = str(error).strip().splitlines()[-1].split("Check failed: ")[-1]
        raise ConfigError(f"model `{config.model}` does not take the {shape} images of dataset `{config.dataset}`: "
                          f"{reason}. Take a model for small images (lenet, resnet18_v2, cifar_resnet20_v1 ...) "
                          "or larger images") from None
    if scores.shape[-1] != config.classes:
        raise ConfigError(f"model `{config.model}` always tells {scores.shape[-1]} classes apart, and dataset "
                          f"`{config.dataset}` has {config.classes}; take another model")


def _read_weights(net: Any, config: TrainConfig) -> None:
    """Take the weights from the file; a last layer of another shape keeps the weights that were drawn."""
    path = Path(str(config.weights)).expanduser()
    found, own = weights.read(path), net._collect_params_with_prefix()
    for name, parameter in own.items():
        there = found[name].shape if name in found else "missing"
        if there == parameter.shape:
            parameter.set_data(mx.nd.array(found[name], dtype=found[name].dtype))
        elif parameter.name not in _last(net):
            raise ConfigError(f"`{path}` is of another network: `{name}` is {there} there and {parameter.shape} in "
                              f"model `{config.model}`; only the last layer may differ")
    for name in found:
        if name not in own:
            raise ConfigError(f"`{path}` is of another network: model `{config.model}` has no `{name}`")


def frozen(net: Any, config: TrainConfig) -> List[str]:
    """Names of the parameters that training does not change, with the statistics of frozen BatchNorm."""
    if config.trainable == "all":
        return []
    last = _last(net)
    return [name for name in net.collect_params() if name not in last]


def digest(net: Any, names: Sequence[str]) -> str:
    """SHA-256 of the bits of these parameters."""
    sha, parameters = hashlib.sha256(), net.collect_params()
    for name in names:
        sha.update(parameters[name].list_data()[0].asnumpy().tobytes())
    return sha.hexdigest()


def _freeze(net: Any, config: TrainConfig) -> None:
    """No gradient for what is frozen; BatchNorm there applies its statistics and leaves them as they are."""
    if config.trainable == "all":
        return
    parameters = net.collect_params()
    for name in frozen(net, config):
        parameters[name].grad_req = "null"
    for layer in _layers(net)[:-1]:
        if isinstance(layer, nn.BatchNorm):
            layer._kwargs["use_global_stats"] = True


def _last(net: Any) -> List[str]:
    """The parameters of the layer that computes the classes."""
    return [parameter.name for parameter in _layers(net)[-1]._reg_params.values()]


def _layers(net: Any) -> List[Any]:
    """The blocks with parameters of their own, in the order in which they were added; the last computes classes."""
    found: List[Any] = []
    net.apply(lambda block: found.append(block) if block._reg_params else None)
    return found


# --- the papers' own --------------------------------------------------------------------------------------------------

def mlp_500(classes: int) -> List[Any]:
    """A 3-layer perceptron. The paper does not name the non-linearity: ReLU."""
    return [nn.Flatten(), nn.Dense(500, activation="relu"), nn.Dense(500, activation="relu"), nn.Dense(classes)]


def caffe_cifar10(classes: int) -> List[Any]:
    """Caffe's `cifar10_full`; its `cifar10_quick` has a second dense layer and 145,578 parameters.

    Without its two response normalizations, which the paper does not mention: alpha is 5e-5, so on normalised images
    they multiply by nearly 1. Pooling keeps a window that the edge cuts, as Caffe does.
    """
    return _caffe(classes, [None] * 4)


def caffe_cifar10_pixels(classes: int) -> List[Any]:
    """The same as Caffe's `cifar10_full` trains it: on pixels in their own scale, which a factor in front restores,
    with weights drawn from narrow normal distributions. There a rate moves the first layer some 60^2 times as far.
    """
    drawn = [mx.init.Normal(sigma) for sigma in (0.0001, 0.01, 0.01, 0.01)]
    return [nn.HybridLambda(lambda F, images: images * CIFAR_DEVIATION), *_caffe(classes, drawn)]


CIFAR_DEVIATION = 64.0
"""Of CIFAR-10's pixels, about; each channel's own is within 4 % of it."""


def _caffe(classes: int, drawn: List[Any]) -> List[Any]:
    """`drawn`: what draws the weights of each layer."""
    def pool(kind: Any) -> Any:
        return kind(3, 2, ceil_mode=True)

    return [nn.Conv2D(32, 5, padding=2, weight_initializer=drawn[0]), pool(nn.MaxPool2D), nn.Activation("relu"),
            nn.Conv2D(32, 5, padding=2, activation="relu", weight_initializer=drawn[1]), pool(nn.AvgPool2D),
            nn.Conv2D(64, 5, padding=2, activation="relu", weight_initializer=drawn[2]), pool(nn.AvgPool2D),
            nn.Dense(classes, weight_initializer=drawn[3])]


def sasgd_cnn(classes: int) -> List[Any]:
    """Four convolutions, each with ReLU, pooling and dropout.

    The table gives no padding. All but the last are padded to keep their size: only so does 2x2 pooling follow the last
    one, and 128 numbers are left for the dense layer.
    """
    layers: List[Any] = []
    for channels, size, padding in ((64, 5, 2), (128, 3, 1), (256, 3, 1), (128, 2, 0)):
        layers += [nn.Conv2D(channels, size, padding=padding, activation="relu"), nn.MaxPool2D(2, 2), nn.Dropout(0.5)]
    return [*layers, nn.Dense(classes)]


def vgg_f(classes: int) -> List[Any]:
    """VGG-F (CNN-F of Chatfield et al., BMVC 2014) as MatConvNet, which the paper used, makes it with batch
    normalization: after every layer but the last, and in place of response normalization and dropout.
    """
    layers: List[Any] = []
    for channels, size, stride, padding, pooled in ((64, 11, 4, 0, True), (256, 5, 1, 2, True), (256, 3, 1, 1, False),
                                                    (256, 3, 1, 1, False), (256, 3, 1, 1, True)):
        layers += [nn.Conv2D(channels, size, stride, padding), nn.BatchNorm(), nn.Activation("relu")]
        layers += [nn.MaxPool2D(3, 2, ceil_mode=True)] if pooled else []
    for _ in range(2):
        layers += [nn.Dense(4096), nn.BatchNorm(), nn.Activation("relu")]
    return [*layers, nn.Dense(classes)]


PAPERS: Dict[str, Callable[[int], List[Any]]] = {
    make.__name__: make for make in (mlp_500, caffe_cifar10, caffe_cifar10_pixels, sasgd_cnn, vgg_f)}
"""Their layers, by name and for a number of classes."""
