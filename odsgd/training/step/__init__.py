"""Kinds of iteration: emulated, in half precision, in virtual time."""
