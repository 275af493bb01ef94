#!/usr/bin/env python3
"""The two numbers of od-sgd's Table 5: how long an iteration computes, and which part of the links carries data.

They are fitted to the six speeds of SSGD in the paper, least squares of their logarithms, with the item's own network
and cluster (scripts/reproduction/papers/od-sgd.yaml). It prints them beside those that stand there, then SSGD's speeds.
It takes a minute.
"""
import fnmatch
import math
import sys
from pathlib import Path
from typing import List, Sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scipy.optimize import least_squares

from odsgd.lab.bench import models
from odsgd.virtual import times
from odsgd.virtual.description import of
from scripts.reproduction.declarations import Cell, paper_called

ITEM = paper_called("od-sgd").items["table-5"]
FITTED = [cell for name, cell in ITEM.cells.items() if fnmatch.fnmatchcase(name, ITEM.fitted)]
PARAMETERS = models.parameters(ITEM.options["model"])
LINKS_MBIT = {"eth": 10_000, "ib": 56_000}
EXAMPLES = 128
"""Of an iteration: with so many the paper's speeds lie on straight lines."""
FIRST = (500.0, 25.0)


def speed(cell: Cell, compute_ms: float, percent: float) -> float:
    """Examples of a worker in a second, where this part of the links carries data."""
    goodput = percent / 100 * LINKS_MBIT[cell.name.split("-")[-1]]
    cluster = of({**ITEM.cluster, **cell.cluster, "links": {"goodput": f"{goodput}mbit"},
                  "compute": {**ITEM.cluster["compute"], "iteration": f"{compute_ms}ms"}})
    pace = times.simulate(cluster, "ssgd", PARAMETERS, iterations=ITEM.options["iterations"], warm_up=0)
    return EXAMPLES / pace.iteration


def errors(numbers: Sequence[float]) -> List[float]:
    """Logarithms of ours over the paper's."""
    return [math.log(speed(cell, *numbers) / cell.paper["speed128"]) for cell in FITTED]


def main() -> None:
    declared = ITEM.cluster["compute"]["iteration"], FITTED[0].cluster["links"]["goodput"]
    found = least_squares(errors, FIRST, x_scale=FIRST, diff_step=0.01)
    compute_ms, percent = found.x
    print(f"fitted: an iteration computes for {compute_ms:.0f} ms, {percent:.1f} % of the links carry data "
          f"({percent * LINKS_MBIT['eth'] / 100:.0f} of {LINKS_MBIT['eth']} Mbit/s)")
    print(f"declared: {declared[0]}, {declared[1]}")
    for cell, error in zip(FITTED, errors(found.x)):
        print(f"{cell.label:18}  paper {cell.paper['speed128']:6.1f}  fitted "
              f"{cell.paper['speed128'] * math.exp(error):6.1f} samples/s  {100 * math.expm1(error):+.0f} %")


if __name__ == "__main__":
    main()
