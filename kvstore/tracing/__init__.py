"""Timelines: what a process does when."""
