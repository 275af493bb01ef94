"""The layer on MXNet: every algorithm is a KVStore.

    import odsgd                                  # first: a process launched as a server becomes one here
    import kvstore
    store = kvstore.create("odsgd", optimizer_local="dcasgd_a", lr_local=0.5, warmup=200)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)

MXNet is imported with the first store, not before.
"""
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, KVStoreError, ProtocolError, RoundTimeoutError, StoreClosedError, WorkerLostError

if TYPE_CHECKING:
    from .store import Store

__all__ = ["create", "register", "ConfigError", "KVStoreError", "ProtocolError", "RoundTimeoutError",
           "StoreClosedError", "WorkerLostError"]


def create(name: str, transport: Any = None, **options: Any) -> "Store":
    """Make a store for ``gluon.Trainer``.

    Parameters
    ----------
    name : ``ssgd``, ``odsgd`` or ``delayed``: a worker of a job (`odsgd launch`); ``local``: SSGD in this process alone
    transport : what carries it; None: the parameter server of the job
    options : see the ``Options`` of the algorithm's file in `kvstore.algorithms`

    Collective and waiting, the first time in a process: all workers of the job meet here.
    """
    from . import factory
    return factory.create(name, transport, options)


def register() -> None:
    """Make the names known to ``mx.kv.create`` as well. ``import odsgd`` does it."""
    from . import factory
    factory.register()
