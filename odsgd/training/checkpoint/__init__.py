"""Checkpoints: files, disks, a second place."""
