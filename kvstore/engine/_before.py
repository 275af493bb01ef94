"""What must be so before MXNet is imported, by a store or by a script.

* NumPy is as MXNet 1.9.1 expects it: with ``numpy.bool``, which NumPy 1.24 removed.
* MXNet joins up to 15 operators into one operation of its engine, so that the gradients of several layers appear
  together, and nothing overlaps. That is switched off for the backward pass.
"""
import os

import numpy

os.environ.setdefault("MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_BWD", "1")

if "bool" not in vars(numpy):
    numpy.bool = bool  # type: ignore[attr-defined]
