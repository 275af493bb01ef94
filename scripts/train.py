#!/usr/bin/env python
"""``odsgd train`` from a checkout: ``scripts/train.py --dataset digits --kvstore local``."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    sys.argv[:1] = ["odsgd", "train"]  # what this process is, before the first import
    from odsgd.cli import main
    sys.exit(main())
