"""``python scripts/reproduction``: what the command scripts/reproduce starts, with the Python of .venv."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.reproduction.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
