"""``odsgd bench``: measure, and report."""
import os
import sys
from pathlib import Path
from typing import Sequence

from kvstore.errors import EXIT_FAILURE
from odsgd.lab.bench import report
from odsgd.lab.bench.config import BenchConfig
from odsgd.lab.bench.results import findings
from odsgd.lab.bench.run import measure
from odsgd.launch.early import handled_by
from odsgd.tools import say, writable


def main(argv: Sequence[str]) -> int:
    """Run a benchmark; 70 if one of its jobs failed."""
    config = BenchConfig.from_flags(argv)
    writable(config.json, config.markdown)
    load_before = os.getloadavg()[0]
    try:
        with handled_by(lambda number, frame: sys.exit(128 + number)):  # which ends the cluster and its job
            measured = measure(config, say)
    finally:
        say("")
    found = findings(config, measured)
    print(report.table(config, found, measured))
    machine = report.machine(config, (load_before, os.getloadavg()[0]))
    command = ["odsgd", "bench", *argv]
    for path, text in ((config.json, report.as_json(config, found, measured, machine)),
                       (config.markdown, report.markdown(config, found, measured, machine, command))):
        if path:
            Path(path).write_text(text, encoding="utf-8")
    return EXIT_FAILURE if measured.failures else 0
