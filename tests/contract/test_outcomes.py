"""What the contract suite makes of scenarios and jobs that fail."""
from typing import Any, Dict, List

import numpy as np
import pytest

from kvstore.transports.in_process import Stage
from tests.contract import outcomes
from tests.jobs import Result, run_job
from tests.scenarios import PLAIN, SCENARIOS_OF, Scenario, train

FEW: Dict[str, Scenario] = {
    "before": Scenario("ssgd", optimizer_params=PLAIN),
    "refused": Scenario("ssgd", {"warmupp": 3}),
    "between": Scenario("ssgd", optimizer_params=PLAIN),
    "lost": Scenario("ssgd", optimizer_params=PLAIN),
    "after": Scenario("ssgd", optimizer_params=PLAIN),
}


def test_a_scenario_that_fails_in_one_process_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def train_or_fail(scenario: Scenario, worker_rank: int, transport: Any) -> Dict[str, np.ndarray]:
        if scenario is FEW["lost"] and worker_rank == 1:  # worker 0 waits for its gradient
            raise LookupError("worker 1 has lost its way")
        return train(scenario, worker_rank, transport)

    monkeypatch.setattr(outcomes, "train", train_or_fail)
    monkeypatch.setitem(SCENARIOS_OF, "few", FEW)
    for result in outcomes.in_process(Stage, 2, "few", FEW):
        np.testing.assert_array_equal(result["between/path"], result["before/path"])
        np.testing.assert_array_equal(result["after/path"], result["before/path"])
        with pytest.raises(pytest.fail.Exception, match="unknown option of store ssgd `warmupp`"):
            result["refused/path"]
        with pytest.raises(pytest.fail.Exception, match="worker 1 has lost its way"):
            result["lost/final"]


def test_a_scenario_that_fails_in_a_real_job_fails_alone() -> None:
    result, = (outcomes.Kept(result) for result in run_job("tests.scenarios:run_all", 1, 1,
                                                           ["ssgd", "sgd", "ssgd_plain"]))
    assert result["ssgd/path"].shape == result["ssgd_plain/path"].shape
    with pytest.raises(pytest.fail.Exception, match="KeyError: 'sgd'"):
        result["sgd/path"]


def test_a_job_that_died_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def die(*_: Any, **__: Any) -> List[Result]:
        started.append("job")
        raise AssertionError("the job ended with 70")

    monkeypatch.setattr(outcomes, "run_job", die)
    monkeypatch.setitem(SCENARIOS_OF, "dying", {})
    for _ in range(2):
        with pytest.raises(pytest.fail.Exception, match=r"ps-lite 2\+1, dying: .*the job ended with 70"):
            outcomes.results("ps-lite 2+1", "dying")
    assert started == ["job"]
