"""The project's own modules, loaded once more on the simulated library: the text that ships, without a changed line.

`Image` is one set of copies. Its `changes` put defects of the past back, by text that must be found.
"""
import builtins
import functools
import importlib.util
import sys
import types
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

from scripts.maintain.simulation import disk, processes, stdlib, threads

SIMULATED: Dict[str, Any] = {
    **{name: getattr(stdlib, name) for name in ("time", "signal", "secrets", "sys", "ctypes", "faulthandler",
                                                "resource", "atexit")},
    **{name: getattr(disk, name) for name in ("os", "tempfile", "shutil", "fcntl")},
    **{name: getattr(processes, name) for name in ("select", "selectors", "subprocess", "socket")},
    **{name: getattr(threads, name) for name in ("threading", "queue", "concurrent")},
    "pathlib": types.SimpleNamespace(Path=disk.Path),
    "mmap": types.SimpleNamespace(mmap=None), "uuid": None}  # imported, and not used in any history
COPIED = ("odsgd.launch", "kvstore.job", "odsgd.training.checkpoint", "odsgd.config.files")
REAL = ("odsgd.launch.connections.tunnel", "kvstore.job.agreement", "odsgd.launch.command")
"""Not simulated; what they give is constant, or not used."""
UNKNOWN = ("asyncio", "datetime", "glob", "http", "logging", "multiprocessing", "random", "sched",
           "socketserver", "ssl")
"""They reach the system, or draw, by themselves. Code that comes to need one has to have it simulated first."""
Changes = Mapping[str, Sequence[Tuple[str, str]]]
_code: Dict[Tuple[str, Tuple[Tuple[str, str], ...]], Any] = {}


@functools.lru_cache(maxsize=None)
def _found(name: str) -> Tuple[str, bool]:
    """A module's file, and whether it is a package."""
    found = importlib.util.find_spec(name)
    assert found and found.origin, name
    return found.origin, found.submodule_search_locations is not None


class Image:
    """Copies of modules; those that are not its `own` are the parent's."""

    def __init__(self, changes: Optional[Changes] = None, parent: "Optional[Image]" = None,
                 own: Sequence[str] = (), copied: Tuple[str, ...] = COPIED, real: Sequence[str] = REAL) -> None:
        self.changes: Changes = parent.changes if parent else changes or {}
        self._parent, self._own, self._copied, self._real = parent, own, copied, real
        self._modules: Dict[str, types.ModuleType] = {}
        self.shipped: Dict[Tuple[str, str], Any] = {}  # constants that are set, by module and name
        self._builtins = {**vars(builtins), "__import__": self._import, "open": disk.builtin_open,
                          "print": stdlib.builtin_print}

    def load(self, name: str) -> Any:
        """The copy of a module."""
        if self._parent and name not in self._own:
            return self._parent.load(name)
        if name not in self._modules:
            path, is_package = _found(name)
            module = types.ModuleType(f"simulated.{name}")
            module.__dict__.update(__builtins__=self._builtins, __file__=path, __package__=name)
            self._modules[name] = sys.modules[module.__name__] = module  # dataclasses look there
            if not is_package:  # what a package itself does is for people who import it
                exec(self._compiled(name, path), vars(module))
        return self._modules[name]

    def _compiled(self, name: str, path: str) -> Any:
        changes = tuple(self.changes.get(name, ()))
        if (name, changes) not in _code:
            with open(path, encoding="utf-8") as file:
                text = file.read()
            for old, new in changes:
                assert text.count(old) == 1, f"{name} has not once: {old}"
                text = text.replace(old, new)
            _code[name, changes] = compile(text, path, "exec")
        return _code[name, changes]

    def _import(self, name: str, of: Any = None, local: Any = None, names: Sequence[str] = (), level: int = 0) -> Any:
        if name == "concurrent.futures":
            return SIMULATED["concurrent"].futures
        if name in SIMULATED or name.partition(".")[0] in ("os", "concurrent"):
            return SIMULATED[name.partition(".")[0]]
        assert name.partition(".")[0] not in UNKNOWN, f"{name} is not simulated"
        if not name.startswith(self._copied) or name in self._real:
            return builtins.__import__(name, of, local, names, level)
        module = self.load(name)
        for one in names:
            if not hasattr(module, one):
                full = f"{name}.{one}"
                copied = builtins.__import__(full, fromlist=["x"]) if full in self._real else self.load(full)
                setattr(module, one, copied)
        return module
