"""The methods, by the names `kvstore.create` knows them by. A new one is a file here and a line below.

A method of your own needs no line: `register_method`, an entry point of the group `odsgd.methods`, or a file named
on the command line (``--method-file``).
"""
import importlib
import importlib.util
import sys
import zlib
from pathlib import Path
from typing import Any, Dict, Iterable, Type

from kvstore.errors import ConfigError, unknown
from kvstore.job import environment
from kvstore.methods import fit
from kvstore.methods.acco import ACCO
from kvstore.methods.asgd import ASGD
from kvstore.methods.async_diloco import AsyncDiLoCo
from kvstore.methods.contract import Method
from kvstore.methods.dcasgd import DCASGDA, DCASGDC
from kvstore.methods.decoupled import Decoupled
from kvstore.methods.delayed import ODSGD, Delayed
from kvstore.methods.diloco import DiLoCo
from kvstore.methods.downpour import Downpour
from kvstore.methods.eager import Eager
from kvstore.methods.elastic import EAMSGD, EASGD
from kvstore.methods.pipelined import DSync, PipeSGD
from kvstore.methods.sasgd import SASGD
from kvstore.methods.softsync import SoftsyncSGD
from kvstore.methods.sparseloco import SparseLoCo
from kvstore.methods.sync import SSGD, Local

METHODS: Dict[str, Type[Method]] = {method.name: method for method in (
    Local, SSGD, ODSGD, Delayed, ASGD, DCASGDC, DCASGDA, SoftsyncSGD, Downpour, EASGD, EAMSGD, SASGD, DSync, PipeSGD,
    ACCO, DiLoCo, Eager, AsyncDiLoCo, Decoupled, SparseLoCo)}


def register_method(method: Type[Method]) -> Type[Method]:
    """`kvstore.register_method`."""
    fit.check_file(method, where(method))
    known = METHODS.setdefault(method.name, method)
    if where(known) != where(method):
        raise ConfigError(f"method `{method.name}` is {where(known)} already; give {where(method)} another name")
    METHODS[method.name] = method
    return method


def find(name: str, what: str = "store", also: Iterable[str] = ()) -> Type[Method]:
    """The Method of this name; ConfigError with the nearest known name, or the nearest in `also`."""
    if name not in METHODS:
        from importlib import metadata
        found, group = metadata.entry_points(), "odsgd.methods"
        for point in found.select(group=group) if hasattr(found, "select") else found.get(group, ()):
            if point.name == name:
                register_method(point.load())
    if name not in METHODS:
        raise unknown(what, name, {*METHODS, *also})
    return METHODS[name]


def where(method: Type[Method]) -> str:
    """Where a Method is, as `load` wants it: ``module:Class``, or ``/path/to/file.py:Class``."""
    source = getattr(sys.modules.get(method.__module__), "__odsgd_file__", None)
    return f"{source or method.__module__}:{method.__qualname__}"


_BUILT_IN = {where(method) for method in METHODS.values()}


def load(text: str, trusted: bool = True) -> Type[Method]:
    """Import and register the Method that `text` names: ``file.py``, ``file.py:Class`` or ``module:Class``.

    ConfigError if there is none. It executes the file; where the sender is not trusted, only this package's are taken.
    """
    module_name, _, class_name = text.rpartition(":") if ":" in text else (text, "", "")
    if not trusted and text not in _BUILT_IN:
        raise ConfigError(f"method {text} is not this package's, and this job has no secret (ODSGD_SECRET) by which a "
                          "server could trust the request; start it with `odsgd launch`")
    if not module_name.endswith(".py") and not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f"method `{text}`: expected FILE.py, FILE.py:CLASS or MODULE:CLASS")
    try:
        with environment.job_folder_first():
            load = _load_file if module_name.endswith(".py") else importlib.import_module
            module: Any = load(module_name)
    except ImportError as error:
        raise ConfigError(f"cannot import the method's module `{module_name}`: {error}") from None
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Method)
             and (kind.__qualname__ == class_name if class_name else kind.__module__ == module.__name__)]
    if len(kinds) != 1:
        found = ", ".join(kind.__qualname__ for kind in kinds) or "none"
        raise ConfigError(f"`{text}`: expected one subclass of kvstore.methods.contract.Method, found {found}"
                          + ("; name one as file.py:Class" if kinds else ""))
    return register_method(kinds[0])


def _load_file(file: str) -> Any:
    """The module in a file; once, whatever it is asked for."""
    path = Path(file).expanduser().absolute()
    name = f"odsgd_method_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"no file `{path}`; a method's file must lie at the same path on every host of the job")
    module = importlib.util.module_from_spec(spec)
    module.__odsgd_file__ = str(path)  # type: ignore[attr-defined]
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
