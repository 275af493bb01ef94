"""Which versions of odsgd, MXNet, NumPy and Python the processes of a job run, compared before anything is trained.

Different versions of odsgd do not understand each other: an error. With the others the job goes on, after one table.
"""
import collections
import os
import platform
import sys
from typing import TYPE_CHECKING, Dict, List, Sequence

from kvstore._version import VERSION
from kvstore.errors import ConfigError, ProtocolError

if TYPE_CHECKING:
    from kvstore.job.agreement import Totals

OF = ("odsgd", "mxnet", "numpy", "python")
UNKNOWN = "-"


def mine() -> str:
    """This process's versions, in the order of `OF`; the launcher imports neither MXNet nor, as a rule, NumPy."""
    imported = (getattr(sys.modules.get(name), "__version__", UNKNOWN) for name in ("mxnet", "numpy"))
    return " ".join([VERSION, *imported, platform.python_version()])


def check_launcher() -> None:
    """ConfigError if the launcher of this process runs another version of odsgd, before any process is called."""
    launcher = os.environ.get("ODSGD_VERSIONS", VERSION).split()[0]
    if launcher != VERSION:
        raise ConfigError(f"this worker runs odsgd {VERSION} and the job that it would join {launcher}; install "
                          f"{launcher} on this host")


def compare(transport: "Totals", servers: Sequence[str] = ()) -> None:
    """Compare the versions of all workers, the launcher and the `servers`, which worker 0 knows. Collective; waits.

    ProtocolError if versions of odsgd differ. If other versions differ, worker 0 prints a table.
    """
    from kvstore.job import agreement  # which imports NumPy
    workers = agreement.gather_texts(transport, mine())
    of_servers = agreement.from_worker_0(transport, "\n".join(servers).encode()).decode()
    launcher = {"launcher": os.environ["ODSGD_VERSIONS"]} if "ODSGD_VERSIONS" in os.environ else {}
    by_process = {**launcher, **{f"worker {rank}": text for rank, text in enumerate(workers) if text},
                  **{f"server {rank}": text for rank, text in enumerate(of_servers.split("\n") if of_servers else ())}}
    if len({text.split()[0] for text in by_process.values()}) > 1:
        raise ProtocolError("the processes of this job run different versions of odsgd; install the same on all hosts\n"
                            + table(by_process))
    if transport.worker_rank == 0 and any(len(set(column) - {UNKNOWN}) > 1
                                          for column in zip(*(text.split() for text in by_process.values()))):
        print("warning: the processes of this job run different versions, and may compute different bits\n"
              + table(by_process), file=sys.stderr, flush=True)


def table(by_process: Dict[str, str]) -> str:
    """A line for each set of versions, with the processes that have it."""
    processes: Dict[str, List[str]] = collections.defaultdict(list)
    for name, text in by_process.items():
        processes[text].append(name)
    rows = [[*OF, ""], *([*text.split(), ", ".join(names)] for text, names in processes.items())]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
