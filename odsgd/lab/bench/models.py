"""Models as lists of shapes: of a model, a benchmark of communication sees its tensors and their order.

Names are those below, the models of ``odsgd train``, whose shapes are read off the network (for 32x32 images), and
numbers of parameters as ``7.5M``, ``50k`` or ``17226``: of a perceptron with five layers.
"""
import functools
import math
import re
from typing import Dict, List, Sequence, Tuple

from kvstore.messages.buckets import Parameter
from kvstore.options import name as one_of
from odsgd.config.train_options import MODELS

Shapes = List[Tuple[int, ...]]

_CONVOLUTIONS = [(16, 3)] + [(16, 16)] * 6 + [(32, 16)] + [(32, 32)] * 5 + [(64, 32)] + [(64, 64)] * 5
"""Channels of a ResNet-20's, out and in; each has four vectors beside it."""

def _resnet50() -> Shapes:
    """The convolutions, each with its two vectors of batch normalization, and the dense layer."""
    kernels, into = [(64, 3, 7, 7)], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            kernels += [(width, into, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            kernels += [] if block else [(4 * width, into, 1, 1)]
            into = 4 * width
    normalized: Shapes = [shape for kernel in kernels for shape in (kernel, kernel[:1], kernel[:1])]
    return [*normalized, (1000, 2048), (1000,)]


def _vgg16() -> Shapes:
    channels = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
    kernels: Shapes = [(out, into, 3, 3) for into, out in zip(channels, channels[1:])]
    return _biased([*kernels, (4096, 512 * 7 * 7), (4096, 4096), (1000, 4096)])


def _transformer() -> Shapes:
    """A decoder with the sizes of GPT-2 medium; the embedding is the output layer, too."""
    layers, width, vocabulary, context = 24, 1024, 50257, 1024
    dense, vector = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)], (width,)
    block: Shapes = [vector, vector, *_biased(dense[:2]), vector, vector, *_biased(dense[2:])]
    return [(vocabulary, width), (context, width), *layers * block, vector, vector]


def _biased(matrices: Sequence[Tuple[int, ...]]) -> Shapes:
    return [shape for matrix in matrices for shape in (matrix, matrix[:1])]


PLAIN: Dict[str, Shapes] = {
    "4.2M": [(1024, 1024), (1024,)] * 4 + [(10, 1024), (10,)],
    "cnn": [(32, 3, 3, 3), (32,), (64, 32, 3, 3), (64,), (128, 64, 3, 3), (128,), (200, 2048), (200,), (10, 200),
            (10,)],
    "0.27M": [shape for out, into in _CONVOLUTIONS for shape in ((out, into, 3, 3), (out,), (out,), (out,), (out,))]
    + [(10, 64), (10,)],
    "25.6M": _resnet50(), "138M": _vgg16(), "355M": _transformer(), "5000x1000": [(1000,)] * 5000, "5M": [(5_000_000,)]}
"""Five dense layers; a small CNN of 0.5 M parameters; a ResNet-20 with 0.27 M in about 100 tensors; ResNet-50 and
VGG-16 for ImageNet; a transformer; 5,000 small tensors, and as many numbers in one."""


def check(name: str) -> str:
    """`name`, if it is a model's."""
    return name if _NUMBER.fullmatch(name) else str(one_of("model", (*PLAIN, *MODELS)).convert(name))


_NUMBER = re.compile(r"(\d{1,4}(?:\.\d{1,6})?)([kM])|\d{1,9}")


def _perceptron(parameters: float) -> Shapes:
    """Four square layers and one to ten classes, with this number of parameters within a per mille from 50 k on.
    """
    width = max(1, round((math.sqrt(14 ** 2 + 16 * (parameters - 10)) - 14) / 8))  # 4 w^2 + 14 w + 10
    return [(width, width), (width,)] * 4 + [(10, width), (10,)]


@functools.lru_cache(maxsize=None)
def shapes(name: str) -> Shapes:
    """The parameters with a gradient, first layer first."""
    number = _NUMBER.fullmatch(name)
    if name in PLAIN:
        return PLAIN[name]
    if number:
        return _perceptron(float(number[1] or name) * {"k": 1e3, "M": 1e6, None: 1}[number[2]])
    from odsgd.config.train import TrainConfig
    from odsgd.training import models
    net = models.create(TrainConfig.from_flags(["--model", name, "--dataset", "synthetic", "--kvstore", "local"]))
    return [parameter.shape for parameter in net.collect_params().values() if parameter.grad_req != "null"]


def size(name: str) -> int:
    """Numbers in all of its parameters."""
    return sum(map(math.prod, shapes(name)))


def parameters(name: str) -> List[Parameter]:
    """The same as a store knows them: ``tensor0`` …"""
    return [Parameter(number, f"tensor{number}", shape) for number, shape in enumerate(shapes(name))]
