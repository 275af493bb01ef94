"""A folder in front of a worker's PYTHONPATH, where the job has a store for scripts that know nothing of it."""
import os

FOLDER = os.path.dirname(os.path.abspath(__file__))
