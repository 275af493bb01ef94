"""A script of Lightning's by a store: handwritten digits, validated after each epoch.

    odsgd launch -n 2 -s 1 scripts/examples/lightning_torch.py
    torchrun --nproc-per-node 2 scripts/examples/lightning_torch.py

Two lines are `# new`; without them DistributedDataParallel trains.
"""
from typing import Any

import lightning
import torch
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split

import odsgd.lightning  # new


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        return functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("right", (self.layers(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    train, test = random_split(data, [1500, len(data) - 1500], torch.Generator().manual_seed(0))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=10, accumulate_grad_batches=2, logger=False,
        enable_progress_bar=False,
        callbacks=[odsgd.lightning.LightningCallback("odsgd", optimizer_local="adam", warmup=50)],  # new
    )
    trainer.fit(Net(), DataLoader(train, 16, shuffle=True), DataLoader(test, 100))
    if trainer.is_global_zero:
        print(f"{float(trainer.callback_metrics['right']):.1%} are right")


if __name__ == "__main__":
    main()
