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
    send = wire.compose(grad, Tag(0, counts=True), wire.last.version, behind)
    engine.push(lambda: order.append("leaves"), [send.whole], [])
    behind_nothing = Wire(mx.nd.zeros(3))
    behind_nothing.compose(mx.nd.ones(3), Tag(0, counts=True), mx.nd.zeros(1)).whole.wait_to_read()
    order.append("comes")
    come()
    mx.nd.waitall()
    assert order == ["comes", "leaves"]
