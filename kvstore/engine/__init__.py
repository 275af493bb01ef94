"""MXNet and its dependency engine: Python functions as operations, optimizers applied to flat arrays."""
