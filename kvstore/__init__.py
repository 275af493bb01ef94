"""Every method is a KVStore.

    import odsgd                                  # first: a process launched as a server becomes one here
    import kvstore
    store = kvstore.create("odsgd", optimizer_local="dcasgd_a", lr_local=0.5, warmup=200)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)

MXNet is imported with the first store, and NumPy with the first name that needs it.
"""
from typing import TYPE_CHECKING, Any, Type, Union

from kvstore.errors import (
    ConfigError,
    DivergedError,
    KVStoreError,
    ProtocolError,
    RoundTimeoutError,
    StoreClosedError,
    WorkerLostError,
)

if TYPE_CHECKING:
    from kvstore.fronts.gluon.legacy import LegacyStore
    from kvstore.messages.seam import Transport
    from kvstore.methods.contract import Method

__all__ = ["create", "register", "register_method", "ConfigError", "DivergedError", "KVStoreError", "ProtocolError",
           "RoundTimeoutError", "StoreClosedError", "WorkerLostError"]


def create(name: str, transport: "Union[str, Transport, None]" = None, **options: Any) -> "LegacyStore":
    """Make a store for ``gluon.Trainer``.

    Without a server each worker applies the global optimizer itself, with the learning rate of its own trainer: set the
    same on all. Where it differs, `Store.global_weights` raises ProtocolError.

    Collective and waiting, the first time in a process: all workers of the job meet here.

    Parameters
    ----------
    name
        ``ssgd``, ``odsgd``, ``asgd``, ``pipesgd`` … (`kvstore.methods`), in a worker of a job (`odsgd launch`); or
        ``local``: SSGD in this process alone. Options may be written behind it: ``odsgd:warmup=200:lr_local=0.05``
    transport
        ``server``, ``ring`` or ``sharded``, where a store runs on it; or a `Transport` of your own. None: the store's
        default, which is the job's parameter servers, and the ring of its workers for ``sasgd``, ``dsync``,
        ``pipesgd``, ``acco``
    options
        see the ``Options`` in the method's file in `kvstore.methods`
    """
    from kvstore.fronts import choice
    with choice.errors_in_a_job_end_it():  # of MXNet's import
        from kvstore.fronts.gluon.legacy import LegacyStore
    return LegacyStore(*choice.checked(name, transport, options))


def register_method(method: "Type[Method]") -> "Type[Method]":
    """Make a Method known by its `name`. A decorator; a second call with the same class does nothing."""
    from kvstore import methods
    return methods.register_method(method)


def register() -> None:
    """Make the names known to MXNet as well (`kvstore.fronts.gluon.by_name`). ``import odsgd`` does it."""
    from kvstore.engine._mxnet import mx
    from kvstore.fronts.gluon import by_name
    by_name.install(mx, create)
