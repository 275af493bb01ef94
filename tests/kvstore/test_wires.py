"""What a message waits for before it leaves."""
import queue

import pytest

from kvstore import engine
from kvstore._mxnet import mx
from kvstore.wires import Buffer, Tag, Wire

LONG_S = 20


def held(array):
    """Have `array` written by nobody yet; returns what ends that."""
    under_way = queue.Queue()
    engine.push_async(under_way.put, [], [array])
    return under_way.get(timeout=LONG_S)


def composed(wire, kind, grad, behind):
    tag = Tag(0, counts=True)
    if kind == "synchronous":
        return wire.compose(grad, tag, behind)
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


@pytest.mark.parametrize("which", [0, 1])
def test_a_bucket_alone_at_its_server_is_behind_its_own_messages(which):
    wire = Wire(mx.nd.zeros(3))
    messages = [wire.compose(mx.nd.full(3, value), Tag(0, counts=True)) for value in (1, 2)]
    send = wire.compose(mx.nd.full(3, 3), Tag(0, counts=True), messages[which])
    assert send is messages[0] and send.payload.asnumpy().tolist() == [3, 3, 3]


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
