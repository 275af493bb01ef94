"""The user's screen: every line with the name of its process in front, and a line at the bottom that is redrawn."""
import contextlib
import functools
import os
import re
import select
import sys
import time
from typing import Callable, Dict, Iterator, Optional, TextIO, Tuple

from kvstore.job.aside import BackgroundThread, guarded

COLOURS = {"worker": ("36", "32", "33", "35", "34", "96", "92", "93"), "server": ("90",), "scheduler": ("90",)}
BAR_OF = "worker 0"
TRACEBACK, MOST_TRACEBACK_LINES = "Traceback (most recent call last):", 10_000
READ_WITHIN_S, ENDED_WITHIN_S, MOST_WAITING = 1.0, 60.0, 1000
BEGIN_LINE, CLEAR_REST = "\r", "\x1b[K"


class Tracebacks:
    """Finds the lines of a traceback that another process has printed already.

    >>> tracebacks = Tracebacks()
    >>> lines = ["Traceback (most recent call last):", '  File "a.py", line 1', "KeyError: 3", "epoch 2"]
    >>> [[tracebacks.repeated(process, line) for line in lines] for process in ("worker 1", "worker 0")]
    [[False, False, False, False], [True, True, True, False]]
    """

    def __init__(self) -> None:
        self._begun: Dict[str, int] = {}
        """By process: the hash of what it has printed of a traceback that goes on."""
        self._first: Dict[int, str] = {}
        """By the hash of a traceback's beginning: the process that printed it first."""

    def repeated(self, process: str, line: str) -> bool:
        """Whether this line, and the traceback above it, are another process's, too."""
        before = self._begun.pop(process, None)
        if before is None and not line.startswith(TRACEBACK):
            return False
        begun = hash((before, line))
        if not line or line[0] == " " or line.endswith(TRACEBACK):
            self._begun[process] = begun
        if len(self._first) == MOST_TRACEBACK_LINES:
            self._first.clear()
        return self._first.setdefault(begun, process) != process


@contextlib.contextmanager
def _harmless() -> Iterator[None]:
    """An error in here costs only what was to be shown, and is said once. The caller hears if a reader has gone."""
    try:
        yield
    except BrokenPipeError:
        raise
    except Exception as error:
        with guarded("the console"):
            raise error


class Console:
    """Writes to two streams that may be the same terminal.

    The bottom line is the job's status (`show_status`), or the progress bar that worker 0 draws itself; bars of several
    processes would overwrite each other. Only a terminal shows it, and other lines are printed above it. Without a
    terminal a bar's last state, which ends with a newline, is a line like any other.

    If a reader takes too little (a stopped terminal, a pipe), the console waits a second in all until the reader has
    taken everything. After that second it leaves out lines beyond the first `MOST_WAITING`, and says so when it goes
    on. It also tells of a full disk. If a pipe has lost its reader, one of the next calls raises BrokenPipeError.
    """

    def __init__(self, stdout: Optional[TextIO] = None, stderr: Optional[TextIO] = None) -> None:
        self.streams: Dict[str, TextIO] = {"stdout": stdout or sys.stdout, "stderr": stderr or sys.stderr}
        self.bar = ""
        self.drawn = False
        """Worker 0 draws a bar; until then the bar is the job's status."""
        self._tracebacks = Tracebacks()
        self._writers = self._make_writers()
        self._waits_s = dict.fromkeys(self._writers.values(), READ_WITHIN_S)
        """How long each stream may still hold up the caller."""
        self._left_out = dict.fromkeys(self.streams, 0)
        self.hurries = False
        """A signal ends the launcher."""
        self._gone = False
        """A stream has lost its reader."""
        self.on_terminal = {name: stream.isatty() for name, stream in self.streams.items()}

    @_harmless()
    def line(self, process: str, text: str, stream: str) -> None:
        """Print a line of a process; one that begins with its name, for want of a launcher, has that once."""
        text = text[len(process) + 2:] if text.startswith((f"{process}: ", f"{process}, ")) else text
        if process == BAR_OF and self.drawn:
            self._drop_bar()
        if not self._tracebacks.repeated(process, text):
            self._print(self._prefix(process, stream) + text, stream)

    @_harmless()
    def progress(self, process: str, text: str) -> None:
        """Show a new state of a process's progress bar."""
        if process == BAR_OF and self.on_terminal["stderr"]:
            self.drawn, self.bar = True, self._prefix(process, "stderr") + text
            self._show_bar()

    @_harmless()
    def show_status(self, text: str) -> None:
        """Show the job's status; an empty text hides it. A bar that the script draws is shown instead."""
        self._check()
        if self.on_terminal["stderr"] and not self.drawn:
            if not text:
                self._hide_bar()
            self.bar = text
            self._show_bar()

    @property
    def columns(self) -> int:
        """The greatest width of a line at the bottom."""
        try:
            return (os.get_terminal_size(self.streams["stderr"].fileno()).columns or 80) - 1
        except (OSError, ValueError):
            return 79

    @_harmless()
    def say(self, text: str) -> None:
        """Print a message of the launcher."""
        if self.drawn:
            self._drop_bar()
        for line in text.splitlines():
            self._print(f"odsgd launch: {line}" if not line.startswith(" ") else line, "stderr")

    def _print(self, text: str, stream: str) -> None:
        self._hide_bar()
        written = self._write(f"{self._left_out_text(stream)}{text}\n", stream)
        self._left_out[stream] = 0 if written else self._left_out[stream] + 1
        self._show_bar()

    def _left_out_text(self, stream: str) -> str:
        number = self._left_out[stream]
        return f"odsgd launch: warning: {number} lines are left out here: nobody read them\n" if number else ""

    def _drop_bar(self) -> None:
        self._hide_bar()
        self.bar = ""

    def _hide_bar(self) -> None:
        if self.bar:
            self._write(BEGIN_LINE + CLEAR_REST, "stderr")

    def _show_bar(self) -> None:
        if self.bar:
            # Cut to the window: a line that wraps could not be redrawn. Cleared last, else it would flicker.
            self._write(BEGIN_LINE + _cut(self.bar, self.columns) + CLEAR_REST, "stderr")

    def _prefix(self, process: str, stream: str) -> str:
        if not self.on_terminal[stream] or os.environ.get("NO_COLOR"):
            return f"{process} | "
        role, _, rank = process.partition(" ")
        colours = COLOURS.get(role, ("31",))
        return f"\x1b[{colours[int(rank or 0) % len(colours) if rank.isdigit() else 0]}m{process} |\x1b[0m "

    def _write(self, text: str, name: str) -> bool:
        """Write the text; false if it is left out."""
        self._check()
        if name in self._writers:
            return self._hand_over(self._writers[name], functools.partial(self._put, text, name))
        self.streams[name].write(self._encoded(text, name).decode(self._encoding(name)))
        self.streams[name].flush()
        return True

    def _hand_over(self, writer: BackgroundThread, call: Callable[[], None]) -> bool:
        if writer.empty:
            self._waits_s[writer] = READ_WITHIN_S
        deadline = time.monotonic() + self._waits_s[writer]
        try:
            writer.do(call, self._waits_s[writer])
        except TimeoutError:
            return False
        finally:
            self._waits_s[writer] = _until(deadline)
        return True

    def _check(self) -> None:
        if self._gone:
            raise BrokenPipeError

    @contextlib.contextmanager
    def flushed(self) -> Iterator[None]:
        """At the end wait for the readers, as any program does; not for ever, and not after a signal."""
        try:
            yield
        except SystemExit:
            self.hurries = True
            raise
        finally:
            deadline = time.monotonic() + (READ_WITHIN_S if self.hurries else ENDED_WITHIN_S)
            for name, writer in self._writers.items():
                with contextlib.suppress(TimeoutError):
                    writer.finish(functools.partial(self._put, self._left_out_text(name), name), _until(deadline))

    def _make_writers(self) -> Dict[str, BackgroundThread]:
        """Threads that write to the standard streams; one for both if they are one file, to keep the lines' order."""
        standard = {name: stream for name, stream in self.streams.items() if stream in (sys.__stdout__, sys.__stderr__)}
        by_file: Dict[Tuple[int, ...], BackgroundThread] = {}
        found = {}
        for name, stream in standard.items():
            stream.flush()
            status = os.fstat(stream.fileno())
            file = status.st_dev, status.st_ino, status.st_rdev
            what = "standard error" if name == "stderr" else "standard output"
            found[name] = by_file.setdefault(file, BackgroundThread(what, MOST_WAITING))
        return found

    def _put(self, text: str, name: str) -> None:
        """Write past Python's buffer, whose lock a blocked write would keep; called on a thread of its own."""
        fd, data = self.streams[name].fileno(), self._encoded(text, name)
        try:
            while data:
                select.select([], [fd], [])  # another program may have made it non-blocking
                with contextlib.suppress(BlockingIOError):
                    data = data[os.write(fd, data):]
        except BrokenPipeError:
            self._gone = True

    def _encoding(self, name: str) -> str:
        return getattr(self.streams[name], "encoding", None) or "utf-8"

    def _encoded(self, text: str, name: str) -> bytes:
        return text.encode(self._encoding(name), "backslashreplace")


def _until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _cut(text: str, columns: int) -> str:
    """The text cut to this many visible characters; colour codes take no room."""
    shown, pieces = 0, []
    for piece in re.split(r"(\x1b\[[\d;]*m)", text):
        if not piece.startswith("\x1b"):
            piece = piece[:max(0, columns - shown)]
            shown += len(piece)
        pieces.append(piece)
    return "".join(pieces)
