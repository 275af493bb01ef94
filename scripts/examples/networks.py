"""The networks of the presets in PyTorch, layer by layer those of Gluon's and GluonCV's model zoos, and one of odsgd's.

    >>> sum(parameter.numel() for parameter in make("cifar_resnet20_v1", (3, 32, 32), 10).parameters())
    272474
"""
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
from torch import nn


def conv(ins: int, outs: int, size: int = 3, stride: int = 1, **more: Any) -> nn.Conv2d:
    """A convolution that keeps an image's size but for its stride; without a bias, as BatchNorm follows."""
    return nn.Conv2d(ins, outs, size, stride, size // 2, **{"bias": False, **more})


class Residual(nn.Module):
    """relu(shortcut(x) + body(x)); https://arxiv.org/abs/1512.03385."""

    def __init__(self, ins: int, outs: int, stride: int, body: List[nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)
        self.shortcut = nn.Sequential() if ins == outs else nn.Sequential(conv(ins, outs, 1, stride),
                                                                          nn.BatchNorm2d(outs))

    def forward(self, x: Any) -> Any:
        return torch.relu(self.shortcut(x) + self.body(x))


def basic(ins: int, outs: int, stride: int) -> nn.Module:
    return Residual(ins, outs, stride, [conv(ins, outs, 3, stride), nn.BatchNorm2d(outs), nn.ReLU(),
                                        conv(outs, outs), nn.BatchNorm2d(outs)])


def bottleneck(ins: int, outs: int, stride: int) -> nn.Module:
    mid = outs // 4
    return Residual(ins, outs, stride, [conv(ins, mid, 1, stride, bias=True), nn.BatchNorm2d(mid), nn.ReLU(),
                                        conv(mid, mid), nn.BatchNorm2d(mid), nn.ReLU(),
                                        conv(mid, outs, 1, bias=True), nn.BatchNorm2d(outs)])


class Preactivated(nn.Module):
    """a = relu(norm(x)); shortcut(a), or x, + body(a); https://arxiv.org/abs/1603.05027."""

    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.BatchNorm2d(ins), nn.ReLU())
        self.body = nn.Sequential(conv(ins, outs, 3, stride), nn.BatchNorm2d(outs), nn.ReLU(), conv(outs, outs))
        self.shortcut = None if ins == outs else conv(ins, outs, 1, stride)

    def forward(self, x: Any) -> Any:
        a = self.before(x)
        return (x if self.shortcut is None else self.shortcut(a)) + self.body(a)


def stages(block: Callable[[int, int, int], nn.Module], blocks: Sequence[int],
           widths: Sequence[int]) -> List[nn.Module]:
    """So many blocks of each width after the first; a stage but the first halves the image."""
    return [block(ins if number == 0 else outs, outs, 2 if number == 0 and stage else 1)
            for stage, (count, ins, outs) in enumerate(zip(blocks, widths, widths[1:])) for number in range(count)]


def stem(channels: int, thumbnail: bool) -> List[nn.Module]:
    if thumbnail:
        return [conv(channels, 64)]
    return [conv(channels, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]


def head(width: int, classes: int) -> List[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]


def mlp(shape: Tuple[int, int, int], classes: int, thumbnail: bool) -> List[nn.Module]:
    return [nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(),
            nn.Linear(64, classes)]


def resnet18_v1(shape: Tuple[int, int, int], classes: int, thumbnail: bool) -> List[nn.Module]:
    return [*stem(shape[0], thumbnail), *stages(basic, (2, 2, 2, 2), (64, 64, 128, 256, 512)), *head(512, classes)]


def resnet18_v2(shape: Tuple[int, int, int], classes: int, thumbnail: bool) -> List[nn.Module]:
    first = nn.BatchNorm2d(shape[0]).requires_grad_(False)
    return [first, *stem(shape[0], thumbnail), *stages(Preactivated, (2, 2, 2, 2), (64, 64, 128, 256, 512)),
            nn.BatchNorm2d(512), nn.ReLU(), *head(512, classes)]


def resnet50_v1(shape: Tuple[int, int, int], classes: int, thumbnail: bool) -> List[nn.Module]:
    return [*stem(shape[0], thumbnail), *stages(bottleneck, (3, 4, 6, 3), (64, 256, 512, 1024, 2048)),
            *head(2048, classes)]


def cifar_resnet20_v1(shape: Tuple[int, int, int], classes: int, thumbnail: bool) -> List[nn.Module]:
    return [conv(shape[0], 16), nn.BatchNorm2d(16), *stages(basic, (3, 3, 3), (16, 16, 32, 64)), *head(64, classes)]


def mobilenet(shape: Tuple[int, int, int], classes: int, thumbnail: bool) -> List[nn.Module]:
    """1.0 of https://arxiv.org/abs/1704.04861: a convolution of each channel by itself, then one of single pixels."""
    layers: List[nn.Module] = [conv(shape[0], 32, 3, 1 if thumbnail else 2), nn.BatchNorm2d(32), nn.ReLU()]
    ins = 32
    for outs, stride in [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2),
                         (1024, 1)]:
        layers += [conv(ins, ins, 3, stride, groups=ins), nn.BatchNorm2d(ins), nn.ReLU(),
                   conv(ins, outs, 1), nn.BatchNorm2d(outs), nn.ReLU()]
        ins = outs
    return [*layers, *head(1024, classes)]


def caffe_cifar10(shape: Tuple[int, int, int], classes: int, thumbnail: bool) -> List[nn.Module]:
    """Pooling keeps a window that the edge cuts, as odsgd's own does."""
    pooled = [-(-size // 8) for size in shape[1:]]
    return [conv(shape[0], 32, 5, bias=True), nn.MaxPool2d(3, 2, ceil_mode=True), nn.ReLU(),
            conv(32, 32, 5, bias=True), nn.ReLU(), nn.AvgPool2d(3, 2, ceil_mode=True),
            conv(32, 64, 5, bias=True), nn.ReLU(), nn.AvgPool2d(3, 2, ceil_mode=True),
            nn.Flatten(), nn.Linear(64 * pooled[0] * pooled[1], classes)]


NETWORKS: Dict[str, Callable[[Tuple[int, int, int], int, bool], List[nn.Module]]] = {
    "mlp": mlp, "resnet18_v1": resnet18_v1, "resnet18_v2": resnet18_v2, "resnet50_v1": resnet50_v1,
    "cifar_resnet20_v1": cifar_resnet20_v1, "mobilenet1.0": mobilenet, "caffe_cifar10": caffe_cifar10}


def make(name: str, shape: Tuple[int, int, int], classes: int, thumbnail: bool = False) -> nn.Module:
    """The network of this name for images of this shape; `thumbnail`: with a first layer for small ones."""
    network = nn.Sequential(*NETWORKS[name](shape, classes, thumbnail))
    for layer in network.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return network
