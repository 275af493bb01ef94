"""MXNet imported in a fifth of the processor time, in a process that runs no script of a user's.

While it is imported MXNet writes and compiles 2,600 Python functions, for its operators. A process calls few: here a
function is written when it is first called, without its documentation. Packages that only MXNet's extras use (its
scikit-learn interface, its tests, plots) are left out, or imported when they are used.
"""
import functools
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any, Callable

EXTRAS = ("bokeh", "cv2", "pandas", "scipy", "sklearn")
"""Packages that MXNet can do without."""
LATER = ("mxnet.contrib.onnx", "mxnet.contrib.quantization", "mxnet.contrib.text", "mxnet.test_utils", "requests")
"""Modules that are imported when somebody asks them for something."""


def begin() -> None:
    """Have this process import MXNet so; called before MXNet is imported."""
    sys.meta_path.insert(0, types.SimpleNamespace(find_spec=_find_spec))


def _find_spec(name: str, path: Any = None, target: Any = None) -> Any:
    if name in EXTRAS and getattr(getattr(sys.modules.get("mxnet"), "__spec__", None), "_initializing", False):
        raise ModuleNotFoundError(f"{name} is left out while MXNet is imported", name=name)
    if name not in (*LATER, "mxnet.base", "distutils"):
        return None
    spec = importlib.machinery.PathFinder.find_spec(name, path)  # distutils: Python's, not all of setuptools
    if spec is None or spec.loader is None:
        return None
    if name in LATER:
        spec.loader = importlib.util.LazyLoader(spec.loader)
    elif name == "mxnet.base":
        spec.loader.exec_module = functools.partial(_run_base, spec.loader.exec_module)  # type: ignore[method-assign]
    return spec


def _run_base(run: Callable[[Any], None], module: Any) -> None:
    """Run `mxnet.base`, and let it register operators whose functions are made later."""
    run(module)
    register, register_np = module._init_op_module, module._init_np_op_module
    module._init_op_module = lambda root, name, make: register(root, name, functools.partial(_operator, make))
    module._init_np_op_module = lambda make_op_func, **names: register_np(
        make_op_func=functools.partial(_operator, make_op_func), **names)


def _operator(make: Callable[..., Any], handle: Any, name: str, func_name: str) -> Any:
    """The function of an operator, which is made when it is first called."""
    made = functools.lru_cache(maxsize=None)(lambda: make(handle, name, func_name))

    def operator(*arguments: Any, **options: Any) -> Any:
        return made()(*arguments, **options)

    operator.__name__, operator.__doc__ = func_name, ""  # MXNet adds to the text
    return operator
