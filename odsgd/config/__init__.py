"""Options of a training run, checked before anything slow is imported."""
