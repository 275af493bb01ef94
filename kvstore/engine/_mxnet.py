"""MXNet, imported the only way that is safe in every process of a job: ``from kvstore.engine._mxnet import mx``.

Two things stand in the way of a plain ``import mxnet``:

* a process whose DMLC_ROLE is ``server`` or ``scheduler`` never returns from it (MXNet enters its own
  server loop), so the variable is out of the environment while the import runs;
* what it needs beforehand (`_before`).

A server or a worker of `odsgd train` runs no script of a user's: there `lean` makes the import short.

MXNet answers a crash with `exit`, which destroys its engine; while a thread waits for the engine, that never ends. So
the signal gets its usual effect back, unless this is imported on another thread than the main one.
"""
import faulthandler
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.engine import _before  # noqa: F401
from kvstore.errors import LacksError
from kvstore.job import environment

if np.__version__.partition(".")[0] != "1" and environment.has_mxnet():
    raise LacksError(f"MXNet 1.9.1 needs NumPy 1, and here is {np.__version__}: pip install 'numpy<2'")
_role = os.environ.pop("DMLC_ROLE", None)
try:
    import mxnet as mx
except ModuleNotFoundError as error:
    if error.name != "mxnet":
        raise
    raise LacksError(f"MXNet is not installed: {environment.INSTALL_MXNET}") from None
finally:
    if _role is not None:
        os.environ["DMLC_ROLE"] = _role

if threading.current_thread() is threading.main_thread():
    prints_stacks = faulthandler.is_enabled()
    faulthandler.disable()
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    if prints_stacks:
        faulthandler.enable(2)

if TYPE_CHECKING:
    NDArray = Any  # MXNet carries no types
else:
    NDArray = mx.nd.NDArray

__all__ = ["NDArray", "mx"]
