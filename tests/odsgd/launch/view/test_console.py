"""The user's screen."""
import contextlib
import io
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path
from typing import Iterator, List, TextIO, Tuple

import pytest

from odsgd.launch.view import console as console_module
from odsgd.launch.view.console import Console
from tests.jobs import until

PATIENCE_S = 200.0


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def test_without_a_terminal_there_are_neither_colours_nor_bars() -> None:
    out, err = Screen(False), Screen(False)
    console = Console(out, err)
    console.line("worker 0", "hello", "stdout")
    console.progress("worker 0", " 10%")
    console.line("server 0", "server 0: oops", "stderr")  # as it says where nobody puts its name in front
    console.line("worker 0", "worker 0, iteration 3: oops", "stdout")
    console.say("the end\n  and why")
    assert out.getvalue() == "worker 0 | hello\nworker 0 | iteration 3: oops\n"
    assert err.getvalue() == "server 0 | oops\nodsgd launch: the end\n  and why\n"


def test_on_a_terminal_lines_go_above_the_bar_of_worker_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Screen(True)
    console = Console(screen, screen)
    console.progress("worker 0", " 10%")
    console.progress("worker 1", " 99%")  # two bars would overwrite each other
    console.line("worker 1", "hello", "stdout")
    console.line("worker 0", "100%", "stderr")
    clear, bar = "\r\x1b[K", "\rworker 0 |  10%\x1b[K"
    assert screen.getvalue() == bar + clear + "worker 1 | hello\n" + bar + clear + "worker 0 | 100%\n"


def test_on_a_terminal_every_worker_has_a_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Screen(True)
    Console(screen, screen).line("worker 1", "hello", "stdout")
    assert screen.getvalue() == "\x1b[32mworker 1 |\x1b[0m hello\n"


def test_a_stream_that_lacks_a_character_shows_its_number() -> None:
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding="ascii")
    Console(stream, stream).line("worker 0", "50 \u2588", "stdout")
    assert buffer.getvalue() == b"worker 0 | 50 \\u2588\n"


def test_the_jobs_own_line_stays_at_the_bottom_until_a_script_draws_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Screen(True)
    console = Console(screen, screen)
    clear, half = "\r\x1b[K", "\rhalf\x1b[K"
    console.show_status("half")
    console.line("worker 0", "hello", "stdout")
    console.say("word")
    console.show_status("half")
    assert screen.getvalue() == (half + clear + "worker 0 | hello\n" + half + clear + "odsgd launch: word\n" + half
                                 + half)
    console.show_status("")
    assert screen.getvalue().endswith(half + clear)
    console.progress("worker 0", " 10%")
    console.show_status("more than half")
    assert screen.getvalue().endswith("\rworker 0 |  10%\x1b[K")


def test_where_there_is_no_terminal_the_jobs_line_is_not_shown() -> None:
    err = Screen(False)
    Console(Screen(False), err).show_status("half")
    assert err.getvalue() == ""


def test_a_slow_reader_is_waited_for_a_while_and_not_for_every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()
    monkeypatch.setattr(console_module, "READ_WITHIN_S", 0.5)
    ended = threading.Event()
    pieces: List[bytes] = []

    def read() -> None:
        while not pieces or pieces[-1]:
            ended.wait(0.02)
            pieces.append(os.read(reads, 65536))
    reader = threading.Thread(target=read)
    with few_wait(monkeypatch, writes) as stream:
        console = Console(stream, stream)
        reader.start()
        with console.flushed():
            for _ in range(100):
                console.line("worker 0", "x" * 65536, "stdout")
            ended.set()
    reader.join(PATIENCE_S)
    os.close(reads)
    assert b"lines are left out here" in b"".join(pieces)


def test_states_of_a_bar_are_no_lines_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, end = stopped_terminal()
    monkeypatch.setattr(console_module, "READ_WITHIN_S", 0.2)
    with few_wait(monkeypatch, end) as stream:
        console = Console(stream, stream)
        with console.flushed():
            for _ in range(10):
                console.show_status("half")
            for _ in range(3):
                console.line("worker 0", "hello", "stderr")
            termios.tcflow(end, termios.TCOON)
    shown = b""
    with contextlib.suppress(OSError):  # nobody writes any more
        while True:
            shown += os.read(terminal, 65536)
    os.close(terminal)
    assert b": 3 lines are left out here" in shown


WAITS = """
import os, pathlib, signal, sys
from odsgd.launch import early
from odsgd.launch.view import console as console_module
console_module.ENDED_WITHIN_S = 1000.0
console = console_module.Console()
with early.exit_on_signals(), console.flushed():
    console.say("the end")
    pathlib.Path(sys.argv[1]).touch()
    if sys.argv[2] == "verdict":
        console.hurries = True
    if sys.argv[2] == "before":
        os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("when", ["before", "meanwhile", "verdict"])
def test_a_signal_ends_the_wait_for_a_terminal_that_is_stopped(when: str, tmp_path: Path) -> None:
    terminal, end = stopped_terminal()
    process = subprocess.Popen([sys.executable, "-c", WAITS, str(tmp_path / "waits"), when],
                               stdin=subprocess.DEVNULL, stdout=end, stderr=end)
    try:
        until((tmp_path / "waits").exists)
        if when == "meanwhile":
            process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == (0 if when == "verdict" else 128 + signal.SIGTERM)
    finally:
        process.kill()
        process.wait()
        os.close(end)
        os.close(terminal)


def stopped_terminal() -> Tuple[int, int]:
    terminal, end = pty.openpty()
    termios.tcflow(end, termios.TCOOFF)  # as Ctrl-S does
    return terminal, end


@contextlib.contextmanager
def few_wait(monkeypatch: pytest.MonkeyPatch, fd: int) -> Iterator[TextIO]:
    """A standard output of which two writes may wait."""
    monkeypatch.setattr(console_module, "MOST_WAITING", 2)
    with open(fd, "w") as stream:
        monkeypatch.setattr(sys, "__stdout__", stream)
        yield stream


def test_what_goes_on_like_a_traceback_for_very_long_does_not_hold_up_the_launcher() -> None:
    tracebacks = console_module.Tracebacks()
    for line in (console_module.TRACEBACK, *[" " * 80] * 400_000):  # each took longer than the one before: hours in all
        assert not tracebacks.repeated("worker 0", line)
