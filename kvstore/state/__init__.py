"""What lasts: arrays and facts by name."""
