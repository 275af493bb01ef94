#!/usr/bin/env python3
"""Goodput and final loss of `decoupled` where workers fail and are unequal: MTBF x M x K x grace, in virtual time.

    scripts/maintain/experiments/failures.py        writes docs/results/failures.csv, goes on from what is there;
                                                    failures.png

Real gradients of a small net on scikit-learn's digits. M workers, one of them at half speed, run for 8 virtual seconds:
an iteration takes 10 ms (log-normal, 0.2), weights travel every 20 steps. A worker fails after the MTBF on average, is
away for a second on average, and comes back with the servers' weights; what it had not sent is lost. `diloco` waits for
all. Goodput: steps that workers have taken and not lost, over those of as many workers that never fail or wait.
"""
import csv
import itertools
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any, Dict, List, NamedTuple, Tuple

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

OUT = ROOT / "docs" / "results" / "failures.csv"
SECONDS, H, DELAY, SLOW, BATCH, LR = 8.0, 20, 6, 0.5, 32, 0.05
MTBFS, WORKERS, SEEDS = ("never", "8s", "2s"), (2, 4, 8), (0, 1, 2, 3, 4)


class Run(NamedTuple):
    mtbf: str
    workers: int
    quorum: int  # all: `diloco`
    grace: int
    seed: int


RUNS = [Run(mtbf, M, K, grace, seed) for seed, M, mtbf in itertools.product(SEEDS, WORKERS, MTBFS)
        for K, grace in (*itertools.product(sorted({1, M // 2}), (0, DELAY - 1)), (M, 0))]


def run(job: Run) -> Tuple[float, float]:
    """Goodput, and the test loss of the global weights in the end."""
    import kvstore
    from kvstore.engine._mxnet import mx
    from odsgd.virtual.description import of
    from odsgd.virtual.transport import VirtualStage
    from scripts.maintain.experiments.modulation import Data, Net
    data = Data(None)
    (x, y), net = data.train, Net(data.train[0].shape[1])
    failing: Dict[str, Any] = {} if job.mtbf == "never" else {"failures": f"{job.mtbf}:1s"}
    stage = VirtualStage(of({
        "workers": job.workers, "seed": job.seed, "links": {"goodput": "100mbit", "latency": "1ms"},
        "compute": {"iteration": "10ms", "draws": "lognormal:0.2", "speeds": {job.workers - 1: SLOW}, **failing}}))
    waits_for_all = job.quorum == job.workers
    settings: Dict[str, Any] = {"H": H, "momentum_outer": 0.0} if waits_for_all else {
        "H": H, "momentum_outer": 0.0, "delay": DELAY, "quorum": job.quorum, "grace": job.grace}

    said: Dict[int, bool] = {}

    def goes_on(t: int, seconds: float) -> bool:
        """Of workers that wait for each other all take as many steps: the first to come to a round decides."""
        return said.setdefault(t // H, seconds < SECONDS) if waits_for_all else seconds < SECONDS

    def work(transport: Any) -> Tuple[int, np.ndarray]:
        store = kvstore.create("diloco" if waits_for_all else "decoupled", transport, **settings)
        store.set_optimizer(mx.optimizer.SGD(learning_rate=LR))
        weight = mx.nd.array(net.initial(job.seed))
        store.broadcast(0, weight, weight)
        examples = np.random.RandomState([job.seed, store.rank])
        kept = steps = 0
        while goes_on(store.iteration, transport.seconds()):
            drawn = examples.randint(len(y), size=BATCH)
            gradient = net.gradient(weight.asnumpy(), x[drawn], y[drawn])
            store.pushpull(0, mx.nd.array(gradient), out=weight)
            steps += 1
            if store.iteration % H == 0:
                kept, steps = kept + steps, 0
            if not waits_for_all and stage.failed(store.rank, store.iteration):
                steps = 0
        with store.global_weights():
            return kept + steps, weight.asnumpy()

    found: List[Tuple[int, np.ndarray]] = stage.run(work)
    ideal = SECONDS / 0.01 * (job.workers - 1 + SLOW)
    return sum(steps for steps, _ in found) / ideal, net.loss(found[0][1], *data.test)


def draw(found: Dict[Run, Tuple[float, float]]) -> None:
    from odsgd import tools
    pyplot = tools.pyplot("the page")
    figure, panels = pyplot.subplots(2, len(WORKERS), figsize=(13, 5.6), sharex=True, sharey="row")
    for column, M in enumerate(WORKERS):
        ways = sorted({(one.quorum, one.grace) for one in found if one.workers == M})
        for K, grace in ways:
            label = f"all {M}: diloco" if K == M else f"K {K}, grace {grace}"
            color, line = "black" if K == M else f"C{int(K > 1)}", "-" if grace or K == M else ":"
            for row in (0, 1):
                of = [[found[Run(mtbf, M, K, grace, seed)][row] for seed in SEEDS] for mtbf in MTBFS]
                means = [mean(one) for one in of]
                spread = [[middle - min(one) for middle, one in zip(means, of)],
                          [max(one) - middle for middle, one in zip(means, of)]]
                panels[row][column].errorbar(range(len(MTBFS)), means, spread, marker="o", markersize=4, label=label,
                                             linewidth=1, capsize=2, color=color, linestyle=line)
        panels[0][column].set_title(f"M = {M}")
        panels[0][column].legend(fontsize=7)
        panels[1][column].set(xticks=range(len(MTBFS)), xticklabels=MTBFS, xlabel="mean time to a worker's failure")
    panels[0][0].set(ylabel="goodput", ylim=(0, 1.05))
    panels[1][0].set(ylabel="test loss in the end", yscale="log", ylim=(0.1, 20))
    for panel in panels.flat:
        panel.grid(alpha=0.3, which="both")
    figure.tight_layout()
    figure.savefig(OUT.with_suffix(".png"), dpi=80)


def main() -> None:
    os.environ.update(OMP_NUM_THREADS="1", MXNET_CPU_WORKER_NTHREADS="1")
    found: Dict[Run, Tuple[float, float]] = {}
    if OUT.exists():
        with OUT.open(newline="") as file:
            for mtbf, *whole, first, second in list(csv.reader(file))[1:]:
                found[Run(mtbf, *map(int, whole))] = float(first), float(second)
    missing = [job for job in RUNS if job not in found]
    with ProcessPoolExecutor(2) as pool, OUT.open("a", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        if not found:
            table.writerow([*Run._fields, "goodput", "test_loss"])
        for job, (goodput, loss) in zip(missing, pool.map(run, missing)):
            table.writerow([*job, f"{goodput:.4f}", f"{loss:.4f}"])
            file.flush()
            found[job] = goodput, loss
    draw(found)


if __name__ == "__main__":
    main()
