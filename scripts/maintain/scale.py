#!/usr/bin/env python3
"""docs/results/scale.md: five stores from 1 to 4,096 workers, in virtual time.

    scripts/maintain/scale.py run     compute what RESULTS lacks, then write the page
    scripts/maintain/scale.py page    write the page's tables and its pictures from RESULTS, as far as they go

Deterministic, on one core. Each point goes to RESULTS as soon as it is computed, so a run that was stopped goes on.
Where the model of virtual clusters has changed, delete that file first.
"""
import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvstore import methods
from odsgd import tools
from odsgd.virtual.description import of
from odsgd.virtual.times import layers, simulate
from scripts.maintain.docs_tables import put
from scripts.maintain.timing_models import NOTHING

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results" / "scale.md"
RESULTS = ROOT / "docs" / "results" / "benchmarks" / "scale_virtual.jsonl"
STORES = {"ssgd": "#555555", "odsgd": "#d62728", "pipesgd": "#1f77b4", "asgd": "#2ca02c", "easgd": "#9467bd"}
MODELS = {"25M": (25_000_000, 0.2), "350M": (350_000_000, 1.0)}
"""Floats, and seconds of both passes."""
LAYERS = 32
"""Alike; each is a bucket, but on a ring, which has the sizes that suit it."""
RATES = ("1gbit", "10gbit", "100gbit")
DRAWS = {"constant": "equal workers", "lognormal:0.3": "stragglers"}
WORKERS = (1, 4, 16, 64, 256, 1024, 4096)
MOST_SERVERS = 16
RATIOS = tuple(2.0 ** (half / 2) for half in range(-10, 7))
SIGMAS = (0.0, 0.05, 0.1, 0.2, 0.4)
CROSSING_WORKERS = 16
CLOSE = 0.01
"""Stores whose iterations differ by no more are as fast as each other."""
DRAWN = 256
"""Iterations of all workers together that count at least, since stragglers are drawn; each worker has three or more."""
MANY = 1024
"""From so many workers on each goes through four iterations, of which two count: a point takes seconds to minutes."""


class Point(NamedTuple):
    model: str
    rate: str
    draws: str
    workers: int
    store: str


def computed(point: Point) -> Dict[str, Any]:
    """Seconds of an iteration, and what the busiest resource of each kind has to do in it."""
    floats, compute = MODELS[point.model]
    servers = min(point.workers, MOST_SERVERS)
    cluster = of({"workers": point.workers, "servers": servers, "links": {"goodput": point.rate},
                  "compute": {"iteration": f"{compute}s", "draws": point.draws}})
    sizes = {f"layer{number}": floats // LAYERS for number in range(LAYERS)}
    options = {} if point.store == "pipesgd" else {"bucket_nbytes": 4 * (floats // LAYERS)}
    warm_up, counted = (4, max(3, DRAWN // point.workers)) if point.workers < MANY else (2, 2)
    pace = simulate(cluster, point.store, layers(sizes), options, iterations=warm_up + counted, warm_up=warm_up)
    return {"iteration": pace.iteration, "loads": pace.loads}


def crossing(sigma: float, ratio: float, store: str) -> Dict[str, Any]:
    """With one server; `ratio`: the time that its link needs for all workers' gradients, over that of the passes."""
    T_cop, floats = 0.2, 25_000_000
    goodput = 8e-6 * 4 * floats * CROSSING_WORKERS / (ratio * T_cop)
    cluster = of({**NOTHING, "workers": CROSSING_WORKERS, "links": {"goodput": f"{goodput:.6f}mbit", "message": 0},
                  "compute": {"iteration": f"{T_cop}s", "draws": f"lognormal:{sigma}" if sigma else "constant"}})
    sizes = {f"layer{number}": floats // LAYERS for number in range(LAYERS)}
    pace = simulate(cluster, store, layers(sizes), {"bucket_nbytes": 4 * (floats // LAYERS)}, iterations=44, warm_up=4)
    return {"iteration": pace.iteration / T_cop}


class Kept:
    """What has been computed, by its settings; `computes`: or is when it is asked for."""

    def __init__(self, computes: bool) -> None:
        self.computes = computes
        lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
        self._found: Dict[str, Any] = {json.dumps(settings): found for settings, found in map(json.loads, lines)}

    def knows(self, settings: Sequence[Any]) -> bool:
        return json.dumps(settings) in self._found

    def get(self, compute: Any, *settings: Any) -> Dict[str, Any]:
        """`compute(*settings)`, unless it is known."""
        key = json.dumps(settings)
        if key not in self._found:
            if not self.computes:
                raise SystemExit(f"{RESULTS}: nothing of {key}; `scripts/maintain/scale.py run` computes it")
            self._found[key] = compute(*settings)
            with open(RESULTS, "a", encoding="utf-8") as file:
                file.write(json.dumps([settings, self._found[key]]) + "\n")
        return self._found[key]


def points(workers: int) -> List[Point]:
    return [Point(model, rate, draws, workers, store)
            for model, rate, draws, store in itertools.product(MODELS, RATES, DRAWS, STORES)]


def efficiency(point: Point, found: Dict[str, Any]) -> float:
    """The passes' time over the iteration's: the share of M times the samples that one worker alone makes."""
    return MODELS[point.model][1] / float(found["iteration"])


# --- what stops them ------------------------------------------------------------------------------------------------

def why(point: Point, found: Dict[str, Any]) -> str:
    """What an iteration is made of, where it is longer than the passes."""
    resource, load = max(found["loads"].items(), key=lambda item: item[1])
    if load >= 0.85 * found["iteration"] and resource != "passes":
        return resource
    if resource != "passes":
        return f"{resource}, and what is not beside it"
    synchronous = not methods.find(point.store).asynchronous
    return "the slowest worker" if synchronous and point.draws != "constant" else "its own exchange"


def tried(found: Dict[Point, Dict[str, Any]]) -> List[int]:
    """For these numbers of workers everything has been computed."""
    return sorted({point.workers for point in found})


Line = List[Tuple[Point, Dict[str, Any]]]
"""One store on clusters of all sizes."""


def line(found: Dict[Point, Dict[str, Any]], model: str, rate: str, draws: str, store: str) -> Line:
    return [(point, found[point]) for point in (Point(model, rate, draws, n, store) for n in tried(found))]


def stop(one: Line) -> str:
    """Up to how many workers a store is at least half as fast as alone, and why no further."""
    slow = next(((point, result) for point, result in one if efficiency(point, result) < 0.5), None)
    good = [point.workers for point, _ in one if slow is None or point.workers < slow[0].workers]
    return (f"{good[-1] if good else 0:,}" + (f": {why(*slow)}" if slow else ""))


def stops(found: Dict[Point, Dict[str, Any]]) -> str:
    """A row for each model, rate and draws: up to how many workers each store is at least half as fast as alone."""
    rows = [["model, links, workers", *(f"`{store}`" for store in STORES)]]
    for model, rate, (draws, shown) in itertools.product(MODELS, RATES, DRAWS.items()):
        rows.append([f"{model}, {rate}, {shown}", *(stop(line(found, model, rate, draws, store)) for store in STORES)])
    return tools.piped(rows, right="") + "\n"


def efficiencies(found: Dict[Point, Dict[str, Any]]) -> str:
    counts = tried(found)
    lines = ["| model, links, workers | store | " + " | ".join(f"{workers:,}" for workers in counts) + " |",
             "|---|---|" + "---:|" * len(counts)]
    for model, rate, (draws, shown), store in itertools.product(MODELS, RATES, DRAWS.items(), STORES):
        row = [efficiency(*one) for one in line(found, model, rate, draws, store)]
        lines.append(f"| {model}, {rate}, {shown} | `{store}` | "
                     + " | ".join(f"{100 * value:.3g} %" for value in row) + " |")
    return "\n".join(lines) + "\n"


def crossings(found: Dict[Tuple[float, float, str], float]) -> str:
    """Where either store is faster by more than CLOSE."""
    rows = [["sigma", "OD-SGD is faster", "by at most", "ASGD is faster", "by at most"]]
    for sigma in SIGMAS:
        gains = [found[sigma, ratio, "asgd"] / found[sigma, ratio, "odsgd"] - 1 for ratio in RATIOS]
        asgds = [1 / (1 + gain) - 1 for gain in gains]
        rows.append([f"{sigma:g}", *(cell for ahead in (gains, asgds) for cell in (spans(ahead), most(ahead)))])
    return tools.piped(rows, right="") + "\n"


def most(gains: Sequence[float]) -> str:
    """The largest gain and its ratio."""
    best = max(range(len(gains)), key=lambda i: gains[i])
    return f"{100 * gains[best]:.0f} % at {RATIOS[best]:.2g}" if gains[best] > CLOSE else ""


def spans(gains: Sequence[float]) -> str:
    """For which ratios a gain is above CLOSE, in words; by straight lines between the ratios that were computed."""
    parts: List[str] = []
    begins: Optional[str] = "" if gains[0] > CLOSE else None
    for low, high, before, after in zip(RATIOS, RATIOS[1:], gains, gains[1:]):
        if (before > CLOSE) != (after > CLOSE):
            at = f"{low + (high - low) * (CLOSE - before) / (after - before):.2f}"
            if begins is None:
                begins = at
            else:
                parts.append(f"{begins} to {at}" if begins else f"below {at}")
                begins = None
    if begins is not None:
        parts.append(f"above {begins}" if begins else "everywhere")
    return ", ".join(parts) or "nowhere"


# --- the pictures ---------------------------------------------------------------------------------------------------

def draw(found: Dict[Point, Dict[str, Any]], crossed: Dict[Tuple[float, float, str], float]) -> None:
    """Two pictures of iterations and efficiency, one of the crossing."""
    pyplot, counts = tools.pyplot("the page"), tried(found)
    for model, (_, compute) in MODELS.items():
        figure, axes = pyplot.subplots(2 * len(DRAWS), len(RATES), figsize=(11, 12), sharex=True, sharey="row")
        for column, rate in enumerate(RATES):
            for row, (draws, shown) in enumerate(DRAWS.items()):
                for store, colour in STORES.items():
                    one = line(found, model, rate, draws, store)
                    for axis, values in ((axes[2 * row][column], [result["iteration"] for _, result in one]),
                                         (axes[2 * row + 1][column], [efficiency(*each) for each in one])):
                        axis.plot(counts, values, "o-", color=colour, label=store, markersize=3)
                        axis.grid(alpha=0.3)
                        axis.set_xscale("log", base=4)
                axes[2 * row][column].set_yscale("log")
                axes[2 * row][column].set_title(f"{rate}, {shown}", fontsize=10)
                axes[2 * row + 1][column].set_ylim(0, 1.05)
                axes[2 * row][0].set_ylabel("seconds per iteration")
                axes[2 * row + 1][0].set_ylabel("efficiency")
            axes[-1][column].set_xticks(counts, [f"{workers:,}" for workers in counts], fontsize=8)
            axes[-1][column].set_xlabel("workers")
        axes[0][0].legend(fontsize=8)
        figure.suptitle(f"{model} parameters, passes of {compute:g} s, up to {MOST_SERVERS} servers (virtual time)")
        figure.tight_layout()
        figure.savefig(ROOT / "docs" / "results" / f"scale_{model}.png", dpi=80, metadata={"Software": None})
        pyplot.close(figure)
    figure, axis = pyplot.subplots(figsize=(7, 4))
    for index, sigma in enumerate(SIGMAS):
        axis.plot(RATIOS, [crossed[sigma, ratio, "asgd"] / crossed[sigma, ratio, "odsgd"] for ratio in RATIOS], "o-",
                  color=pyplot.get_cmap("viridis")(index / len(SIGMAS)), label=f"sigma {sigma:g}", markersize=3)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("T_com / T_cop: all workers' gradients over the server's link, over the passes")
    axis.set_ylabel("iteration: asgd / odsgd")
    axis.set_title(f"Above 1 OD-SGD is faster; {CROSSING_WORKERS} workers, one server (virtual time)", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "results" / "scale_crossing.png", dpi=80, metadata={"Software": None})


def results(kept: Kept) -> Tuple[Dict[Point, Dict[str, Any]], Dict[Tuple[float, float, str], float]]:
    """All points, and the crossings' iterations over the passes; what is not kept is computed, or else left out."""
    crossed = {(sigma, ratio, store): kept.get(crossing, sigma, ratio, store)["iteration"]
               for sigma in SIGMAS for ratio in RATIOS for store in ("odsgd", "asgd")}
    found: Dict[Point, Dict[str, Any]] = {}
    for workers in WORKERS:
        if kept.computes or all(map(kept.knows, points(workers))):
            found.update((point, kept.get(lambda *settings: computed(Point(*settings)), *point))
                         for point in points(workers))
    return found, crossed


def written(page: str, found: Dict[Point, Dict[str, Any]], crossed: Dict[Tuple[float, float, str], float]) -> str:
    """The page with its tables as the results have them."""
    counts = [f"{workers:,}" for workers in tried(found)]
    tables = {"tried": f"Tried: {', '.join(counts[:-1])} and {counts[-1]} workers.\n", "stops": stops(found),
              "efficiencies": efficiencies(found), "crossings": crossings(crossed)}
    for name, text in tables.items():
        page = put(page, f"<!-- {name} -->", text)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "page"))
    all_of_them = results(Kept(computes=parser.parse_args().what == "run"))
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), *all_of_them), encoding="utf-8")
    draw(*all_of_them)


if __name__ == "__main__":
    main()
