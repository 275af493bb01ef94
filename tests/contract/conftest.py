"""The contract's jobs as fixtures: the results of all their scenarios, by worker rank."""
from typing import List

import pytest

from tests.contract.outcomes import RINGS, TRANSPORTS, WITH_PARTS, NamedJob, results
from tests.jobs import Result


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


@pytest.fixture(params=list(WITH_PARTS))
def sharded_job(request: pytest.FixtureRequest) -> List[Result]:
    """The results of the synchronous scenarios where every worker owns a part, on each transport in turn."""
    return results(request.param, "sharded")


@pytest.fixture
def named_job() -> NamedJob:
    return results
