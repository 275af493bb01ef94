"""Optimizers: how they are applied to a bucket, and what they are called."""
