"""The user's screen."""
import io

import pytest

from odsgd.launch.view.console import Console


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
    console.line("server 0", "oops", "stderr")
    console.say("the end\n  and why")
    assert out.getvalue() == "worker 0 | hello\n"
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
    console.stand("half")
    console.line("worker 0", "hello", "stdout")
    console.say("word")
    console.stand("half")
    assert screen.getvalue() == (half + clear + "worker 0 | hello\n" + half + clear + "odsgd launch: word\n" + half
                                 + half)
    console.stand("")
    assert screen.getvalue().endswith(half + clear)
    console.progress("worker 0", " 10%")
    console.stand("more than half")
    assert screen.getvalue().endswith("\rworker 0 |  10%\x1b[K")


def test_where_there_is_no_terminal_the_jobs_line_is_not_shown() -> None:
    err = Screen(False)
    Console(Screen(False), err).stand("half")
    assert err.getvalue() == ""
