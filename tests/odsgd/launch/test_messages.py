"""Messages between launcher and agents, over pipes."""
import os
import socket
from typing import Iterator, List

import pytest

from odsgd.launch.messages import Channel, Message


@pytest.fixture
def channel() -> Iterator[Channel]:
    """A channel that hears itself."""
    read_fd, write_fd = os.pipe()
    yield Channel(read_fd, write_fd)
    os.close(read_fd)
    os.close(write_fd)


def test_messages_arrive_whole_and_in_order(channel: Channel) -> None:
    assert channel.receive() == []
    sent: Message = {"event": "unstartable", "process": "worker 0", "error": "ü\n"}
    channel.send(sent)
    os.write(channel.write_fd, b'{"event"')
    assert channel.receive() == [sent]
    os.write(channel.write_fd, b': "ended"}\n\n')
    assert channel.receive() == [{"event": "ended"}]


@pytest.mark.parametrize("line", ['{"event": "exit", "process": "worker 0"}', '{"event": "hello", "host": 7}',
                                  '{"event": ["ended"]}', '{"text": "x"}', "[" * 3000])
def test_a_message_of_another_form_is_noise(channel: Channel, line: str) -> None:
    os.write(channel.write_fd, line.encode() + b"\n")
    assert channel.receive() == [{"event": "noise", "text": line}]


def test_greetings_of_a_login_shell_are_noise(channel: Channel) -> None:
    os.write(channel.write_fd, b"Welcome\n17\n")
    assert channel.receive() == [{"event": "noise", "text": "Welcome"}, {"event": "noise", "text": "17"}]


def test_a_message_longer_than_the_pipe_waits_for_its_reader_without_holding_anything_up(channel: Channel) -> None:
    message = {"do": "end", "process": "x" * 300000}
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
        channel.send({"event": "hello"})
    else:
        assert channel.receive() == []
    assert not channel.open and not channel.backlog
    ours.close()
