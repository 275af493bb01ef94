"""What a message waits for before it leaves."""
import queue
import types

import pytest

from kvstore.engine import engine
from kvstore.engine._mxnet import mx
from kvstore.transports.wires import Buffer, Tag, Window, Wire

LONG_S = 20


def held(array):
    """Have `array` written by nobody yet; returns what ends that."""
    under_way = queue.Queue()
    engine.push_async(under_way.put, [], [array])
    return under_way.get(timeout=LONG_S)


def composed(wire, kind, grad, behind):
    tag = Tag(0, counts=True)
    if kind == "synchronous":
        return wire.compose(grad, tag, [behind])
    return wire.compose_async(grad, tag) if kind == "asynchronous" else wire.compose_fetch(grad, tag)


@pytest.mark.parametrize("kind, what", [
    ("synchronous", "grad"), ("synchronous", "last answer"), ("synchronous", "message it is behind"),
    ("asynchronous", "grad"), ("asynchronous", "latest answer"), ("fetch", "grad"), ("fetch", "latest answer")])
def test_a_message_leaves_when_all_that_it_is_behind_has_come(kind, what):
    wire, grad, behind, order = Wire(mx.nd.zeros(3)), mx.nd.ones(3), Buffer(3, mx.cpu()), []
    come = held({"grad": grad, "last answer": wire.last.whole, "latest answer": wire.latest,
                 "message it is behind": behind.whole}[what])
    send = composed(wire, kind, grad, behind)
    engine.push(lambda: order.append("leaves"), [send.whole], [])
    behind_nothing = Wire(mx.nd.zeros(3))
    behind_nothing.compose(mx.nd.ones(3), Tag(0, counts=True)).whole.wait_to_read()
    order.append("comes")
    come()
    mx.nd.waitall()
    assert order == ["comes", "leaves"]


def rounds_of(window, sizes, rounds):
    """What each message of some rounds of buckets of these sizes is behind, itself and others being (round, bucket)."""
    found = {}
    for number in range(rounds):
        for bucket, size in enumerate(sizes):
            message = types.SimpleNamespace(nbytes=size, name=(number, bucket))
            found[message.name] = [other.name for other in window.make_room(bucket, size)]
            window.add(bucket, message)
    return found


@pytest.mark.parametrize("nbytes", [100, 250, 400, 500, 700, 1300])
@pytest.mark.parametrize("sizes", [[100] * 10, [100] * 3, [100] * 2, [100], [900] + [10] * 30 + [100] * 3,
                                   [300, 100] * 4, [100, 1, 1] * 5])
def test_a_server_gets_no_more_at_once_than_the_window_and_no_less_than_there_is(nbytes, sizes):
    behind = rounds_of(Window(nbytes), sizes, rounds=4)
    order, answered = list(behind), set()  # as they leave one after the other
    for position, message in enumerate(order):
        answered.update(other for other in order[:position] if other[1] == message[1])  # one of a bucket at a time
        new = [other for other in behind[message] if other not in answered]
        assert all(order.index(other) < position and other[1] != message[1] for other in behind[message])
        answered.update(new)
        under_way = [other for other in order[:position + 1] if other not in answered]
        nbytes_under_way = sum(sizes[other[1]] for other in under_way)
        assert nbytes_under_way <= nbytes + max(sizes) / 2 or len(under_way) <= 2
        assert len(under_way) >= min(2, len(sizes), position + 1)
        assert not new or nbytes_under_way + sizes[new[-1][1]] > nbytes  # the last one to go had to
        assert all(order.index(other) < order.index(under_way[0]) for other in new)  # the oldest go


@pytest.mark.parametrize("nbytes", [100, 150, 200])
def test_large_messages_wait_for_large_ones_however_many_small_ones_are_between(nbytes):
    behind = rounds_of(Window(nbytes), [100, 1, 1] * 5, rounds=1)
    waited_for = {}
    for message, others in behind.items():
        waited_for[message] = {*others, *(one for other in others for one in waited_for[other])}
    large = [message for message in behind if message[1] % 3 == 0]
    assert all(set(large[:place]) & waited_for[message] for place, message in enumerate(large) if place > 2)


def test_a_message_carries_the_learning_rate_it_was_composed_with_where_the_workers_counts():
    for counts, lr in ((True, 0.1), (False, 0)):
        tag, wire, grad = Tag(1, counts), Wire(mx.nd.zeros(3)), mx.nd.ones(3)
        written = held(grad)
        tag.lr = 0.1
        message = wire.compose(grad, tag)
        tag.lr = 0.2
        written()
        *payload, version, high, low, mark = message.whole.asnumpy().tolist()
        assert (payload, version, mark) == ([1, 1, 1], 0, 2) and high + low == pytest.approx(lr, abs=1e-12)
