"""A script of DistributedDataParallel's, as its tutorials have it, by a store: handwritten digits.

    odsgd launch -n 2 -s 1 scripts/examples/ddp_torch.py
    torchrun --nproc-per-node 2 scripts/examples/ddp_torch.py

Four lines differ from the original. Added ones end in `# new`; above a changed one, `# was:` has the old line.
"""
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import odsgd.torch as od  # new


class Trainer:
    def __init__(self, model: torch.nn.Module, data: Dataset, optimizer: torch.optim.Optimizer) -> None:
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data), drop_last=True)
        self.model = DistributedDataParallel(model)
        # was: self.optimizer = optimizer
        self.optimizer = od.Optimizer(optimizer, self.model, od.create("odsgd", warmup=50))

    def run(self, epochs: int) -> None:
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            for x, y in self.loader:
                self.optimizer.zero_grad()
                functional.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()

    def evaluate(self, x: torch.Tensor, y: torch.Tensor) -> None:
        right = (self.model(x).argmax(1) == y).float().mean()
        print(f"{right:.1%} are right", flush=True)
        if self.local_rank == 0:
            torch.save(self.model.module.state_dict(), "weights.pt")


def main() -> None:
    dist.init_process_group("gloo")
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    trainer = Trainer(model, data, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    trainer.run(epochs=20)
    with trainer.optimizer.store.global_weights():  # new
    # was: trainer.evaluate(*data.tensors)
        trainer.evaluate(*data.tensors)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
