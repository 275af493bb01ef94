"""Python imports this at its start, in workers of ``odsgd launch --store``: `import mxnet` then imports odsgd first.

So it is as if the script began with `import odsgd`, and no file is changed. Nothing is imported before the script
imports mxnet, because environment variables that it sets before should count.
"""
import importlib.machinery
import os
import sys
import types
from typing import Any


def _find_spec(name: str, path: Any = None, target: Any = None) -> Any:
    """For mxnet, the module that odsgd imports in a safe order; None: Python imports as usual."""
    if name != "mxnet" or "odsgd" in sys.modules:
        return None
    import odsgd  # noqa: F401  isort: skip
    import kvstore
    kvstore.register()
    mxnet = sys.modules[name]
    own = mxnet.__spec__

    def exec_module(module: Any) -> None:
        module.__spec__ = own

    loader: Any = types.SimpleNamespace(create_module=lambda spec: mxnet, exec_module=exec_module)
    mxnet.__spec__ = importlib.machinery.ModuleSpec(name, loader)  # Python takes the spec of a module that exists
    return mxnet.__spec__


def _next() -> None:
    """Import the sitecustomize that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    mine = sys.modules.pop(__name__)
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != here]
    try:
        importlib.import_module(__name__)
    except ModuleNotFoundError as error:
        if error.name != __name__:
            raise
        sys.modules[__name__] = mine  # Python expects it there


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, types.SimpleNamespace(find_spec=_find_spec))
    _next()
