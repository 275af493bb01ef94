"""``odsgd trace merge|summary|draw``."""
import argparse
import dataclasses
import sys
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

from kvstore.errors import ConfigError
from odsgd.config.flags import Parser
from odsgd.timeline.summary import shares, table
from odsgd.timeline.timeline import MERGED, Timeline, finish, home, read_timeline
from odsgd.tools import chosen, told_apart

USAGE = """usage: odsgd trace merge DIR [-o FILE]
       odsgd trace summary DIR|FILE ... [--iterations FIRST:STOP]
       odsgd trace draw DIR|FILE ... -o FIGURE.png [--iterations FIRST:STOP]

Show timelines of jobs that ran with `odsgd train --trace DIR`. DIR holds one
file of each process; copy the files of other hosts into it.

merge    puts the files into one, with one clock, for https://ui.perfetto.dev
         or chrome://tracing (default: DIR/{merged})
summary  prints for each worker which part of its time it computes, waits for
         exchanges, or is idle
draw     draws computing and communication: a panel for each trace, all on the
         same scale

Iterations count from 0; FIRST:STOP means FIRST to STOP - 1.

example:
  odsgd launch -n 2 -s 1 odsgd train --kvstore odsgd --warmup 2 \\
    --emulate-compute 50ms --iterations 20 --trace traces/odsgd
  (and the same with --kvstore ssgd and --trace traces/ssgd)
  odsgd trace summary traces/ssgd traces/odsgd
  odsgd trace draw traces/ssgd traces/odsgd --iterations 8:12 -o timeline.png
"""

HINT = "; `odsgd trace --help` says how"


def main(argv: Sequence[str]) -> int:
    chosen(argv, USAGE.format(merged=MERGED), {"merge": merge, "summary": summary, "draw": draw})(list(argv[1:]))
    return 0


def merge(argv: List[str]) -> None:
    parser = Parser(HINT, prog="odsgd trace", add_help=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", dest="out", type=Path)
    options = parser.parse_args(argv)
    try:
        print(finish(options.folder, options.out))
    except OSError as error:
        raise ConfigError(f"{options.out or options.folder}: {error.strerror}") from None


def summary(argv: List[str]) -> None:
    options = _traces().parse_args(argv)
    timelines = _read(options.traces)
    for timeline in timelines:
        print(f"{timeline.name}\n{table(shares(timeline, *options.iterations))}")
    _remark(timelines)


def draw(argv: List[str]) -> None:
    parser = _traces()
    parser.add_argument("-o", dest="out", type=Path, required=True)
    options = parser.parse_args(argv)
    timelines = _read(options.traces)
    from odsgd.timeline.draw import figure
    try:
        figure(timelines, [options.iterations] * len(timelines), options.out)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # of matplotlib: a folder, or a kind of file
        raise ConfigError(f"-o {options.out}: {error}") from None
    _remark(timelines)


def _read(paths: List[Path]) -> List[Timeline]:
    """The timelines, with names that tell them apart."""
    timelines, names = map(read_timeline, paths), told_apart(list(map(home, paths)))
    return [dataclasses.replace(timeline, name=name) for timeline, name in zip(timelines, names)]


def _traces() -> Parser:
    parser = Parser(HINT, prog="odsgd trace", add_help=False)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--iterations", type=_iterations, default=(None, None))
    return parser


def _iterations(text: str) -> Tuple[Optional[int], Optional[int]]:
    first, colon, stop = text.partition(":")
    if not colon or not all(part == "" or part.isdigit() for part in (first, stop)):
        raise argparse.ArgumentTypeError(f"expected FIRST:STOP, e.g. 8:12, got `{text}`")
    return (int(first) if first else None), (int(stop) if stop else None)


def _remark(timelines: List[Timeline]) -> None:
    for timeline in timelines:
        for line in timeline.remarks:
            print(f"{timeline.name}: {line}", file=sys.stderr)
