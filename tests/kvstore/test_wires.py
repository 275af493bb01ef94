"""What a message waits for before it leaves."""
import queue

import pytest

from kvstore import engine
from kvstore._mxnet import mx
from kvstore.wires import Buffer, Tag, Wire

LONG_S = 20


@pytest.mark.parametrize("held", ["grad", "last answer", "message it is behind"])
def test_a_message_leaves_when_all_that_it_is_behind_has_come(held):
    wire, grad, behind = Wire(mx.nd.zeros(3)), mx.nd.ones(3), Buffer(3, mx.cpu())
    array = {"grad": grad, "last answer": wire.last.whole, "message it is behind": behind.whole}[held]
    under_way, order = queue.Queue(), []
    engine.push_async(under_way.put, [], [array])
    come = under_way.get(timeout=LONG_S)
    send = wire.compose(grad, Tag(0, counts=True), behind)
    engine.push(lambda: order.append("leaves"), [send.whole], [])
    behind_nothing = Wire(mx.nd.zeros(3))
    behind_nothing.compose(mx.nd.ones(3), Tag(0, counts=True)).whole.wait_to_read()
    order.append("comes")
    come()
    mx.nd.waitall()
    assert order == ["comes", "leaves"]


def test_a_message_carries_the_learning_rate_it_was_composed_with_where_the_workers_counts():
    for counts, lr in ((True, 0.1), (False, 0)):
        tag, wire, grad = Tag(1, counts), Wire(mx.nd.zeros(3)), mx.nd.ones(3)
        under_way = queue.Queue()
        engine.push_async(under_way.put, [], [grad])
        written = under_way.get(timeout=LONG_S)
        tag.lr = 0.1
        message = wire.compose(grad, tag)
        tag.lr = 0.2
        written()
        *payload, version, high, low, mark = message.whole.asnumpy().tolist()
        assert (payload, version, mark) == ([1, 1, 1], 0, 2) and high + low == pytest.approx(lr, abs=1e-12)
