"""The network of one worker."""
from __future__ import annotations

from typing import Any, Sequence, Tuple

import torch
from torch import nn

from odsgd.config.train import TrainConfig
from scripts.examples.networks import make
from scripts.reproduction.gpu.tensors import compiled


class Replica:
    """The network of a worker: its parameters, and its statistics of BatchNorm, each in one flat tensor.

    Weights of convolutions are there with their channels last, as the GPU wants them.
    """

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        torch.manual_seed(config.seed)
        self.network = make(config.model, config.input_shape, config.classes, config.thumbnail)
        self.network.to(device, memory_format=torch.channels_last)
        self.parameters = [one for one in self.network.parameters() if one.requires_grad]
        self.flat = torch.cat([_flattened(one.detach()) for one in self.parameters])
        for one, part in zip(self.parameters, self.flat.split([one.numel() for one in self.parameters])):
            one.data = _shaped(part, one.shape)
        self.norms = [one for one in self.network.modules() if isinstance(one, nn.BatchNorm2d)]
        self.norms.sort(key=lambda one: -one.num_features)  # none begins where kernels cannot read four floats
        found = [(one, name) for one in self.norms for name in ("running_mean", "running_var")]
        self.statistics = torch.cat([torch.zeros(0, device=device), *(one._buffers[name] for one, name in found)])
        for (one, name), part in zip(found, self.statistics.split([len(one._buffers[name]) for one, name in found])):
            one._buffers[name] = part
        for one in self.norms:
            one.__class__ = _Norm

    def gradient(self, images: Any, labels: Any, out: Any) -> Any:
        """Put the gradient of the mean loss into `out`; loss and right answers, summed."""
        # Without norms there is little to make one kernel of, and compiled pooling that keeps cut windows has wrong
        # gradients (PyTorch 2.11).
        learned = compiled(_learned) if images.is_cuda and self.norms else _learned
        loss, counted, seen = learned(self.network, self.norms, images, labels)
        torch.cat([_flattened(one) for one in torch.autograd.grad(loss, self.parameters)], out=out)
        if self.norms:
            self.statistics.lerp_(torch.cat(seen), self.norms[0].momentum)
        return counted

    def tested(self, images: Any, labels: Any) -> Any:
        with torch.no_grad():
            output = self.network(images)
            return _counted(nn.functional.cross_entropy(output, labels), output, labels)


class _Norm(nn.BatchNorm2d):
    """In plain operations, which a compiler makes few kernels of. (cuDNN's blocks wait for each other, and those of
    other streams may keep them out.)"""

    def forward(self, x: Any) -> Any:
        if not self.training:
            return super().forward(x)
        variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        self.seen = mean.detach(), variance.detach()
        wide = slice(None), None, None
        return (x - mean[wide]) * (self.weight * torch.rsqrt(variance + self.eps))[wide] + self.bias[wide]


def _learned(network: Any, norms: Sequence[_Norm], images: Any, labels: Any) -> Tuple[Any, Any, Any]:
    """The mean loss; loss and right answers, summed; and what each of `norms` has seen of the batch."""
    output = network(images)
    loss = nn.functional.cross_entropy(output, labels)
    return loss, _counted(loss.detach(), output.detach(), labels), [one for norm in norms for one in norm.seen]


def _counted(loss: Any, output: Any, labels: Any) -> Any:
    return torch.stack([loss * len(labels), (output.argmax(1) == labels).sum()])


def _flattened(tensor: Any) -> Any:
    return (tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor).reshape(-1)


def _shaped(flat: Any, shape: Sequence[int]) -> Any:
    if len(shape) != 4:
        return flat.view(shape)
    outs, ins, height, width = shape
    return flat.view(outs, height, width, ins).permute(0, 3, 1, 2)
