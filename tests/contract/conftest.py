"""The contract's runs, each done once: on real processes, with servers or as a ring over MPI, and inside this one."""
import functools
import importlib.util
from typing import Callable, List

import pytest

from tests.jobs import Result, run_job
from tests.scenarios import SCENARIOS_OF, Scenario, train

#: Transports of the contract suite: name -> (workers, servers); 0 servers is a transport inside one process, or MPI.
PS_LITE = {"ps-lite 1+1": (1, 1), "ps-lite 2+1": (2, 1), "ps-lite 2+2": (2, 2), "ps-lite 3+1": (3, 1)}
INPROCESS = {"in process 1": (1, 0), "in process 2": (2, 0), "in process 3": (3, 0)}
TRANSPORTS = {**INPROCESS, **PS_LITE}
RINGS = {**INPROCESS, "MPI 1": (1, 0), "MPI 2": (2, 0), "MPI 3": (3, 0)}


@functools.lru_cache(maxsize=None)
def results(transport: str, kind: str = "sync") -> List[Result]:
    """Every scenario's result on `transport`, by worker rank. A job is synchronous, asynchronous or a ring."""
    workers, servers = {**TRANSPORTS, **RINGS}[transport]
    if transport.startswith("MPI") and importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    if transport in INPROCESS:
        return in_process(workers, kind)
    return run_job("tests.scenarios:run_all", workers, servers, list(SCENARIOS_OF[kind]), kind)


def in_process(workers: int, kind: str) -> List[Result]:
    from kvstore.transports.inprocess import Stage

    def run(scenario: Scenario) -> List[Result]:
        cluster = Stage(workers, timeout_s=20)
        return cluster.run(lambda transport: train(scenario, transport.worker_rank, transport),
                           cluster.ring_worker if kind == "ring" else cluster.worker)

    merged: List[Result] = [{} for _ in range(workers)]
    for name, scenario in SCENARIOS_OF[kind].items():
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


@pytest.fixture(params=list(RINGS))
def ring_job(request: pytest.FixtureRequest) -> List[Result]:
    """The results of the scenarios without servers on each transport in turn."""
    return results(request.param, "ring")


@pytest.fixture
def named_job() -> Callable[[str], List[Result]]:
    return results
