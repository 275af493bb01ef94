"""``odsgd watch``: a running job, process by process, on one screen."""
import contextlib
import os
import shlex
import shutil
import sys
import time
from typing import Callable, Dict, List, Optional, Sequence

from kvstore.errors import ConfigError
from odsgd.config.flags import Parser, given
from odsgd.launch.view import status_file
from odsgd.launch.view.overview import Facts, line
from odsgd.tools import aligned

EVERY_S = 1.0
STALE_S = 5.0
HOME, BELOW = "\x1b[H", "\x1b[J"
NO_TERMINAL = 120, 30
ENDLINE = "\x1b[K\n"
OTHER_SCREEN, THIS_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"

Cell = Callable[[Facts], str]


def main(argv: List[str]) -> int:
    """Show a job until it has ended, or once."""
    parser = parser_of("watch", "Show the state of a running job: for each worker and server its iteration, rate, "
                       "share of time spent waiting for weights, bytes, staleness and lag. Run this on the machine and "
                       "as the user that launched the job. Ctrl-C ends the watching, not the job.")
    parser.add_argument("--once", action="store_true", help="print it once and end, as without a terminal")
    options = parser.parse_args(argv)
    job = found(options.job)
    if options.once or not sys.stdout.isatty():
        facts, columns = status_file.read(job), shutil.get_terminal_size(NO_TERMINAL).columns
        print("the job has ended" if facts is None else screen(facts, time.time(), columns))
    else:
        _watch(job)
    return 0


def parser_of(command: str, description: str) -> Parser:
    """The parser of a command about a running job."""
    parser = Parser(f"; `odsgd {command} --help` says how", prog=f"odsgd {command}", description=description)
    parser.add_argument("job", metavar="RUN-or-JOB", nargs="?",
                        help="folder of the job's run, or number of the launcher's process; not needed where only one "
                        "job runs")
    return parser


def found(asked: Optional[str]) -> int:
    """The one job that `asked` names; ConfigError if there is none, or several."""
    jobs = status_file.running()
    meant = [job for job, facts in jobs.items() if asked in (None, str(job)) or (asked and _is_of(asked, job, facts))]
    if len(meant) == 1:
        return meant[0]
    there = "; ".join(f"{job}: {facts.get('command')}" for job, facts in jobs.items())
    if not jobs:
        raise ConfigError(status_file.taken() or "no job of this user runs on this machine; start one with `odsgd "
                          "launch`, and watch it where it was launched")
    if asked is None:
        raise ConfigError(f"{len(jobs)} jobs run; name one of them by its number: {there}")
    raise ConfigError(f"`{asked}` is no job that runs here, nor the folder of its run; there are {there}")


def _is_of(folder: str, job: int, facts: Facts) -> bool:
    """Whether this is the folder of the job's run: as a worker has told it, or before that as the command names it."""
    out = facts.get("out")
    with contextlib.suppress(OSError, ValueError, ConfigError):
        if not out:
            asked, = given(shlex.split(str(facts.get("command"))), "--out")
            out = asked and os.path.join(os.readlink(f"/proc/{job}/cwd"), asked)
        return bool(out) and os.path.realpath(folder) == os.path.realpath(str(out))
    return False


def _watch(job: int) -> None:
    """Show a job on the terminal's other screen, which is gone afterwards."""
    sys.stdout.write(OTHER_SCREEN)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                facts = status_file.read(job)
                if facts is None:
                    break
                columns, rows = shutil.get_terminal_size(NO_TERMINAL)
                text = screen(facts, time.time(), columns - 1)
                shown = [one[:columns - 1] for one in text.splitlines()[:rows - 1]]
                sys.stdout.write(HOME + "".join(one + ENDLINE for one in shown) + BELOW)
                sys.stdout.flush()
                time.sleep(EVERY_S)
    finally:
        sys.stdout.write(THIS_SCREEN)
        sys.stdout.flush()
    if status_file.read(job) is None:
        print(f"job {job} has ended")


# --- the screen -------------------------------------------------------------------------------------------------------

def _of(key: str, words: Callable[[float], str]) -> Cell:
    return lambda row: "-" if row.get(key) is None else words(row[key])


COLUMNS: Dict[str, Cell] = {
    "process": lambda row: row["name"] + (" (slow)" if row.get("slow") else ""),
    "host": lambda row: str(row["host"]),
    "at": _of("at", "{:.0f}".format),
    "behind": _of("behind", "{:.0f}".format),
    "per second": _of("rate", "{:.1f}".format),
    "waiting": _of("waiting", "{:.0%}".format),
    "own ms": _of("own_ms", "{:.1f}".format),
    "MB/s": _of("bytes_per_s", lambda value: f"{value / 1e6:.1f}"),
    "staleness": _of("staleness", "{:.2f}".format),
    "doing": lambda row: str(row.get("doing") or "-"),
}


def screen(facts: Facts, now: float, columns: int) -> str:
    """The facts as text.

    >>> print(screen({"job": 7, "command": "train", "written_at": 9.0, "starting": "starting for 3 s", "rows": [
    ...     {"name": "worker 0", "host": "a", "at": 12, "behind": 0, "rate": 4.0, "waiting": 0.25, "own_ms": 187.5,
    ...      "bytes_per_s": 2e6, "staleness": None, "doing": "training"}]}, now=10.0, columns=80))
    job 7: train
    starting for 3 s
    <BLANKLINE>
    process   host  at  behind  per second  waiting  own ms  MB/s  staleness  doing
    worker 0  a     12       0         4.0      25%   187.5   2.0          -  training
    """
    rows: Sequence[Facts] = facts.get("rows") or []
    lines = [list(COLUMNS), *([cell(row) for cell in COLUMNS.values()] for row in rows)]
    silent_s = now - facts.get("written_at", now)
    return "\n".join([f"job {facts.get('job')}: {facts.get('command')}",
                      line(facts["status"], columns) if facts.get("status") else facts.get("starting")
                      or "no worker has begun to train", "",
                      aligned(lines, to_left=("process", "host", "doing")),
                      *([f"the launcher has said nothing for {silent_s:.0f} s"] if silent_s > STALE_S else [])])
