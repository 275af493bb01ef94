"""Pictures of our runs, of what the papers' figures show: an SVG for each figure, with a panel for each of its parts;
and of a paper's claims, the intervals that decide them.

The same runs make the same file: no date, no random names, and text that stays text.
"""
from __future__ import annotations

import collections
import contextlib
import math
import statistics
import textwrap
from pathlib import Path
from typing import Any, Counter, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from odsgd.tools import pyplot
from scripts.reproduction.claims import FAILS, HOLDS, OPEN, Seeds, Tested, paired
from scripts.reproduction.declarations import Item, Picture
from scripts.reproduction.measures import MEASURES, Estimate, estimate, spread
from scripts.reproduction.results import Result
from scripts.reproduction.words import interval

CURVES = {"accuracy": ("test_accuracy", "test accuracy, %"), "error": ("test_accuracy", "test error, %"),
          "train_accuracy": ("train_accuracy", "training accuracy, %"),
          "train_error": ("train_accuracy", "training error, %")}

STYLE = {"svg.hashsalt": "odsgd", "svg.fonttype": "none", "font.size": 8, "axes.titlesize": 8, "legend.frameon": False,
         "axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True}

ACROSS = 3
"""Panels beside each other, at most."""

COLOURS = 10
"""After which they begin again, with dashed lines."""

LATE = 1 / 4
"""The axis of a curve is chosen by what comes after this share of it."""

SPREAD = 4
"""Times whose ends differ by more have a logarithmic axis."""

SECONDS = tuple(digit * 10 ** power for power in range(6) for digit in (1, 2, 5))
"""Marks of a logarithmic axis of times."""

FACTORS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1, 1.1, 1.3, 1.5, 2, 3, 5, 10, 20, 50)
"""Marks of an axis of quotients."""

WIDE, POINTS = 8, (-50, -20, -5, -1, -0.5, 0, 0.5, 1, 5, 20, 50)
"""Beyond so many points an axis of differences is logarithmic from 1 point on, with these marks."""

MARKS = {HOLDS: ("#1b7837", "o"), FAILS: ("#b2182b", "X"), OPEN: ("#777777", "s")}
"""Colour and form of a claim's mean, by its verdict."""


class Panel(NamedTuple):
    """A picture of the cells that have run at a scale."""

    picture: Picture
    scale: str
    cells: Mapping[str, Seeds]


def draw(title: str, below: str, item: Item, drawn: Sequence[Panel], path: Path) -> None:
    """One figure of the cells that have run; `below` its title stands how large the runs are."""
    panels = [one.picture for one in drawn]
    shown = [[name for name in (one.picture.cells or item.cells) if name in one.cells] for one in drawn]
    across = min(len(panels), 2 if len(panels) % 2 == 0 else ACROSS)
    down = -(-len(panels) // across)
    bars = max(len(names) for picture, names in zip(panels, shown)) if panels[0].kind == "bars" else 0
    labels = [_labels(item, picture, names) for picture, names in zip(panels, shown)]
    colours = _colours(panels, labels)
    below += _explained(drawn, item)
    several = len({one.scale for one in drawn}) > 1
    with _figure(title, below, 3.1 * max(across, 2), down * max(2.6, 0.3 * bars) + 0.2 * len(colours) / across,
                 path) as figure:
        for number, ((picture, scale, cells), names) in enumerate(zip(drawn, shown), start=1):
            axes = figure.add_subplot(down, across, number)
            common, own = labels[number - 1]
            axes.set_title(", ".join(filter(None, [picture.title or common, f"scale {scale}" * several])), loc="left")
            {"curve": _curves, "histogram": _histograms, "bars": _bars,
             "lengths": _lengths}[picture.kind](axes, item, picture, dict(zip(names, own)), cells, colours)
        _heights(item, drawn, figure.axes, [dict(zip(names, own)) for names, (_, own) in zip(shown, labels)], colours)
        handles: Dict[str, Any] = {}
        for axes in figure.axes:
            for handle, label in zip(*axes.get_legend_handles_labels()):
                handles.setdefault(label, handle)
        room = 3.1 * max(across, 2) * 15 // (max(map(len, handles), default=0) + 7)
        figure.legend([*handles.values()], [*handles], loc="outside lower center",
                      ncols=max(1, min(4, len(handles), int(room))))


@contextlib.contextmanager
def _figure(title: str, below: str, width: float, height: float, path: Path) -> Iterator[Any]:
    """An empty figure with its title, saved when it has been filled."""
    plt = pyplot("a picture")
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(width, height + 0.6))
        wide = int(width * 15)
        figure.suptitle("\n".join([textwrap.fill(title, wide), textwrap.fill(below, wide)]), x=0.01,
                        ha="left", fontsize=8.5)
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)


def _labels(item: Item, picture: Picture, names: Sequence[str]) -> Tuple[str, List[str]]:
    """What all labels have in common, for the title of a panel; and what each has of its own."""
    parts = [picture.names.get(name, item.cells[name].label).split(", ") for name in names]
    if picture.kind == "lengths":  # lines, of which each has many cells
        return "", [", ".join(one[:-1]) for one in parts]
    declared = [item.cells[name].label.split(", ") for name in picture.cells]
    common = [part for part in parts[0] if all(part in one for one in declared)] if len(declared) > 1 else []
    own = [", ".join(part for part in one if part not in common) for one in parts]
    return (", ".join(common), own) if all(own) else ("", [", ".join(one) for one in parts])


def _colours(panels: Sequence[Picture], labels: Sequence[Tuple[str, List[str]]]) -> Dict[str, Tuple[Any, str]]:
    """Colour and line of each label, the same in all panels; a scale of colours where the labels have an order, and
    black and grey for those behind them.
    """
    names = [*dict.fromkeys(label for _, own in labels for label in own)]
    ordered = max(picture.ordered for picture in panels)
    if not ordered:
        return {name: (f"C{place % COLOURS}", "-" if place < COLOURS else "--") for place, name in enumerate(names)}
    scale = pyplot("a picture").get_cmap("viridis")
    return {name: (scale(0.9 * place / (ordered - 1)) if place < ordered else ("black", "grey")[place > ordered], "-")
            for place, name in enumerate(names)}


def _explained(drawn: Sequence[Panel], item: Item) -> str:
    """What bands, dashes and marks mean, where there are any."""
    panels, kinds = [one.picture for one in drawn], {one.picture.kind for one in drawn}
    counts = {len(seeds) for one in drawn for seeds in one.cells.values()}
    said = ["bands: range of the seeds"] * (max(counts) > 1 and "curve" in kinds)
    if any(_given(item, picture, name) for picture in panels for name in picture.cells or item.cells):
        said.append("dashed: the paper's mean" if "histogram" in kinds
                    else "dashed, or a number: the paper's value at the end")
    said += ["whiskers: standard deviation of the seeds"] if "bars" in kinds else []
    said += ["whiskers: 95 % confidence intervals"] * ("lengths" in kinds)
    said += ["hollow: one seed"] * (1 in counts and "lengths" in kinds)
    return "".join(f"; {one}" for one in said)


def _given(item: Item, picture: Picture, name: str) -> Optional[float]:
    """The paper's value at the end of a curve, or its mean staleness."""
    paper = item.cells[name].paper
    keys = {"curve": (picture.y, f"{picture.y}5"), "histogram": ("staleness",)}.get(picture.kind, ())
    return next((paper[key] for key in keys if key in paper), None)


def _curves(axes: Any, item: Item, picture: Picture, names: Mapping[str, str], cells: Mapping[str, Seeds],
            colours: Mapping[str, Tuple[Any, str]]) -> None:
    """The mean over seeds, of x too, and the range of them."""
    column, label = CURVES[picture.y]
    ends = []
    most = max(len(cells[name]) for name in names)
    for name, own in names.items():
        results = list(cells[name].values())
        xs = list(map(statistics.fmean, _by_epoch(results, "epoch" if picture.x == "epoch" else "virtual_seconds")))
        points = [[100 - 100 * value if "error" in picture.y else 100 * value for value in values]
                  for values in _by_epoch(results, column)]
        means = list(map(statistics.fmean, points))
        colour, line = colours[own]
        wide = [*colours].index(own) % 2 == 0  # so that of two which lie on each other both are seen
        axes.plot(xs, means, label=own + " (1 seed)" * (len(results) == 1 < most), linestyle=line, color=colour,
                  linewidth=2.6 if wide else 1.1, zorder=2 if wide else 3, marker="o" if len(xs) < 4 else None,
                  markersize=5 if wide else 3)
        axes.fill_between(xs, list(map(min, points)), list(map(max, points)), alpha=0.2 if len(names) < 6 else 0.1,
                          color=colour, linewidth=0)
        ends.append(xs[-1])
    if picture.x != "epoch" and max(ends) > SPREAD * min(ends):
        axes.set_xscale("log")
        _mark(axes.xaxis, SECONDS, *axes.get_xlim())
        axes.minorticks_off()
    elif picture.x == "epoch":
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("epoch" if picture.x == "epoch" else "seconds, virtual time")
    axes.set_ylabel(label)


def _heights(item: Item, drawn: Sequence[Panel], every_axes: Sequence[Any], names: Sequence[Mapping[str, str]],
             colours: Mapping[str, Tuple[Any, str]]) -> None:
    """One axis for all panels that show the same at a scale: where the curves are, without their steep beginnings, if
    these are more than twice as high as the rest. And the paper's values.
    """
    for y, scale in dict.fromkeys((one.picture.y, one.scale) for one in drawn if one.picture.kind == "curve"):
        panels = [(axes, one.picture, own) for axes, one, own in zip(every_axes, drawn, names)
                  if (one.picture.kind, one.picture.y, one.scale) == ("curve", y, scale)]
        curves = [[value for value in line.get_ydata() if math.isfinite(value)] for axes, _, _ in panels
                  for line in axes.lines]
        late = [value for curve in curves for value in curve[int(LATE * len(curve)):]]
        ends = [end for axes, _, _ in panels for end in axes.get_ylim()]
        low, high, first, last = min(late), max(late), min(map(min, curves)), max(map(max, curves))
        if last - first > 3 * (high - low):
            margin = 0.15 * max(high - low, 1)
            ends = [max(low - 2 * margin, first - margin), min(high + 2 * margin, last + margin)]
        given = [{name: value for name in own if (value := _given(item, picture, name)) is not None}
                 for _, picture, own in panels]
        near = _near([value for values in given for value in values.values()], min(ends), max(ends))
        margin = 0.012 * (max(ends) - min(ends))
        ends += [near[0] - margin, near[-1] + margin] if near else []
        for (axes, _, own), values in zip(panels, given):
            axes.set_ylim(min(ends), max(ends))
            _dashed(axes, values, near, {name: colours[label][0] for name, label in own.items()})


def _near(values: Sequence[float], low: float, high: float) -> List[float]:
    """Which values of the paper are near the curves and apart from each other, in order."""
    room = 0.6 * (high - low)
    near = sorted(value for value in values if low - room < value < high + room)
    return near if len({*near}) < 2 or near[-1] - near[0] >= room / 30 else []


def _dashed(axes: Any, values: Mapping[str, float], near: Sequence[float], colours: Mapping[str, Any]) -> None:
    """The paper's values as lines, or as a word on those that are not near."""
    for name, value in values.items():
        if value in near:
            axes.plot([0.75, 1], [value, value], linestyle="--", linewidth=1, color=colours[name],
                      transform=axes.get_yaxis_transform())
    far, (low, high) = [value for value in values.values() if value not in near], map(float, axes.get_ylim())
    if far:
        text = " to ".join(dict.fromkeys(f"{value:.1f}" for value in (min(far), max(far))))
        where = " ↑" * (min(far) > high) + " ↓" * (max(far) < low)
        axes.set_title(f"the paper: {text}{where}", loc="right", fontsize=7, color="grey")


def _by_epoch(results: Sequence[Result], column: str) -> List[List[float]]:
    """A number of all seeds, at each epoch that all have."""
    seeds = [dict(zip(result.column("epoch"), result.column(column))) for result in results]
    return [[seed[epoch] for seed in seeds] for epoch in seeds[0] if all(epoch in seed for seed in seeds)]


def _histograms(axes: Any, item: Item, picture: Picture, names: Mapping[str, str], cells: Mapping[str, Seeds],
                colours: Mapping[str, Tuple[Any, str]]) -> None:
    """The share of pushes by their staleness, all seeds together."""
    for name, own in names.items():
        counts: Counter[int] = collections.Counter()
        for result in cells[name].values():
            assert result.staleness is not None
            counts.update({int(tau): pushes for tau, pushes in result.staleness["histogram"].items()})
        taus = range(max(counts) + 1)
        shares = [counts[tau] / sum(counts.values()) for tau in taus]
        axes.stairs(shares, [tau - 0.5 for tau in range(len(shares) + 1)], fill=True, alpha=0.6, label=own,
                    color=colours[own][0])
        given = _given(item, picture, name)
        if given is not None:
            axes.axvline(given, linestyle="--", linewidth=1, color=colours[own][0])
    axes.set_xlabel("staleness")
    axes.set_ylabel("share of the gradients")


def _lengths(axes: Any, item: Item, picture: Picture, names: Mapping[str, str], cells: Mapping[str, Seeds],
             colours: Mapping[str, Tuple[Any, str]]) -> None:
    """How much a measure of cells is above that of others, by iterations: means over common seeds, with intervals."""
    lines: Dict[str, List[Tuple[float, Estimate]]] = {}
    made: Dict[float, Tuple[str, str]] = {}  # of each length: in words, and by which framework
    of = MEASURES[picture.y].of
    for name, own in names.items():
        base = cells.get(picture.over[name], {})
        gaps = [of(cells[name][seed]) - of(base[seed]) for seed in paired(cells[name], base)]
        if gaps:
            one = next(iter(cells[name].values()))
            iterations = one.column("iteration")[-1]
            made[iterations] = item.cells[name].label.rpartition(", ")[2], one.framework
            lines.setdefault(own, []).append((iterations, estimate(gaps)))
    for number, (own, points) in enumerate(lines.items()):
        beside = 1.04 ** (number - (len(lines) - 1) / 2)  # else intervals hide each other
        bars = [0 if math.isinf(found.high) else found.high - found.mean for _, found in points]
        xs, means, colour = [x * beside for x, _ in points], [found.mean for _, found in points], colours[own][0]
        axes.errorbar(xs, means, bars, label=own, marker="o", markersize=4, capsize=3, color=colour, linewidth=1.2,
                      linestyle="none")
        for framework in sorted({framework for _, framework in made.values()}):  # each draws its own weights and data
            of_it = [place for place, (x, _) in enumerate(points) if made[x][1] == framework]
            axes.plot([xs[place] for place in of_it], [means[place] for place in of_it], color=colour, linewidth=1.2)
        alone = [(x, found.mean) for x, (_, found) in zip(xs, points) if found.seeds == 1]
        axes.plot(*zip(*alone) if alone else ((), ()), linestyle="none", marker="o", markersize=4, color=colour,
                  markerfacecolor="white", zorder=3)
    axes.axhline(0, color="grey", linewidth=0.8)
    low, high = map(float, axes.get_ylim())
    wide = high - low > WIDE
    if wide:
        _in_points(axes, axes.yaxis, low, high)
    axes.set_xscale("log")
    axes.set_xticks(sorted(made))
    several = len({framework for _, framework in made.values()}) > 1
    axes.set_xticklabels([f"{x:,.0f}\n{made[x][0]}" + f"\n{made[x][1]}" * several for x in sorted(made)])
    axes.minorticks_off()
    axes.set_xlabel("iterations")
    axes.set_ylabel((picture.label or MEASURES[picture.y].label) + ",\nlogarithmic beyond 1" * wide)


def _bars(axes: Any, item: Item, picture: Picture, names: Mapping[str, str], cells: Mapping[str, Seeds],
          colours: Mapping[str, Tuple[Any, str]]) -> None:
    """A measure of each cell with its deviation over seeds, and the paper's number where it gives one; or both divided
    by those of other cells.
    """
    measure = MEASURES[picture.y]
    names = {name: own for name, own in names.items() if picture.over.get(name, name) in cells}
    ours = [spread([measure.of(result) / _base(picture, name, cells, seed) for seed, result in cells[name].items()])
            for name in names]
    papers = [(place, value) for place, name in enumerate(names)
              if (value := _papers_own(picture, item, name)) is not None]
    height = 0.4 if papers else 0.7
    axes.barh([place - 0.2 * bool(papers) for place in range(len(names))], [mean for mean, _ in ours], height,
              label="ours" if papers else None,
              xerr=[0 if deviation != deviation else deviation for _, deviation in ours], color="C0")
    if papers:
        ends = [value if isinstance(value, (tuple, list)) else (0, value) for _, value in papers]
        axes.barh([place + 0.2 for place, _ in papers], [high - low for low, high in ends], height,
                  left=[low for low, _ in ends], label="the paper's", color="none", edgecolor="black", linestyle="--",
                  linewidth=0.8)
    axes.set_yticks(range(len(names)))
    axes.set_yticklabels([*names.values()])
    axes.invert_yaxis()
    bases = {item.cells[base].label.partition(", ")[0] for base in picture.over.values()}
    if bases:
        axes.axvline(1, color="grey", linewidth=0.8)
    label = f"{measure.label}, times that of {' or '.join(sorted(bases))}" if bases else measure.label
    axes.set_xlabel(textwrap.fill(picture.label or label, 60))


def _base(picture: Picture, name: str, cells: Mapping[str, Seeds], seed: int) -> float:
    """What a cell's measure is divided by: that of another with the same seed, if there is one; or their mean."""
    if name not in picture.over:
        return 1.0
    seeds, measure = cells[picture.over[name]], MEASURES[picture.y]
    return statistics.fmean(measure.of(seeds[one]) for one in ([seed] if seed in seeds else seeds))


def _papers_own(picture: Picture, item: Item, name: str) -> Any:
    """The paper's number of a bar, or two between which it is; None if it does not give what it takes."""
    if name in picture.papers:
        return picture.papers[name]
    of, by = (item.cells[one].paper.get(picture.y) if one else 1.0 for one in (name, picture.over.get(name)))
    return None if of is None or by is None else of / by


# --- claims -----------------------------------------------------------------------------------------------------------

def forest(title: str, rows: Sequence[Tuple[str, Tested]], path: Path) -> None:
    """Each claim's interval, of the comparison that decides it, its bounds and the paper's value: differences above,
    quotients below.
    """
    kinds = {ratio: [(label, one) for label, one in rows if bool(one.comparison.over) is ratio]
             for ratio in (False, True)}
    kinds = {ratio: found for ratio, found in kinds.items() if found}
    below = ("means with 95 % intervals, or the wider ones that decide. An arrow: the interval goes on. Claims that "
             "have no number yet are left out")
    with _figure(title, below, 9.5, 0.34 * len(rows) + 0.8 * len(kinds), path) as figure:
        grid = figure.subplots(len(kinds), 1, squeeze=False, height_ratios=[len(one) + 1 for one in kinds.values()])
        for axes, (ratio, found) in zip(grid.flat, kinds.items()):
            low, high = _range([one for _, one in found], ratio)
            if ratio:
                axes.set_xscale("log")
                _mark(axes.xaxis, FACTORS, low, high)
                axes.minorticks_off()
            elif high - low > WIDE:
                _in_points(axes, axes.xaxis, low, high)
            for place, (_, one) in enumerate(found):
                _row(axes, place, one, low, high)
            axes.set_xlim(low, high)
            axes.set_ylim(len(found) - 0.4, -0.6)
            axes.set_yticks(range(len(found)))
            axes.set_yticklabels([f"{label}\n{one.name}" for label, one in found], fontsize=7)
            numbers = axes.secondary_yaxis("right")
            numbers.set_yticks(range(len(found)), [interval(one) for _, one in found], fontsize=7)
            numbers.tick_params(length=0)
            numbers.spines["right"].set_visible(False)
            axes.axvline(float(ratio), color="black", linewidth=0.6)
            axes.set_xlabel("one divided by the other" if ratio
                            else "points" + ", logarithmic beyond 1" * (axes.get_xscale() == "symlog"))
        mark = pyplot("a picture").Line2D
        figure.legend([*(mark([], [], color=colour, marker=form) for colour, form in MARKS.values()),
                       mark([], [], color=MARKS[OPEN][0], marker=MARKS[OPEN][1], markerfacecolor="white", linestyle=""),
                       mark([], [], color="#dddddd", linewidth=8),
                       mark([], [], color="black", marker="|", markersize=9, linestyle="")],
                      ["holds, or is reproduced", "does not hold, or is not", "open", "one seed",
                       "what the claim allows", "the paper's value"], loc="outside lower center", ncols=3)


def _mark(axis: Any, marks: Sequence[float], low: float, high: float) -> None:
    """Marks of a logarithmic axis, far enough from each other to be read, from the middle on."""
    places = dict(zip(marks, axis.get_transform().transform(marks)))
    begin, end = axis.get_transform().transform([low, high])
    apart = (0.12 if axis.axis_name == "x" else 0.05) * (end - begin)  # words are wider than they are high
    found: List[float] = []
    for mark in sorted(places, key=lambda one: abs(places[one])):
        if low < mark < high and all(abs(places[mark] - places[one]) > apart for one in found):
            found.append(mark)
    axis.set_ticks(found)
    axis.set_major_formatter("{x:g}")


def _in_points(axes: Any, axis: Any, low: float, high: float) -> None:
    """Differences, some of them small and some large."""
    getattr(axes, f"set_{axis.axis_name}scale")("symlog", linthresh=1)
    _mark(axis, POINTS, low, high)


def _range(rows: Sequence[Tested], ratio: bool) -> Tuple[float, float]:
    """An axis on which all means, bounds and values of papers are seen."""
    values = [float(ratio), *(value for one in rows for value in (
        one.mean, one.comparison.above, one.comparison.below, one.paper) if value is not None and math.isfinite(value))]
    low, high = min(values), max(values)
    if ratio:
        return 0.85 * low, 1.18 * high
    margin = (0.25 if high - low > WIDE else 0.08) * (high - low)
    return low - margin, high + margin


def _row(axes: Any, place: int, one: Tested, low: float, high: float) -> None:
    axes.fill_betweenx([place - 0.38, place + 0.38], max(one.comparison.above, low), min(one.comparison.below, high),
                       color="#dddddd", linewidth=0)
    colour, marker = MARKS[one.verdict]
    alone, found = one.estimate.seeds == 1, one.estimate
    if not alone:
        axes.plot([max(found.low, low), min(found.high, high)], [place, place], color=colour, linewidth=1.3)
        for end, beyond, arrow in ((low, found.low < low, "<"), (high, found.high > high, ">")):
            if beyond:
                axes.plot([end], [place], marker=arrow, color=colour, markersize=4)
    axes.plot([one.mean], [place], marker=marker, color=colour, markersize=4.5,
              markerfacecolor="white" if alone else colour)
    if one.paper is not None:
        axes.plot([one.paper] * 2, [place - 0.4, place + 0.4], linestyle=(0, (2, 1)), color="black", linewidth=1.2)
