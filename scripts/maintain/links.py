#!/usr/bin/env python3
"""Loss against time and against bytes, for methods that send gradients or weights, on links of several rates.

    scripts/maintain/links.py [FOLDER]        15 minutes on two shared cores; writes docs/results/weights.csv and .png

Real gradients of four workers on handwritten digits (scikit-learn's), in virtual time: 10 ms an iteration, one server
on a host of its own. All take SGD steps of the same rate; weights travel every 20 steps. `FOLDER` keeps the runs. The
control: the same steps of one worker, with and without outer momentum; of these runs only the end is kept.
"""
import csv
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from kvstore.messages.codecs import codec
from odsgd import tools
from odsgd.report.runs import METRICS, events_of

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "results" / "weights.csv"
H, PARAMETERS = 20, 17226
METHODS: Dict[str, str] = {
    "SSGD": "ssgd", "OD-SGD": "odsgd --warmup 20", "eager": "eager", "DiLoCo": "diloco",
    "streaming": "diloco --fragments 6 --delay 2", "async": "async_diloco", "decoupled": "decoupled --quorum 2",
    "sparse": "sparseloco"}
LINKS = ("10mbit", "100mbit", "1gbit", "10gbit")
Curve = List[Tuple[float, float, float]]
"""Virtual seconds, bytes of a worker both ways, and test loss."""


class Job(NamedTuple):
    method: str
    link: str
    workers: int = 4
    momentum: float = 0
    seed: int = 0


SIDE_BY_SIDE = [Job(method, link) for link in LINKS for method in METHODS]
CONTROL = [Job(method, "10gbit", workers, momentum, seed) for workers in (1, 4) for seed in (0, 1) for method in METHODS
           for momentum in (0, 0.5) if method != "OD-SGD" and (method != "SSGD" or not momentum)
           and (workers > 1 or method not in ("eager", "async"))]
"""Of one worker these two are DiLoCo (identities 11 and 12)."""


def bytes_of(method: str, iterations: int) -> float:
    """What a worker has sent and received, without headers."""
    plain = codec("none").nbytes(PARAMETERS)
    if method in ("SSGD", "OD-SGD"):
        return 2.0 * plain * iterations
    there = codec("largest_2bit:64").nbytes(PARAMETERS) if method == "sparse" else plain
    return (there + plain) * iterations / H


def run(folder: Path, job: Job) -> Curve:
    method, link, workers, momentum, seed = job
    out = folder / "_".join(map(str, job))
    store, *options = METHODS[method].split()
    if store == "decoupled" and workers == 1:
        options = []
    if store not in ("ssgd", "odsgd"):
        options += ["--H", str(H), "--momentum-outer", str(momentum)]
    cluster = folder / f"{link}_{workers}.yaml"
    cluster.write_text(f"workers: {workers}\nservers: 1\nlinks: {{goodput: {link}, latency: 1ms}}\n"
                       "compute: {iteration: 10ms, draws: \"lognormal:0.2\"}\n")
    records = trained(out, [
        "--kvstore", store, *options, "--cluster", str(cluster), "--epochs", str(15 * workers), "--eval-every",
        str(workers), "--seed", str(seed)])
    return [(record["virtual_seconds"], bytes_of(method, record["iteration"]), record["test_loss"])
            for record in records if "test_loss" in record]


def trained(out: Path, options: Sequence[str]) -> List[Dict[str, Any]]:
    """What a training says after each epoch; one that has ended in `out` is not run again."""
    path = out / METRICS
    if not path.exists() or not any(record["event"] == "end" for record in events_of(path)):
        subprocess.run([sys.executable, "-m", "odsgd", "train", "--config", str(ROOT / "configs/digits_async.yaml"),
                        *options, "--checkpoint-every", "1000epochs", "--out", str(out)], check=True,
                       stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return [record for record in events_of(path) if record["event"] == "epoch"]


def draw(curves: Dict[Job, Curve]) -> None:
    pyplot = tools.pyplot("the page")
    figure, panels = pyplot.subplots(1, len(LINKS) + 1, figsize=(17, 3.6), sharey=True)
    styles: Dict[str, Any] = {method: {"color": f"C{i}", "marker": "osv^D<>x"[i], "markersize": 3, "linewidth": 1}
                              for i, method in enumerate(METHODS)}
    for (method, link, *_), curve in curves.items():
        panels[LINKS.index(link)].plot([one[0] for one in curve], [one[2] for one in curve], label=method,
                                       **styles[method])
        if link == LINKS[0]:
            panels[-1].plot([one[1] / 1e6 for one in curve], [one[2] for one in curve], label=method,
                            **styles[method])
    for panel, title in zip(panels, [*LINKS, "bytes, any link"]):
        panel.set(title=title, xlabel="virtual seconds" if title in LINKS else "MB of a worker, both ways")
        panel.loglog()
        panel.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("test loss")
    panels[-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(OUT.with_suffix(".png"), dpi=80)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="odsgd-links-"))
    folder.mkdir(exist_ok=True)
    jobs = [*SIDE_BY_SIDE, *CONTROL]
    with ThreadPoolExecutor(2) as pool:
        curves = list(zip(jobs, pool.map(lambda job: run(folder, job), jobs)))
    with OUT.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([*Job._fields, "virtual_s", "bytes", "test_loss"])
        for number, (job, curve) in enumerate(curves):
            table.writerows([*job, f"{s:.3f}", f"{nbytes:.0f}", f"{loss:.4f}"]
                            for s, nbytes, loss in (curve if number < len(SIDE_BY_SIDE) else curve[-1:]))
    draw(dict(curves[:len(SIDE_BY_SIDE)]))


if __name__ == "__main__":
    main()
