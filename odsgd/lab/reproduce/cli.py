"""``odsgd reproduce``: run, list, report."""
from __future__ import annotations

import argparse
import fnmatch
import math
import os
import re
import signal
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

from kvstore.errors import EXIT_FAILURE, EXIT_INTERRUPTED, ConfigError, shown
from odsgd.config.flags import Parser
from odsgd.lab.reproduce import pages, results, words
from odsgd.lab.reproduce.declarations import SCALES, SOURCES, STATES, Item, Trial, named, paper_called, papers
from odsgd.lab.reproduce.run import Folders, again, differing, run
from odsgd.tools import pyplot

DESCRIPTION = """\
Run the tables and figures of five papers, and write pages with the papers'
numbers beside ours. A run that was stopped goes on from its checkpoint when
the same command is given again.

  odsgd reproduce --list
  odsgd reproduce od-sgd/table-1 --data-dir DIR --seeds 3 --budget 2h
  odsgd reproduce --plan --data-dir DIR --budget 2h
  odsgd reproduce --report"""

RUNS = ("data_dir", "results", "runs", "jobs", "budget")

USED = {"list": ("results",), "report": ("results",), "again": ("data_dir", "results"), "plan": RUNS, "stale": RUNS}
"""What goes with each of these; a run takes all else."""

FIRST = 1
"""The turn of the plan after which results of unknown source are run again."""

MOST_WORDS = 110
"""Characters of a line of `--list` that says how or why."""


def main(argv: Sequence[str]) -> int:
    """Do what is asked; 70 if a run failed, or came out otherwise than before."""
    parser = _parser()
    asked = parser.parse_args(argv)
    _check_used(parser, argv)
    if asked.list:
        print(listed(asked.results))
        return 0
    if asked.report:
        return _report(asked.results)
    folders = Folders(asked.data_dir, asked.results, asked.runs)
    if asked.again:
        return _ended(lambda: _again(asked.again, folders))
    trials = _trials(asked)
    return _ended(lambda: _run(trials, folders, asked.jobs, asked.budget))


def _trials(asked: argparse.Namespace) -> List[Trial]:
    """What is to run, in this order."""
    if asked.plan:
        return planned(asked.results)
    if asked.stale:
        return stale(asked.results)
    if not asked.items:
        raise ConfigError("expected tables or figures to run, as od-sgd/table-2, or --plan, --stale, --list, --report "
                          "or --again")
    return chosen(named(asked.items), asked.scale, asked.cells, asked.seeds)


def _report(folder: Path) -> int:
    """Write the pages; 70 if there are lines that do not count."""
    pyplot("--report")  # or complain before anything is written
    refused: List[str] = []
    print("\n".join(map(str, pages.write(papers(), folder, refused))))
    print("".join(f"refused: {line}\n" for line in refused), end="", file=sys.stderr)
    return EXIT_FAILURE if refused else 0


def _check_used(parser: Parser, argv: Sequence[str]) -> None:
    """ConfigError for an argument that has no effect beside another."""
    nothing = argparse.Namespace(**dict.fromkeys(vars(parser.parse_args([]))))  # instead of the defaults
    given = {name: value for name, value in vars(parser.parse_args(argv, nothing)).items() if value not in (None, [])}
    for action in [name for name in USED if name in given]:
        for name, value in given.items():
            if name not in (action, *USED[action]):
                argument = shown(value[0]) if name == "items" else f"--{name.replace('_', '-')}"
                raise ConfigError(f"`{argument}` is not used with --{action}; leave it out")


def _parser() -> Parser:
    parser = Parser("; `odsgd reproduce --help` says how", prog="odsgd reproduce", description=DESCRIPTION,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("items", metavar="PAPER/ITEM", nargs="*", help="tables and figures, or a whole PAPER")
    add("--list", action="store_true", help="every table and figure by its state, and how many of its cells have run")
    add("--report", action="store_true", help="write the pages from the results that are there")
    add("--again", metavar=("PAPER/ITEM", "SCALE", "CELL", "SEED"), nargs=4,
        help="run what a result has once more, and compare the numbers")
    add("--plan", action="store_true", help="run all that the plan of seeds has and that is not there, in its order")
    add("--stale", action="store_true", help="run again the results of which it is not known what source they ran")
    add("--scale", choices=SCALES, help="the paper's, or a smaller one (default: the smaller one where there is one)")
    add("--seeds", metavar="N", type=_positive, default=3, help="runs of each cell, with seeds from 0 on (default: 3)")
    add("--cells", metavar="GLOB", default="*", help="only the cells with such names, e.g. 'odsgd-*'")
    add("--budget", metavar="TIME", type=_seconds, default=math.inf, help="stop after so long, e.g. 90s, 30m or 2h")
    add("--jobs", metavar="N", type=_positive, default=os.cpu_count() or 1, help="runs at a time (default: one a core)")
    add("--data-dir", metavar="DIR", type=Path, help="folder with mnist/ and cifar10/")
    add("--results", metavar="DIR", type=Path, default=Path("docs/results"), help="(default: docs/results)")
    add("--runs", metavar="DIR", type=Path, default=Path("runs/reproduce"), help="folder of the runs (default: "
        "runs/reproduce)")
    return parser


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


def planned(folder: Path) -> List[Trial]:
    """All trials of the plan by their turns; after the first turn those of `stale`."""
    trials = sorted((one for paper in papers() for one in paper.planned()), key=lambda one: one[0])
    first = [trial for turn, trial in trials if turn <= FIRST]
    ordered = [*first, *stale(folder), *(trial for _, trial in trials)]
    return list({str(trial): trial for trial in ordered}.values())


def stale(folder: Path) -> List[Trial]:
    """The trials whose results do not say what source they ran, those of the quickest item first."""
    found: Dict[str, List[Tuple[float, Trial]]] = {}
    for paper in papers():
        for (item, scale), cells in pages.load(paper, folder, []).items():
            for name, seeds in cells.items():
                for seed, result in seeds.items():
                    trial = paper.trial(item, scale, name, seed)
                    if trial and not result.source_is_known:
                        found.setdefault(trial.file, []).append((result.seconds, trial))
    quick = sorted(found.values(), key=lambda runs: sum(seconds for seconds, _ in runs))
    return [trial for runs in quick for _, trial in sorted(runs, key=lambda run: run[1].seed)]


def _ended(work: Callable[[], int]) -> int:
    """What `work` returns, or the status after Ctrl-C; Ctrl-C and SIGTERM end its trainings with it."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return work()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


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
    trial = paper_called(paper).trial(item, scale, cell, _seed(seed)) if paper in SOURCES else None
    if trial is None:
        raise ConfigError(f"no cell is declared as {' '.join(map(shown, named_so))}; expected PAPER/ITEM, scale, cell "
                          "and seed, as od-sgd/table-1 small ssgd 0")
    first = results.read_of(trial, folders.results)
    if first is None:
        raise ConfigError(f"{trial}: no result of it in `{folders.results / trial.file}`")
    second = again(trial, folders, _say)
    _say(f"{trial}: {differing(first, second)}")
    return 0 if first.numbers() == second.numbers() else EXIT_FAILURE


def _seed(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise ConfigError(f"--again: expected a seed, a whole number, got `{shown(text)}`")
    return int(text)


def listed(folder: Path) -> str:
    """Every table and figure by its state: the cells that have run, what it shows; below that, how or why.

    Where there are no results how many have run is not told.
    """
    there = (folder / "data").is_dir()
    found: Dict[str, List[Tuple[str, str, str, str]]] = {state: [] for state in STATES}
    for paper in papers():
        runs = pages.load(paper, folder, [])
        for item in paper.items.values():
            progress = words.progress(paper, item, runs if there else None)
            found[item.state].append((item.full_name, progress, item.caption, _because(item)))
    name_width, runs_width = (max(len(row[place]) for rows in found.values() for row in rows) for place in (0, 1))
    lines: List[str] = []
    for state, rows in found.items():
        lines += ["", f"{STATES[state][0].upper()}{STATES[state][1:]}:"]
        for name, progress, caption, because in rows:
            lines.append(f"  {name:{name_width}}  {progress:{runs_width}}  {caption}")
            lines += [f"      {because}"] if because else []
    if not there:
        lines += ["", "The numbers count cells. How many have run is not known: "
                  f"no results lie in `{folder}`; those of the project lie in docs/results of a checkout (--results)."]
    return "\n".join(lines[1:])


def _because(item: Item) -> str:
    """How an item is smaller here than in its paper, which preset is ready for it, or why it cannot be had."""
    how = ""
    if item.state == "none":
        how = _plain(item.note)
    elif item.cells_of:
        how = f"the runs of {item.cells_of}"
    elif "small" in item.scales and item.state != "own":
        how = textwrap.shorten(_plain("".join(item.scales["small"].differs[:1])), MOST_WORDS, placeholder=" …")
    return "; ".join(filter(None, [how, f"preset configs/{item.preset}" if item.preset else ""]))


def _plain(text: str) -> str:
    """Without Markdown's links."""
    return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", text)


def _say(text: str) -> None:
    print(text, flush=True)
