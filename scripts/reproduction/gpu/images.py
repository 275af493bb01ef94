"""A data set on the device, and its batches."""
from __future__ import annotations

from typing import Any, Tuple

import numpy as np
import torch

from odsgd.config.train import TrainConfig
from odsgd.training.data.data import PAD, Shards, in_memory, random_bits, shifts


class Images:
    """A data set on the device, normalised, with its channels last; with a border, where images are to be shifted."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        arrays = in_memory(config)
        assert arrays is not None
        self.augment, self.device = config.augment, device
        self.mean, self.std = (torch.tensor(one, device=device) for one in (arrays.mean, arrays.std))
        images = arrays.train.images
        self.height, self.width = images.shape[2:]
        if self.augment:
            images = np.pad(images, ((0, 0), (0, 0), (PAD, PAD), (PAD, PAD)))
        self.train, self.labels = self._placed(images), torch.tensor(arrays.train.labels, device=device).long()
        self.test, self.test_labels = (self._placed(arrays.test.images),
                                       torch.tensor(arrays.test.labels, device=device).long())

    def _placed(self, images: np.ndarray) -> Any:
        pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 2, 3, 1))).to(self.device)
        return (pixels.float() - self.mean) / self.std

    def plan(self, shards: Shards, epoch: int) -> Any:
        """Iteration, worker, example: number, and with augmentation rows, columns and whether it is mirrored."""
        count = shards.batches_per_epoch * shards.num_workers * shards.worker_batch_size
        examples = shards.order(epoch)[:count]
        columns = [examples]
        if self.augment:
            columns += shifts(random_bits(shards.seed, epoch, examples))
        shape = (len(columns), shards.batches_per_epoch, shards.num_workers, shards.worker_batch_size)
        planned = np.stack([one.astype(np.int64) for one in columns]).reshape(shape).transpose(1, 2, 0, 3)
        tensor = torch.from_numpy(np.ascontiguousarray(planned))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def batch(self, planned: Any) -> Tuple[Any, Any]:
        """What `planned` says of one worker's batch."""
        examples, labels = planned[0], self.labels[planned[0]]
        if not self.augment:
            return self.train[examples].permute(0, 3, 1, 2), labels
        down, right, mirror = planned[1:].unsqueeze(-1)
        rows, along = (torch.arange(one, device=self.device) for one in (self.height, self.width))
        columns = right + torch.where(mirror > 0, self.width - 1 - along, along)
        images = self.train[examples[:, None, None], (down + rows)[:, :, None], columns[:, None, :]]
        return images.permute(0, 3, 1, 2), labels
