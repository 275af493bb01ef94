#!/usr/bin/env python3
"""A worker joins a running job of `decoupled`, and another one dies: how far each worker is, and the loss.

    scripts/maintain/experiments/join.py        1 to 5 minutes; writes docs/results/join.csv and join.png

Real processes on this machine: three places, one of them empty at first, on sockets. Twice a second it notes the
iteration of every worker, which is what `odsgd watch` shows; test losses are worker 0's.
"""
import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any, List, Tuple

from odsgd import tools
from odsgd.launch import linux
from odsgd.launch.view import status_file

ROOT = Path(__file__).resolve().parents[3]
OUT = ROOT / "docs" / "results" / "join.csv"
EPOCHS = 700
JOINS, DIES = 1500, 6000
"""Iterations of worker 0 when a worker is asked to join, and, if that has joined, when another one is killed."""
TRAIN = ("train", "--config", str(ROOT / "configs/digits_async.yaml"), "--kvstore", "decoupled", "--H", "20",
         "--momentum-outer", "0", "--lr", "0.002", "--epochs", str(EPOCHS), "--eval-every", "10",
         "--checkpoint-every", "0")
Row = Tuple[float, str, float]
"""Seconds since the launch; a worker, `test loss`, or what has happened to a worker; a number."""


def watched(run: Path) -> List[Row]:
    """Launch the job, let one worker join and kill another; what was seen meanwhile."""
    odsgd, began = [sys.executable, "-m", "odsgd"], time.time()
    job = subprocess.Popen([*odsgd, "launch", "-n", "3", "--spare", "1", "-s", "1", "--wire", "sockets",
                            "--on-worker-loss", "continue", *odsgd, *TRAIN, "--out", str(run)],
                           stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                           env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert job.stderr
    os.set_blocking(job.stderr.fileno(), False)
    rows: List[Row] = []
    to_join, to_die = True, True
    while job.poll() is None:
        time.sleep(0.5)
        seconds = time.time() - began
        for line in job.stderr.readlines():
            found = re.match(r"odsgd launch: (worker \d) (starts|has joined|was lost)", line)
            rows += [(seconds, " ".join(found.groups()), 0)] if found else []
        facts: Any = status_file.read(job.pid) or {}
        at = {row["name"]: row["at"] for row in facts.get("rows", []) if row["name"].startswith("worker")}
        rows += [(seconds, name, iteration) for name, iteration in at.items() if iteration]
        if to_join and at.get("worker 0", 0) > JOINS:
            subprocess.Popen([*odsgd, "join", str(job.pid)], stdout=subprocess.DEVNULL)
            to_join = False
        if to_die and at.get("worker 2") and at.get("worker 0", 0) > DIES:
            os.kill(next(pid for pid in linux.descendants(job.pid) if is_worker_1(pid)), signal.SIGKILL)
            to_die = False
    assert job.returncode == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    offset = datetime.fromisoformat(records[0]["time"]).timestamp() - began
    return rows + [(offset + record["seconds_since_start"], "test loss", record["test_loss"])
                   for record in records if record["event"] == "epoch" and "test_loss" in record]


def is_worker_1(pid: int) -> bool:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return b"ODSGD_WORKER_RANK=1" in variables and b"DMLC_ROLE=worker" in variables


def draw(rows: List[Row]) -> None:
    pyplot = tools.pyplot("the page")
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 3.6))
    for what in ("worker 0", "worker 1", "worker 2", "test loss"):
        mine = [(seconds, number) for seconds, name, number in rows if name == what]
        panels[int(what == "test loss")].plot(*zip(*mine), label=what, linewidth=1.2,
                                         color="black" if what == "test loss" else f"C{what[-1]}")
    for seconds, what, _ in rows:
        if what.endswith(("starts", "joined", "lost")):
            for panel in panels:
                panel.axvline(seconds, color=f"C{what.split()[1]}", linestyle=":" if "starts" in what else "--")
            panels[0].text(seconds, 0, f" {what}", rotation=90, fontsize=7, va="bottom", ha="right")
    panels[0].set(xlabel="seconds", ylabel="iteration", title="how far each worker is")
    panels[1].set(xlabel="seconds", ylabel="test loss", yscale="log", title="the servers' weights")
    panels[0].legend(fontsize=7)
    for panel in panels:
        panel.grid(alpha=0.3, which="both")
    figure.tight_layout()
    figure.savefig(OUT.with_suffix(".png"), dpi=80)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = watched(Path(folder) / "run")
    with OUT.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["seconds", "what", "number"])
        table.writerows([f"{seconds:.1f}", what, f"{number:.5g}"] for seconds, what, number in rows)
    draw(rows)


if __name__ == "__main__":
    main()
