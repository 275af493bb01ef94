"""One worker's training run."""
