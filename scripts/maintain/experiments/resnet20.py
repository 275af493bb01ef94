#!/usr/bin/env python3
"""ResNet-20 on CIFAR-10 by methods that send gradients or weights: the table of docs/results/weights.md.

    scripts/maintain/experiments/resnet20.py CIFAR_DIR FOLDER        one core for 5 minutes a run; prints the table

Real gradients of four workers in virtual time, links of 1 Gbit/s. All take SGD steps of one rate; weights travel every
20 steps. `FOLDER` keeps the runs that have ended. Writes docs/results/resnet20.csv.
"""
import csv
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from scripts.maintain import links  # noqa: E402

OUT = ROOT / "docs" / "results" / "resnet20.csv"
WEIGHTS = "--H 20 --momentum-outer 0"
METHODS: Dict[str, str] = {
    "`ssgd`": "ssgd", "`odsgd`, warm-up 20": "odsgd --warmup 20", "`eager`": f"eager {WEIGHTS}",
    "`diloco`": f"diloco {WEIGHTS}"}
NET = ("--model cifar_resnet20_v1 --dataset cifar10 --batch-size 32 --num-examples 25600 --lr 0.1 --momentum 0 "
       "--epochs 2")
CLUSTER = ("workers: 4\nservers: 1\nlinks: {goodput: 1gbit, latency: 1ms}\n"
           "compute: {iteration: 50ms, draws: \"lognormal:0.2\"}\n")


def run(data: str, folder: Path, method: str) -> List[Dict[str, Any]]:
    """What was measured after each epoch."""
    store, *options = METHODS[method].split()
    return links.trained(folder / store, [*NET.split(), "--data-dir", data, "--kvstore", store, *options,
                                          "--cluster", str(folder / "cluster.yaml")])


def main() -> None:
    data, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(exist_ok=True)
    (folder / "cluster.yaml").write_text(CLUSTER)
    with ThreadPoolExecutor(2) as pool:
        curves = dict(zip(METHODS, pool.map(lambda method: run(data, folder, method), METHODS)))
    with OUT.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["method", "iteration", "virtual_s", "test_loss", "test_accuracy"])
        for method, curve in curves.items():
            table.writerows([method.replace("`", ""), one["iteration"], f"{one['virtual_seconds']:.2f}",
                             f"{one['test_loss']:.4f}", f"{one['test_accuracy']:.4f}"] for one in curve)
    print("| | virtual seconds | test loss | test accuracy after each epoch, % |\n|---|---|---|---|")
    for method, curve in curves.items():
        print(f"| {method} | {curve[-1]['virtual_seconds']:.1f} | {curve[-1]['test_loss']:.3f} "
              "| " + ", ".join(f"{100 * one['test_accuracy']:.1f}" for one in curve) + " |")


if __name__ == "__main__":
    main()
