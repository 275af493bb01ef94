"""``odsgd COMMAND ...``: finds the command's module and runs it.

Exit codes: 0 done, 64 a setting cannot work (one line on standard error), 70, 75 and 130 as kvstore/errors.py has them.
"""
import importlib
import os
import select
import signal
import sys
from typing import Any, Callable, Optional, Sequence

from kvstore.errors import EXIT_INTERRUPTED, EXIT_USAGE, ConfigError, unknown

#: The module of each command, and its line of help. The module is imported when the command is asked for; its
#: ``main(argv)`` returns the exit code, or raises ConfigError.
COMMANDS = {
    "train": ("odsgd.training.cli", "train a model, alone or as a worker of a job"),
    "launch": ("odsgd.launch.command", "start a job: a scheduler, servers and workers"),
    "join": ("odsgd.launch.view.join", "add a worker to a running job"),
    "watch": ("odsgd.launch.view.watch", "show the state of a running job, process by process"),
    "report": ("odsgd.report.cli", "print a table of runs, and write a page with pictures"),
    "trace": ("odsgd.timeline.cli", "merge, sum up or draw the timelines of a job"),
    "cluster": ("odsgd.lab.cluster.cli", "emulate a cluster with slow links on this machine"),
    "profile": ("odsgd.lab.profile.cli", "measure this machine and its links for a virtual cluster"),
    "bench": ("odsgd.lab.bench.cli", "measure the speed of several systems on the same links"),
    "advise": ("odsgd.lab.advise.cli", "predict each store's speed on a cluster, and what limits it"),
}

USAGE = """usage: odsgd COMMAND [options]

Data-parallel training that computes the next batch while gradients travel.

to begin, on this machine:
  odsgd launch -n 2 -s 1 odsgd train --warmup 1epoch   two workers, a server
  odsgd launch -n 2 -s 1 script.py                     a script of your own
  odsgd report runs/digits-mlp-odsgd-sgd               the results of the first

{commands}

  odsgd COMMAND --help    the options of a command
  odsgd --version
"""


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run one command; returns the exit code."""
    _open_closed()
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:<11}{help}" for name, (_, help) in COMMANDS.items())
        print(USAGE.format(commands=commands), end="")
        return 0 if argv else EXIT_USAGE
    if argv[0] == "--version":
        from kvstore._version import VERSION, commit
        print(f"odsgd {VERSION}" + (f" (commit {commit()})" if commit() else ""))
        return 0
    command, *rest = argv
    return ended(f"odsgd {command}" if command in COMMANDS else "odsgd", lambda: int(_module_of(command).main(rest)))


def _module_of(command: str) -> Any:
    if command == "reproduce":
        raise ConfigError("`reproduce` is run from a checkout of the repository: scripts/reproduce --help")
    if command not in COMMANDS:
        raise unknown("command", command, COMMANDS)
    return importlib.import_module(COMMANDS[command][0])


def ended(label: str, work: Callable[[], int]) -> int:
    """What `work` returns; the exit code, with a line on standard error, if it raises ConfigError or is interrupted."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _unread():
            raise
        return 128 + signal.SIGPIPE
    except ConfigError as error:
        print(f"{label}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if hasattr(sys.excepthook, "dies_in"):  # a process of a job ends at once by it, and waits for no other
            raise
        print(f"{label}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except SystemExit as stop:  # argparse, after --help
        return int(stop.code or 0)


def _open_closed() -> None:
    """A standard stream that was closed (`>&-`) leads nowhere; the next file would otherwise take its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  as long as the process lives


def _unread() -> bool:
    """Whether nobody reads our output any more (`| head`); then nothing more is written there."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # an error is always told
    if not poll.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
