"""From a process's bytes to the user's screen: lines, progress bars, prefixes."""
import io

from odsgd.launch.agent import MAX_LINE, Lines, pack, unpack
from odsgd.launch.console import Console


def pieces(*chunks):
    lines = Lines()
    return [found for chunk in chunks for found in lines.feed(chunk)] + lines.flush()


def test_a_line_may_come_in_pieces_and_the_last_one_without_its_end():
    assert pieces(b"on", b"e\ntw", b"o") == [("one", False), ("two", False)]


def test_cr_lf_is_one_end_of_line_even_across_chunks():
    assert pieces(b"a\r\nb\r", b"\nc") == [("a", False), ("b", False), ("c", False)]


def test_a_bar_is_frames_until_its_newline():
    assert pieces(b"\r 10%", b"\r 20%", b"\r100%\n") == [(" 10%", True), (" 20%", True), ("100%", False)]


def test_of_several_frames_in_one_chunk_only_the_newest_counts():
    assert pieces(b"\r1\r2\r3") == [("3", True), ("3", False)]


def test_empty_lines_are_lines_and_cursor_movements_are_not_text():
    assert pieces(b"\n\x1b[A\x1b[32mgreen\x1b[0m\x1b[K\n") == [("", False), ("\x1b[32mgreen\x1b[0m", False)]


def test_bytes_that_are_no_text_and_lines_without_end_do_no_harm():
    assert pieces(b"\xff\n") == [("\ufffd", False)]
    assert [len(text) for text, _ in pieces(b"x" * (MAX_LINE + 1))] == [MAX_LINE + 1]


def test_jobs_survive_the_way_through_an_environment_variable():
    jobs = {"ranks": [{"env": {"A": "ü'\" \n"}}] * 200}
    assert unpack(pack(jobs)) == jobs and len(pack(jobs)) < 2000


class Screen(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


def test_without_a_terminal_there_are_neither_colours_nor_bars():
    out, err = Screen(False), Screen(False)
    console = Console(out, err)
    console.line("worker 0", "hello", "stdout")
    console.progress("worker 0", " 10%")
    console.line("server 0", "oops", "stderr")
    console.say("the end\n  and why")
    assert out.getvalue() == "worker 0 | hello\n"
    assert err.getvalue() == "server 0 | oops\nodsgd launch: the end\n  and why\n"


def test_on_a_terminal_lines_go_above_the_bar_of_worker_0(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Screen(True)
    console = Console(screen, screen)
    console.progress("worker 0", " 10%")
    console.progress("worker 1", " 99%")  # two bars would overwrite each other
    console.line("worker 1", "hello", "stdout")
    console.line("worker 0", "100%", "stderr")
    clear = "\r\x1b[K"
    assert screen.getvalue() == (clear + "worker 0 |  10%" + clear + "worker 1 | hello\n" + clear + "worker 0 |  10%"
                                 + clear + "worker 0 | 100%\n")


def test_on_a_terminal_every_worker_has_a_colour(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Screen(True)
    Console(screen, screen).line("worker 1", "hello", "stdout")
    assert screen.getvalue() == "\x1b[32mworker 1 |\x1b[0m hello\n"


def test_a_stream_that_lacks_a_character_shows_its_number():
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding="ascii")
    Console(stream, stream).line("worker 0", "50 \u2588", "stdout")
    assert buffer.getvalue() == b"worker 0 | 50 \\u2588\n"
