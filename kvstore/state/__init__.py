"""State that checkpoints keep: arrays and facts by name."""
