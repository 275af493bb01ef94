"""The servers' rules by themselves: what they refuse."""
import pytest

from kvstore.algorithms.asynchronous import AsyncUpdate
from kvstore.algorithms.sync import SyncUpdate
from kvstore.engine._mxnet import mx
from kvstore.errors import ProtocolError
from kvstore.wire.messages import ASYNC_MODULUS, Header


def started(rule, workers=3):
    made = rule(7, None, workers, mx.optimizer.SGD())
    made.start(mx.nd.zeros(2))
    return made


def receive(rule, version, worker_rank):
    rule.receive(Header(version, 0.5, worker_rank), mx.nd.ones(2), mx.nd.zeros(2))


def test_a_round_of_all_workers_at_one_version_is_an_update():
    rule = started(SyncUpdate)
    for version in range(3):
        receive(rule, 3 * version, 0 + 1 + 2)
        assert rule.version == version + 1


@pytest.mark.parametrize("version, ranks", [(0, 0 + 1 + 1), (1, 0 + 1 + 2), (3, 0 + 1 + 2)])
def test_a_round_with_a_push_that_does_not_belong_to_it_is_refused(version, ranks):
    with pytest.raises(ProtocolError, match="bucket 7: in this round the ranks add up to .* a worker pushed twice"):
        receive(started(SyncUpdate), version, ranks)


def test_versions_are_counted_round_without_an_error():
    rule = started(SyncUpdate, workers=1)
    rule.version = 4095
    receive(rule, 4095, 0)
    receive(rule, 0, 0)
    assert rule.version == 4097


def test_staleness_is_counted_per_worker_and_past_the_end_of_what_a_float_can_count():
    rule = started(AsyncUpdate)
    rule.version = ASYNC_MODULUS + 1
    receive(rule, ASYNC_MODULUS - 1, 2)
    assert rule.statistics()["staleness"] == [[2, 2, 1]]


def test_a_gradient_from_the_future_is_refused():
    with pytest.raises(ProtocolError, match="worker 1 pushed a gradient of version 5, the weights are at version 0"):
        receive(started(AsyncUpdate), 5, 1)
