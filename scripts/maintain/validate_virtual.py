#!/usr/bin/env python3
"""A virtual cluster against real jobs: rows that `odsgd bench` measured, and staleness of asynchronous jobs.

    validate_virtual.py rows PROFILE.yaml PAGE.md ...    predict the rows of these pages
    validate_virtual.py staleness PROFILE.yaml           run asynchronous jobs, and the same in virtual time
    validate_virtual.py page                             write docs/how-to/virtual.md from the results

All pages are predicted from one description, which `odsgd profile` wrote on the machine that they were measured on. Of
a row come the sizes of the model, T_cop, the number of workers, the store, its servers, and the goodput measured with
it. Each is predicted twice: by the links and threads of the virtual cluster alone, as if every host had cores of its
own, and with the cores of this one machine shared by all hosts (`cores`). Results are kept in RESULTS.
"""
import argparse
import dataclasses
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from kvstore.messages.buckets import Parameter
from odsgd.config.files import read_cluster
from odsgd.lab.bench import models, systems
from odsgd.lab.bench.systems import AUTO, OURS
from odsgd.tools import piped
from odsgd.training.step.emulated import FORWARD, steps
from odsgd.virtual import times
from odsgd.virtual.description import Draws, LayerTimes, Quantity, VirtualCluster
from scripts.maintain.docs_tables import by_line, put

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "benchmarks" / "virtual_2core_202611.json"
TABLE = RESULTS.with_suffix(".md")
PAGE = ROOT / "docs" / "how-to" / "virtual.md"
CORES = 2
LOOPBACK = Quantity(3e9)
"""Where no links are emulated nothing is slower than the processors."""
HEADLINE = re.compile(r"## (\S+) \(.*\), (\d+) workers?, T_cop ([\d.]+) ms, (?:loopback|links of (\S+) \(B = (\d+) "
                      r"Mbit/s\))")
ROW = re.compile(r"\| (\S+) \| ([\d.]+) \| [\d.]+ – [\d.]+ \|")
SYNCHRONOUS, ASYNCHRONOUS = (16, 4), (40, 15)
"""Iterations, and how many of them do not count."""
SPREAD = 0.01
"""Of computing times, although the emulated accelerator's are constant: no job is as regular as none. Without any, two
asynchronous workers that begin together push together for ever."""
STEP_S = 70e-6
"""Processor time of a step of the emulated accelerator (`odsgd.training.step.emulated`)."""
HAND_IN_S = 10e-6
"""A parameter that the training loop hands to the store: dsync with one worker, which sends nothing, takes 1.2 ms with
97 tensors of 0.27 M numbers and 5.3 ms with 10 of 4.2 M (the page `host`)."""
GOODPUT = 955.0
"""Mbit/s that links of 1gbit carry, as the pages have it."""
WORST = 10


class Measured(NamedTuple):
    """A row of a page."""

    page: str
    model: str
    workers: int
    compute_ms: float
    rate: str
    goodput: Optional[float]  # Mbit/s
    system: str
    measured_ms: float


def rows(page: Path) -> Iterator[Measured]:
    """The rows of a page whose systems a virtual cluster knows."""
    setting: Dict[str, Any] = {}
    for line in page.read_text(encoding="utf-8").splitlines():
        headline, row = HEADLINE.match(line), ROW.match(line)
        if headline:
            model, workers, compute_ms, rate, goodput = headline.groups()
            setting = {"page": page.stem.split("_")[0], "model": model, "workers": int(workers),
                       "compute_ms": float(compute_ms), "rate": rate or "none",
                       "goodput": float(goodput) if goodput else None}
        elif row and re.split("[:@]", row[1])[0] in OURS:
            yield Measured(**setting, system=row[1], measured_ms=float(row[2]))


class Job(NamedTuple):
    """A measured job as the virtual cluster runs it."""

    cluster: VirtualCluster
    system: systems.System
    parameters: List[Parameter]

    def pace(self, cluster: VirtualCluster) -> times.Pace:
        options = {key: value for key, value in self.system.options.items() if key != "transport"}
        transport = self.system.options.get("transport") or OURS[self.system.name].transports[0]
        iterations, warm_up = ASYNCHRONOUS if OURS[self.system.name].asynchronous else SYNCHRONOUS
        return times.simulate(cluster, self.system.name, self.parameters, options, iterations, warm_up, transport)


def job(row: Measured, profile: VirtualCluster) -> Job:
    system = systems.parse(row.system)
    beside = system.servers == AUTO
    goodput = Quantity(row.goodput * 1e6 / 8) if row.goodput else LOOPBACK
    cluster = dataclasses.replace(
        profile, workers=row.workers, servers=row.workers if beside else int(system.servers or 1),
        placement="beside" if beside else "apart", compute=compute(row.model, row.compute_ms / 1000, SPREAD),
        links=dataclasses.replace(profile.links, goodput=goodput))
    return Job(cluster, system, models.parameters(row.model))


def compute(model: str, seconds: float, spread: float, forward: float = 0.0) -> LayerTimes:
    return dataclasses.replace(passes(model, seconds, forward), draws=Draws("lognormal", (spread,)))


def passes(model: str, seconds: float, forward: float = 0.0) -> LayerTimes:
    """The times of the emulated accelerator's steps, and what they take of its host. A step needs the weights of all
    its layers, and has their gradients when it ends.

    The benchmarks' accelerator has no forward pass. Without computing, an iteration begins when Python has handed in
    all parameters.
    """
    sizes = np.array([math.prod(shape) for shape in models.shapes(model)], float)
    durations, numbers = seconds * sizes / sizes.sum(), list(range(len(sizes)))
    there, back = np.zeros((2, len(sizes)))
    if seconds:
        for step, step_s in steps(numbers, forward * durations):
            there[step[-1]] = step_s
        for step, step_s in steps(numbers[::-1], (1 - forward) * durations):
            back[step[0]] = step_s
    taken = STEP_S * (np.count_nonzero(there) + np.count_nonzero(back)) + HAND_IN_S * len(sizes)
    if not seconds:
        back[:] = HAND_IN_S
    return LayerTimes(layers={f"tensor{number}": (Quantity(first), Quantity(last)) for number, (first, last)
                              in enumerate(zip(there, back))}, processor=Quantity(taken))


def predict(row: Measured, profile: VirtualCluster) -> Dict[str, Any]:
    one = job(row, profile)
    alone, together = one.pace(one.cluster), one.pace(dataclasses.replace(one.cluster, cores=CORES))
    busy = together.loads.get("shared cores", 0.0) / together.iteration
    return {**row._asdict(), "links_ms": round(1000 * alone.iteration, 3),
            "predicted_ms": round(1000 * together.iteration, 3), "busy": round(busy, 3)}


def keep(key: str, value: Any) -> None:
    """Into the file of results."""
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    RESULTS.write_text(by_line({**results, key: value}), encoding="utf-8")


def validate_rows(profile: str, pages: Sequence[str]) -> None:
    read = read_cluster(profile)
    found = [predict(row, read) for page in pages for row in rows(Path(page))]
    for one in found:
        print(f"{one['page']:9} {one['model']:6} {one['workers']:2} {one['compute_ms']:7} {one['rate']:8} "
              f"{one['system']:34} {one['measured_ms']:8} {one['links_ms']:8.1f} {100 * error(one, 'links_ms'):+6.1f} "
              f"% {one['predicted_ms']:8.1f} {100 * error(one):+6.1f} %  busy {one['busy']:.2f}")
    keep("profile", os.path.relpath(profile, ROOT))
    keep("rows", found)
    kept = json.loads(RESULTS.read_text(encoding="utf-8")).get("staleness", [])
    keep("staleness", [{**one, "virtual": virtual(Stale(*(one[name] for name in Stale._fields)), read)}
                       for one in kept])
    for page in sorted({one["page"] for one in found}):
        print(page, summary([one for one in found if one["page"] == page]))
    print("all", summary(found))


def error(row: Dict[str, Any], key: str = "predicted_ms") -> float:
    return float(row[key] / row["measured_ms"] - 1)


def summary(found: Sequence[Dict[str, Any]], key: str = "predicted_ms") -> Tuple[float, float]:
    """Median error, and the share of rows within 10 %."""
    errors = [abs(error(row, key)) for row in found]
    return statistics.median(errors), sum(one <= 0.1 for one in errors) / len(errors)


class Stale(NamedTuple):
    """An asynchronous job whose staleness is counted."""

    workers: int
    store: str
    model: str
    compute_ms: float
    spread: float
    rate: str
    iterations: int

    @property
    def compute(self) -> str:
        return f"{self.compute_ms:g}ms,lognormal:{self.spread:g}"


STALE = [Stale(workers, "asgd", "cifar_resnet20_v1", compute_ms, 0.2, "1gbit", 150)
         for workers, compute_ms in ((4, 100), (8, 100), (8, 50))]


def real(one: Stale) -> Dict[int, int]:
    """tau -> pushes, of a job on the emulated cluster."""
    odsgd = [sys.executable, "-m", "odsgd"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [*odsgd, "cluster", "run", "--hosts", str(one.workers + 1), "--rate", one.rate, *odsgd, "launch", "-n",
             str(one.workers), "-s", "1", "-H", "@hosts", "--env", "OMP_NUM_THREADS:1", *odsgd, "train", "--dataset",
             "synthetic", "--num-examples", str(8 * one.workers * one.iterations), "--batch-size", "8", "--model",
             one.model, "--kvstore", one.store, "--emulate-compute", one.compute, "--iterations", str(one.iterations),
             "--out", folder, "--lr", "0.001"],
            check=True, cwd=ROOT, timeout=110, stdout=subprocess.DEVNULL)
        counted = json.loads(Path(folder, "staleness.json").read_text(encoding="utf-8"))
    return {int(tau): pushes for tau, pushes in counted["histogram"].items()}


def virtual(one: Stale, profile: VirtualCluster) -> Dict[int, int]:
    """The same in virtual time."""
    cluster = dataclasses.replace(profile, workers=one.workers, servers=1,
                                  compute=compute(one.model, one.compute_ms / 1000, one.spread, FORWARD),
                                  links=dataclasses.replace(profile.links, goodput=Quantity(GOODPUT * 1e6 / 8)))
    return times.simulate(cluster, one.store, models.parameters(one.model), {}, one.iterations, 0).staleness


def validate_staleness(profile: str) -> None:
    read, found = read_cluster(profile), []
    for one in STALE:
        counted, computed = real(one), virtual(one, read)
        found.append({**one._asdict(), "real": counted, "virtual": computed})
        print(one, f"mean {mean(counted):.3f} real, {mean(computed):.3f} virtual; total variation "
              f"{distance(counted, computed):.3f}")
    keep("staleness", found)


def mean(counts: Dict[Any, int]) -> float:
    return sum(int(tau) * pushes for tau, pushes in counts.items()) / sum(counts.values())


def distance(one: Dict[Any, int], other: Dict[Any, int]) -> float:
    """Half the sum of the differences of two histograms' shares."""
    first, second = ({int(tau): pushes / sum(counts.values()) for tau, pushes in counts.items()}
                     for counts in (one, other))
    return sum(abs(first.get(tau, 0.0) - second.get(tau, 0.0)) for tau in {*first, *second}) / 2


def section(results: Dict[str, Any]) -> str:
    """What docs/how-to/virtual.md says of the results."""
    found = results["rows"]
    by_page = [["page", "rows", "links alone: median error, within 10 %", "shared cores: median error, within 10 %"]]
    for page in [*dict.fromkeys(row["page"] for row in found), "all"]:
        some = [row for row in found if page in (row["page"], "all")]
        by_page.append([page, str(len(some)), *(f"{100 * median:.1f} %, {100 * share:.0f} %" for median, share in
                                                (summary(some, "links_ms"), summary(some)))])
    worst = [["row", "measured, ms", "links alone", "shared cores", "cores used"]]
    worst += [[place(row), f"{row['measured_ms']:g}", f"{100 * error(row, 'links_ms'):+.0f} %",
               f"{100 * error(row):+.0f} %", f"{100 * row['busy']:.0f} %"]
              for row in sorted(found, key=lambda row: -abs(error(row)))[:WORST]]
    stale = [["asynchronous job, 1 Gbit/s, one server", "staleness, real", "virtual", "total variation distance"]]
    stale += [[f"`{one['store']}`, {one['workers']} workers, {one['model']}, {one['compute_ms']:g} ms, lognormal:"
               f"{one['spread']:g}", f"{mean(one['real']):.2f}", f"{mean(one['virtual']):.2f}",
               f"{distance(one['real'], one['virtual']):.3f}"] for one in results.get("staleness", [])]
    return f"{piped(by_page)}\n\nThe {WORST} worst of the last column:\n\n{piped(worst)}\n\n{piped(stale)}\n"


def place(row: Dict[str, Any]) -> str:
    """A row in words."""
    return (f"{row['page']}: `{row['system']}`, {row['model']}, {row['workers']} workers, T_cop "
            f"{row['compute_ms']:g} ms, {'loopback' if row['rate'] == 'none' else row['rate']}")


def table(results: Dict[str, Any]) -> str:
    """The page with every row."""
    rows = [["row", "measured", "links alone", "error", "shared cores", "error"]]
    rows += [[place(row), f"{row['measured_ms']:g}", f"{row['links_ms']:.1f}", f"{100 * error(row, 'links_ms'):+.1f} %",
              f"{row['predicted_ms']:.1f}", f"{100 * error(row):+.1f} %"] for row in results["rows"]]
    return ("# Measured rows and the virtual cluster's, November 2026\n\n"
            f"<!-- Written by scripts/maintain/validate_virtual.py from {RESULTS.name} -->\n\n"
            f"Every row of these pages that a virtual cluster knows, from `{results['profile']}`: milliseconds per "
            "iteration.\n[Virtual clusters](../../how-to/virtual.md#against-real-jobs) says how.\n\n"
            f"{piped(rows)}\n")


def described(page: str) -> str:
    """docs/how-to/virtual.md with the section as it should be."""
    return put(page, "<!-- validation -->", section(json.loads(RESULTS.read_text(encoding="utf-8"))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rows", "staleness", "page"))
    parser.add_argument("files", nargs="*")
    asked = parser.parse_args()
    if asked.what == "page":
        PAGE.write_text(described(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        TABLE.write_text(table(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
    elif not asked.files:
        parser.error("the profile is missing")
    elif asked.what == "rows":
        validate_rows(asked.files[0], asked.files[1:])
    else:
        validate_staleness(asked.files[0])


if __name__ == "__main__":
    main()
