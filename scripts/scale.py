#!/usr/bin/env python3
"""Write docs/scale.md's tables and its pictures anew: five stores from 1 to 4,096 workers, in virtual time.

    scripts/scale.py

Deterministic. What is computed is kept in runs/scale.jsonl as it comes, so that a run that was stopped goes on; a file
that another version of the code has left should be deleted first.
"""
import json
import re
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Tuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kvstore import algorithms  # noqa: E402  (the path comes first)
from kvstore.transports.virtual.description import of  # noqa: E402
from kvstore.transports.virtual.times import layers, simulate  # noqa: E402

PAGE, KEPT = ROOT / "docs" / "scale.md", ROOT / "runs" / "scale.jsonl"
STORES = {"ssgd": "#555555", "odsgd": "#d62728", "pipesgd": "#1f77b4", "asgd": "#2ca02c", "easgd": "#9467bd"}
MODELS = {"25M": (25_000_000, "200ms"), "350M": (350_000_000, "1s")}
"""Floats, and the time of both passes."""
LAYERS = 32
"""Alike; each is a bucket, but on a ring, which has the sizes that suit it."""
RATES = ("1gbit", "10gbit", "100gbit")
DRAWS = {"constant": "equal workers", "lognormal:0.3": "stragglers"}
WORKERS = (1, 4, 16, 64, 256, 1024, 4096)
MOST_SERVERS = 16
RATIOS = tuple(2.0 ** (half / 2) for half in range(-10, 7))
SIGMAS = (0.0, 0.05, 0.1, 0.2, 0.4)
CROSSING_WORKERS = 16


class Point(NamedTuple):
    """One store on one cluster."""

    model: str
    rate: str
    draws: str
    workers: int
    store: str


def computed(point: Point) -> Dict[str, Any]:
    floats, compute = MODELS[point.model]
    servers = min(point.workers, MOST_SERVERS)
    cluster = of({"workers": point.workers, "servers": servers, "links": {"goodput": point.rate},
                  "compute": {"iteration": compute, "draws": point.draws}})
    sizes = {f"layer{number}": floats // LAYERS for number in range(LAYERS)}
    options = {} if point.store == "pipesgd" else {"bucket_nbytes": 4 * (floats // LAYERS)}
    counted = max(4, 64 // point.workers) if point.workers < 1024 else 3
    pace = simulate(cluster, point.store, layers(sizes), options, iterations=2 + counted, warm_up=2)
    return {"iteration": pace.iteration, "efficiency": cluster.compute.iteration / pace.iteration, "loads": pace.loads}


def crossing(sigma: float, ratio: float, store: str) -> Dict[str, Any]:
    """With one server; `ratio`: the time that its link needs for all workers' gradients, over that of the passes."""
    T_cop, floats = 0.2, 25_000_000
    goodput = 8e-6 * 4 * floats * CROSSING_WORKERS / (ratio * T_cop)
    nothing = {"worker": {"message": 0, "gather": 0, "step": 0, "scatter": 0},
               "server": {"message": 0, "receive": 0, "update": 0}}
    cluster = of({**nothing, "workers": CROSSING_WORKERS, "links": {"goodput": f"{goodput:.6f}mbit", "message": 0},
                  "compute": {"iteration": f"{T_cop}s", "draws": f"lognormal:{sigma}" if sigma else "constant"}})
    sizes = {f"layer{number}": floats // LAYERS for number in range(LAYERS)}
    pace = simulate(cluster, store, layers(sizes), {"bucket_nbytes": 4 * (floats // LAYERS)}, iterations=44, warm_up=4)
    return {"iteration": pace.iteration / T_cop}


class Kept:
    """What has been computed, by its settings."""

    def __init__(self) -> None:
        KEPT.parent.mkdir(exist_ok=True)
        lines = KEPT.read_text(encoding="utf-8").splitlines() if KEPT.exists() else []
        self._found: Dict[str, Any] = dict(map(json.loads, lines))

    def get(self, compute: Any, *settings: Any) -> Dict[str, Any]:
        key = json.dumps(settings)
        if key not in self._found:
            found = json.loads(json.dumps(compute(*settings)))
            with open(KEPT, "a", encoding="utf-8") as file:
                file.write(json.dumps([key, found]) + "\n")
            self._found[key] = found
        return self._found[key]


def points() -> Iterator[Point]:
    """Small clusters first."""
    return (Point(model, rate, draws, workers, store) for workers in WORKERS for model in MODELS for rate in RATES
            for draws in DRAWS for store in STORES)


# --- what stops them ------------------------------------------------------------------------------------------------

def why(point: Point, found: Dict[str, Any]) -> str:
    """What an iteration is made of, where it is longer than the passes."""
    resource, load = max(found["loads"].items(), key=lambda item: item[1])
    if load >= 0.85 * found["iteration"] and resource != "passes":
        return resource
    if resource != "passes":
        return f"{resource}, and what is not beside it"
    synchronous = not algorithms.find(point.store).asynchronous
    return "the slowest worker" if synchronous and point.draws != "constant" else "its own exchange"


def stops(found: Dict[Point, Dict[str, Any]]) -> str:
    """A row for each model, rate and draws: up to how many workers each store is at least half as fast as alone."""
    lines = ["| model, links, workers | " + " | ".join(f"`{store}`" for store in STORES) + " |",
             "|---|" + "---|" * len(STORES)]
    for model in MODELS:
        for rate in RATES:
            for draws, shown in DRAWS.items():
                cells = []
                for store in STORES:
                    line = [(point, found[point]) for point in (Point(model, rate, draws, workers, store)
                                                                for workers in WORKERS)]
                    slow = next(((point, one) for point, one in line if one["efficiency"] < 0.5), None)
                    good = [point.workers for point, one in line if slow is None or point.workers < slow[0].workers]
                    cells.append(f"{good[-1] if good else 0:,}: {why(*slow)}" if slow else f"{good[-1]:,}")
                lines.append(f"| {model}, {rate}, {shown} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def efficiencies(found: Dict[Point, Dict[str, Any]]) -> str:
    lines = ["| model, links, workers | store | " + " | ".join(f"{workers:,}" for workers in WORKERS) + " |",
             "|---|---|" + "---:|" * len(WORKERS)]
    for model in MODELS:
        for rate in RATES:
            for draws, shown in DRAWS.items():
                for store in STORES:
                    row = [found[Point(model, rate, draws, workers, store)]["efficiency"] for workers in WORKERS]
                    lines.append(f"| {model}, {rate}, {shown} | `{store}` | "
                                 + " | ".join(f"{100 * value:.3g} %" for value in row) + " |")
    return "\n".join(lines) + "\n"


def crossings(found: Dict[Tuple[float, float, str], float]) -> str:
    """Where ASGD's curve crosses OD-SGD's, by straight lines between the ratios that were computed."""
    lines = ["| sigma | ASGD is faster | OD-SGD is faster, and by how much at most |", "|---|---|---|"]
    for sigma in SIGMAS:
        gains = [found[sigma, ratio, "asgd"] / found[sigma, ratio, "odsgd"] - 1 for ratio in RATIOS]
        ends: List[Tuple[float, bool]] = []
        for (low, high), (before, after) in zip(zip(RATIOS, RATIOS[1:]), zip(gains, gains[1:])):
            if (before > 0) != (after > 0):
                ends.append((low + (high - low) * before / (before - after), after > 0))
        odsgd = spans(ends, gains[0] > 0)
        best = max(range(len(gains)), key=lambda i: gains[i])
        shown = f"{odsgd}, {100 * gains[best]:.0f} % at {RATIOS[best]:.2g}" if gains[best] > 0 else "nowhere"
        asgd = spans([(at, not up) for at, up in ends], gains[0] <= 0) or "nowhere"
        lines.append(f"| {sigma:g} | {asgd} | {shown} |")
    return "\n".join(lines) + "\n"


def spans(ends: Sequence[Tuple[float, bool]], at_first: bool) -> str:
    """Where something is so, in words; `ends`: where that changes, and whether it is so from there on."""
    begins: Any = "" if at_first else None
    parts = []
    for at, on in ends:
        if on:
            begins = f"{at:.2f}"
        elif begins is not None:
            parts.append(f"{begins} to {at:.2f}" if begins else f"below {at:.2f}")
            begins = None
    if begins is not None:
        parts.append(f"above {begins}" if begins else "everywhere")
    return ", ".join(parts)


# --- the pictures ---------------------------------------------------------------------------------------------------

def draw(found: Dict[Point, Dict[str, Any]], crossed: Dict[Tuple[float, float, str], float]) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    for model, (_, compute) in MODELS.items():
        figure, axes = pyplot.subplots(2 * len(DRAWS), len(RATES), figsize=(11, 12), sharex=True, sharey="row")
        for column, rate in enumerate(RATES):
            for row, (draws, shown) in enumerate(DRAWS.items()):
                for store, colour in STORES.items():
                    line = [found[Point(model, rate, draws, workers, store)] for workers in WORKERS]
                    for axis, what in ((axes[2 * row][column], "iteration"), (axes[2 * row + 1][column], "efficiency")):
                        axis.plot(WORKERS, [one[what] for one in line], "o-", color=colour, label=store, markersize=3)
                        axis.grid(alpha=0.3)
                        axis.set_xscale("log", base=4)
                axes[2 * row][column].set_yscale("log")
                axes[2 * row][column].set_title(f"{rate}, {shown}", fontsize=10)
                axes[2 * row + 1][column].set_ylim(0, 1.05)
                axes[2 * row][0].set_ylabel("seconds per iteration")
                axes[2 * row + 1][0].set_ylabel("efficiency")
            axes[-1][column].set_xticks(WORKERS, [f"{workers:,}" for workers in WORKERS], fontsize=8)
            axes[-1][column].set_xlabel("workers")
        axes[0][0].legend(fontsize=8)
        figure.suptitle(f"{model} parameters, passes of {compute}, up to {MOST_SERVERS} servers (virtual time)")
        figure.tight_layout()
        figure.savefig(ROOT / "docs" / f"scale_{model}.png", dpi=80, metadata={"Software": None})
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
    figure.savefig(ROOT / "docs" / "scale_crossing.png", dpi=80, metadata={"Software": None})


def main() -> None:
    kept = Kept()
    crossed = {(sigma, ratio, store): kept.get(crossing, sigma, ratio, store)["iteration"]
               for sigma in SIGMAS for ratio in RATIOS for store in ("odsgd", "asgd")}
    found = {point: kept.get(lambda *settings: computed(Point(*settings)), *point) for point in points()}
    page = PAGE.read_text(encoding="utf-8")
    tables = {"stops": stops(found), "efficiencies": efficiencies(found), "crossings": crossings(crossed)}
    for name, text in tables.items():
        page, count = re.subn(rf"(<!-- {name} -->\n).*?(<!-- end -->)",
                              lambda match, text=text: match[1] + text + match[2], page,  # type: ignore[misc]
                              flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"{PAGE}: expected one table `{name}`, found {count}")
    PAGE.write_text(page, encoding="utf-8")
    draw(found, crossed)


if __name__ == "__main__":
    main()
