"""Workers that exchange weights once in 20 steps, with PyTorch: AdamW steps by itself on every worker.

    odsgd launch -n 2 -s 1 scripts/examples/diloco_torch.py

In place of 20, hundreds suit longer runs. What is learned: which of three angles a point on a spiral belongs to.
"""
from typing import Tuple

import torch
from torch import nn
from torch.nn import functional

import odsgd.torch as od

STEPS = 400


def spirals(number: int, random: torch.Generator) -> Tuple[torch.Tensor, torch.Tensor]:
    """Points on three arms, and their arms."""
    arm, along = torch.randint(3, (number,), generator=random), torch.rand(number, generator=random)
    angle = 2.1 * arm + 4 * along + 0.2 * torch.randn(number, generator=random)
    return torch.stack([along * angle.cos(), along * angle.sin()], 1), arm


def main() -> None:
    store = od.create("diloco", H=20, momentum_outer=0.5)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = od.Optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model, store)
    random = torch.Generator().manual_seed(1 + store.rank)  # every worker has examples of its own
    for _ in range(STEPS):
        x, y = spirals(32, random)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    x, y = spirals(1000, torch.Generator().manual_seed(0))
    with store.global_weights(), torch.no_grad():
        right = (model(x).argmax(1) == y).float().mean().item()
    print(f"worker {store.rank}: {right:.1%} of unseen points are right", flush=True)
    store.close()


if __name__ == "__main__":
    main()
