"""Whether a claim of a paper holds in our runs.

Each comparison of a claim is a number of each seed: a cell's measure, alone or against another cell's with the same
seed and framework, which has the same first weights and the same order of the data; or two cells' difference or
quotient against that of two others. Its mean has a 95 % confidence interval by Student's t. If the interval is inside
what the claim says, the comparison holds. If it is wholly outside, the comparison does not hold. Otherwise, and with a
single seed, it is open. The interval for "outside" is wider if a claim has k comparisons, with a confidence of
1 - 0.05 / k (Bonferroni's): a claim fails if one of them does, and one of many may be outside by chance.

If seeds are planned (`declarations`), they alone decide a claim, when all of them have run. Otherwise one could add
runs until the verdict is as one likes.
"""
from __future__ import annotations

import math
from typing import Mapping, NamedTuple, Optional, Sequence, Tuple

from scripts.reproduction.declarations import Claim, Comparison, Item, Paper, Scale
from scripts.reproduction.measures import CONFIDENCE, MEASURES, Estimate, estimate
from scripts.reproduction.results import Result

HOLDS, FAILS, OPEN = "holds", "does not hold", "open"

Seeds = Mapping[int, Result]
Runs = Mapping[Tuple[str, str], Mapping[str, Seeds]]
"""Results of a paper: by item and scale, by cell, by seed."""


class Tested(NamedTuple):
    """What one comparison of a claim comes to: our mean with its interval, the one that decides, and the paper's
    number, if it gives one. `surely`: the confidence of that interval.
    """

    comparison: Comparison
    name: str
    verdict: str
    estimate: Estimate
    paper: Optional[float]
    surely: float = CONFIDENCE

    @property
    def mean(self) -> float:
        return self.estimate.mean


class Ruling(NamedTuple):
    """What a claim comes to: at which scale, whether by its plan, by which comparisons, and what is still to run."""

    verdict: str
    why: str = ""
    scale: Optional[str] = None
    planned: bool = False
    findings: Tuple[Tested, ...] = ()
    lacks: str = ""

    @property
    def decisive(self) -> Optional[Tested]:
        """Of the comparisons that make the verdict, the one that is the furthest out, or the least inside; one with an
        interval, if there is any.
        """
        found = [one for one in self.findings if one.verdict == self.verdict and one.estimate.seeds]
        return min(found, key=lambda one: (one.estimate.seeds == 1, inside(one.comparison, one.mean)), default=None)

    @property
    def missing(self) -> str:
        """Why there is no number of it."""
        return self.lacks or self.why.partition(";")[0] or "not run"


def inside(one: Comparison, value: float) -> float:
    """How far a number is from the nearer bound; below 0 if it is beyond."""
    away = min(value - one.above, one.below - value)
    return -math.inf if math.isnan(away) else away


def ruling(paper: Paper, item: Item, claim: Claim, runs: Runs) -> Ruling:
    """By the largest scale whose plan of seeds is full; without such a plan, or by what was there before it, at the
    largest scale that decides.
    """
    of, cells = paper.runs_of(item), [cell for one in claim.tests for cell, _ in one.sides]
    scales = [one for one in of.scales.values() if cells and claim.scale in (None, one.name)]
    found, lacks = Ruling(OPEN, claim.why or _not_run(claim, [runs.get((of.name, one.name), {}) for one in scales])), []
    for scale in scales:
        results, first = runs.get((of.name, scale.name), {}), claim.from_seed.get(scale.name, 0)
        planned = {cell: range(first, scale.seeds(cell)) for cell in cells}
        there = [seed in results.get(cell, {}) for cell, seeds in planned.items() for seed in seeds]
        full = all(there) and all(planned.values())
        if all(planned.values()) and not full:
            found = found._replace(why=claim.why if any(there) else found.why)
            where = f" (scale {scale.name})" if len(of.scales) > 1 else ""
            lacks.append(f"{sum(there)} of {len(there)} planned runs so far{where}")
        end = scale.seeds if full else scale.had
        deciding = {name: {seed: result for seed, result in seeds.items() if first <= seed < end(name)}
                   for name, seeds in results.items()}
        if full or all(deciding.get(cell) for cell in cells) or (results and not scale.plan):
            found = _all(scale, of, claim, deciding, full)
            if full or found.verdict != OPEN:
                break
    beyond_plan = [{cell for cell in cells if not scale.seeds(cell)} for scale in scales]
    if cells and all(beyond_plan) and found.verdict == OPEN:
        every = len(set(cells))
        fewest = min(map(len, beyond_plan), default=every)
        lacks = [f"no plan for {fewest} of its {every} cells" if fewest < every else "no run is planned"]
    return found._replace(lacks="; ".join(lacks))


def _not_run(claim: Claim, runs: Sequence[Mapping[str, Seeds]]) -> str:
    """Why runs do not decide a claim, at the scales that could."""
    if not any(cells.get(cell) for cells in runs for one in claim.tests for cell, _ in one.sides):
        return "not run" + f" at scale `{claim.scale}`, which alone decides" * bool(claim.scale)
    return "later runs will decide, not those that suggested it" if claim.from_seed else ""


def _all(scale: Scale, item: Item, claim: Claim, deciding: Mapping[str, Seeds], planned: bool) -> Ruling:
    """Of all comparisons together."""
    findings = tuple(compared(item, one, deciding, len(claim.tests)) for one in claim.tests)
    verdicts = [one.verdict for one in findings]
    verdict = FAILS if FAILS in verdicts else OPEN if OPEN in verdicts else HOLDS
    return Ruling(verdict, "", scale.name, planned, findings)


def compared(item: Item, one: Comparison, cells: Mapping[str, Seeds], comparisons: int = 1) -> Tested:
    """What one of so many comparisons of a claim comes to."""
    ratio = bool(one.over)
    name = _words([f"({item.cells[cell].label})" for cell, _ in one.sides], ratio)
    given = [item.cells[cell].paper[measure] for cell, measure in one.sides if measure in item.cells[cell].paper]
    paper = one.paper if one.paper is not None else _number(given, ratio) if len(given) == len(one.sides) else None
    seeds = paired(*(cells.get(cell, {}) for cell, _ in one.sides))
    if not seeds:
        return Tested(one, name, OPEN, Estimate(math.nan, -math.inf, math.inf, 0), paper)
    values = [_number([MEASURES[measure].of(cells[cell][seed]) for cell, measure in one.sides], ratio)
              for seed in seeds]
    surely = 1 - (1 - CONFIDENCE) / comparisons
    found, wide = estimate(values), estimate(values, surely)
    verdict = (HOLDS if one.above < found.low and found.high < one.below
               else FAILS if wide.high <= one.above or one.below <= wide.low else OPEN)
    if verdict == OPEN and (found.high <= one.above or one.below <= found.low):
        return Tested(one, name, verdict, wide, paper, surely)
    return Tested(one, name, verdict, found, paper)


def paired(*cells: Seeds) -> Sequence[int]:
    """The seeds with which all these cells have run, and by one framework."""
    return sorted(seed for seed in set.intersection(*map(set, cells))
                  if len({seeds[seed].framework for seeds in cells}) == 1)


def _number(sides: Sequence[float], ratio: bool) -> float:
    """Of one side, two or four: the first against the second, and that against the same of the others.

    >>> _number([3.0], False), _number([3.0, 2.0], False), _number([9.0, 3.0, 2.0, 1.0], True)
    (3.0, 1.0, 1.5)
    """
    if len(sides) == 1:
        return sides[0]
    half = len(sides) // 2
    mine, other = _number(sides[:half], ratio), _number(sides[half:], ratio)
    if ratio:
        return mine / other if other else math.nan
    return mine - other


def _words(labels: Sequence[str], ratio: bool) -> str:
    if len(labels) == 1:
        return labels[0][1:-1]
    first, second = (f" {'/' if ratio else '-'} ".join(pair) for pair in (labels[:2], labels[2:]))
    return f"{first} against {second}" if second else first


def expected(one: Comparison) -> str:
    """The bounds in words.

    >>> expected(Comparison("a.accuracy", above=-1))
    'above -1'
    """
    bounds = {"above": one.above, "below": one.below}
    return " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if math.isfinite(bound))
