"""What a message waits for before it leaves."""
import queue
import types

import pytest

from kvstore import engine
from kvstore._mxnet import mx
from kvstore.wires import Buffer, Tag, Window, Wire

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
    order, answered = list(behind), {}  # before a message leaves, whatever leaves when
    for position, (number, bucket) in enumerate(order):
        others = behind[number, bucket]
        assert all(order.index(other) < position and other[1] != bucket for other in others)
        awaited = [*others, *([(number - 1, bucket)] if number else [])]
        answered[number, bucket] = {*awaited, *(one for other in awaited for one in answered[other])}
        before = [other for other in order[:position] if other not in answered[number, bucket]]
        assert number or before == order[position - len(before):position]  # the oldest make room
        under_way = [sizes[other] for other in {*(other[1] for other in before), bucket}]  # one of a bucket at a time
        assert sum(under_way) <= nbytes + max(sizes) / 2 or len(under_way) <= 2
        assert len(under_way) >= min(2, len(sizes), position + 1)
        if others and number == 0 and len(set(sizes)) == 1:
            assert sum(under_way) + sizes[0] > nbytes  # there was no room for one more


def test_equal_messages_wait_for_no_more_than_may_be_under_way():
    behind = rounds_of(Window(400), [100] * 50, rounds=3)
    assert max(map(len, behind.values())) == 4


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
