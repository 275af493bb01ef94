"""What a worker and a rule declare is kept, and put back."""
import collections
import json
from typing import Any, ClassVar, Deque, Dict, List

import numpy as np
import pytest

import kvstore
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import ConfigError
from kvstore.messages.seam import Pending
from kvstore.methods.contract import Rule, Worker
from kvstore.methods.sync import SSGD
from kvstore.state import declared
from kvstore.transports.in_process import Stage
from tests.jobs import alone


class Pipeline(Worker):
    """A worker with an array, a deque of answers, numbers, and what it returns."""

    arrays: ClassVar = {"w": "what it returned last", "v": "momentum", "in_flight": "sums under way",
                        "unused": "not made"}
    facts = ("rates", "seen")
    returned = "w"

    def __init__(self, size: int) -> None:
        self.w, self.v, self.unused = mx.nd.ones(size), mx.nd.zeros(size), None
        self.in_flight: Deque[Pending] = collections.deque()
        self.rates: List[float] = []
        self.seen = 0


class Counting(Rule):
    """A rule with a list of arrays and a count by names."""

    arrays: ClassVar = {"backups": "what each worker was last sent", "sum": "gradients"}
    facts = ("version", "staleness")

    def __init__(self, size: int) -> None:
        self.version, self.backups, self.sum = 0, [np.zeros(size, np.float32) for _ in range(2)], np.zeros(size)
        self.staleness: Dict[str, int] = {}


def saved(owner: Any) -> Any:
    """Arrays and facts as a file would have them: flat, of NumPy, and JSON."""
    arrays = {name: np.array(array if isinstance(array, np.ndarray) else array.asnumpy()).reshape(-1)
              for name, array in declared.arrays_of(owner).items()}
    return arrays, json.loads(json.dumps(declared.saved(owner)[1]))


def test_a_worker_with_answers_in_flight_is_kept_and_put_back() -> None:
    worker = Pipeline(3)
    worker.v[:] = 2.0
    worker.in_flight.extend(Pending(mx.nd.array([t, 1.0, 2.0])) for t in range(12))
    worker.rates, worker.seen = [0.1, 0.2], 7
    arrays, facts = saved(worker)
    assert list(arrays) == ["v", *(f"in_flight/{t}" for t in range(12))]  # w is kept as the worker's weights

    again = Pipeline(3)
    declared.restore(again, arrays, facts, like=again.w)
    assert [answer.result().asnumpy().tolist() for answer in again.in_flight] == [[t, 1, 2] for t in range(12)]
    assert again.v.asnumpy().tolist() == [2, 2, 2] and (again.rates, again.seen) == ([0.1, 0.2], 7)
    again.in_flight[0].result()[:] = 5
    assert again.in_flight[1].result().asnumpy().tolist() == [1, 1, 2]  # each an array of its own


def test_a_rule_with_counts_is_kept_and_put_back() -> None:
    rule = Counting(2)
    rule.version, rule.sum[:], rule.backups[1][:] = 9, 3, 4
    rule.staleness.update({"0 3": 2, "1 0": 5})
    arrays, facts = saved(rule)
    assert list(arrays) == ["backups/0", "backups/1", "sum"]

    again, third = Counting(2), Counting(2)
    kept = again.backups[1]
    for owner in (again, third):  # as of two buckets that were saved as one
        declared.restore(owner, arrays, facts, like=np.zeros(2))
    again.staleness["0 3"] += 1
    assert (again.staleness, third.staleness) == ({"0 3": 3, "1 0": 5}, rule.staleness)
    assert again.version == 9 and again.sum.tolist() == [3, 3]
    assert kept is again.backups[1] and kept.tolist() == [4, 4]  # filled in place


def test_an_array_that_is_not_there_is_named() -> None:
    arrays, facts = saved(Counting(2))
    del arrays["backups/1"]
    with pytest.raises(ConfigError, match="no array `backups/1` in the saved state; it belongs to another version"):
        declared.restore(Counting(2), arrays, facts, like=np.zeros(2))
    del facts["staleness"]
    with pytest.raises(ConfigError, match="no fact `staleness` in the saved state"):
        declared.restore(Counting(2), arrays, facts, like=np.zeros(2))


def test_an_array_of_an_optimizer_keeps_its_shape() -> None:
    class Shaped(Rule):
        arrays: ClassVar = {"state": "of two dimensions"}

        def __init__(self) -> None:
            self.state: NDArray = mx.nd.zeros((2, 3))

    one, other = Shaped(), Shaped()
    one.state[:] = mx.nd.arange(6).reshape((2, 3))
    declared.restore(other, saved(one)[0], {}, like=None)
    assert other.state.asnumpy().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_what_is_kept_has_the_names_of_the_declaration_and_no_others() -> None:
    found: Dict[str, Any] = declared.arrays_of(Pipeline(3))
    assert list(found) == ["v"] and list(declared.saved(Pipeline(3))[1]) == ["rates", "seen"]


@pytest.mark.parametrize("side", ["worker", "rule"])
def test_an_array_that_is_not_declared_is_told_before_a_checkpoint_lacks_it(
        side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Remembers(getattr(SSGD, side)):  # type: ignore[misc]
        def start(self, w: Any) -> None:
            self.v, self._scratch = w.copy(), w.copy()

    monkeypatch.setattr(SSGD, side, Remembers)

    def step(size: int = 3) -> None:
        store = kvstore.create("ssgd", Stage(1).worker(0))
        w = alone(store, mx.nd.ones(size))
        store.pushpull("w", w, w)

    with pytest.raises(ConfigError, match="Remembers has an array in `v`, which no checkpoint would keep; declare it"):
        step()
    step(1)  # as long as a number
    monkeypatch.setattr(Remembers, "arrays", {"v": "momentum"})
    step()


def test_a_fact_may_be_numpys_number_and_one_that_json_lacks_is_named() -> None:
    rule = Counting(2)
    rule.version, rule.staleness = np.int64(9), {"0 3": np.float32(0.5)}  # type: ignore[assignment,dict-item]
    assert saved(rule)[1] == {"version": 9, "staleness": {"0 3": 0.5}}
    rule.staleness["sum"] = np.ones(2)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"fact Counting\.staleness: expected numbers, text, .*; arrays are declared"):
        saved(rule)
    rule.staleness = {(1, 2): 3}  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"fact Counting\.staleness: expected numbers, .*got `\(1, 2\)`"):
        saved(rule)
