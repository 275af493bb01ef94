"""``scripts/reproduce``: run, list, report."""
from __future__ import annotations

import argparse
import fnmatch
import math
import os
import re
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

from kvstore.errors import EXIT_FAILURE, ConfigError, shown
from odsgd.cli import ended
from odsgd.config.flags import Parser
from odsgd.launch.early import handled_by
from odsgd.tools import pyplot
from scripts.reproduction import pages, results, words
from scripts.reproduction.declarations import SCALES, SOURCES, STATES, Item, Trial, named, paper_called, papers
from scripts.reproduction.run import Folders, again, differing, run

DESCRIPTION = """\
Repeat the trainings behind the tables and figures of five papers, and write
pages with the papers' numbers beside ours. A stopped run goes on from its
checkpoint when the same command is given again.

  scripts/reproduce --list
  scripts/reproduce od-sgd/table-1 --data-dir DIR --seeds 3 --budget 2h
  scripts/reproduce --plan --data-dir DIR --budget 2h
  scripts/reproduce --report"""

ROOT = Path(__file__).resolve().parents[2]

USED = {"list": ("results",), "report": ("results",), "again": ("data_dir", "results"),
        "plan": ("data_dir", "results", "runs", "jobs", "budget")}
"""What goes with each of these; a run takes all else."""

MOST_WORDS = 110
"""Characters of a line of `--list` that says how or why."""


def main(argv: Sequence[str]) -> int:
    """Do what is asked; 70 if a run failed, or came out otherwise than before; 64 after one line on standard error, if
    it cannot be done.
    """
    return ended("scripts/reproduce", lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    parser = _parser()
    asked = parser.parse_args(argv)
    _check_used(parser, argv)
    if asked.list:
        print(listed(asked.results))
        return 0
    if asked.report:
        pyplot("--report")  # or complain before anything is written
        print("\n".join(map(str, pages.write(papers(), asked.results))))
        return EXIT_FAILURE if results.refused else 0
    folders = Folders(asked.data_dir, asked.results, asked.runs)
    if not (asked.again or asked.items or asked.plan):
        raise ConfigError("expected tables or figures to run, as od-sgd/table-2; or --plan, --list, --report, --again")
    with handled_by(lambda number, frame: sys.exit(128 + number)):  # which ends the trainings
        if asked.again:
            return _again(asked.again, folders)
        trials = planned() if asked.plan else chosen(named(asked.items), asked.scale, asked.cells, asked.seeds)
        return _run(trials, folders, asked.jobs, asked.budget)


def _parser() -> Parser:
    parser = Parser("; `scripts/reproduce --help` says how", prog="scripts/reproduce", description=DESCRIPTION,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("items", metavar="PAPER/ITEM", nargs="*", help="tables and figures to run, or a whole PAPER")
    add("--list", action="store_true", help="list tables and figures by state, and how many of their cells ran")
    add("--report", action="store_true", help="write the pages from the results so far")
    add("--again", metavar=("PAPER/ITEM", "SCALE", "CELL", "SEED"), nargs=4,
        help="repeat one finished run, and compare the numbers")
    add("--plan", action="store_true", help="run what is left of the plan of seeds, in its order")
    add("--scale", choices=SCALES, help="size of the runs (default: the smallest that there is)")
    add("--seeds", metavar="N", type=_positive, default=3, help="runs of each cell; seeds 0 to N - 1 (default: 3)")
    add("--cells", metavar="GLOB", default="*", help="only cells with such names, e.g. 'odsgd-*' (default: all)")
    add("--budget", metavar="TIME", type=_seconds, default=math.inf, help="stop after this time, e.g. 90s, 30m or 2h")
    add("--jobs", metavar="N", type=_positive, default=os.cpu_count() or 1, help="runs at a time (default: one a core)")
    add("--data-dir", metavar="DIR", type=Path, help="folder with mnist/ and cifar10/")
    add("--results", metavar="DIR", type=Path, default=ROOT / "docs" / "results", help="default: docs/results")
    add("--runs", metavar="DIR", type=Path, default=ROOT / "runs" / "reproduce", help="folder of all runs' files "
        "(default: runs/reproduce)")
    return parser


def _check_used(parser: Parser, argv: Sequence[str]) -> None:
    """ConfigError for an argument that has no effect beside another."""
    nothing = argparse.Namespace(**dict.fromkeys(vars(parser.parse_args([]))))  # instead of the defaults
    given = {name: value for name, value in vars(parser.parse_args(argv, nothing)).items() if value not in (None, [])}
    for action in [name for name in USED if name in given]:
        for name, value in given.items():
            if name not in (action, *USED[action]):
                argument = shown(value[0]) if name == "items" else f"--{name.replace('_', '-')}"
                raise ConfigError(f"`{argument}` is not used with --{action}; leave it out")


def _positive(text: str) -> int:
    """Of a whole number from 1 on."""
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got `{shown(text)}`")
    return int(text)


def _seconds(text: str) -> float:
    """Of a time with its unit.

    >>> _seconds("90s"), _seconds("1.5h")
    (90.0, 5400.0)
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smh])", text)
    if not match:
        raise argparse.ArgumentTypeError(f"expected a time with its unit, as 90s, 30m or 2h, got `{shown(text)}`")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def chosen(items: Sequence[Item], scale: Any, glob: str, seeds: int) -> List[Trial]:
    """The trials of these items; the first seeds of all come first."""
    found: List[Trial] = []
    for item in items:
        if not item.scales:
            raise ConfigError(f"{item.full_name} has nothing to run: {item.note or item.state}")
        if scale is not None and scale not in item.scales:
            raise ConfigError(f"{item.full_name} has no scale `{scale}`; it has {', '.join(item.scales)}")
        found += item.trials(scale or list(item.scales)[-1], seeds)
    picked = [trial for trial in found if fnmatch.fnmatchcase(trial.cell.name, glob)]
    if not picked:
        raise ConfigError(f"no cell is called `{shown(glob)}`; there are "
                          f"{', '.join(dict.fromkeys(trial.cell.name for trial in found))}")
    return sorted(picked, key=lambda trial: trial.seed)


def planned() -> List[Trial]:
    """All trials of the plan by their turns."""
    turns = [one for paper in papers() for one in paper.planned()]
    return [trial for _, trial in sorted(turns, key=lambda one: one[0])]


def _run(trials: Sequence[Trial], folders: Folders, jobs: int, budget_s: float) -> int:
    counts = run(trials, folders, jobs, time.monotonic() + budget_s, _say)
    there = len(trials) - counts.finished - counts.failed - counts.left
    _say(f"{counts.finished} runs finished, {there} were there, {counts.failed} failed, {counts.left} are left"
         f"{'; the same command goes on with them' if counts.left else ''}")
    return EXIT_FAILURE if counts.failed else 0


def _again(named_so: Sequence[str], folders: Folders) -> int:
    """Run a finished trial again; 70 if its numbers are others."""
    name, scale, cell, seed = named_so
    paper, _, item = name.partition("/")
    trial = (paper_called(paper).trial(item, scale, cell, int(seed))
             if paper in SOURCES and re.fullmatch(r"\d{1,9}", seed) else None)
    if trial is None:
        raise ConfigError(f"no cell is declared as {' '.join(map(shown, named_so))}; expected PAPER/ITEM, scale, cell "
                          "and seed, as od-sgd/table-1 small ssgd 0")
    first = trial.result(folders.results)
    if first is None:
        raise ConfigError(f"{trial}: no result of it in `{folders.results / trial.file}`")
    second = again(trial, folders, _say)
    _say(f"{trial}: {differing(first, second)}")
    return 0 if first.numbers() == second.numbers() else EXIT_FAILURE


def _say(text: str) -> None:
    print(text, flush=True)


def listed(folder: Path) -> str:
    """Every table and figure by its state: the cells that have run, what it shows; below that, how or why."""
    found: Dict[str, List[Tuple[str, str, Item]]] = {state: [] for state in STATES}
    for paper in papers():
        runs = pages.load(paper, folder)
        for item in paper.items.values():
            found[item.state].append((item.full_name, words.progress(paper, item, runs), item))
    all_rows = [row for rows in found.values() for row in rows]
    name_width, runs_width = (max(map(len, column)) for column in zip(*((row[0], row[1]) for row in all_rows)))
    lines: List[str] = []
    for state, rows in found.items():
        lines += ["", f"{STATES[state][0].upper()}{STATES[state][1:]}:"]
        for name, progress, item in rows:
            lines.append(f"  {name:{name_width}}  {progress:{runs_width}}  {item.caption}")
            lines += [f"      {because}" for because in [_because(item)] if because]
    return "\n".join(lines[1:])


def _because(item: Item) -> str:
    """How an item is smaller here than in its paper, which preset is ready for it, or why it cannot be run."""
    how = ""
    if item.state == "none":
        how = item.note
    elif item.cells_of:
        how = f"the runs of {item.cells_of}"
    elif "small" in item.scales and item.state != "own":
        how = textwrap.shorten("".join(item.scales["small"].differs[:1]), MOST_WORDS, placeholder=" …")
    how = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", how)  # without Markdown's links
    return "; ".join(filter(None, [how, f"preset configs/{item.preset}" if item.preset else ""]))
