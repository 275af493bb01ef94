"""One model in training, whatever its framework and transport."""
