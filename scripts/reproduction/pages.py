"""The pages of ``docs/results``: from the declarations and the files of results, and from nothing else.

    README.md        what is known of OD-SGD; every claim of every paper with its verdict         `front`
    PAPER.md         every table and figure: the paper's numbers beside ours, pictures, claims
    beyond.md        the same of what no paper shows
    pictures/*.svg

Each number of ours is worked out of files, so pages written anew from the same files have the same text.
"""
from __future__ import annotations

import collections
import fnmatch
import math
import statistics
from pathlib import Path
from typing import Dict, List, Mapping, Sequence, Tuple

from odsgd.tools import piped
from scripts.reproduction import front, pictures, results, words
from scripts.reproduction.claims import OPEN, Ruling, Runs, Seeds, Tested, compared, expected, ruling
from scripts.reproduction.declarations import BEYOND, SCALES, Claim, Comparison, Grid, Item, Paper, Scale
from scripts.reproduction.measures import MEASURES, diverged, spread
from scripts.reproduction.pictures import Panel
from scripts.reproduction.results import Result

SOON = ("seconds90", "seconds93")
"""The measures of figures that are shown side by side."""

HOW_TO_READ = ("Written by `scripts/reproduce --report`; do not edit. "
               "[How to read it](README.md#how-to-read-these-pages).")


def load(paper: Paper, folder: Path) -> Runs:
    """All results of a paper; one that no cell is declared for, or that was made otherwise, is refused by name."""
    found: Dict[Tuple[str, str], Dict[str, Dict[int, Result]]] = {}
    for path in sorted((folder / "data" / paper.name).glob("*.jsonl")):
        for key, result in sorted(results.read(path).items()):
            trial = paper.trial(*key)
            if trial is None or result.paper != paper.name or folder / trial.file != path:
                results.refuse(f"`{path}`: no cell is declared as {' '.join(map(str, key))} for this file; remove the "
                               "line")
            elif trial.otherwise(result):
                results.refuse(f"`{path}`: {trial.otherwise(result)}")
            else:
                found.setdefault(key[:2], {}).setdefault(trial.cell.name, {})[trial.seed] = result
    for item in paper.items.values():
        for one in [one for one in item.cells.values() if one.same_as]:
            of, scale, shown = one.same_as.split("/")
            if shown in found.get((of, scale), {}):
                found.setdefault((item.name, [*item.scales][-1]), {})[one.name] = found[of, scale][shown]
    return found


def write(papers: Sequence[Paper], folder: Path) -> List[Path]:
    """All pages and pictures, and no picture of before; returns the pages' paths."""
    made = set()
    for paper in papers:
        runs = load(paper, folder)
        for item in paper.items.values():
            of, drawn, path = paper.runs_of(item), _drawn(paper, item, runs), folder / _file(item)
            if drawn:
                pictures.draw(f"{paper.title}, {item.title}: {item.caption}", _sizes(of, drawn), of, drawn, path)
                made.add(path)
        rows = front.forest(paper, runs)
        if rows:
            pictures.forest(f"{paper.title}: claims", rows, folder / front.forest_file(paper))
            made.add(folder / front.forest_file(paper))
    for old in {*(folder / "pictures").glob("*")} - made:
        old.unlink()
    texts = pages(papers, folder)
    for page, text in texts.items():
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    return list(texts)


def pages(papers: Sequence[Paper], folder: Path) -> Dict[Path, str]:
    loaded = {paper.name: load(paper, folder) for paper in papers}
    texts = {paper.name: _page(paper, loaded[paper.name]) for paper in papers}
    return {folder / f"{name}.md": words.filled(text, papers, loaded)
            for name, text in {"README": front.page(papers, loaded), **texts}.items()}


# --- one paper --------------------------------------------------------------------------------------------------------

def _page(paper: Paper, runs: Runs) -> str:
    own = front.intervals(paper, runs) if paper.name == BEYOND else []  # those of papers stand on the front page
    parts = [f"# {paper.title}", paper.cite, HOW_TO_READ, *own, *_side_by_side(paper, runs)]
    for item in paper.items.values():
        if item.state != "drawing":
            parts += _section(paper, item, runs)
    return "\n\n".join([*parts, *words.drawings(paper), *_made_with(runs)]) + "\n"


def _side_by_side(paper: Paper, runs: Runs) -> List[str]:
    """What the figures that ask how soon an accuracy is reached have in common: their methods, in one table."""
    shown = [(item, next(one for one in SOON if one in item.measures), runs[item.name, scale])
             for item in paper.items.values() if {*SOON} & {*item.measures}
             for scale in item.scales if (item.name, scale) in runs]
    if not shown:
        return []
    methods = shown[0][0].cells.values()
    columns = [["", *(cell.label for cell in methods)]]
    for item, soon, cells in shown:
        found = _how_soon(soon, cells)
        columns.append([f"[{item.title}](#{item.name}), {soon[-2:]} %", *(found.get(one.name, "") for one in methods)])
    return ["## Side by side", "A cell has the virtual seconds until the test accuracy in the head of the column, "
            "and in brackets the final accuracy: means over the seeds that all methods have. Tests are one epoch "
            "apart; times are interpolated between two of them. A dash: not all runs reach the accuracy, or they "
            "pass it at the first test. Empty: not run, or no common seed. Bold: the fastest of each figure.",
            piped(list(zip(*columns)))]


def _how_soon(soon: str, cells: Mapping[str, Seeds]) -> Dict[str, str]:
    """By cell, means over the seeds that all cells have; of no cell, if there is no such seed."""
    common = set.intersection(*(set(seeds) for seeds in cells.values()))
    means = {name: [statistics.fmean(MEASURES[measure].of(seeds[seed]) for seed in common)
                    for measure in (soon, "accuracy")] for name, seeds in cells.items() if common}
    fastest = min((seconds for seconds, _ in means.values() if not math.isnan(seconds)), default=math.nan)
    bold = {name: "**" * (seconds == fastest) for name, (seconds, _) in means.items()}
    return {name: f"{bold[name]}{MEASURES[soon].text(seconds)}{bold[name]} ({MEASURES['accuracy'].text(accuracy)})"
            for name, (seconds, accuracy) in means.items()}


def _section(paper: Paper, item: Item, runs: Runs) -> List[str]:
    of = paper.runs_of(item)
    shared = f" The runs are those of [{of.title}](#{of.name})." if of is not item else ""
    preset = f" Preset: [{item.preset}](../../configs/{item.preset})." if item.preset else ""
    note = f" {item.note}" if item.note else ""
    state = words.state_of(paper, item, runs)
    parts = [f"## {item.title}", f"{item.caption} *{state[0].upper()}{state[1:]}.*{note}{preset}{shared}"]
    if of is item and item.cells:
        scales = [scale for scale in item.scales.values() if (item.name, scale.name) in runs]
        for scale in scales or list(item.scales.values())[-1:]:
            parts += _differences(item, scale, scales)
            cells = runs.get((item.name, scale.name), {})
            parts.append(piped(_grid(item.grid, cells) if item.grid else _table(item, cells)))
            parts += _how_far(item, cells) if item.fitted else []
        if not item.scales:
            parts.append(piped(_table(item, {})))
    if _drawn(paper, item, runs):
        parts.append(f"![{item.title}: {item.caption}]({_file(item)})")
    return parts + (_claims(paper, item, runs) if item.claims else [])


def _claims(paper: Paper, item: Item, runs: Runs) -> List[str]:
    """Each with its verdict; below, folded, the comparisons with their intervals."""
    rulings, of = [(claim, ruling(paper, item, claim, runs)) for claim in item.claims], paper.runs_of(item)
    parts = [piped([["claim", "where", "verdict", "decided by"], *(
        [claim.says, claim.where, f"**{words.verdict(claim, found)}**", _by(claim, found)]
        for claim, found in rulings)], right="")]
    found = [(str(number), scale, one) for number, (claim, found) in enumerate(rulings, start=1)
             for scale, one in _at_every_scale(of, claim.tests, found, runs)]
    there = {one.name for _, _, one in found}
    lengths = [Comparison(f"{cell}.{picture.y}", f"{base}.{picture.y}") for picture in item.pictures
               if picture.kind == "lengths" for cell, base in picture.over.items()]
    found += [("", scale, one) for scale, one in _at_every_scale(of, lengths, Ruling(OPEN), runs)
              if one.name not in there]
    if found:
        lines = [[number, one.name, MEASURES[one.comparison.sides[0][1]].label, expected(one.comparison),
                  words.number(one, one.paper), words.interval(one), str(one.estimate.seeds), scale]
                 for number, scale, one in found]
        table = piped([["claim", "comparison", "of", "expected", "the paper", "ours (95 %)", "seeds", "scale"], *lines],
                      right="")
        parts.append(f'<details markdown="1"><summary>Intervals</summary>\n\n{table}\n\n</details>')
    return parts


def _at_every_scale(of: Item, tests: Sequence[Comparison], ruled: Ruling, runs: Runs) -> List[Tuple[str, Tested]]:
    """Comparisons at the scale that decides, and at others where they have run."""
    every = [(scale, one) for scale in of.scales for one in (ruled.findings if scale == ruled.scale else [
        compared(of, one, runs.get((of.name, scale), {}), len(tests)) for one in tests])]
    return [(scale + ", does not decide" * (scale != ruled.scale), one) for scale, one in every if one.estimate.seeds]


def _by(claim: Claim, found: Ruling) -> str:
    """At which scale and by which seeds, and what of the plan is still to run; or why there is nothing."""
    first = claim.from_seed.get(found.scale or "")
    return "; ".join(filter(None, [
        found.why, found.scale and f"scale {found.scale}" + ", as planned" * found.planned
        + (f", seeds from {first} on" if first else ""), found.lacks]))


def _errors(item: Item, cells: Mapping[str, Seeds]) -> Dict[str, float]:
    """Of our means of an item that was fitted, in percent of the paper's numbers; by cell."""
    measure = item.measures[0]
    papers = {name: item.cells[name].paper.get(measure) for name, seeds in cells.items() if seeds}
    return {name: 100 * (statistics.fmean(map(MEASURES[measure].of, cells[name].values())) / paper - 1)
            for name, paper in papers.items() if paper is not None}


def _fitted(item: Item, cell: str) -> bool:
    return fnmatch.fnmatchcase(cell, item.fitted)


def _how_far(item: Item, cells: Mapping[str, Seeds]) -> List[str]:
    """How far predictions are from the paper's numbers, and fitted ones for comparison."""
    errors = _errors(item, cells)
    fitted, others = ([abs(error) for name, error in errors.items() if _fitted(item, name) is which]
                      for which in (True, False))
    if not fitted or not others:
        return []
    return [f"Of the {len(fitted)} numbers that were fitted the median error is {statistics.median(fitted):.0f} %, at "
            f"most {max(fitted):.0f} %; of the {len(others)} predictions {statistics.median(others):.0f} %, at most "
            f"{max(others):.0f} %."]


def _differences(item: Item, scale: Scale, shown: Sequence[Scale]) -> List[str]:
    """Of a smaller scale, what makes it smaller, and what differs at the paper's, too, if that is not `shown`."""
    every = item.scales[SCALES[0]].differs if SCALES[0] in item.scales and scale.name != SCALES[0] else ()
    if not scale.differs and not every:
        return [f"Scale `{scale.name}`:"]
    head = "Settings" if item.state == "own" else f"Scale `{scale.name}`. What differs from the paper"
    parts = [_list(f"{head}:", scale.differs)]
    if every and item.scales[SCALES[0]] in shown:
        parts.append("And, unless these say otherwise, what differs at the paper's scale.")
    elif every:
        parts.append(_list("And, unless these say otherwise, what differs at every scale:", every))
    return parts


def _list(head: str, points: Sequence[str]) -> str:
    return f"{head}\n\n" + "\n".join(f"- {one}" for one in points)


def _table(item: Item, cells: Mapping[str, Seeds]) -> List[List[str]]:
    """The paper's numbers beside ours, by column."""
    every = list(item.cells.values())
    seeds = [cells.get(cell.name, {}) for cell in every]
    columns = [["run", *(cell.label for cell in every)]]
    for name in item.measures:
        measure = MEASURES[name]
        if any(name in cell.paper for cell in every):
            columns.append([f"paper: {measure.label}", *(
                measure.text(cell.paper[name]) if name in cell.paper else "" for cell in every)])
        if item.scales:
            columns.append([f"ours: {measure.label}", *(_ours(name, one) for one in seeds)])
    if item.fitted:
        errors = _errors(item, cells)
        columns.append(["error", *(f"{errors[cell.name]:+.0f} %{', fitted' * _fitted(item, cell.name)}"
                                   if cell.name in errors else "" for cell in every)])
    if item.scales:
        columns.append(["seeds", *(str(len(one)) for one in seeds)])
    return [list(line) for line in zip(*columns)]


def _grid(grid: Grid, cells: Mapping[str, Seeds]) -> List[List[str]]:
    """Accuracies, those of a value in a column; the best of each line in bold."""
    accuracy, values = MEASURES["accuracy"], sorted(grid.values)
    lines = [[f"{accuracy.label}, by {grid.option}", *map(str, values)]]
    for row, cell in grid.rows.items():
        found = [cells.get(grid.name(row, value), {}) for value in values]
        means = [statistics.fmean(map(accuracy.of, seeds.values())) if seeds else -math.inf for seeds in found]
        lines.append([cell.label, *(f"**{_ours('accuracy', seeds)}**" if seeds and mean == max(means)
                                    else _ours("accuracy", seeds) for seeds, mean in zip(found, means))])
    return lines


def _ours(name: str, seeds: Seeds) -> str:
    if not seeds:
        return "not run"
    mean, deviation = spread([MEASURES[name].of(result) for result in seeds.values()])
    lost = all(map(diverged, seeds.values())) and name in ("accuracy", "accuracy5")
    spreads = len(seeds) > 1 and not math.isnan(mean)
    return (MEASURES[name].text(mean) + f" ± {MEASURES[name].text(deviation)}" * spreads
            + (" (diverged)" if lost else ""))


def _file(item: Item) -> str:
    return f"pictures/{item.paper}-{item.name}.svg"


def _drawn(paper: Paper, item: Item, runs: Runs) -> List[Panel]:
    """The figure of an item: at the largest scale at which most of its cells have run, and before that the curves of
    the largest at which two have.
    """
    of = paper.runs_of(item)
    asked = {name for picture in item.pictures for name in picture.cells or of.cells}
    there = {name: asked & {*runs.get((of.name, name), {})} for name in of.scales}
    best = max(there, key=lambda name: len(there[name]), default=None) if asked else None
    if best is None or not there[best]:
        return []
    names = [*of.scales]
    longer = [name for name in names[:names.index(best)] if len(there[name]) > 1][:1]
    return [Panel(picture, name, runs[of.name, name]) for name in [*longer, best] for picture in item.pictures
            if name == best or picture.kind == "curve"
            if len({*(picture.cells or of.cells)} & there[name]) > (name != best)]


def _sizes(item: Item, drawn: Sequence[Panel]) -> str:
    """How large the runs of a figure are, and how many seeds they have, by scale."""
    said = []
    for scale in dict.fromkeys(one.scale for one in drawn):
        cells = [one.cells[name] for one in drawn if one.scale == scale for name in one.picture.cells or item.cells
                 if name in one.cells]
        size = (words.share(item, [result for seeds in cells for result in seeds.values()], " of the paper's training")
                or "times only" * (item.options.get("dataset") == "synthetic"))
        counts = [min(map(len, cells)), max(map(len, cells))]
        said.append(f"scale {scale}{', ' * bool(size)}{size}; {' to '.join(map(str, dict.fromkeys(counts)))} "
                    f"seed{'s' * (counts[-1] > 1)}")
    return "; ".join(said)


def _made_with(runs: Runs) -> List[str]:
    """Versions, machines and the time of all runs, in a line."""
    all_results = [*{result.key: result for cells in runs.values() for seeds in cells.values()
                     for result in seeds.values()}.values()]  # a cell may show those of another
    if not all_results:
        return []
    versions: Dict[str, Dict[str, None]] = collections.defaultdict(dict)
    for result in sorted(all_results, key=lambda one: one.key):
        for key in ("mxnet", "numpy", "odsgd", "python"):
            versions[key].update(dict.fromkeys(result.versions.get(key, "").split(", ")))
        versions["on"]["{cpu}, {cores} cores, a thread for each run".format(**result.machine)] = None
    hours = sum(result.seconds for result in all_results) / 3600
    unknown = sum("tree" not in one.versions for one in all_results)
    trees = {tree for one in all_results for tree in one.versions.get("tree", "").split(", ")} - {""}
    said = ", ".join(f"{key} {' and '.join(sorted(filter(None, values)))}" for key, values in versions.items())
    return [f"Made by {len(all_results)} runs: {hours:.2f} hours of training and evaluation, {said}. Their source had "
            f"{len(trees)} states, which [data](data) names"
            + (f"; of {unknown} runs it is not known." if unknown else ".")]
