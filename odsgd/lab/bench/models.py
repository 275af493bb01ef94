"""Models as lists of shapes: of a model, a benchmark of communication sees its tensors and their order.

Names are those below and the models of ``odsgd train``, whose shapes are read off the network (for 32x32 images).
"""
from __future__ import annotations

import functools
import math
from typing import Dict, List, Tuple

from kvstore.errors import unknown
from odsgd.config.names import MODELS

Shapes = List[Tuple[int, ...]]

_CONVOLUTIONS = [(16, 3)] + [(16, 16)] * 6 + [(32, 16)] + [(32, 32)] * 5 + [(64, 32)] + [(64, 64)] * 5
"""Channels of a ResNet-20's, out and in; each has four vectors beside it."""

PLAIN: Dict[str, Shapes] = {
    "4.2M": [(1024, 1024), (1024,)] * 4 + [(10, 1024), (10,)],
    "cnn": [(32, 3, 3, 3), (32,), (64, 32, 3, 3), (64,), (128, 64, 3, 3), (128,), (200, 2048), (200,), (10, 200),
            (10,)],
    "0.27M": [shape for out, into in _CONVOLUTIONS for shape in ((out, into, 3, 3), (out,), (out,), (out,), (out,))]
    + [(10, 64), (10,)]}
"""Five dense layers; a small CNN of 0.5 M parameters; a ResNet-20 with 0.27 M in about 100 tensors."""


def check(name: str) -> str:
    """`name`, if it is a model's."""
    if name not in PLAIN and name not in MODELS:
        raise unknown("model", name, [*PLAIN, *MODELS])
    return name


@functools.lru_cache(maxsize=None)
def shapes(name: str) -> Shapes:
    """The parameters with a gradient, first layer first."""
    return PLAIN[name] if name in PLAIN else _shapes_of_network(name)


def _shapes_of_network(name: str) -> Shapes:
    from odsgd.config.train import TrainConfig
    from odsgd.training import models
    net = models.create(TrainConfig.from_flags(["--model", name, "--dataset", "synthetic", "--kvstore", "local"]))
    return [parameter.shape for parameter in net.collect_params().values() if parameter.grad_req != "null"]


def size(name: str) -> int:
    """Numbers in all of its parameters."""
    return sum(map(math.prod, shapes(name)))
