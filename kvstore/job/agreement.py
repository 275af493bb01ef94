"""Checks that all workers mean the same, before training starts, so that a difference is named and not trained on.

Different versions of odsgd do not understand each other: an error. With other versions of MXNet, NumPy or Python the
job goes on, after one table.
"""
import collections
import difflib
import hashlib
import json
import os
import socket
import sys
from typing import Any, Dict, List, Protocol, Sequence

import numpy as np

from kvstore import _version
from kvstore._version import VERSION
from kvstore.errors import LacksError, ProtocolError
from kvstore.job import environment


class Totals(Protocol):
    """What makes sums over the workers: a transport, or what several transports share."""

    worker_rank: int
    num_workers: int

    def total(self, array: np.ndarray) -> np.ndarray:
        """As `Transport.total`."""


def check(transport: Totals, what: str, mine: List[Any]) -> None:
    """ProtocolError with a diff unless all workers, except lost ones, have the same list `mine`. Collective; waits."""
    if environment.joined():
        return  # `servers.ParameterServers` compares it with what the servers know
    lines = [line if isinstance(line, str) else json.dumps(line) for line in mine]
    digest = np.frombuffer(hashlib.sha256("\n".join(lines).encode()).digest(), np.uint8)
    digests = _gather(transport, digest)
    there = digests.any(axis=1)
    silent = set(np.flatnonzero(~there).tolist())
    if not environment.all_lost(silent):
        raise ProtocolError(f"worker {min(silent - environment.lost_workers())} has made another call where others "
                            f"compare {what}; all workers make the same collective calls, in the same order")
    first, *others = np.flatnonzero(there)
    if np.all(digests[others] == digests[first]):
        return
    texts = gather_texts(transport, "\n".join(lines))
    for other in others:
        if texts[other] != texts[first]:
            diff = difflib.unified_diff(texts[first].splitlines(), texts[other].splitlines(), f"worker {first}",
                                        f"worker {other}", n=0, lineterm="")
            raise ProtocolError(f"workers {first} and {other} differ in {what}; all workers must run the same script "
                                "with the same settings\n  " + "\n  ".join(diff))


def _gather(transport: Totals, mine: np.ndarray) -> np.ndarray:
    """Every worker's bytes, one row each: a sum in which each has its own row."""
    table = np.zeros((transport.num_workers, mine.size), np.float32)
    table[transport.worker_rank] = mine
    return transport.total(table).astype(np.uint8)


def gather_texts(transport: Totals, mine: str) -> List[str]:
    """Every worker's text; empty for one that the job has lost. Collective; waits.

    A worker that is lost after the first sum leaves zeros in the second, where its text or the end of it would be.
    """
    data = np.frombuffer(mine.encode(), np.uint8)
    lengths = np.zeros(transport.num_workers, np.float32)
    lengths[transport.worker_rank] = data.size
    lengths = transport.total(lengths).astype(int)
    padded = np.zeros(lengths.max(), np.uint8)
    padded[:data.size] = data
    texts = [row[:length] for row, length in zip(_gather(transport, padded), lengths)]
    return [text.tobytes().decode() if text.all() else "" for text in texts]


def brings_own(transport: Totals) -> bool:
    """Whether this worker goes on with its own values: worker 0, whose values the others get by sums, and a worker that
    has joined a running job, which gets nothing by sums."""
    return transport.worker_rank == 0 or environment.joined() > 0


def from_worker_0(transport: Totals, data: bytes) -> bytes:
    """Worker 0's `data` on every worker; its own on one that has joined a running job. Collective; waits."""
    return from_one(transport, data if brings_own(transport) else b"")


def from_one(transport: Totals, mine: bytes) -> bytes:
    """The bytes of the only worker that has any, on all of them: a sum, two bytes a float. Collective; waits."""
    size = int(transport.total(np.array([len(mine) >> 16, len(mine) & 0xffff])).astype(np.int64) @ [1 << 16, 1])
    if size == 0:
        return b""
    pairs = np.zeros((size + 1) // 2, np.uint16)
    pairs.view(np.uint8)[:len(mine)] = np.frombuffer(mine, np.uint8)
    return transport.total(pairs).astype(np.uint16).tobytes()[:size]


def check_launcher() -> None:
    """LacksError if the launcher of this worker runs another version of odsgd, before any process is called: servers
    of another version may read its messages otherwise."""
    launcher = os.environ.get("ODSGD_VERSIONS", VERSION).split()[0]
    if launcher != VERSION:
        raise LacksError(f"this worker runs odsgd {VERSION}, and its job's launcher {launcher}; install {launcher} "
                         f"for {sys.executable} on {socket.gethostname()}")


def compare_versions(transport: Totals, servers: Sequence[str] = ()) -> None:
    """Compare the versions of all workers, the launcher and the `servers`, which worker 0 knows. Collective; waits.

    ProtocolError if versions of odsgd differ. If other versions differ, worker 0 prints a table.
    """
    workers = gather_texts(transport, _version.running_versions())
    of_servers = from_worker_0(transport, "\n".join(servers).encode()).decode()
    launcher = {"launcher": os.environ["ODSGD_VERSIONS"]} if "ODSGD_VERSIONS" in os.environ else {}
    by_process = {**launcher, **{f"worker {rank}": text for rank, text in enumerate(workers) if text},
                  **{f"server {rank}": text for rank, text in enumerate(of_servers.splitlines())}}
    if len({text.split()[0] for text in by_process.values()}) > 1:
        raise ProtocolError("the processes of this job run different versions of odsgd; install the same on all hosts\n"
                            + _table(by_process))
    if transport.worker_rank == 0 and any(len(set(column) - {_version.UNKNOWN}) > 1
                                          for column in zip(*(text.split() for text in by_process.values()))):
        print("warning: the processes of this job run different versions, and may compute different bits\n"
              + _table(by_process), file=sys.stderr, flush=True)


def _table(by_process: Dict[str, str]) -> str:
    """A line for each set of versions, with the processes that have it."""
    processes: Dict[str, List[str]] = collections.defaultdict(list)
    for name, text in by_process.items():
        processes[text].append(name)
    rows = [[*_version.PROGRAMS, ""], *([*text.split(), ", ".join(names)] for text, names in processes.items())]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
