"""NumPy as MXNet 1.9.1 expects it: with ``numpy.bool``, which NumPy 1.24 removed."""
import numpy

if "bool" not in vars(numpy):
    numpy.bool = bool  # type: ignore[attr-defined]
