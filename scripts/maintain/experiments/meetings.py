#!/usr/bin/env python3
"""How stale gradients are under n-softsync with 30 workers where all meet now and then, as at the end of an epoch.

    scripts/maintain/experiments/meetings.py [--iterations N] [--every N ...]

On a virtual cluster, times alone. They decide the order at every rule, so these are the counts of
`odsgd train --workers 30 --cluster virtual --kvstore softsync --n 15` with the MLP, whose epoch of MNIST has 500
iterations. Prints, for each interval between meetings (0: none), the mean, the largest, and how many are above 2n; of
these how many were taken on weights from before a meeting.
"""
import argparse
import collections
import sys
from pathlib import Path
from typing import Dict

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from kvstore.methods.softsync import SoftsyncSGD
from odsgd.virtual import times
from odsgd.virtual.description import of

WORKERS, SPLIT = 30, 15
MLP = {"hidden_w": 784 * 128, "hidden_b": 128, "second_w": 128 * 64, "second_b": 64, "last_w": 640, "last_b": 10}


def counted(iterations: int, every: int) -> str:
    """A line; every so many iterations all workers meet."""
    cluster = of({"workers": WORKERS, "compute": {"draws": "lognormal:0.1"}})
    options = SoftsyncSGD.Options(n=SPLIT).in_iterations()
    job = times.simulation(cluster, SoftsyncSGD, options, times.layers(MLP))
    ends = [*range(every, iterations, every), iterations] if every else [iterations]
    for first, last in zip([0, *ends], ends):
        for m in range(WORKERS):
            for t in range(first + 1, last + 1):
                job.begin(m, t)
            job.rest(m)
        job.met()
    averaged, after = WORKERS // SPLIT, 0
    taus: Dict[int, int] = collections.Counter()
    for order in job.order.values():
        seen, pushes = [0] * WORKERS, [0] * WORKERS
        for number, m in enumerate(order):
            tau = number // averaged - seen[m]
            taus[tau] += 1
            after += tau > 2 * SPLIT and pushes[m] in ends
            seen[m], pushes[m] = (number + 1) // averaged, pushes[m] + 1
    whole, above = sum(taus.values()), sum(count for tau, count in taus.items() if tau > 2 * SPLIT)
    mean = sum(tau * count for tau, count in taus.items()) / whole
    return (f"meetings every {every}: mean {mean:.2f}, max {max(taus)}, above {2 * SPLIT}: {above} of {whole}, "
            f"of which {after} follow a meeting")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--every", type=int, nargs="+", default=[0, 500, 100])
    asked = parser.parse_args()
    for every in asked.every:
        print(counted(asked.iterations, every), flush=True)


if __name__ == "__main__":
    main()
