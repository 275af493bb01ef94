"""Pictures of our runs, of what the papers' figures show: curves and histograms in their axes, and bars."""
from __future__ import annotations

import collections
import math
import statistics
import textwrap
from pathlib import Path
from typing import Any, Counter, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from odsgd.lab.reproduce.claims import Seeds
from odsgd.lab.reproduce.declarations import Cell, Item, Picture
from odsgd.lab.reproduce.measures import MEASURES, Estimate, estimate, spread
from odsgd.lab.reproduce.results import Result
from odsgd.tools import pyplot

CURVES = {"accuracy": ("test_accuracy", "test accuracy, %"), "error": ("test_accuracy", "test error, %"),
          "train_accuracy": ("train_accuracy", "training accuracy, %"),
          "train_error": ("train_accuracy", "training error, %")}


PER_UNIT = {"epoch": 1, "seconds": 1, "hours": 3600}

FEW = 7
"""Curves whose legend finds room among them."""

COLOURS = 10
"""After which they begin again, with dashed lines."""


def draw(item: Item, picture: Picture, cells: Mapping[str, Seeds], path: Path) -> None:
    """One picture of the cells that have run."""
    plt = pyplot("a picture")
    names = [name for name in (picture.cells or item.cells) if name in cells]
    crowded = picture.kind != "bars" and len(names) > FEW
    figure, axes = plt.subplots(figsize=(6.4, 5 if crowded else 4))
    {"curve": _curves, "histogram": _histograms, "bars": _bars,
     "lengths": _lengths}[picture.kind](axes, item, picture, names, cells)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1), "ncol": 2}  # bars reach everywhere else
    axes.legend(fontsize=8, frameon=False, **(above if picture.kind == "bars" or crowded else {}))
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _curves(axes: Any, item: Item, picture: Picture, names: List[str], cells: Mapping[str, Seeds]) -> None:
    """The mean over seeds, of x too, and the range of them."""
    column, label = CURVES[picture.y]
    for number, name in enumerate(names):
        results = list(cells[name].values())
        xs = [statistics.fmean(values) / PER_UNIT[picture.x] for values in
              _by_epoch(results, "epoch" if picture.x == "epoch" else "virtual_seconds")]
        points = [[100 - 100 * value if "error" in picture.y else 100 * value for value in values]
                  for values in _by_epoch(results, column)]
        line, = axes.plot(xs, list(map(statistics.fmean, points)), label=item.cells[name].label, linewidth=1.3,
                          linestyle="-" if number < COLOURS else "--")
        axes.fill_between(xs, list(map(min, points)), list(map(max, points)), alpha=0.2, color=line.get_color(),
                          linewidth=0)
    axes.set_xlabel("epoch" if picture.x == "epoch" else f"{picture.x}, virtual time")
    axes.set_ylabel(label)


def _by_epoch(results: Sequence[Result], column: str) -> List[List[float]]:
    """A number of all seeds, at each epoch that all have."""
    seeds = [dict(zip(result.column("epoch"), result.column(column))) for result in results]
    return [[seed[epoch] for seed in seeds] for epoch in seeds[0] if all(epoch in seed for seed in seeds)]


def _histograms(axes: Any, item: Item, picture: Picture, names: List[str], cells: Mapping[str, Seeds]) -> None:
    """The share of pushes by their staleness, all seeds together."""
    for name in names:
        counts: Counter[int] = collections.Counter()
        for result in cells[name].values():
            assert result.staleness is not None
            counts.update({int(tau): pushes for tau, pushes in result.staleness["histogram"].items()})
        taus = range(max(counts) + 1)
        shares = [counts[tau] / sum(counts.values()) for tau in taus]
        axes.bar(taus, shares, width=1, alpha=0.6, label=item.cells[name].label)
    axes.set_xlabel("staleness")
    axes.set_ylabel("share of the gradients")


def _lengths(axes: Any, item: Item, picture: Picture, names: List[str], cells: Mapping[str, Seeds]) -> None:
    """How much a measure of cells is above that of others, by iterations: means over common seeds, with intervals."""
    lines: Dict[str, List[Tuple[float, Estimate]]] = {}
    of = MEASURES[picture.y].of
    for name in names:
        base = cells.get(picture.over[name], {})
        gaps = [of(result) - of(base[seed]) for seed, result in cells[name].items() if seed in base]
        if gaps:
            iterations = next(iter(cells[name].values())).column("iteration")[-1]
            label = item.cells[name].label.rpartition(", ")[0]
            lines.setdefault(label, []).append((iterations, estimate(gaps)))
    for number, (label, points) in enumerate(lines.items()):
        beside = 1.04 ** (number - (len(lines) - 1) / 2)  # else intervals hide each other
        bars = [0 if math.isinf(found.high) else found.high - found.mean for _, found in points]
        axes.errorbar([x * beside for x, _ in points], [found.mean for _, found in points], bars, label=label,
                      marker="o", markersize=4, capsize=3, linewidth=1.3)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_xscale("log")
    lengths = sorted({x for points in lines.values() for x, _ in points})
    axes.set_xticks(lengths)
    axes.set_xticklabels([f"{x:,.0f}" for x in lengths])
    axes.minorticks_off()
    axes.set_xlabel("iterations")
    axes.set_ylabel(picture.label or MEASURES[picture.y].label)


def _bars(axes: Any, item: Item, picture: Picture, names: List[str], cells: Mapping[str, Seeds]) -> None:
    """A measure of each cell with its deviation over seeds, and the paper's number where it gives one; or both divided
    by those of other cells.
    """
    measure = MEASURES[picture.y]
    names = [name for name in names if picture.over.get(name, name) in cells]
    ours = [spread([measure.of(result) / _base(picture, name, cells, seed) for seed, result in cells[name].items()])
            for name in names]
    papers = [(place, value) for place, name in enumerate(names)
              for value in _papers(picture, item.cells[name], item.cells.get(picture.over.get(name, "")))]
    height = 0.4 if papers else 0.7
    axes.barh([place - 0.2 * bool(papers) for place in range(len(names))], [mean for mean, _ in ours], height,
              label="ours", xerr=[0 if deviation != deviation else deviation for _, deviation in ours])
    if papers:
        axes.barh([place + 0.2 for place, _ in papers], [value for _, value in papers], height, label="the paper's")
    axes.set_yticks(range(len(names)))
    axes.set_yticklabels([picture.names.get(name, item.cells[name].label) for name in names], fontsize=8)
    axes.invert_yaxis()
    bases = dict.fromkeys(item.cells[base].label for base in picture.over.values())
    label = f"{measure.label}: times {'; '.join(bases)}" if bases else measure.label
    axes.set_xlabel(textwrap.fill(picture.label or label, 60))


def _base(picture: Picture, name: str, cells: Mapping[str, Seeds], seed: int) -> float:
    """What a cell's measure is divided by: that of another with the same seed, if there is one; or their mean."""
    if name not in picture.over:
        return 1.0
    seeds, measure = cells[picture.over[name]], MEASURES[picture.y]
    return statistics.fmean(measure.of(seeds[one]) for one in ([seed] if seed in seeds else seeds))


def _papers(picture: Picture, cell: Cell, base: Optional[Cell]) -> Iterator[float]:
    """The paper's number of a bar, if it gives what it takes."""
    if cell.name in picture.papers:
        yield picture.papers[cell.name]
        return
    given = [one.paper.get(picture.y, math.nan) for one in (cell, *([base] if base else []))]
    if not any(map(math.isnan, given)):
        yield given[0] / (given[1] if base else 1)
