"""``python -m odsgd.launch``."""
import sys

from odsgd.launch import main

if __name__ == "__main__":
    sys.exit(main())
