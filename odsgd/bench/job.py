"""One measured job, on the launching machine: ``python -m odsgd.bench.job FLAGS.json``.

It is `odsgd launch` with those flags; but stock MXNet's jobs get stock servers.
"""
from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from odsgd.launch import cli, supervise


def main(file: str) -> int:
    """Run it to its end; returns the launcher's exit code."""
    asked = json.loads(Path(file).read_text(encoding="utf-8"))
    job = cli.parse(asked["flags"])
    if asked["server_command"]:
        job = dataclasses.replace(job, server_command=tuple(asked["server_command"]))
    return supervise.run(job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
