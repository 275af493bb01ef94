"""A script of Hugging Face's Accelerate by a store: gradients of two batches are added up, the rate falls.

    odsgd launch -n 2 -s 1 scripts/examples/accelerate_torch.py
    torchrun --nproc-per-node 2 scripts/examples/accelerate_torch.py

Four lines differ from the original. Added ones end in `# new`; above a changed one, `# was:` has the old line.
"""
import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import odsgd.torch as od  # new


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1200)
    loader, test_loader = DataLoader(data, 16, shuffle=True, drop_last=True), DataLoader(data, 100)
    model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)
    scheduler = accelerator.prepare(scheduler)
    store = od.create("odsgd", optimizer_local="adam", warmup=50)  # new
    optimizer.optimizer = od.Optimizer(optimizer.optimizer, model, store)  # new
    for _ in range(20):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(functional.cross_entropy(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    model.eval()
    right = 0
    # was: with torch.no_grad():
    with store.global_weights(), torch.no_grad():
        for x, y in test_loader:
            found, y = accelerator.gather_for_metrics((model(x).argmax(1), y))
            right += int((found == y).sum())
    accelerator.print(f"{right / len(data):.1%} are right")
    accelerator.end_training()


if __name__ == "__main__":
    main()
