"""The pages of ``docs/results``: from the declarations and the files of results, and from nothing else.

    README.md        all claims of all papers with their rulings, and the counts
    PAPER.md         every table and figure: the paper's numbers beside ours, pictures, claims
    beyond.md        the same of what no paper shows
    pictures/*.png

Each number of ours is worked out of files, so pages written anew from the same files have the same text.
"""
from __future__ import annotations

import collections
import math
import statistics
from pathlib import Path
from typing import Counter, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

from odsgd.lab.reproduce import pictures, results
from odsgd.lab.reproduce.claims import FAILS, HOLDS, OPEN, Ruling, Runs, Seeds, ruling
from odsgd.lab.reproduce.declarations import BEYOND, SCALES, STATES, Grid, Item, Paper, Picture, Scale
from odsgd.lab.reproduce.measures import CONFIDENCE, MEASURES, diverged, spread
from odsgd.lab.reproduce.results import Result
from odsgd.tools import piped

SOON = "seconds90"
"""The measure of figures that are shown side by side."""

INTRODUCTION = f"""\
Written by `odsgd reproduce --report` from the files in [data](data) alone; do not edit. How a cell is run, and the rest
of them with one command: [reproduce](../how-to/reproduce.md). Numbers of ours are means over seeds with the standard
deviation. A claim is tested on differences between runs with the same seed, by a {CONFIDENCE:.0%} confidence interval
(Student's t), which covers chance in training, not in the choice of the test set, and has no width where all seeds
agree; what speaks against a claim of several differences has to be surer by their number. Many claims are tested, so
one in twenty of those at the edge may be chance.""".replace("95%", "95 %")


def load(paper: Paper, folder: Path, refused: List[str]) -> Runs:
    """All results of a paper; what lines are refused joins `refused`, also those that no cell is declared for, or that
    were made otherwise than declared.
    """
    found: Dict[Tuple[str, str], Dict[str, Dict[int, Result]]] = {}
    for path in sorted((folder / "data" / paper.name).glob("*.jsonl")):
        there = results.read(path)
        refused += there.refused
        for (cell, seed), result in sorted(there.results.items()):
            trial = paper.trial(result.trial["item"], result.trial["scale"], cell, seed)
            if trial is None or folder / trial.file != path:
                refused.append(f"`{path}` ({cell}, seed {seed}): no such cell is declared for this file; remove the "
                               "line")
            elif results.otherwise(result, trial):
                refused.append(f"`{path}`: {results.otherwise(result, trial)}")
            else:
                found.setdefault((trial.item.name, trial.scale.name), {}).setdefault(cell, {})[seed] = result
    for item in paper.items.values():
        for name, (of, scale, shown) in ((cell.name, cell.alike) for cell in item.cells.values() if cell.alike):
            if shown in found.get((of, scale), {}):
                found.setdefault((item.name, [*item.scales][-1]), {})[name] = found[of, scale][shown]
    return found


def write(papers: Sequence[Paper], folder: Path, refused: List[str]) -> List[Path]:
    """All pages and pictures; returns the pages' paths."""
    for paper in papers:
        runs = load(paper, folder, [])
        for item in paper.items.values():
            for picture, cells, path in _pictures(paper, item, runs):
                pictures.draw(paper.runs_of(item), picture, cells, folder / path)
    texts = pages(papers, folder, refused)
    for page, text in texts.items():
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    return list(texts)


def pages(papers: Sequence[Paper], folder: Path, refused: List[str]) -> Dict[Path, str]:
    """The text of every page; what lines are refused joins `refused`."""
    loaded = {paper.name: load(paper, folder, refused) for paper in papers}
    texts = {folder / f"{paper.name}.md": _page(paper, loaded[paper.name]) for paper in papers}
    return {folder / "README.md": _overview([paper for paper in papers if paper.name != BEYOND], loaded), **texts}


# --- one paper --------------------------------------------------------------------------------------------------------

def _page(paper: Paper, runs: Runs) -> str:
    parts = [f"# {paper.title}", paper.cite, INTRODUCTION, *_side_by_side(paper, runs)]
    for item in paper.items.values():
        parts += _section(paper, item, runs)
    return "\n\n".join([*parts, *_made_with(runs)]) + "\n"


def _side_by_side(paper: Paper, runs: Runs) -> List[str]:
    """What the figures that ask how soon an accuracy is reached have in common: their methods, in one table."""
    shown = [(item, runs[item.name, scale]) for item in paper.items.values() if SOON in item.measures
             for scale in item.scales if (item.name, scale) in runs]
    if not shown:
        return []
    means = [_common_means(cells) for _, cells in shown]
    items = [item for item, _ in shown]
    lines = [["", *(f"[{item.title}](#{item.name})" for item in items)]]
    for cell in items[0].cells.values():
        lines.append([cell.label, *(_soon(found.get(cell.name), found) for found in means)])
    return ["## Side by side", f"{MEASURES[SOON].label[0].upper()}{MEASURES[SOON].label[1:]}, and in brackets the "
            "accuracy at the end; means over the seeds that all have. Tests are one epoch apart: times are on a line "
            "between two of them, or from 0 % at the start to the first. A dash: not reached by all. Empty: not run, "
            "or no seed that all have. In bold the fastest of each figure.",
            piped(lines)]


def _common_means(cells: Mapping[str, Seeds]) -> Dict[str, Dict[str, float]]:
    """By cell, means over the seeds that all cells have; of no cell, if there is no such seed."""
    common = set.intersection(*(set(seeds) for seeds in cells.values()))
    if not common:
        return {}
    return {name: {measure: statistics.fmean(MEASURES[measure].of(seeds[seed]) for seed in common)
                   for measure in (SOON, "accuracy")} for name, seeds in cells.items()}


def _soon(cell: Optional[Mapping[str, float]], cells: Mapping[str, Mapping[str, float]]) -> str:
    if cell is None:
        return ""
    text = MEASURES[SOON].text(cell[SOON])
    fastest = min((one[SOON] for one in cells.values() if not math.isnan(one[SOON])), default=math.nan)
    return f"{f'**{text}**' if cell[SOON] == fastest else text} ({MEASURES['accuracy'].text(cell['accuracy'])})"


def _section(paper: Paper, item: Item, runs: Runs) -> List[str]:
    of = paper.runs_of(item)
    shared = f" The runs are those of [{of.title}](#{of.name})." if of is not item else ""
    preset = f" Preset: [{item.preset}](../../configs/{item.preset})." if item.preset else ""
    note = f" {item.note}" if item.note else ""
    state = capital(state_of(paper, item, runs))
    parts = [f"## {item.title}", f"{item.caption} *{state}.*{note}{preset}{shared}"]
    if of is item and item.cells:
        scales = [scale for scale in item.scales.values() if (item.name, scale.name) in runs]
        for scale in scales or list(item.scales.values())[-1:]:
            parts += _differences(item, scale, scales)
            cells = runs.get((item.name, scale.name), {})
            parts.append(piped(_grid(item.grid, cells) if item.grid else _table(item, cells)))
        if not item.scales:
            parts.append(piped(_table(item, {})))
    parts += [f"![{item.title}, {picture.kind}]({path})" for picture, _, path in _pictures(paper, item, runs)]
    if item.claims:
        rulings = [(claim, ruling(paper, item, claim, runs)) for claim in item.claims]
        parts.append(_left([["claim", "where", "verdict", "by"], *(
            [claim.says, claim.where, f"**{found.verdict}**", found.because] for claim, found in rulings)]))
    return parts


def _differences(item: Item, scale: Scale, shown: Sequence[Scale]) -> List[str]:
    """Of a smaller scale, what makes it smaller, and what differs at the paper's, too, if that is not `shown`."""
    every = item.scales[SCALES[0]].differs if SCALES[0] in item.scales and scale.name != SCALES[0] else ()
    if not scale.differs and not every:
        return [f"Scale `{scale.name}`:"]
    head = "Settings" if item.state == "own" else f"Scale `{scale.name}`. What differs from the paper"
    parts = [_list(f"{head}:", scale.differs)]
    if every and item.scales[SCALES[0]] in shown:
        parts.append("And, unless that says otherwise, what differs at the paper's scale.")
    elif every:
        parts.append(_list("And, unless that says otherwise, what differs at every scale:", every))
    return parts


def _list(head: str, points: Sequence[str]) -> str:
    return f"{head}\n\n" + "\n".join(f"- {one}" for one in points)


def _table(item: Item, cells: Mapping[str, Seeds]) -> List[List[str]]:
    """The paper's numbers beside ours."""
    head, columns = ["run"], []
    for name in item.measures:
        if any(name in cell.paper for cell in item.cells.values()):
            head.append(f"paper: {MEASURES[name].label}")
            columns.append((name, True))
        if item.scales:
            head.append(f"ours: {MEASURES[name].label}")
            columns.append((name, False))
    lines = [[*head, *(["seeds"] if item.scales else [])]]
    for cell in item.cells.values():
        seeds = cells.get(cell.name, {})
        line = [cell.label]
        for name, papers_own in columns:
            if papers_own:
                line.append(MEASURES[name].text(cell.paper[name]) if name in cell.paper else "")
            else:
                line.append(_ours(name, seeds))
        lines.append([*line, *([str(len(seeds))] if item.scales else [])])
    return lines


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
    return (MEASURES[name].text(mean) + (f" ± {MEASURES[name].text(deviation)}" if len(seeds) > 1 else "")
            + (" (diverged)" if lost else ""))


def _pictures(paper: Paper, item: Item, runs: Runs) -> Iterator[Tuple[Picture, Mapping[str, Seeds], str]]:
    """Those with something to show: of the paper's scale if there are runs of it."""
    of = paper.runs_of(item)
    for scale in of.scales:
        cells = runs.get((of.name, scale), {})
        for number, picture in enumerate(item.pictures, start=1):
            if any(name in cells for name in (picture.cells or of.cells)):
                yield picture, cells, f"pictures/{paper.name}-{item.name}-{scale}-{number}.png"


def _made_with(runs: Runs) -> List[str]:
    """Versions, machines and the time of all runs."""
    all_results = [result for cells in runs.values() for seeds in cells.values() for result in seeds.values()]
    if not all_results:
        return []
    versions: Dict[str, Set[str]] = collections.defaultdict(set)
    for result in all_results:
        for key, value in result.versions.items():
            versions[key].update(value.split(", "))
        versions["processor"].add("{cpu}, {cores} cores, a thread for each run".format(**result.machine))
    hours = sum(result.seconds for result in all_results) / 3600
    lines = [["", ""], *([key, ", ".join(sorted(values))] for key, values in sorted(versions.items()))]
    lines.append(["training and evaluation", f"{hours:.2f} hours of {len(all_results)} runs"])
    unknown = sum(not one.source_is_known for one in all_results)
    lines.append(["unknown source", f"{unknown} runs, whose commit is gone, or had been changed"])
    return ["## Made with", _left(lines)]


# --- all papers -------------------------------------------------------------------------------------------------------

def _overview(papers: Sequence[Paper], loaded: Mapping[str, Runs]) -> str:
    items = [(paper, item) for paper in papers for item in paper.items.values() if item.state != "own"]
    full, *smaller = ([(paper, item) for paper, item in items
                       if (paper.runs_of(item).name, scale) in loaded[paper.name]] for scale in SCALES)
    results_of = full + [one for one in items if any(one in of for of in smaller) and one not in full]
    states = collections.Counter(state_of(paper, item, loaded[paper.name]) for paper, item in items)
    rulings = {(paper.name, item.name, claim.name): ruling(paper, item, claim, loaded[paper.name])
               for paper, item in items for claim in item.claims}
    verdicts = collections.Counter(one.verdict for one in rulings.values())
    unrun = sum(len(item.claims) for paper, item in items if (paper, item) not in results_of)
    counts = [[state, str(count)] for state, count in sorted(states.items())]
    parts = [
        "# The papers' tables and figures", INTRODUCTION,
        f"Methods of all papers beside each other, which is in none of them: [beyond the papers]({BEYOND}.md).",
        f"Of {len(items)} tables and figures, or parts of one, of {len(papers)} papers {len(results_of)} have "
        f"results here, {len(full)} at the paper's scale and {len(results_of) - len(full)} smaller. Of {len(rulings)} "
        f"claims {verdicts[HOLDS]} hold, {verdicts[FAILS]} do not hold, and {verdicts[OPEN]} cannot be told: of "
        f"{unrun} of these nothing has run.",
        piped([["tables and figures", "number"], *counts]), "## Claims",
        _claims(items, rulings),
        "## The plan of seeds", "What is to run, in this order, written down before the runs. A claim is told at a "
        "scale with a plan when all runs that are planned for its cells are there, and by these alone.",
        _plan(papers, loaded),
        "## Tables and figures", _items(items, loaded)]
    return "\n\n".join(parts) + "\n"


def _claims(items: Sequence[Tuple[Paper, Item]], rulings: Mapping[Tuple[str, str, str], Ruling]) -> str:
    return _left([["", "claim", "verdict"], *(
        [f"[{paper.title}, {item.title}]({paper.name}.md#{item.name})", claim.says,
         f"**{rulings[paper.name, item.name, claim.name].verdict}**"]
        for paper, item in items for claim in item.claims)])


def _plan(papers: Sequence[Paper], loaded: Mapping[str, Runs]) -> str:
    counts: Dict[Tuple[float, str, str], List[bool]] = {}
    for paper in papers:
        for turn, trial in paper.planned():
            seeds = loaded[paper.name].get((trial.item.name, trial.scale.name), {}).get(trial.cell.name, {})
            name = f"[{paper.title}, {trial.item.title}]({paper.name}.md#{trial.item.name})"
            counts.setdefault((turn, name, trial.scale.name), []).append(trial.seed in seeds)
    return _left([["turn", "runs of", "scale", "there", "planned"], *(
        [f"{turn:g}", name, scale, str(sum(there)), str(len(there))]
        for (turn, name, scale), there in sorted(counts.items()))])


def _items(items: Sequence[Tuple[Paper, Item]], loaded: Mapping[str, Runs]) -> str:
    return _left([["", "shows", "state", "runs"], *(
        [f"[{paper.name}, {item.title}]({paper.name}.md#{item.name})", item.caption,
         *(words(paper, item, loaded[paper.name]) for words in (state_of, progress))] for paper, item in items)])


def state_of(paper: Paper, item: Item, runs: Runs) -> str:
    """In words, from what has run: of what runs here, at which scale all cells did, and at which larger one some."""
    if item.state != "run":
        return STATES[item.state]
    of = paper.runs_of(item)
    counts = {scale: len(runs.get((of.name, scale), {})) for scale in of.scales}
    whole = [scale for scale, count in counts.items() if count == len(of.cells)]
    some = [scale for scale, count in counts.items() if count]
    at = {SCALES[0]: "at the paper's scale", SCALES[1]: "at a medium scale", SCALES[2]: "smaller"}
    part = f", a part {at[some[0]]}" if some and some[0] not in whole[:1] else ""
    return f"runs here{f', {at[whole[0]]}' if whole else ''}{part}" if some else "to be run here"


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def progress(paper: Paper, item: Item, runs: Runs) -> str:
    """How many of an item's cells have run, by scale."""
    of = paper.runs_of(item)
    counts: Counter[str] = collections.Counter({scale: len(runs.get((of.name, scale), {})) for scale in of.scales})
    return ", ".join(f"{scale}: {counts[scale]} of {len(of.cells)}" for scale in of.scales)


def _left(lines: Sequence[Sequence[str]]) -> str:
    """A table of words."""
    head, *body = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *body])
