"""Messages between launcher and agents, over pipes."""
import json
import os
import socket
from typing import Iterator, List, Tuple

import pytest

from odsgd.launch import messages
from odsgd.launch.lines import MAX_LINE, Lines, Pieces, Stream
from odsgd.launch.messages import Channel, Message, Orders, ProcessOrders, TunnelOrders, of_json


@pytest.fixture
def channel() -> Iterator[Channel]:
    """A channel that hears itself."""
    read_fd, write_fd = os.pipe()
    yield Channel(read_fd, write_fd)
    os.close(read_fd)
    os.close(write_fd)


def test_messages_arrive_whole_and_in_order(channel: Channel) -> None:
    assert channel.receive() == []
    sent: Message = messages.Unstartable("worker 0", "ü\n")
    channel.send(sent)
    os.write(channel.write_fd, b'{"message"')
    assert channel.receive() == [sent]
    os.write(channel.write_fd, b': "Ended"}\n\n')
    assert channel.receive() == [messages.Ended()]


@pytest.mark.parametrize("line", ['{"message": "Exit", "process": "worker 0"}', '{"message": "Hello", "host": 7}',
                                  '{"message": ["Ended"]}', '{"text": "x"}', "[" * 3000])
def test_a_message_of_another_form_is_noise(channel: Channel, line: str) -> None:
    os.write(channel.write_fd, line.encode() + b"\n")
    assert channel.receive() == [messages.Noise(line)]


def test_greetings_of_a_login_shell_are_noise(channel: Channel) -> None:
    os.write(channel.write_fd, b"Welcome\n17\n")
    assert channel.receive() == [messages.Noise("Welcome"), messages.Noise("17")]


def test_a_message_behind_what_a_shell_has_written_without_an_end_of_line_is_heard(channel: Channel) -> None:
    os.write(channel.write_fd, b"\033]0;node1\007")
    channel.send(messages.Hello("node1"))
    assert channel.receive() == [messages.Hello("node1")]


def test_a_message_longer_than_the_pipe_waits_for_its_reader_without_holding_anything_up(channel: Channel) -> None:
    message = messages.EndHung("x" * 300000)
    channel.send(message)
    assert channel.backlog
    found: List[Message] = []
    while not found:
        found = channel.receive()
        channel.flush()
    assert found == [message] and not channel.backlog


@pytest.mark.parametrize("notice", ["receive", "send"])
def test_a_channel_closes_when_the_other_side_has_gone(notice: str) -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours.fileno(), ours.fileno())
    theirs.close()
    if notice == "send":
        channel.send(messages.Ended())
    else:
        assert channel.receive() == []
    assert not channel.open and not channel.backlog
    ours.close()


def test_orders_are_the_same_after_their_way(channel: Channel) -> None:
    tunnel = TunnelOrders("PEM", 0, "10.0.0.9", None, 60.0, ["/tmp/1"])
    orders = Orders([ProcessOrders("worker 0", ["true"], {"A": "1"})], {}, [], 5, None, tells_losses=True,
                    sockets={"/tmp/1": False}, tunnel=tunnel)
    channel.send(orders)
    assert of_json(Orders, json.loads(os.read(channel.read_fd, 10000))) == orders


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


def test_the_end_of_a_stream_does_not_wait_for_who_goes_on_writing(pipe: Tuple[Stream, int]) -> None:
    stream, end = pipe
    read = stream._chunk
    stream._chunk = lambda: (os.write(end, b"y\n" * 1000), read())[1]  # type: ignore[method-assign]
    assert 0 < len(stream.drain()) <= 65536 and not stream.open
    os.close(end)
