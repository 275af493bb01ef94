"""PyTorch scripts on the stores.

    import odsgd.torch as od                                    # before torch or after it, and before mxnet
    store = od.create("odsgd", lr_local=0.05, warmup=200)
    optimizer = od.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, store)

docs/how-to/pytorch.md begins with a script of DistributedDataParallel's, and says which lines of others change.
"""
from kvstore.fronts.torch.optimizer import GradScaler, Optimizer
from kvstore.fronts.torch.store import TorchStore, create

__all__ = ["Optimizer", "TorchStore", "create", "GradScaler"]
