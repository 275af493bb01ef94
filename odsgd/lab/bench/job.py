"""One measured job, on the launching machine: ``python -m odsgd.lab.bench.job SPEC.json``.

It is `odsgd launch` with the flags that stand there and with servers that note their usage, stock MXNet's where that is
measured.
"""
import dataclasses
import json
import sys
from pathlib import Path

from odsgd.launch import command, supervisor


def main(file: str) -> int:
    """Run it to its end; returns the launcher's exit code."""
    asked = json.loads(Path(file).read_text(encoding="utf-8"))
    job = command.parse(asked["flags"])
    return supervisor.run(dataclasses.replace(job, server_command=tuple(asked["server_command"])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
