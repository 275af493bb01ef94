"""From a name and options to a store."""
import dataclasses
from typing import Any, Dict

from ._mxnet import mx
from .algorithms import STORES
from .errors import unknown
from .store import Store
from .transport import Transport

LOCAL = "local"


def create(name: str, transport: Any, options: Dict[str, Any]) -> Store:
    """`kvstore.create`, whose documentation it is."""
    if name not in (*STORES, LOCAL):
        raise unknown("store", name, [*STORES, LOCAL])
    algorithm = "ssgd" if name == LOCAL else name
    program = STORES[algorithm]
    known = [field.name for field in dataclasses.fields(program.Options)]
    for option in options:
        if option not in known:
            raise unknown(f"option of store {name}", option, known)
    checked = program.Options(**options)
    return Store(algorithm, program, transport or connect(name, checked.timeout_s), checked)


def connect(name: str, timeout_s: float) -> Transport:
    """The transport a store of this name runs on by default."""
    if name == LOCAL:
        from .inprocess import Cluster
        return Cluster(1, timeout_s=timeout_s).worker(0)
    from .ps import ParameterServer
    return ParameterServer(timeout_s, STORES[name].synchronous)


def register() -> None:
    """Let ``mx.kv.create("odsgd")`` and ``gluon.Trainer(…, kvstore="odsgd")`` make a store with default options.

    For the Trainer MXNet is taught a line: it makes no store at all for one device, unless the name contains ``dist``.
    """
    for name in STORES:
        mx.kvstore.KVStoreBase.kv_registry.setdefault(name, _Maker(name))
    if not isinstance(mx.gluon.trainer._create_kvstore, _Creator):
        mx.gluon.trainer._create_kvstore = _Creator(mx.gluon.trainer._create_kvstore)


class _Creator:
    """MXNet's way from the Trainer's `kvstore` to a store, with our names made first."""

    def __init__(self, mxnets: Any) -> None:
        self._mxnets = mxnets

    def __call__(self, kvstore: Any, *arguments: Any) -> Any:
        return self._mxnets(create(kvstore, None, {}) if kvstore in STORES else kvstore, *arguments)


class _Maker:
    """What MXNet calls where it expects a class."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self) -> Store:
        return create(self._name, None, {})
