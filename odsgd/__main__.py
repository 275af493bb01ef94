"""``python -m odsgd``: the same as the command ``odsgd``."""
import sys

from odsgd.cli import main

if __name__ == "__main__":
    sys.exit(main())
