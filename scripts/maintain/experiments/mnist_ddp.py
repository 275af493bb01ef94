#!/usr/bin/env python3
"""MNIST by a script of DistributedDataParallel's, as it is or by a store: a table of docs/how-to/pytorch.md.

    torchrun --nproc-per-node 2 scripts/maintain/experiments/mnist_ddp.py DATA STORE SEED    STORE: ddp, odsgd, …
    odsgd launch -n 2 -s 1 scripts/maintain/experiments/mnist_ddp.py DATA ssgd SEED

Five epochs of a perceptron, two workers of 64 images. `DATA` has the four files of MNIST.
"""
import contextlib
import sys
import time
from typing import ContextManager

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import odsgd.torch as od
from odsgd.training.data import datasets

FOLDER, STORE, SEED = sys.argv[1], sys.argv[2], int(sys.argv[3])
EPOCHS = 5


def tensors(part: datasets.Examples) -> TensorDataset:
    images = torch.from_numpy(part.images).float().flatten(1) / 255
    return TensorDataset(images, torch.from_numpy(part.labels).long())


def main() -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    arrays = datasets.mnist(FOLDER)
    data, test = tensors(arrays.train), tensors(arrays.test)
    sampler = DistributedSampler(data, seed=SEED)
    loader = DataLoader(data, batch_size=64, sampler=sampler, drop_last=True)
    model = torch.nn.Sequential(torch.nn.Linear(784, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(),
                                torch.nn.Linear(256, 10))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    at_the_end: ContextManager[None] = contextlib.nullcontext()
    if STORE != "ddp":
        name, *options = STORE.split(":")
        store = od.create(name, **dict(option.split("=") for option in options))
        optimizer, at_the_end = od.Optimizer(optimizer, ddp, store), store.global_weights()
    began = time.perf_counter()
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(ddp(x), y).backward()
            optimizer.step()
    spent = time.perf_counter() - began
    with at_the_end, torch.no_grad():
        right = (model(test.tensors[0]).argmax(1) == test.tensors[1]).float().mean()
    if dist.get_rank() == 0:
        print(f"{STORE}, seed {SEED}: {right:.2%} right, {1e3 * spent / EPOCHS / len(loader):.2f} ms an iteration",
              flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
