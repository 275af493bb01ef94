"""From a name and options to a store."""
import dataclasses
from typing import Any, Dict, List

from kvstore.algorithms import STORES
from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError, unknown
from kvstore.gluon.store import Store
from kvstore.wire.interfaces import Transport

LOCAL = "local"


def create(name: str, transport: Any, options: Dict[str, Any]) -> Store:
    """`kvstore.create`, whose documentation it is."""
    if isinstance(transport, str):
        options, transport = {**options, "transport": transport}, None
    elif transport is not None and "transport" in _known(name):
        options = {**options, "transport": "server" if transport.has_servers else "ring"}
    checked = read(name, options)
    program = STORES[_algorithm(name)]
    transport = transport or connect(name, checked)
    if transport.has_servers == program.on_ring(checked):
        needs, has = ("a ring", "servers") if transport.has_servers else ("servers", "none")
        raise ConfigError(f"store {name} needs {needs} and the transport given has {has}")
    if getattr(checked, "codec", "none") != getattr(transport, "codec_name", "none"):
        raise ConfigError(f"store {name} is to send with codec {checked.codec} and the transport given has "
                          f"{transport.codec_name}")
    return Store(_algorithm(name), program, transport, checked)


def read(name: str, options: Dict[str, Any]) -> Any:
    """The checked `Options` of the store of this name."""
    known = _known(name)
    for option in options:
        if option not in known:
            raise unknown(f"option of store {name}", option, known)
    return STORES[_algorithm(name)].Options(**options)


def _known(name: str) -> List[str]:
    if name not in (*STORES, LOCAL):
        raise unknown("store", name, [*STORES, LOCAL])
    return [field.name for field in dataclasses.fields(STORES[_algorithm(name)].Options)]


def _algorithm(name: str) -> str:
    return "ssgd" if name == LOCAL else name


def connect(name: str, options: Any) -> Transport:
    """The transport that a store of this name with these `Options` runs on by default."""
    if name == LOCAL:
        from kvstore.transports.inprocess import Cluster
        return Cluster(1, timeout_s=options.timeout_s).worker(0)
    program = STORES[name]
    if program.on_ring(options):
        from kvstore.transports.ring import Ring
        return Ring(options.timeout_s, getattr(options, "codec", "none"))
    from kvstore.transports.ps import ParameterServer
    return ParameterServer(options.timeout_s, program.synchronous)


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
