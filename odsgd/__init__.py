"""OD-SGD and its relatives for Gluon and PyTorch: training with delayed and stale gradients.

Import this before mxnet, if the script has that. In a process that a tracker has started as a parameter server or
scheduler (DMLC_ROLE), the import serves until the job is over and then ends the process: one script is all roles, as
with MXNet itself.
"""
import os
import sys

from odsgd.launch import early

if early.command() == "launch":
    early.end_on_signals()

import kvstore

if not hasattr(kvstore, "register_method"):
    raise ImportError(f"{kvstore.__file__} is not odsgd's kvstore; rename it, or take its folder out of PYTHONPATH")

from kvstore._version import VERSION
from kvstore.fronts.gluon import by_name
from kvstore.job import environment, lean

if early.command() == "train":
    lean.begin()

__version__ = VERSION

if os.environ.get("DMLC_ROLE") in ("server", "scheduler") and not environment.serving:
    from kvstore.weights.servers.__main__ import main

    sys.exit(main())

if "mxnet" in sys.modules:
    kvstore.register()  # mx.kv.create("odsgd")
else:
    by_name.install_when_imported(kvstore.create)
