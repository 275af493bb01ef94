#!/usr/bin/env python
"""``odsgd train`` from a checkout: ``scripts/train.py --dataset digits --kvstore local``."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from odsgd.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
