"""The contract's jobs as fixtures: the results of their scenarios, by worker rank.

A test is given the transport by its parameters; `on` of outcomes.py makes them.
"""
import pytest

from tests.contract.outcomes import EVERYTHING, RINGS, TRANSPORTS, WITH_PARTS, Job, NamedJob, results


@pytest.fixture(params=list(TRANSPORTS))
def job(request: pytest.FixtureRequest) -> Job:
    """The results of the synchronous scenarios on each transport in turn."""
    return results(request.param)


@pytest.fixture(params=[name for name in TRANSPORTS if name in EVERYTHING])
def whole_job(request: pytest.FixtureRequest) -> Job:
    """The results of all synchronous scenarios, on each transport that has them."""
    return results(request.param)


@pytest.fixture(params=list(TRANSPORTS))
def async_job(request: pytest.FixtureRequest) -> Job:
    """The results of the asynchronous scenarios on each transport in turn."""
    return results(request.param, "async")


@pytest.fixture(params=list(RINGS))
def ring_job(request: pytest.FixtureRequest) -> Job:
    """The results of the scenarios without servers on each transport in turn."""
    return results(request.param, "ring")


@pytest.fixture(params=list(WITH_PARTS))
def sharded_job(request: pytest.FixtureRequest) -> Job:
    """The results of the synchronous scenarios where every worker owns a part, on each transport in turn."""
    return results(request.param, "sharded")


@pytest.fixture
def named_job() -> NamedJob:
    return results
