"""The contract's jobs, each run once whatever comes of it: real processes with servers or as a ring, and in this one.

A scenario that fails alone fails the tests that ask for it; a job that dies fails every test that needs it, at once.
"""
import functools
import importlib.util
import itertools
import traceback
from functools import partial
from typing import Any, Callable, Dict, Iterable, List, Tuple, Union

import numpy as np
import pytest

from kvstore.transports.in_process import Stage
from odsgd.virtual.description import of
from odsgd.virtual.transport import VirtualStage
from tests.jobs import Result, run_job
from tests.scenarios import SCENARIOS_OF, Scenario, train

#: Transports of the contract suite: name -> (workers, servers); 0 servers is a scripted one in this process, or MPI.
PS_LITE = {"ps-lite 1+1": (1, 1), "ps-lite 2+1": (2, 1), "ps-lite 2+2": (2, 2), "ps-lite 3+1": (3, 1)}
INPROCESS = {"in process 1": (1, 0), "in process 2": (2, 0), "in process 3": (3, 0)}
VIRTUAL = {"virtual 1": (1, 1), "virtual 2": (2, 2), "virtual 3": (3, 1)}
TRANSPORTS = {**INPROCESS, **VIRTUAL, **PS_LITE}
WITH_CODECS = {**INPROCESS, **PS_LITE}
WITH_PARTS = {**INPROCESS, "MPI 1": (1, 0), "MPI 2": (2, 0), "MPI 3": (3, 0)}
RINGS = {**VIRTUAL, **WITH_PARTS}
#: Kinds of scenarios that share the processes of one launch: to start them takes longer than all that they then do.
TOGETHER = (("sync", "coded"), ("async", "coded async"), ("ring", "sharded"))

NamedJob = Callable[..., List[Result]]


class Kept(Dict[str, np.ndarray]):
    """One worker's results; asked for a scenario that failed, it says what the scenario failed of."""

    def __missing__(self, key: str) -> np.ndarray:
        name = key.split("/")[0]
        reason = self.get(f"{name}/error", "not in this job")
        pytest.fail(f"scenario {name}: {reason}", pytrace=False)


def results(transport: str, kind: str = "sync") -> List[Result]:
    """Every scenario's result on `transport`, by worker rank. A job is synchronous, asynchronous or a ring."""
    if transport.startswith("MPI") and importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    found = outcome(transport, kind)
    if isinstance(found, str):
        pytest.fail(f"{transport}, {kind}: {found}", pytrace=False)
    return found


@functools.lru_cache(maxsize=None)
def outcome(transport: str, kind: str) -> Union[List[Result], str]:
    """What came of a job: results by worker rank, or what it died of."""
    workers, servers = {**TRANSPORTS, **RINGS}[transport]
    try:
        if transport in INPROCESS:
            return in_process(Stage, workers, kind)
        if transport in VIRTUAL:
            return in_process(partial(virtual, servers), workers, kind)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    found = launched(workers, servers, next((kinds for kinds in TOGETHER if kind in kinds), (kind,)))
    return found if isinstance(found, str) else [only(kind, result) for result in found]


@functools.lru_cache(maxsize=None)
def launched(workers: int, servers: int, kinds: Tuple[str, ...]) -> Union[List[Result], str]:
    """What came of a launch: the results of all these kinds by worker rank, or what it died of."""
    try:
        return run_job("tests.scenarios:run_kinds", workers, servers, list(kinds))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def only(kind: str, result: Result) -> Kept:
    """One worker's results of one kind."""
    return Kept({key.partition("/")[2]: array for key, array in result.items() if key.partition("/")[0] == kind})


def virtual(servers: int, workers: int, timeout_s: float) -> VirtualStage:
    """A cluster whose workers take turns at random, and whose messages last about as long as a backward pass."""
    return VirtualStage(of({"workers": workers, "servers": servers, "links": {"goodput": "1mbit"}, "compute": {
        "iteration": "1ms", "draws": "lognormal:0.5"}}), timeout_s)


def in_process(made: Callable[..., Stage], workers: int, kind: str) -> List[Result]:
    merged: List[Result] = [Kept() for _ in range(workers)]
    for name, scenario in SCENARIOS_OF[kind].items():
        stage = made(workers, timeout_s=60)
        make = {"ring": stage.ring_worker, "sharded": stage.sharded_worker}.get(kind, stage.worker)

        def run(transport: Any, scenario: Scenario = scenario) -> Result:
            return train(scenario, transport.worker_rank, transport)

        try:
            parts = stage.run(run, make)
        except Exception:
            parts = [{"error": np.array(traceback.format_exc())}] * workers
        for result, part in zip(merged, parts):
            result.update({f"{name}/{what}": array for what, array in part.items()})
    return merged


def assert_same_bits(one: List[Result], other: List[Result], names: Iterable[str]) -> None:
    """Every worker of both jobs has walked the same path in each of these scenarios."""
    for name in names:
        for m, (mine, its) in enumerate(itertools.zip_longest(one, other)):
            np.testing.assert_array_equal(mine[f"{name}/path"], its[f"{name}/path"], err_msg=f"{name}, worker {m}")
