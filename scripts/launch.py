#!/usr/bin/env python3
"""``odsgd launch`` from a checkout: start a job on this machine or many (see odsgd/launch/)."""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from odsgd.cli import main

if __name__ == "__main__":
    sys.exit(main(["launch", *sys.argv[1:]]))
