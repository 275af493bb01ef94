"""Words and tables that the front page and the papers' pages share."""
from __future__ import annotations

import math
import re
from typing import Iterator, Mapping, Match, Optional, Sequence

from scripts.reproduction.claims import FAILS, HOLDS, OPEN, Ruling, Runs, Tested, compared
from scripts.reproduction.declarations import SCALES, STATES, Claim, Comparison, Item, Paper
from scripts.reproduction.measures import CONFIDENCE, MEASURES, TIMES
from scripts.reproduction.results import Result

NUMBER = re.compile(r"\{([\w-]+)/([\w-]+)/(\w+): ([\w-]+\.\w+)(?: ([-/]) ([\w-]+\.\w+))?"
                    r"(?: of seed (\d+)|(, seeds))?\}")
"""A number of ours in a text: cells of PAPER/ITEM/SCALE, one, or two with `-` or `/`; of one seed with `of seed 3`;
with `, seeds` how many they are."""

SIGNS = {HOLDS: "✓", FAILS: "✗", OPEN: "?"}


def verdict(claim: Claim, found: Ruling) -> str:
    """In words; about times in others than about learning."""
    if claim.about == "learning" or found.verdict == OPEN:
        return found.verdict
    certain = ", where it cannot fail" if claim.certain and found.verdict == HOLDS else ""
    if claim.where == "ours":
        return f"{found.verdict} in the simulator{certain}"
    return f"{'not ' if found.verdict == FAILS else ''}reproduced in the simulator{certain}"


def percent(value: float) -> str:
    """
    >>> percent(0.00372), percent(0.0861), percent(0.9995)
    ('0.4 %', '8.6 %', '100 %')
    """
    return f"{100 * value:.0f} %" if value >= 0.0995 else f"{100 * value:.1f} %"


def filled(text: str, papers: Sequence[Paper], loaded: Mapping[str, Runs]) -> str:
    """A text with our numbers in it: a mean alone, a comparison with its interval or of one seed."""
    items = {item.full_name: item for paper in papers for item in paper.items.values()}

    def ours(place: Match[str]) -> str:
        paper, name, scale, of, sign, other, seed, count = place.groups()
        cells = {cell: {one: result for one, result in seeds.items() if seed in (None, str(one))}
                 for cell, seeds in loaded.get(paper, {}).get((name, scale), {}).items()}
        if not cells:
            return "not run"
        asked = Comparison(of, minus=other if sign == "-" else "", over=other if sign == "/" else "")
        found = compared(items[f"{paper}/{name}"], asked, cells)
        if count:
            return f"{found.estimate.seeds} seed{'s' * (found.estimate.seeds > 1)}"
        alone = number(found, found.mean) if sign else MEASURES[of.rpartition(".")[2]].text(found.mean)
        return interval(found) if sign and seed is None else alone

    return NUMBER.sub(ours, text)


def share(item: Item, results: Sequence[Result], of: str = "") -> str:
    """How much of the paper's training these runs are, from end to end where they differ; empty if it is not known."""
    found = sorted(one for one in map(item.share, results) if not math.isnan(one))
    shown = found[-1:] if not found or found[-1] < 1.5 * found[0] else [found[0], found[-1]]
    return " to ".join(map(percent, shown)) + (f" of a guessed {item.guessed}" if item.guessed else of) * bool(found)


def number(finding: Tested, value: Optional[float], beside: float = math.nan) -> str:
    """A difference in points, a quotient, or a number alone; a quotient near 1, or `beside` one, with four decimals."""
    if value is None or math.isnan(value):
        return ""
    if finding.comparison.over:
        near = 0.99 < (value if math.isnan(beside) else beside) < 1.01
        return f"× {value:.4f}" if near else f"× {value:.3g}"
    return f"{value:+.2f}" if len(finding.comparison.sides) > 1 else f"{value:.4g}"


def interval(finding: Tested) -> str:
    """Our mean with its interval, unless that is narrower than the last digit."""
    found = finding.estimate
    if math.isnan(found.mean):
        return "not reached by all"
    if found.seeds == 1:
        return f"{number(finding, found.mean)} (one seed)"
    low, high = (number(finding, value, found.mean).replace("× ", "") for value in (found.low, found.high))
    mean, surely = number(finding, found.mean), f" at {100 * finding.surely:.1f} % confidence"
    if low == high:
        return mean
    return f"{mean} ({low} to {high}{surely * (finding.surely > CONFIDENCE)})"


def drawings(paper: Paper, head: str = "") -> Iterator[str]:
    """Those without results, in a line."""
    names = [item.title for item in paper.items.values() if item.state == "drawing"]
    if names:
        yield f"{head}{STATES['drawing']}: {', '.join(names)}.".replace("a drawing or a table", "Drawings and tables")


def state_of(paper: Paper, item: Item, runs: Runs) -> str:
    """In words, from what has run: of what runs here, at which scale all cells did, and at which larger one some."""
    if item.state != "run":
        return STATES[item.state]
    of = paper.runs_of(item)
    counts = {scale: len(runs.get((of.name, scale), {})) for scale in of.scales}
    whole = [scale for scale, count in counts.items() if count == len(of.cells)]
    some = [scale for scale, count in counts.items() if count]
    smaller = "times only" if of.measures and TIMES.issuperset(of.measures) else "smaller"
    at = {SCALES[0]: "at the paper's scale", SCALES[1]: "at a medium scale", SCALES[2]: smaller}
    part = f", a part {at[some[0]]}" if some and some[0] not in whole[:1] else ""
    return f"runs here{f', {at[whole[0]]}' if whole else ''}{part}" if some else "to be run here"


def progress(paper: Paper, item: Item, runs: Runs) -> str:
    """How many of an item's cells have run, by scale."""
    of = paper.runs_of(item)
    return ", ".join(f"{scale}: {len(runs.get((of.name, scale), {}))} of {len(of.cells)}" for scale in of.scales)
