"""The contract's jobs, each run once whatever comes of it: real processes with servers or as a ring, and in this one.

A scenario that fails alone fails the tests that ask for it; a job that dies fails every test that needs it, at once.
"""
import functools
import importlib.util
import itertools
import traceback
from functools import partial
from typing import Any, Callable, Dict, Iterable, List, Sequence, Tuple, Union

import numpy as np
import pytest

from kvstore.transports.in_process import Stage
from odsgd.virtual.description import of
from odsgd.virtual.transport import VirtualStage
from tests.jobs import Result, run_job
from tests.scenarios import LONG, SCENARIOS_OF, Scenario, train

#: Transports of the contract suite: name -> (workers, servers); 0 servers is a scripted one in this process, or MPI.
PS_LITE = {"ps-lite 1+1": (1, 1), "ps-lite 2+1": (2, 1), "ps-lite 2+2": (2, 2), "ps-lite 3+1": (3, 1)}
SOCKETS = {"sockets 2+1": (2, 1)}
INPROCESS = {"in process 1": (1, 0), "in process 2": (2, 0), "in process 3": (3, 0)}
VIRTUAL = {"virtual 1": (1, 1), "virtual 2": (2, 2), "virtual 3": (3, 1)}
TRANSPORTS = {**INPROCESS, **VIRTUAL, **PS_LITE, **SOCKETS}
WITH_CODECS = {**INPROCESS, **PS_LITE, **SOCKETS}
WITH_PARTS = {**INPROCESS, "MPI 1": (1, 0), "MPI 2": (2, 0), "MPI 3": (3, 0)}
RINGS = {**VIRTUAL, **WITH_PARTS}
#: Where the scenarios of LONG run: with several workers, which may come apart, or where two transports are compared.
LASTING = ("in process 2", "in process 3", "MPI 2", "MPI 3")
#: Where every scenario runs; elsewhere a few do, which tell whether that transport's own way is right.
EVERYTHING = (*INPROCESS, "ps-lite 2+1", "MPI 2")
FEW: Dict[str, List[str]] = {
    "sync": ["gluon", "gluon_adam", "gluon_states", "ssgd", "ssgd_adam", "ssgd_mult", "ssgd_tiny", "ssgd_two_devices",
             "ssgd_states", "odsgd", "odsgd_tiny", "odsgd_two_devices", "odsgd_none", "odsgd_a", "odsgd_schedule",
             "odsgd_replaced", "delayed", "diloco", "diloco_tiny", "diloco_two_devices", "eager", "eager_tiny",
             "streaming", "streaming_tiny"],
    "async": ["gluon_momentum", "asgd", "asgd_tiny", "asgd_two_devices", "asgd_states", "dcasgd_c", "dcasgd_a",
              "softsync", "softsync_1", "downpour", "downpour_apart", "easgd", "easgd_alone", "eamsgd",
              "async_diloco", "async_diloco_tiny", "async_diloco_1", "asgd_plain", "decoupled", "decoupled_1"],
    "ring": ["gluon", "gluon_adam", "dsync", "dsync_adam", "dsync_tiny", "dsync_two_devices", "dsync_quantize",
             "pipesgd_1_quantize", "pipesgd_3", "acco", "pipesgd_truncate", "sasgd_3", "sasgd_tiny", "delayed", "odsgd",
             "odsgd_tiny", "odsgd_none", "long_truncate", "diloco", "eager", "streaming"],
    "coded": ["ssgd_truncate", "ssgd_2bit", "ssgd_2bit_tiny", "ssgd_back", "ssgd_both_adam", "odsgd_float16",
              "odsgd_float16_tiny", "odsgd_1bit", "odsgd_both_2bit", "delayed_quantize", "delayed_both"],
    "coded async": ["asgd_quantize", "asgd_both", "dcasgd_c_2bit", "softsync_both", "downpour_2_2bit"]}
FEW["sharded"] = FEW["sync"]
#: Kinds of scenarios that share the processes of one launch: to start them takes longer than all that they then do.
TOGETHER = (("sync", "coded"), ("async", "coded async"), ("ring", "sharded"))



class Job(List[Result]):
    """Results of one job by worker rank, and the names of its scenarios."""

    def __init__(self, results: Iterable[Result], names: List[str]) -> None:
        super().__init__(results)
        self.names = names


NamedJob = Callable[..., Job]


class Kept(Dict[str, np.ndarray]):
    """One worker's results; asked for a scenario that failed, it says what the scenario failed of."""

    def __missing__(self, key: str) -> np.ndarray:
        name = key.split("/")[0]
        reason = self.get(f"{name}/error", "not in this job")
        pytest.fail(f"scenario {name}: {reason}", pytrace=False)


def scenarios_on(transport: str, kind: str) -> List[str]:
    """The names of the scenarios of this kind that run there."""
    names = list(SCENARIOS_OF[kind]) if transport in EVERYTHING else FEW[kind]
    return [name for name in names if name not in LONG or transport in LASTING]


def on(transports: Iterable[str], kind: str, cases: Iterable[Any]) -> List[Any]:
    """Pairs of a transport and a case, which is a scenario's name or several, where all of them run."""
    def names(case: Any) -> Sequence[str]:
        return [case] if isinstance(case, str) else case
    return [pytest.param(transport, case, id=f"{transport}-{' is '.join(names(case))}")
            for transport in transports for case in cases
            if set(names(case)) <= set(scenarios_on(transport, kind))]


def results(transport: str, kind: str = "sync") -> Job:
    """The results of a kind of scenarios on `transport`. A job is synchronous, asynchronous or a ring."""
    if transport.startswith("MPI") and importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    found = outcome(transport, kind)
    if isinstance(found, str):
        pytest.fail(f"{transport}, {kind}: {found}", pytrace=False)
    return Job(found, scenarios_on(transport, kind))


@functools.lru_cache(maxsize=None)
def outcome(transport: str, kind: str) -> Union[List[Result], str]:
    """What came of a job: results by worker rank, or what it died of."""
    workers, servers = {**TRANSPORTS, **RINGS}[transport]
    try:
        if transport in INPROCESS:
            return in_process(Stage, workers, kind, scenarios_on(transport, kind))
        if transport in VIRTUAL:
            return in_process(partial(virtual, servers), workers, kind, scenarios_on(transport, kind))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    found = launched(transport, next((kinds for kinds in TOGETHER if kind in kinds), (kind,)))
    return found if isinstance(found, str) else [only(kind, result) for result in found]


@functools.lru_cache(maxsize=None)
def launched(transport: str, kinds: Tuple[str, ...]) -> Union[List[Result], str]:
    """What came of a launch: the results of all these kinds by worker rank, or what it died of."""
    try:
        return run_job("tests.scenarios:run_kinds", *{**TRANSPORTS, **RINGS}[transport],
                       {kind: scenarios_on(transport, kind) for kind in kinds},
                       extra=["--wire", "sockets"] if transport in SOCKETS else [])
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def only(kind: str, result: Result) -> Kept:
    """One worker's results of one kind."""
    return Kept({key.partition("/")[2]: array for key, array in result.items() if key.partition("/")[0] == kind})


def virtual(servers: int, workers: int) -> VirtualStage:
    """A cluster whose workers take turns at random, and whose messages last about as long as a backward pass."""
    return VirtualStage(of({"workers": workers, "servers": servers, "links": {"goodput": "1mbit"}, "compute": {
        "iteration": "1ms", "draws": "lognormal:0.5"}}))


def in_process(made: Callable[..., Stage], workers: int, kind: str, names: Iterable[str]) -> List[Result]:
    merged: List[Result] = [Kept() for _ in range(workers)]
    for name in names:
        stage = made(workers)
        make = {"ring": stage.ring_worker, "sharded": stage.sharded_worker}.get(kind, stage.worker)

        def run(transport: Any, scenario: Scenario = SCENARIOS_OF[kind][name]) -> Result:
            return train(scenario, transport.worker_rank, transport)

        try:
            parts = stage.run(run, make)
        except Exception:
            parts = [{"error": np.array(traceback.format_exc())}] * workers
        for result, part in zip(merged, parts):
            result.update({f"{name}/{what}": array for what, array in part.items()})
    return merged


def assert_same_bits(one: Job, other: Job) -> None:
    """Every worker of both jobs has walked the same path in each scenario of the first."""
    for name in one.names:
        for m, (mine, its) in enumerate(itertools.zip_longest(one, other)):
            np.testing.assert_array_equal(mine[f"{name}/path"], its[f"{name}/path"], err_msg=f"{name}, worker {m}")
