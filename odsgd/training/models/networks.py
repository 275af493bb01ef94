"""The papers' own networks, for images of the size that each was made for.

    mlp_500         Pipe-SGD, section 4, MNIST-MLP: 784-500-500-10; 648,010 parameters on MNIST
    caffe_cifar10   staleness-aware ASGD, section 4.1: Caffe's CIFAR-10 network, 3 convolutions; 89,578
    caffe_cifar10_pixels    the same, inputs and first weights scaled as Caffe does
    sasgd_cnn       SASGD, Table I, with dropout; 506,378
    vgg_f           delayed weight update, section 3.2.1, with batch normalization; 60.9 million, 243 MB

Otherwise weights are drawn as in all networks here (Xavier), inputs normalised alike. Where a paper leaves room,
the function says what was chosen.
"""
from typing import Any, Callable, Dict, List

from kvstore.engine._mxnet import mx

nn = mx.gluon.nn


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
    normalization: behind every layer but the last, and in place of response normalization and dropout.
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
