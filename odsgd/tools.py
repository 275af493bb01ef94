"""Shared by several commands: actions by name, short programs, tables and figures, the machine's name."""
from __future__ import annotations

import importlib
import itertools
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

from kvstore.errors import EXIT_USAGE, ConfigError, LacksError, unknown

Action = Callable[[List[str]], Any]


def chosen(argv: Sequence[str], usage: str, actions: Dict[str, Action]) -> Action:
    """The action named first; SystemExit after help, which `--help` asks for and which an empty command line gets."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage, end="")
        raise SystemExit(0 if argv else EXIT_USAGE)
    if argv[0] not in actions:
        raise unknown("action", argv[0], actions)
    return actions[argv[0]]


def aligned(lines: Sequence[Sequence[str]], to_left: Sequence[str] = ()) -> str:
    """Cells as columns of text: the first column, and those with these headings, to the left, the others to the right.

    >>> print(aligned([["run", "epochs"], ["odsgd", "8"]]))
    run    epochs
    odsgd       8
    """
    columns = []
    for column in zip(*lines):
        adjusted = str.ljust if column[0] in (lines[0][0], *to_left) else str.rjust
        columns.append([adjusted(cell, max(map(len, column))) for cell in column])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns))


def told_apart(paths: Sequence[Path]) -> List[str]:
    """Names that tell these absolute paths apart: their ends, as long as need be.

    >>> told_apart([Path("/a/run"), Path("/b/run")]), told_apart([Path("/a/run"), Path("/b/next")])
    (['a/run', 'b/run'], ['run', 'next'])
    """
    parts = [path.parts for path in paths]
    length = next(count for count in itertools.count(1) if len({one[-count:] for one in parts}) == len(set(parts)))
    return [str(Path(*one[-length:])) for one in parts]


def say(text: str) -> None:
    """Say what is under way: on a terminal in one line that the next overwrites, elsewhere a line each; "": nothing."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def writable(*paths: Optional[str]) -> None:
    """See that these files can be made, before what they will hold is measured; ConfigError if not."""
    for path in filter(None, paths):
        new = not os.path.exists(path)
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            open(path, "a").close()
            if new:
                os.unlink(path)
        except OSError as error:
            raise ConfigError(f"cannot write `{path}`: {error.strerror}; name another file") from None


def imported(name: str, purpose: str) -> Any:
    """A package that this `purpose` alone needs; LacksError unless it is installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise LacksError(f"{purpose} needs {name}: pip install {name} ({error})") from None


def pyplot(purpose: str) -> Any:
    """matplotlib's, which draws to files; ConfigError unless it is installed: a command of one host, not of a job."""
    try:
        imported("matplotlib", purpose).use("Agg")
    except LacksError as error:
        raise ConfigError(error) from None
    from matplotlib import pyplot
    return pyplot


def piped(lines: Sequence[Sequence[str]], right: str = ":") -> str:
    """Cells as a table of Markdown, whose numbers stand to the right; with `right` empty it is one of words."""
    head, *body = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([head, "|---|" + f"---{right}|" * (len(lines[0]) - 1), *body])


def cpu() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def ran(command: Sequence[str], needed_for: str, within_s: float, input: str = "") -> subprocess.CompletedProcess[str]:
    """Run a short command; ConfigError, which begins with `needed_for`, if it cannot run or takes longer."""
    try:
        return subprocess.run(command, input=input, capture_output=True, encoding="utf-8", errors="replace",
                              timeout=within_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{needed_for}: cannot run {command[0]}: {why}") from None


def output(command: Sequence[str]) -> str:
    """The standard output of a short command; `unknown` if it cannot run."""
    try:
        return ran(command, "", 60).stdout.strip() or "unknown"
    except ConfigError:
        return "unknown"
