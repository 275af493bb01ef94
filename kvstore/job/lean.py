"""MXNet imported in less than half the time, in a process that runs no script of a user's.

While it is imported MXNet writes 2,600 Python functions, for its operators, and compiles them all. A process
calls few: here a function is compiled when it is first called. `environment.lean` leaves out packages besides.
"""
import functools
import importlib.machinery
import re
import sys
import types
from typing import Any, Dict

from kvstore.job import environment

WRITERS = ("mxnet.ndarray.register", "mxnet.symbol.register")
"""MXNet's modules that write those functions; they call ``exec(text, None, made)`` for each."""


def begin() -> None:
    """Have this process import MXNet so; called before MXNet is imported."""
    environment.lean = True
    sys.meta_path.insert(0, types.SimpleNamespace(find_spec=_find_spec))


def _find_spec(name: str, path: Any = None, target: Any = None) -> Any:
    spec = importlib.machinery.PathFinder.find_spec(name, path) if name in WRITERS else None
    if spec is None or spec.loader is None:
        return None
    run = spec.loader.exec_module

    def exec_module(module: Any) -> None:
        module.exec = functools.partial(_define, vars(module))  # of this module only
        run(module)

    spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


def _define(names: Dict[str, Any], text: str, _: None, made: Dict[str, Any]) -> None:
    """In the place of ``exec(text, None, made)``: the function of this text is compiled when it is first called."""
    found = re.match(r"\s*def (\w+)\(", text)
    if found is None:
        exec(text, names, made)
        return
    name, compiled = found[1], {}  # type: ignore[var-annotated]

    def operator(*arguments: Any, **options: Any) -> Any:
        if name not in compiled:
            exec(text, names, compiled)
        return compiled[name](*arguments, **options)

    made[name] = operator
