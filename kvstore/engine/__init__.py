"""Python functions as operations of an engine: of MXNet's on its arrays, of ours on NumPy's."""
