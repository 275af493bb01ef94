"""From the bytes of a process to lines and frames of progress bars."""
import os
from typing import Iterator, Tuple

import pytest

from odsgd.launch.lines import MAX_LINE, Lines, Pieces, Stream


def pieces(*chunks: bytes) -> Pieces:
    lines = Lines()
    return [found for chunk in chunks for found in lines.feed(chunk)] + lines.flush()


def test_a_line_may_come_in_pieces_and_the_last_one_without_its_end() -> None:
    assert pieces(b"on", b"e\ntw", b"o") == [("one", False), ("two", False)]


def test_cr_lf_is_one_end_of_line_even_across_chunks() -> None:
    assert pieces(b"a\r\nb\r", b"\nc") == [("a", False), ("b", False), ("c", False)]


def test_a_bar_is_frames_until_its_newline() -> None:
    assert pieces(b"\r 10%", b"\r 20%", b"\r100%\n") == [(" 10%", True), (" 20%", True), ("100%", False)]


def test_of_several_frames_in_one_chunk_only_the_newest_counts() -> None:
    assert pieces(b"\r1\r2\r3") == [("3", True), ("3", False)]


def test_empty_lines_are_lines_and_cursor_movements_are_not_text() -> None:
    assert pieces(b"\n\x1b[A\x1b[32mgreen\x1b[0m\x1b[K\n") == [("", False), ("\x1b[32mgreen\x1b[0m", False)]


def test_bytes_that_are_no_text_and_lines_without_end_do_no_harm() -> None:
    assert pieces(b"\xff\n") == [("\ufffd", False)]
    assert [len(text) for text, _ in pieces(b"x" * (MAX_LINE + 1))] == [MAX_LINE + 1]


@pytest.fixture
def pipe() -> Iterator[Tuple[Stream, int]]:
    """A stream, and the end at which to write into it."""
    read_fd, write_fd = os.pipe()
    yield Stream("stdout", read_fd), write_fd
    os.close(read_fd)


def test_a_stream_never_waits_and_knows_its_end(pipe: Tuple[Stream, int]) -> None:
    stream, end = pipe
    assert stream.read() == [] and stream.open
    os.write(end, b"one\ntw")
    assert stream.read() == [("one", False)] and stream.open
    os.close(end)
    assert stream.read() == [("tw", False)] and not stream.open


def test_a_stream_is_drained_though_its_other_end_is_held(pipe: Tuple[Stream, int]) -> None:
    stream, end = pipe
    os.write(end, b"one\ntwo")
    assert stream.drain() == [("one", False), ("two", False)] and not stream.open
    os.close(end)
