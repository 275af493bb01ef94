"""Messages between launcher and agents, over pipes."""
import json
import os
import socket
from typing import Iterator, List

import pytest

from odsgd.launch import messages
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
