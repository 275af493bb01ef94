#!/usr/bin/env python3
"""How stale gradients are under n-softsync, as its servers count it, on real processes.

    scripts/maintain/experiments/staleness.py [--workers M ...] [--iterations N] [--compute MS] [--spread S]
                                     [--png FILE] [--json FILE]

One job per number of workers M and n = 1, 2, 4 … M: a scheduler, a server and M workers on this machine. A worker's
computation is a sleep of log-normal length (median `--compute`, its logarithm spread by `--spread`), so that two cores
can stand in for M machines of about the same speed; pushes, updates and answers are real. The paper: the mean is about
n, and more than 2n is very rare (Zhang, Gupta, Lian, Liu, IJCAI 2016, sec. 2.4).
"""
import argparse
import io
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

FLOATS = 1000
REST = 10  # iterations that the others go on after worker 0, who asks for the counts while all are at work


def work(n: int, iterations: int, compute_s: float, spread: float, file: str) -> None:
    import kvstore
    from kvstore.engine._mxnet import mx
    from kvstore.session.staleness import mean
    store = kvstore.create("softsync", n=n)
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.01))
    grad, weight = mx.nd.ones(FLOATS) * 1e-3, mx.nd.ones(FLOATS)
    store.broadcast(0, weight, weight)
    store.begin()
    store.barrier()
    length = random.Random(store.rank)
    start = time.perf_counter()
    for _ in range(iterations + (REST if store.rank else 0)):
        time.sleep(compute_s * length.lognormvariate(0, spread))
        store.pushpull(0, grad, out=weight)
        weight.wait_to_read()
    if store.rank == 0:
        seconds = time.perf_counter() - start
        found = store.statistics()
        Path(file).write_text(json.dumps({
            "pushes": found.pushes, "updates": found.updates_per_bucket, "seconds": seconds, "mean": found.mean,
            "max": found.max, "lr": found.lr_mean / 0.01, "histogram": found.histogram,
            "worker_means": {rank: mean(taus) for rank, taus in found.by_worker.items()}}))
    store.close()


def run(workers: int, n: int, options: argparse.Namespace) -> Dict[str, Any]:
    """One job; what worker 0 was told."""
    from odsgd.launch import command, supervisor
    from odsgd.launch.view import console
    with tempfile.TemporaryDirectory() as folder:
        file, said = folder + "/counts.json", io.StringIO()
        code = supervisor.run(command.parse(
            ["-n", str(workers), "-s", "1", __file__, "--be-worker-of", str(n), "--iterations", str(options.iterations),
             "--compute", str(options.compute), "--spread", str(options.spread), "--json", file]),
            console.Console(said, said))
        if code:
            sys.exit(f"staleness: the job with {workers} workers and n = {n} ended with {code}:\n{said.getvalue()}")
        found = json.loads(Path(file).read_text())
    found["histogram"] = {int(tau): count for tau, count in found["histogram"].items()}
    return {"workers": workers, "n": n, **found}


def beyond(found: Dict[str, Any]) -> int:
    """Pushes with tau > 2n."""
    return sum(count for tau, count in found["histogram"].items() if tau > 2 * found["n"])


def show(results: List[Dict[str, Any]]) -> None:
    print(f"{'workers':>7} {'n':>3} {'pushes':>7} {'mean tau':>9} {'of a worker':>13} {'(M-1)/c':>8} {'max':>4} "
          f"{'tau > 2n':>14} {'lr / lr_0':>10} {'updates/s':>10}")
    for found in results:
        means, c = found["worker_means"].values(), found["workers"] // found["n"]
        span = f"{min(means):.2f} – {max(means):.2f}"
        rare = f"{beyond(found)} ({100 * beyond(found) / found['pushes']:.3f} %)"
        print(f"{found['workers']:7} {found['n']:3} {found['pushes']:7} {found['mean']:9.3f} {span:>13} "
              f"{(found['workers'] - 1) / c:8.2f} {found['max']:4} {rare:>14} {found['lr']:10.3f} "
              f"{found['updates'] / found['seconds']:10.1f}")


def draw(results: List[Dict[str, Any]], file: Path) -> None:
    """A histogram per job, a row per number of workers."""
    from odsgd import tools
    pyplot = tools.pyplot("a histogram")
    rows = sorted({found["workers"] for found in results})
    columns = max(sum(found["workers"] == row for found in results) for row in rows)
    figure, axes = pyplot.subplots(len(rows), columns, figsize=(2.6 * columns, 2.3 * len(rows)), squeeze=False,
                                   sharey=True, layout="constrained")
    for row, workers in enumerate(rows):
        these = [found for found in results if found["workers"] == workers]
        for axis in axes[row][len(these):]:
            axis.axis("off")
        for axis, found in zip(axes[row], these):
            taus = range(2 * found["n"] + 3)  # a few later ones would make the rest small; the legend counts them
            axis.bar(taus, [found["histogram"].get(tau, 0) / found["pushes"] for tau in taus], color="#4878a8")
            axis.axvline(found["mean"], color="black", linewidth=1, label=f"mean {found['mean']:.2f}")
            axis.axvline(2 * found["n"] + 0.5, color="#c44e52", linewidth=1, linestyle="--",
                         label=f"2n: {100 * beyond(found) / found['pushes']:.2g} % beyond")
            axis.set_title(f"M = {workers}, n = {found['n']}", fontsize=10)
            axis.set_ylim(0, 1.15)
            axis.legend(fontsize=7, loc="upper right", framealpha=1, edgecolor="none")
            axis.tick_params(labelsize=8)
            axis.xaxis.get_major_locator().set_params(integer=True)
        axes[row][0].set_ylabel("part of the pushes", fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("staleness tau", fontsize=8)
    figure.savefig(file, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[4])
    parser.add_argument("--iterations", type=int, default=500, help="of worker 0")
    parser.add_argument("--compute", type=float, default=20, help="median length of a computation in milliseconds")
    parser.add_argument("--spread", type=float, default=0.1, help="standard deviation of the length's logarithm")
    parser.add_argument("--png", type=Path, help="draw histograms there (needs matplotlib)")
    parser.add_argument("--json", type=Path, help="write all counts there")
    parser.add_argument("--be-worker-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be_worker_of:
        return work(options.be_worker_of, options.iterations, options.compute / 1000, options.spread, str(options.json))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = []
    for workers in options.workers:
        for n in (2 ** k for k in range(workers.bit_length())):
            print(f"\r{workers} workers, n = {n} ", end="", file=sys.stderr, flush=True)
            results.append(run(workers, n, options))
    print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    load = " ".join(f"{one:.1f}" for one in os.getloadavg())
    print(f"computation: {options.compute:g} ms, spread {options.spread:g}; {os.cpu_count()} cores, load {load}")
    show(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    if options.png:
        draw(results, options.png)


if __name__ == "__main__":
    main()
