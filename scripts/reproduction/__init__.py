"""``scripts/reproduce``. How its modules follow each other stands in docs/explanation/virtual-time.md."""
