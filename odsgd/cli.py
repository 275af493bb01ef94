"""``odsgd COMMAND ...``: what each command does is in its module; here is only the way there.

Exit codes: 0 done, 64 a setting cannot work (one line on standard error), 70 and 75 as kvstore/errors.py has them.
"""
from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Callable, Dict, List, Optional, Sequence, Tuple

from kvstore.errors import EXIT_USAGE, ConfigError, unknown

if TYPE_CHECKING:
    pass


def _train(argv: List[str]) -> int:
    from odsgd.config.train import TrainConfig
    config = TrainConfig.from_flags(argv)
    from odsgd.training.train import run  # MXNet's import takes a second: only once the options are right
    return int(run(config))


def _launch(argv: List[str]) -> int:
    from odsgd.launch.cli import main as launch
    return launch(argv)


def _cluster(argv: List[str]) -> int:
    from odsgd.lab.cluster.cli import main as cluster
    return cluster(argv)


def _bench(argv: List[str]) -> int:
    from odsgd.lab.bench.cli import main as bench
    return bench(argv)


def _trace(argv: List[str]) -> int:
    from odsgd.lab.tracing.cli import main as trace
    return trace(argv)


COMMANDS: Dict[str, Tuple[Callable[[List[str]], int], str]] = {
    "train": (_train, "train a model; alone, or as one of a job's workers"),
    "launch": (_launch, "start a job: scheduler, servers, and the workers' command"),
    "trace": (_trace, "timelines: put together, sum up, draw"),
    "cluster": (_cluster, "emulate a cluster with slow links on this machine"),
    "bench": (_bench, "measure systems side by side, on emulated links"),
}

USAGE = """usage: odsgd COMMAND [options]

One-step-delay, synchronous and asynchronous SGD on MXNet's parameter server.

{commands}

  odsgd COMMAND --help    the options of a command
  odsgd --version

example, two workers and one server on this machine:
  odsgd launch -n 2 -s 1 odsgd train --dataset digits --kvstore odsgd
"""


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run one command; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage(), end="")
        return 0 if argv else EXIT_USAGE
    if argv[0] == "--version":
        from odsgd import __version__
        print(f"odsgd {__version__}")
        return 0
    return _run(argv[0], argv[1:])


def _run(command: str, argv: List[str]) -> int:
    label = f"odsgd {command}"
    try:
        if command not in COMMANDS:
            label = "odsgd"
            raise unknown("command", command, COMMANDS)
        return COMMANDS[command][0](argv)
    except ConfigError as error:
        print(f"{label}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except SystemExit as stop:  # argparse, after --help
        return int(stop.code or 0)


def _usage() -> str:
    return USAGE.format(commands="\n".join(f"  {name:<8}{help}" for name, (_, help) in COMMANDS.items()))

