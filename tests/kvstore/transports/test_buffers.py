"""What a message waits for before it leaves."""
import queue
import types
from typing import Any, Dict, List, Sequence, Set, Tuple

import pytest

from kvstore.engine import engine
from kvstore.engine._mxnet import NDArray, mx
from kvstore.transports.buffers import BucketBuffers, Buffer, Buffered, Tag, Window

LONG_S = 300
TAG: Tag = (0.0, 0.0, 1)

Message = Tuple[int, int]
"""Round and bucket."""


def held(array: NDArray) -> engine.Done:
    """Have `array` written by nobody yet; returns what ends that."""
    under_way: queue.Queue[engine.Done] = queue.Queue()
    engine.push_async(under_way.put, [], [array])
    return under_way.get(timeout=LONG_S)


def composed(buffers: BucketBuffers, kind: str, grad: NDArray, behind: Buffer) -> Buffer:
    if kind == "synchronous":
        return buffers.compose(grad, TAG, [behind])
    return buffers.compose_async(grad, TAG) if kind == "asynchronous" else buffers.compose_fetch(grad, (0, 0, -1))


@pytest.mark.parametrize("kind, what", [
    ("synchronous", "grad"), ("synchronous", "last answer"), ("synchronous", "message it is behind"),
    ("asynchronous", "grad"), ("asynchronous", "latest answer"), ("fetch", "grad"), ("fetch", "latest answer")])
def test_a_message_leaves_when_all_that_it_is_behind_has_come(kind: str, what: str) -> None:
    buffers, grad, behind = BucketBuffers(mx.nd.zeros(3)), mx.nd.ones(3), Buffer(3, mx.cpu())
    order: List[str] = []
    come = held({"grad": grad, "last answer": buffers.last.whole, "latest answer": buffers.latest,
                 "message it is behind": behind.whole}[what])
    send = composed(buffers, kind, grad, behind)
    engine.push(lambda: order.append("leaves"), [send.whole], [])
    behind_nothing = BucketBuffers(mx.nd.zeros(3))
    behind_nothing.compose(mx.nd.ones(3), TAG).whole.wait_to_read()
    order.append("comes")
    come()
    mx.nd.waitall()
    assert order == ["comes", "leaves"]


def rounds_of(window: Window, sizes: Sequence[int], rounds: int) -> Dict[Message, List[Message]]:
    """What each message of some rounds of buckets of these sizes is behind, itself and others being (round, bucket)."""
    found: Dict[Message, List[Message]] = {}
    for number in range(rounds):
        for bucket, size in enumerate(sizes):
            message: Any = types.SimpleNamespace(nbytes=size, name=(number, bucket))
            room: Sequence[Any] = window.make_room(bucket, size)
            found[message.name] = [other.name for other in room]
            window.add(bucket, message)
    return found


@pytest.mark.parametrize("nbytes", [100, 250, 400, 500, 700, 1300])
@pytest.mark.parametrize("sizes", [[100] * 10, [100] * 3, [100] * 2, [100], [900] + [10] * 30 + [100] * 3,
                                   [300, 100] * 4, [100, 1, 1] * 5])
def test_a_server_gets_no_more_at_once_than_the_window_and_no_less_than_there_is(nbytes: int, sizes: List[int]) -> None:
    behind = rounds_of(Window(nbytes), sizes, rounds=4)
    order = list(behind)  # as they leave one after the other
    answered: Set[Message] = set()
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
def test_large_messages_wait_for_large_ones_however_many_small_ones_are_between(nbytes: int) -> None:
    behind = rounds_of(Window(nbytes), [100, 1, 1] * 5, rounds=1)
    waited_for: Dict[Message, Set[Message]] = {}
    for message, others in behind.items():
        waited_for[message] = {*others, *(one for other in others for one in waited_for[other])}
    large = [message for message in behind if message[1] % 3 == 0]
    assert all(set(large[:place]) & waited_for[message] for place, message in enumerate(large) if place > 2)


@pytest.mark.parametrize("worker_rank, synchronous, counts", [(0, True, True), (1, True, False), (1, False, True)])
def test_a_message_carries_the_learning_rate_it_was_composed_with_where_the_workers_counts(
        worker_rank: int, synchronous: bool, counts: bool) -> None:
    worker, buffers, grad = Buffered(worker_rank, synchronous), BucketBuffers(mx.nd.zeros(3)), mx.nd.ones(3)
    written = held(grad)
    rates = (0.1, 0.2)
    messages = [buffers.compose(grad, worker._tag(lr)) for lr in rates]
    written()
    for message, lr in zip(messages, rates):
        *payload, version, high, low, sender_code = message.whole.asnumpy().tolist()
        assert (payload, version, sender_code) == ([1, 1, 1], 0, worker_rank + 1)
        assert high + low == pytest.approx(lr if counts else 0, abs=1e-12)
