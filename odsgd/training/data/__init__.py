"""Data sets and how they are fed."""
