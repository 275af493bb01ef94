"""A folder that is first in PYTHONPATH of workers whose script gets its store from `--store`."""
import os

FOLDER = os.path.dirname(os.path.abspath(__file__))
