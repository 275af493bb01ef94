"""A script of one process, as PyTorch's example of MNIST is, on several workers: small images of digits.

    odsgd launch -n 2 -s 1 scripts/examples/mnist_torch.py
    torchrun --nproc-per-node 2 scripts/examples/mnist_torch.py

Five lines differ from the original. Added ones end in `# new`; above a changed one, `# was:` has the old line.
"""
import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR

import odsgd.torch as od  # new

store = od.create("odsgd", optimizer_local="adam", lr_local=0.001, warmup=50)  # new


def train(model: nn.Module, loader: torch.utils.data.DataLoader, optimizer: optim.Optimizer) -> None:
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(data), target).backward()
        optimizer.step()


def test(model: nn.Module, loader: torch.utils.data.DataLoader) -> None:
    model.eval()
    # was: with torch.no_grad():
    with store.global_weights(), torch.no_grad():
        right = sum(int((model(data).argmax(1) == target).sum()) for data, target in loader)
    print(f"{right / len(loader.dataset):.1%} are right", flush=True)


def main() -> None:
    torch.manual_seed(1)
    images, labels = load_digits(return_X_y=True)
    data = torch.utils.data.TensorDataset(torch.tensor(images / 16).float().view(-1, 1, 8, 8), torch.tensor(labels))
    train_data, test_data = torch.utils.data.random_split(data, [1400, len(data) - 1400])
    train_kwargs = {"batch_size": 32}
    train_kwargs["sampler"] = torch.utils.data.DistributedSampler(train_data, store.num_workers, store.rank)  # new
    train_loader = torch.utils.data.DataLoader(train_data, **train_kwargs)
    test_loader = torch.utils.data.DataLoader(test_data, batch_size=100)
    model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.25),
                          nn.Linear(288, 10))
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    optimizer = od.Optimizer(optimizer, model, store)  # new
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(4):
        train(model, train_loader, optimizer)
        test(model, test_loader)
        scheduler.step()


if __name__ == "__main__":
    main()
