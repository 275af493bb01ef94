"""The front page of ``docs/results``: what is known of OD-SGD, and each paper's claims with their verdicts.

A verdict about times is one of a simulator, and says so. Learning and times stand apart.
"""
from __future__ import annotations

import collections
import math
import re
import textwrap
from typing import Dict, List, Mapping, NamedTuple, Sequence, Tuple

from odsgd.tools import piped
from scripts.reproduction import words
from scripts.reproduction.claims import FAILS, HOLDS, OPEN, Ruling, Runs, Tested, compared, inside, ruling
from scripts.reproduction.declarations import ABOUT, BEYOND, Claim, Item, Paper
from scripts.reproduction.measures import CONFIDENCE
from scripts.reproduction.results import Key, Result

HOW_TO_READ = f"""\
`scripts/reproduce --report` writes these pages from the files in [data](data) and the texts of the declarations; do not
edit them. [Reproduce](../how-to/reproduce.md) says how a cell is run, and how one command runs all the others.

- **Sizes.** *Scale paper* is the paper's own size. *Medium* has all examples, and the paper's mini-batch and rates, but
  fewer epochs. *Small* is smaller still, often with a part of the data. *Share* is the part of the paper's training
  that our runs have, by examples. A verdict at a few per cent is about short trainings; in longer ones a delay may cost
  less. Where our network or images are not the paper's, the item says so: with a share of 100 % our training is as
  long as the paper's, and not the same.
- **Numbers.** A number with × is a quotient of the two cells that are named; any other is their difference, in points.
  In tables of results, our numbers are means over seeds, with the standard deviation.
- **Intervals.** A claim is tested on differences between runs with the same seed, by a {CONFIDENCE:.0%} confidence
  interval (Student's t). This covers chance in training, but not in the choice of the test set. If the interval is
  narrower than the last digit, only the number is shown. Many claims are tested, so one in twenty of those at the edge
  may be chance.
- **Signs.** ✓ the claim holds: the whole interval agrees with it. ✗ the claim does not hold: the whole interval
  disagrees with it. ? the claim is open: neither is true, or there is a single seed. Times are those of a simulated
  cluster: there ✓ and ✗ mean *reproduced* and *not reproduced in the simulator*, and "certain": it cannot fail there.
- **Several comparisons.** A claim with several comparisons holds if all of them hold. It does not hold if one fails at
  a stricter level, 1 - 0.05/k for k comparisons. If that alone keeps the claim open, the stricter interval is shown,
  with "at 98.3 % confidence". A table shows the worst comparison ("worst of 3: A - B") and the paper's number for it.
  If nothing has run, the table shows the paper's number that is the closest to the limit.
- **Plans.** A plan says how many seeds a claim gets. When all planned runs are there, they decide the claim ("as
  planned"). Before that, and without a plan, the runs that were there before the plans decide, if they are enough.\
""".replace("95%", "95 %")

BEFORE = ("before there was a plan of seeds (82 claims, at b0c33e8)", 12, 1, 35, 17, 9, 8)
"""The counts at that time, in the columns of now."""

FEWER = """\
Of learning:

- The only claim of a paper that did not hold is open now: a delayed update loses at most 1.5 points (Table 2). With 8
  threads, in 4 % of the training, ours loses more: {delayed-update/table-2/small: prop-8.accuracy - conv-8.accuracy}.
  But the claim is about the end of the training. There, in the paper's number of iterations, ours loses less;
  only the interval of 4 threads goes beyond 1.5 points. With 2 threads:
  {delayed-update/table-2/paper: prop-2.accuracy - conv-2.accuracy}, with 4:
  {delayed-update/table-2/paper: prop-4.accuracy - conv-4.accuracy}, with 8:
  {delayed-update/table-2/paper: prop-8.accuracy - conv-8.accuracy}.
- Four claims are new. One holds, in the paper's number of iterations: in the latter part a delayed update converges as
  well with 8 threads as with fewer (Table 2). One does not hold, in 2 % of the training: with 2 learners SASGD, EAMSGD
  and Downpour do not converge alike (Figure 9). Downpour's local weights are as good in training as SASGD's; its global
  weights, which we test, are not. Two are open: OD-SGD's local updates with 8 and 12 workers (Table 2), and how its
  test accuracy vibrates (Figure 11).
- Two claims that held are open again: SASGD's Figure 2, because its test was changed after the first runs, and OD-SGD's
  Table 2 (12 workers), because larger runs are planned.

Of times:

- The links of OD-SGD's Table 5 are now fitted only to SSGD's six numbers. Since then the simulator does not reproduce
  that DC-ASGD is slower than SSGD on InfiniBand (Figure 18), or that ASGD is the fastest on Ethernet at every size
  (Figure 17, which was open). It is open whether the speed falls as the cluster grows (Table 5).
- Three tests are stricter. Staleness-aware ASGD's "22 to 28 times" (Figure 2) is tested at both ends, and open. Both
  halves of "D-Sync pays for compression, and Pipe-SGD hides its cost" are tested: D-Sync does pay, but Pipe-SGD does
  not hide the cost. Figure 12 of OD-SGD is tested after the warm-up, and open.
- Two open claims are decided: how soon OD-SGD reaches its best accuracy (Figure 10; the whole training has run), and
  that ASGD is faster than SSGD (Figure 2 of staleness-aware ASGD; there are more seeds)."""

LEAD = """\
**In short.** With MobileNet on MNIST, over the paper's whole training, OD-SGD and SSGD end within 0.2 points of each
other (3 seeds). In our runs on CIFAR-10 OD-SGD ended lower. It may be chance with ResNet18 over the whole training (0.8
points, one seed) and with ResNet-20 after 40 epochs (1.8 points, 3 seeds). With ResNet-20 after 10 epochs it is not (14
points, 6 seeds, with 15 iterations of warm-up; the paper advises 3 epochs). {open} of the paper's {claims} claims about
accuracy are open: they need longer runs, more seeds or ImageNet. In a simulated cluster of 4 workers OD-SGD is 1.3 to
1.5 times as fast as SSGD on Ethernet (the paper: 1.6 to 1.7 times) and hardly faster on InfiniBand (the paper: 1.3
times). With 12 workers it is 1.1 times as fast on Ethernet (the paper: 1.4) and 1.3 times on InfiniBand (the paper:
1.3). OD-SGD is about as fast as ASGD in this cluster, and faster on InfiniBand with 12 workers.

This table has the longest trainings with 4 workers so far, with the test accuracy in %. The difference is OD-SGD minus
SSGD, over the seeds that both have run, with a 95 % interval.

| network, data, OD-SGD's local update | epochs | OD-SGD | SSGD | difference | OD-SGD, the paper | SSGD, the paper |
|---|---|---|---|---|---|---|
| MobileNet, MNIST, SGD | 40, as in the paper | {od-sgd/table-1/paper: odsgd.accuracy} \
| {od-sgd/table-1/paper: ssgd.accuracy} | {od-sgd/table-1/paper: odsgd.accuracy - ssgd.accuracy}, \
{od-sgd/table-1/paper: odsgd.accuracy - ssgd.accuracy, seeds} | 98.76 | 98.59 |
| ResNet18_v2, CIFAR-10, DC-ASGD-c | 160, as in the paper | {od-sgd/table-2/paper: odsgd-4.accuracy5} \
| {od-sgd/table-2/paper: ssgd-4.accuracy5} | {od-sgd/table-2/paper: odsgd-4.accuracy5 - ssgd-4.accuracy5} \
| 80.43 | 80.48 |
| ResNet-20, CIFAR-10, SGD | 40 of a guessed 200 | {od-sgd/gap-resnet20/medium: sgd-100.accuracy} \
| {od-sgd/table-6/medium: ssgd.accuracy} | {od-sgd/gap-resnet20/medium: sgd-100.accuracy - ssgd-100.accuracy}, \
{od-sgd/gap-resnet20/medium: sgd-100.accuracy - ssgd-100.accuracy, seeds} | 92.14 (DC-ASGD-c) | 92.12 |

With ResNet18 both are some 6 points below the paper, perhaps because its code mirrors images at random and these runs
do not. Our ResNet-20 warms up for 58 iterations; the paper's number has 3 epochs of warm-up, 294 iterations. No run
uses ImageNet.

{lost} of the {all} results, all those [from a GPU](../how-to/reproduce.md#on-a-gpu), name a commit that is lost: the
160 epochs of ResNet18, and the 10 and 40 of ResNet-20. Every other result names a commit of the history.

Times are those of a simulated cluster. There OD-SGD is SSGD without its waiting, so with 4 to 12 workers it cannot be
slower; the runs show how much faster it is. The links of Table 5 are fitted to the paper's six speeds of SSGD. This
table has OD-SGD's samples per second, divided by SSGD's:

| network, link | ours | the paper |
|---|---|---|
| MobileNet, Ethernet (Table 1) | {od-sgd/table-1/paper: odsgd.speed128 / ssgd.speed128} | × 1.7 |
| ResNet18, Ethernet (Table 5, 4 workers) \
| {od-sgd/table-5/small: odsgd-4-eth.speed128 / ssgd-4-eth.speed128} | × 1.56 |
| ResNet18, Ethernet (Table 5, 12 workers) \
| {od-sgd/table-5/small: odsgd-12-eth.speed128 / ssgd-12-eth.speed128} | × 1.36 |
| ResNet18, InfiniBand (Table 5, 4 workers) \
| {od-sgd/table-5/small: odsgd-4-ib.speed128 / ssgd-4-ib.speed128} | × 1.31 |
| ResNet18, InfiniBand (Table 5, 12 workers) \
| {od-sgd/table-5/small: odsgd-12-ib.speed128 / ssgd-12-ib.speed128} | × 1.27 |

What all runs together say to a reader of the OD-SGD paper:"""

LOST = "5709844f"
"""The one commit that results name and the history does not have."""

PLAN = """\
The plan says which runs follow, the most important first. Some turns began before earlier ones were complete, and runs
on a GPU came first. {had} of the planned runs were there before their plan; if they suggested a claim, only later seeds
decide it. Three plans have changed. In the hour in which the plan was written, before any of these runs, Table 1's ASGD
and DC-ASGD got a third seed, and Table 2 more cells at scale medium. For ResNet-20 after 10 and 40 epochs we planned 3
and 2 seeds, and 6 when the results from the GPU came. For MobileNet we added half an epoch, which decides no claim,
when the runs of 0.2 epochs had shown nothing. At a scale with a plan, only the planned runs of a claim's cells decide
it, once all of them are there. With two seeds an interval reaches nine standard deviations to each side: such a plan
shows the size of an effect, and decides only if the effect is large. The hours are the times of the runs so far, on one
core each or [on a GPU](../how-to/reproduce.md#on-a-gpu), beside other work."""

SHORT = 84
"""Characters of a line of a claim beside its interval."""


class Ruled(NamedTuple):
    """A claim with where it stands and what it comes to."""

    paper: Paper
    item: Item
    claim: Claim
    found: Ruling

    @property
    def link(self) -> str:
        ours = "beyond the papers, " * (self.paper.name == BEYOND)
        return f"[{ours}{self.item.title}]({self.paper.name}.md#{self.item.name})"


def page(papers: Sequence[Paper], loaded: Mapping[str, Runs]) -> str:
    """All of it; of what stands in no paper only what is known."""
    every = {paper.name: ruled(paper, loaded[paper.name]) for paper in papers}
    plan = _plan(papers, loaded)
    lead = _lead(papers, [one for all_of in every.values() for one in all_of], loaded)
    papers = [paper for paper in papers if paper.name != BEYOND]
    counts = _counts(papers, every)
    parts = ["# The papers' tables and figures", *lead,
             f"A comparison of all papers' methods, which none of them has, is in [beyond the papers]"
             f"({BEYOND}.md). This table counts the claims of the papers only, none of ours:",
             piped(counts[:-1]), "## How to read these pages", HOW_TO_READ]
    for paper in papers:
        parts += _paper(paper, every[paper.name], loaded[paper.name])
    changed = ["## Why the counts have changed", piped([counts[0], *counts[-2:]]), FEWER]
    return "\n\n".join([*parts, *plan, *_items(papers, loaded), *changed]) + "\n"


def ruled(paper: Paper, runs: Runs) -> List[Ruled]:
    return [Ruled(paper, item, claim, ruling(paper, item, claim, runs))
            for item in paper.items.values() for claim in item.claims]


# --- what is known ----------------------------------------------------------------------------------------------------

def _lead(papers: Sequence[Paper], every: Sequence[Ruled], loaded: Mapping[str, Runs]) -> List[str]:
    """What the claims that a reader asks for first come to, by what is known and what is not."""
    asked = [*{one.claim.known: one for one in reversed(every) if one.claim.known}.values()][::-1]
    if not asked:
        return []
    lines = []
    for head, about, verdicts in (("We know, of learning", "learning", (HOLDS, FAILS)),
                                  ("We know, of times in the simulator", "times", (HOLDS, FAILS)),
                                  ("We do not know", "open", (OPEN,))):
        said = [_known(one, loaded) for one in asked if one.found.verdict in verdicts
                and about in ("open", one.claim.about)]
        said += [text for paper in papers for text in paper.known.get(about, ())]
        lines.append(f"- **{head}**" + ("".join(f"\n    - {one}" for one in said) if said else ": nothing yet"))
    commits = [result.versions["commit"] for result in _every(loaded).values()]
    learning = [one.found.verdict for one in every if one.paper is papers[0] and one.item.state != "own"
                and one.claim.about == "learning"]
    lead = LEAD
    for name, number in (("lost", sum(LOST in commit for commit in commits)), ("all", len(commits)),
                         ("claims", len(learning)), ("open", learning.count(OPEN))):
        lead = lead.replace(f"{{{name}}}", f"{number:,}")
    return ["## What we know now about OD-SGD, and what we do not", lead, "\n".join(lines)]


def _known(one: Ruled, loaded: Mapping[str, Runs]) -> str:
    """A claim in a few words with our number so far, unless it has numbers in its words."""
    finding, claim = one.found.decisive, one.claim
    says = {OPEN: "whether ", FAILS: "*not reproduced:* "}.get(one.found.verdict, "") + (claim.known or "")
    if one.found.verdict == FAILS and any(part.verdict == HOLDS for part in one.found.findings):
        says = says.replace("*not ", "*not wholly ", 1)
    number = "" if "{" in says else one.found.missing if finding is None else _numbers(one, finding, loaded)
    lacks = one.found.lacks if one.found.lacks != number else ""
    return f"{'; '.join(filter(None, [says + f': {number}' * bool(number), lacks]))} ({one.link})"


def _numbers(one: Ruled, finding: Tested, loaded: Mapping[str, Runs]) -> str:
    """What a comparison came to, the paper's number, seeds, and the share of the paper's training."""
    tests, seeds = len(one.claim.tests), finding.estimate.seeds
    paper = words.number(finding, finding.paper)
    return ", ".join(filter(None, [
        words.interval(finding), f"the paper {paper}" if paper else "",
        f"worst of {tests}: {finding.name}" if tests > 1 else "", f"{seeds} seeds" if seeds > 1 else "",
        _share(one, loaded[one.paper.name], " of the training")]))


def _counts(papers: Sequence[Paper], every: Mapping[str, Sequence[Ruled]]) -> List[List[str]]:
    """Of claims by verdict: of each paper, of all, and of all as it was."""
    columns = [(about, verdict) for about in ABOUT for verdict in words.SIGNS]
    counts = [collections.Counter((one.claim.about, one.found.verdict) for one in every[paper.name]
                                  if one.item.state != "own") for paper in papers]
    every_one = sum(counts, collections.Counter())
    names = [*(f"[{paper.title}](#{_anchor(paper)})" for paper in papers), f"all {sum(every_one.values())}, now"]
    return [["", *(f"{about} {words.SIGNS[verdict]}" for about, verdict in columns)],
            *([name, *(str(count[column]) for column in columns)]
              for name, count in zip(names, [*counts, every_one])), [*map(str, BEFORE)]]


def _anchor(paper: Paper) -> str:
    return re.sub(r"[^\w\- ]", "", paper.title.lower()).replace(" ", "-")


# --- one paper --------------------------------------------------------------------------------------------------------

def _paper(paper: Paper, every: Sequence[Ruled], runs: Runs) -> List[str]:
    parts = [f"## {paper.title}", f"{paper.cite} Tables, figures and all intervals: [{paper.title}]({paper.name}.md)."]
    for about in ABOUT:
        rows = [_row(one, runs) for one in every if one.claim.about == about]
        if rows:
            head = ["of learning" if about == "learning" else "of times, in the simulator", "the paper", "ours (95 %)"]
            parts.append(piped([[*head, *(["share"] if about == "learning" else []), "seeds", ""], *rows], right=""))
    return parts + intervals(paper, runs)


def intervals(paper: Paper, runs: Runs) -> List[str]:
    return [f"![{paper.title}: the interval of each claim]({forest_file(paper)})"] if forest(paper, runs) else []


def _row(one: Ruled, runs: Runs) -> List[str]:
    finding = one.found.decisive
    numbers = [_papers(one), one.found.missing] if finding is None else [
        words.number(finding, finding.paper), f"{words.interval(finding)}{_which(one, finding)}"]
    size = [_share(one, runs)] if one.claim.about == "learning" else []
    certain = " (certain)" if one.claim.certain and one.found.verdict == HOLDS else ""
    ours = "ours: " * (one.item.state == "own" and one.paper.name != BEYOND)
    return [f"{one.link}: {ours}{one.claim.says}", *numbers, *size, str(finding.estimate.seeds) if finding else "",
            words.SIGNS[one.found.verdict] + certain]


def _which(one: Ruled, finding: Tested) -> str:
    """Which comparison that is, of several, and how many of the planned runs are there."""
    tests = len(one.claim.tests)
    worst = f", worst of {tests}: {finding.name}" if tests > 1 else ""
    return worst + (f"; {one.found.lacks}" if one.found.lacks else "")


def _papers(one: Ruled) -> str:
    """The paper's number of a claim that has none of ours; of several the closest to what the claim excludes."""
    of = one.paper.runs_of(one.item)
    given = [(inside(test, found.paper), found) for test in one.claim.tests
             for found in [compared(of, test, {})] if found.paper is not None]
    if given:
        found = min(given, key=lambda pair: pair[0])[1]
        return words.number(found, found.paper) + f", closest of {len(given)}" * (len(given) > 1)
    ends = [f"{cell.label} {cell.paper['accuracy']:.2f}" for cell in of.cells.values() if "accuracy" in cell.paper]
    return ", ".join(ends) if 1 < len(ends) < 4 and not one.claim.tests else ""


def _share(one: Ruled, runs: Runs, text: str = "") -> str:
    """Of the paper's training, that of the runs which decide; empty if that is not known."""
    finding, of = one.found.decisive, one.paper.runs_of(one.item)
    if finding is None or one.claim.about != "learning":
        return ""
    seeds = runs.get((of.name, one.found.scale or ""), {}).get(finding.comparison.sides[0][0], {})
    return words.share(of, [*seeds.values()], text)


def forest(paper: Paper, runs: Runs) -> List[Tuple[str, Tested]]:
    """The claims that have an interval to show, each with the comparison that decides it."""
    rows = []
    for one in ruled(paper, runs):
        finding = one.found.decisive
        if finding and math.isfinite(finding.mean) and len(finding.comparison.sides) > 1:
            says = re.sub(r" \(.*?\)|\.$", "", one.claim.says)
            rows.append((textwrap.fill(f"{one.item.title}: {says}", SHORT), finding))
    return rows


def forest_file(paper: Paper) -> str:
    return f"pictures/{paper.name}-claims.svg"


# --- what is to run, what has run -------------------------------------------------------------------------------------

def _every(loaded: Mapping[str, Runs]) -> Dict[Tuple[str, Key], Result]:
    """All results once; an item may share its cells with another."""
    return {(name, result.key): result for name, runs in loaded.items() for cells in runs.values()
            for seeds in cells.values() for result in seeds.values()}


def _plan(papers: Sequence[Paper], loaded: Mapping[str, Runs]) -> List[str]:
    every = {key: result.seconds / 3600 for key, result in _every(loaded).items()}
    rest, counts, had = dict(every), collections.defaultdict(list), 0  # of hours
    for paper in papers:
        for turn, trial in paper.planned():
            name = f"[{paper.title}, {trial.item.title}]({paper.name}.md#{trial.item.name})"
            counts[turn, name, trial.scale.name].append(every.get((paper.name, trial.key)))
            rest.pop((paper.name, trial.key), None)
            had += trial.seed < trial.scale.had(trial.cell.name)
    lines = [(f"{turn:g}", name, scale, str(len(found)), [hours for hours in found if hours is not None])
             for (turn, name, scale), found in sorted(counts.items())]
    lines += [("", "what is in no plan", "", "", [*rest.values()]), ("", "all", "", "", [*every.values()])]
    return ["## The plan of seeds", PLAN.replace("{had}", str(had)),
            piped([["turn", "runs of", "scale", "planned", "there", "hours"], *(
                [turn, name, scale, planned, str(len(there)), f"{sum(there):.1f}"]
                for turn, name, scale, planned, there in lines)], right="")]


def _items(papers: Sequence[Paper], loaded: Mapping[str, Runs]) -> List[str]:
    rows = [[f"[{paper.title}, {item.title}]({paper.name}.md#{item.name})", item.caption,
             words.state_of(paper, item, loaded[paper.name]), words.progress(paper, item, loaded[paper.name])]
            for paper in papers for item in paper.items.values() if item.state not in ("drawing", "own")]
    states = collections.Counter(row[2] for row in rows)
    said = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return ["## Tables and figures", f"Of {len(rows)} tables and figures, or parts of one: {said}.",
            piped([["", "shows", "state", "cells that have run"], *rows], right=""),
            *(line for paper in papers for line in words.drawings(paper, f"{paper.title}: "))]
