"""Imported first, by a job of the tests: its processes then import MXNet as `odsgd train` does, in half the time."""
from kvstore.job import lean

lean.begin()
