"""ResNet-18 on CIFAR-10, with PyTorch: what DistributedDataParallel's scripts do, by a store.

    odsgd launch -n 2 -s auto scripts/examples/resnet18_cifar10.py --data-dir ~/cifar10
    odsgd launch -n 2 -s auto scripts/examples/resnet18_cifar10.py --store ssgd --iterations 50

`--data-dir` holds CIFAR-10's binary files; without it images are made up, of classes that a network can tell apart.
"""
import argparse
import time

import torch
from networks import make
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import odsgd.torch as od
from odsgd.training.data import datasets


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="folder of data_batch_1.bin ... test_batch.bin; made-up images without it")
    parser.add_argument("--store", default="odsgd", help="the method (default: odsgd)")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--iterations", type=int, default=10 ** 9, help="at most so many in all")
    parser.add_argument("--batch-size", type=int, default=128, help="of all workers together")
    parser.add_argument("--examples", type=int, default=2048, help="how many images are made up")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--save", help="file for the weights")
    return parser.parse_args()


def tensors(part: datasets.Examples, arrays: datasets.Arrays) -> TensorDataset:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (arrays.mean, arrays.std))
    return TensorDataset((torch.from_numpy(part.images).float() - mean) / std, torch.from_numpy(part.labels).long())


def augmented(images: torch.Tensor) -> torch.Tensor:
    """Shifted by up to four pixels, and every other time mirrored; a batch as a whole."""
    down, right = torch.randint(9, (2,)).tolist()
    shifted = torch.nn.functional.pad(images, (4, 4, 4, 4))[..., down:down + 32, right:right + 32]
    return shifted.flip(-1) if torch.rand(()) < 0.5 else shifted


def main() -> None:
    flags = parsed()
    arrays = datasets.cifar10(flags.data_dir) if flags.data_dir else datasets.synthetic((3, 32, 32), 10, flags.examples)
    train, test = tensors(arrays.train, arrays), tensors(arrays.test, arrays)

    store = od.create(flags.store)
    sampler = DistributedSampler(train, store.num_workers, store.rank)
    loader = DataLoader(train, flags.batch_size // store.num_workers, sampler=sampler, drop_last=True)
    model = make("resnet18_v1", (3, 32, 32), 10, thumbnail=True).to(memory_format=torch.channels_last)
    loss_of = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=flags.lr, momentum=0.9, weight_decay=5e-4)
    optimizer = od.Optimizer(optimizer, model, store)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, flags.epochs)

    for epoch in range(flags.epochs):
        if store.iteration >= flags.iterations:
            break
        sampler.set_epoch(epoch)
        model.train()
        began, before, losses = time.perf_counter(), store.iteration, []
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_of(model(augmented(images)), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if store.iteration >= flags.iterations:
                break
        scheduler.step()
        ms = 1000 * (time.perf_counter() - began) / (store.iteration - before)
        with store.global_weights():
            model.eval()
            with torch.inference_mode():
                hits = sum((model(images).argmax(1) == labels).sum() for images, labels in DataLoader(test, 250)
                           ) if store.leads else 0
        if store.leads:
            print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean():.4f}, {ms:.0f} ms per iteration, "
                  f"test accuracy {int(hits) / len(test):.2%} after {store.iteration} iterations", flush=True)
    with store.global_weights():
        if flags.save and store.leads:
            torch.save(model.state_dict(), flags.save)


if __name__ == "__main__":
    main()
