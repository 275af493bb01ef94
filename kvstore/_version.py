"""The version of odsgd. Both packages have it, since they are installed together, and the tag `vVERSION`."""
import subprocess
import sys
from pathlib import Path

VERSION = "0.5.0"
BUILT_FROM = "_commit.txt"
PROGRAMS = ("odsgd", "mxnet", "numpy", "python")
UNKNOWN = "-"


def commit() -> str:
    """Where a checkout stands, with `-dirty` if it was changed, or what a wheel was built from; empty if unknown."""
    here = Path(__file__).resolve().parent
    if (here.parent / ".git").exists():
        try:
            done = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude", "*"], cwd=str(here),
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.decode().strip()
    built = here / BUILT_FROM
    return built.read_text(encoding="ascii").strip() if built.is_file() else ""


def running_versions() -> str:
    """What this process runs, in the order of `PROGRAMS`; the launcher imports neither MXNet nor, as a rule, NumPy."""
    imported = (getattr(sys.modules.get(name), "__version__", UNKNOWN) for name in ("mxnet", "numpy"))
    return " ".join([VERSION, *imported, sys.version.split()[0]])
