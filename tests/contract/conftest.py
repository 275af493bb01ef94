"""The contract's runs, each done once: on real ps-lite processes, and inside this process."""
import functools
from typing import Callable, Dict, List

import pytest

from tests.jobs import Result, run_job
from tests.scenarios import SCENARIOS_OF, Scenario, train

#: Transports of the contract suite: name -> (workers, servers); 0 servers is the transport inside one process.
PS_LITE = {"ps-lite 1+1": (1, 1), "ps-lite 2+1": (2, 1), "ps-lite 2+2": (2, 2), "ps-lite 3+1": (3, 1)}
INPROCESS = {"in process 1": (1, 0), "in process 2": (2, 0), "in process 3": (3, 0)}
TRANSPORTS = {**INPROCESS, **PS_LITE}


@functools.lru_cache(maxsize=None)
def results(transport: str, kind: str = "sync") -> List[Result]:
    """Every scenario's result on `transport`, by worker rank. A job is synchronous or asynchronous."""
    workers, servers = TRANSPORTS[transport]
    if servers:
        return run_job("tests.scenarios:run_all", workers, servers, list(SCENARIOS_OF[kind]))
    return in_process(workers, SCENARIOS_OF[kind])


def in_process(workers: int, scenarios: Dict[str, Scenario]) -> List[Result]:
    from kvstore.inprocess import Cluster

    def run(scenario: Scenario) -> List[Result]:
        cluster = Cluster(workers, timeout_s=20)
        return cluster.run(lambda transport: train(scenario, transport.worker_rank, transport))

    merged: List[Result] = [{} for _ in range(workers)]
    for name, scenario in scenarios.items():
        for rank, result in enumerate(run(scenario)):
            merged[rank].update({f"{name}/{part}": array for part, array in result.items()})
    return merged


@pytest.fixture(params=list(TRANSPORTS))
def job(request: pytest.FixtureRequest) -> List[Result]:
    """The results of all scenarios on each transport in turn."""
    return results(request.param)


@pytest.fixture(params=list(TRANSPORTS))
def async_job(request: pytest.FixtureRequest) -> List[Result]:
    """The results of the asynchronous scenarios on each transport in turn."""
    return results(request.param, "async")


@pytest.fixture
def named_job() -> Callable[[str], List[Result]]:
    return results
