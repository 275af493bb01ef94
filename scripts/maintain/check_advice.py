#!/usr/bin/env python3
"""Whether `odsgd advise` is right: configurations drawn at random, predicted, and measured on the emulated cluster.

    check_advice.py --predict       what the adviser says of each configuration
    check_advice.py                 as root: predict and measure what has not been measured yet, print the table
    check_advice.py --only 2        the second cluster alone
    check_advice.py --table         the table alone, of what has been measured

First five clusters are drawn: each number of workers from 2 to 6 once, and links of 0.2 to 10 Gbit/s, once from each
fifth of that range. Then four jobs on each: a model (0.05 to 25 M parameters) and T_cop (a tenth to ten times the
T_wire of a server beside every worker). All but the workers are drawn on a logarithmic scale. A job whose iterations
with one server would be longer than SLOWEST_S is drawn again, since its measurement would take minutes.
docs/results/data/advice.json has each configuration with what was predicted and what was measured, and what the adviser
is told of the machine.
"""
import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

from odsgd.lab.advise import cli
from odsgd.lab.advise.config import AdviseConfig
from odsgd.tools import piped
from odsgd.virtual.description import PAYLOAD
from scripts.maintain.docs_tables import by_line
from scripts.maintain.validate_virtual import passes

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "results" / "data" / "advice.json"
EXACT = ("ssgd", "odsgd@1", "odsgd", "asgd", "odsgd:transport=ring", "pipesgd")
"""Systems that send every gradient."""
SYSTEMS = (*EXACT, "easgd:T=4")
WITHIN = 1.05
JOBS = 4
"""On each cluster; one start of a system measures all of them."""
SLOWEST_S = 0.4


class Drawn(NamedTuple):
    model: str
    workers: int
    rate: str
    compute_ms: float
    ratio: float  # T_cop / T_wire


def drawn(seed: int) -> Iterator[List[Drawn]]:
    """The jobs of five clusters; the same seed gives the same ones."""
    draws = random.Random(seed)

    def between(low: float, high: float) -> float:
        return math.exp(draws.uniform(math.log(low), math.log(high)))

    numbers, fifths = draws.sample(range(2, 7), 5), draws.sample(range(5), 5)
    for workers, fifth in zip(numbers, fifths):
        gbit = between(0.2 * 50 ** (fifth / 5), 0.2 * 50 ** ((fifth + 1) / 5))
        jobs: List[Drawn] = []
        while len(jobs) < JOBS:
            size, ratio = between(0.05, 25), between(0.1, 10)
            one_way_s = 4e6 * size / (PAYLOAD * gbit * 1e9 / 8)
            compute_s = ratio * 2 * (workers - 1) / workers * one_way_s
            if compute_s + workers * one_way_s <= SLOWEST_S:
                jobs.append(Drawn(f"{size:.3g}M", workers, f"{1000 * gbit:.0f}mbit", float(f"{1000 * compute_s:.3g}"),
                                  round(ratio, 3)))
        yield jobs


def profile(of: Drawn, host: Dict[str, Any]) -> Dict[str, Any]:
    """What the adviser is told: the machine, and when the emulated accelerator's gradients appear."""
    compute = passes(of.model, of.compute_ms / 1000)
    layers = {name: [f"{1000 * seconds:.6f}ms" for seconds in pair] for name, pair in compute.layers.items()}
    return {**host, "compute": {"layers": layers, "processor": f"{1000 * compute.processor:.6f}ms"}}


def predicted(of: Drawn, host: Dict[str, Any]) -> Dict[str, float]:
    """Milliseconds per iteration of every system."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "profile.yaml")
        path.write_text(yaml.safe_dump(profile(of, host)), encoding="utf-8")
        config = AdviseConfig.from_flags([str(path), "--model", of.model, "--rate", of.rate, "--systems",
                                          ",".join(SYSTEMS)])
        found = cli.ranked(config, cli.of_profile(config), of.workers)
    return {one.system.label: round(1000 * one.iteration_s, 3) for one in found}


def measured(jobs: Sequence[Drawn]) -> List[Dict[str, Any]]:
    """The same, by `odsgd bench`, and processor time of a worker and of a server, in milliseconds per iteration."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "bench.json")
        subprocess.run([sys.executable, "-m", "odsgd", "bench", "--systems", ",".join(SYSTEMS), "--workers",
                        str(jobs[0].workers), "--rates", jobs[0].rate, "--models", ",".join(of.model for of in jobs),
                        "--compute", ",".join(f"{of.model}={of.compute_ms}ms" for of in jobs), "--repeat", "1",
                        "--seconds", "1.2", "--json", str(path)], cwd=ROOT, check=False)
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    of_jobs = [[row for row in rows if row["case"]["model"] == of.model] for of in jobs]
    return [{"measured_ms": {row["system"]: row["iteration_ms"] for row in mine},
             "cpu_ms": {row["system"]: [row["worker_cpu_ms"], row["server_cpu_ms"]] for row in mine}}
            for mine in of_jobs]


class Verdict(NamedTuple):
    """How good a choice among some systems was."""

    choice: str
    fastest: str
    ratio: float

    @classmethod
    def of(cls, result: Dict[str, Any], systems: Sequence[str]) -> "Verdict":
        times = {system: result["measured_ms"][system] for system in systems if system in result["measured_ms"]}
        choice = next(system for system in result["predicted_ms"] if system in times)  # they stand as the adviser says
        fastest = min(times, key=lambda system: times[system])
        return cls(choice, fastest, times[choice] / times[fastest])


def table(results: Dict[str, Dict[str, Any]]) -> str:
    """Markdown: a line per configuration, and how often the choice was good."""
    heads = ["", "parameters", "workers", "Gbit/s", "T_cop, ms", "T_cop / T_wire", "first choice", "predicted, ms",
             "measured, ms", "fastest", "ms", "slower by", "choice of those that send all", "fastest", "slower by"]
    lines = [heads]
    good: List[List[bool]] = [[], []]
    errors: List[float] = []
    for number, result in results.items():
        of, both = Drawn(**result["configuration"]), [Verdict.of(result, systems) for systems in (SYSTEMS, EXACT)]
        errors += [abs(result["predicted_ms"][system] / time - 1) for system, time in result["measured_ms"].items()]
        for verdict, known in zip(both, good):
            known.append(verdict.ratio <= WITHIN)
        (first, exact), times = both, result["measured_ms"]
        lines.append([
            number, of.model, str(of.workers), f"{float(of.rate[:-4]) / 1000:.2f}", f"{of.compute_ms:g}",
            f"{of.ratio:.2f}", f"`{first.choice}`", f"{result['predicted_ms'][first.choice]:.1f}",
            f"{times[first.choice]:.1f}", f"`{first.fastest}`", f"{times[first.fastest]:.1f}", _slower(first),
            f"`{exact.choice}`", f"`{exact.fastest}`", _slower(exact)])
    errors.sort()
    return (f"{piped(lines, right='')}\n\n"
            f"Within {100 * (WITHIN - 1):.0f} % of the fastest: {sum(good[0])} of {len(results)}; among systems that "
            f"send every gradient as it is: {sum(good[1])} of {len(results)}. Error of all {len(errors)} "
            f"predictions: median {100 * errors[len(errors) // 2]:.1f} %, nine of ten within "
            f"{100 * errors[9 * len(errors) // 10]:.0f} %.")


def _write(path: Path, kept: Dict[str, Any]) -> None:
    known = dict(sorted(kept["configurations"].items()))
    path.write_text(by_line({**kept, "configurations": known}), encoding="utf-8")


def _slower(verdict: Verdict) -> str:
    return f"{100 * (verdict.ratio - 1):.1f} %"


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, action="append", help="numbers of clusters, from 1")
    parser.add_argument("--file", type=Path, default=FILE, help="of results, with the machine's description as `host`")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--predict", action="store_true")
    asked = parser.parse_args(argv)
    kept = json.loads(asked.file.read_text(encoding="utf-8"))
    known = kept.setdefault("configurations", {})
    for number, jobs in enumerate(drawn(asked.seed), start=1):
        mine = [known.setdefault(f"{number}{letter}", {"configuration": of._asdict()})
                for letter, of in zip("abcd", jobs)]
        if asked.table or number not in (asked.only or [number]):
            continue
        for result, of in zip(mine, jobs):
            if asked.predict or "predicted_ms" not in result:
                result["predicted_ms"] = predicted(of, kept["host"])
                _write(asked.file, kept)
        if not asked.predict and not all("measured_ms" in result for result in mine):
            for result, found in zip(mine, measured(jobs)):
                result.update(found)
            _write(asked.file, kept)
    results = {number: result for number, result in known.items() if "measured_ms" in result}
    if results:
        print(table(results))


if __name__ == "__main__":
    main()
