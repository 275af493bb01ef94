"""``odsgd report RUN...``"""
import os
from pathlib import Path
from typing import List

from kvstore.errors import ConfigError, printable
from odsgd.config.flags import Parser
from odsgd.report import page
from odsgd.report.runs import compared, outcome, read_records, table
from odsgd.tools import told_apart

PAGE = "report.html"


def main(argv: List[str]) -> int:
    """Print the table of the runs named, and write the page."""
    parser = Parser("; `odsgd report --help` says how", prog="odsgd report",
                    description="Print a table of runs (accuracy, speed and, for asynchronous runs, staleness), "
                    "and write a page with pictures: accuracy by epoch and by time, throughput, staleness, and, for "
                    "runs with --trace, how an iteration spends its time.")
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="folder of a run (its --out)")
    parser.add_argument("-o", dest="out", metavar="FILE.html", type=Path,
                        help=f"file of the page (default: {PAGE} in the folder of the run, or of all runs)")
    parser.add_argument("--table", action="store_true", help="print the table only, and write no page")
    options = parser.parse_args(argv)
    path = options.out or Path(os.path.commonpath([folder.resolve() for folder in options.runs])) / PAGE
    if path.suffix != ".html":
        raise ConfigError(f"-o {path}: expected a name that ends in .html")
    read = [read_records(folder) for folder in options.runs]
    runs = [run._replace(name=name) for run, name in zip(read, told_apart([run.folder for run in read]))]
    print(table(list(map(outcome, runs))))
    if not options.table:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(page.html(runs), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; name another file for the page (-o)") from None
        print(f"page: {path}")
    for line in compared(list(map(outcome, runs))):
        print(printable(line))
    return 0
