"""Every method through PyTorch's front end, on NumPy's engine, against the papers' in NumPy; and on MXNet's engine."""
import functools
import importlib.util
from typing import Any, List, Tuple

import numpy as np
import pytest

from kvstore.transports.in_process import Stage
from tests import paper
from tests.contract import test_asynchronous, test_collective
from tests.contract.outcomes import INPROCESS, RINGS, TRANSPORTS
from tests.contract.test_algorithms import CLOSE, by_the_paper, summed
from tests.jobs import Result, run_job
from tests.scenarios import ASYNC, RING, SCENARIOS, SCENARIOS_OF, SHARDED, Scenario, gradient, initial

pytest.importorskip("torch")

GLOO = {"gloo 2": (2, 0), "gloo 3": (3, 0)}

# MXNet's momentum, which the papers' methods have here, holds the learning rates that its steps had; PyTorch's takes
# the one of now: they agree where the rate stays.
NAMES = {kind: [name for name, one in scenarios.items() if one.store and one.optimizer == "sgd" and one.devices == 1
                and not one.schedule and one.batch == 4 and not (one.lr_at and one.optimizer_params.get("momentum"))
                and not one.optimizer_at and not one.states_at and one.options.get("optimizer_local") != "adam"]
         for kind, scenarios in (("sync", SCENARIOS), ("async", ASYNC), ("ring", RING), ("sharded", SHARDED))}


@functools.lru_cache(maxsize=None)
def by_torch(transport: str, kind: str, engine: str = "NumPy") -> List[Result]:
    from tests.torch_scenarios import train
    workers, servers = {**TRANSPORTS, **RINGS, **GLOO}[transport]
    if transport not in INPROCESS:
        return run_job(f"tests.torch_scenarios:{'run_by_gloo' if transport in GLOO else 'run_all'}", workers, servers,
                       NAMES[kind], kind, extra=["--wire", "sockets"] if transport.startswith("sockets") else [])
    merged: List[Result] = [{} for _ in range(workers)]
    for name in NAMES[kind]:
        stage = Stage(workers)
        make = {"ring": stage.ring_worker, "sharded": stage.sharded_worker}.get(kind, stage.worker)

        def run(wire: Any, scenario: Scenario = SCENARIOS_OF[kind][name]) -> Result:
            if engine == "MXNet":
                from kvstore.engine._mxnet import mx
                wire.context = mx.cpu()
            return train(scenario, wire.worker_rank, wire)

        for result, part in zip(merged, stage.run(run, make)):
            result.update({f"{name}/{what}": array for what, array in part.items()})
    return merged


def in_numpy(kind: str, name: str, workers: int) -> Tuple[List[List[np.ndarray]], np.ndarray]:
    """What the paper makes of a scenario: each worker's path, and the global weights at the end."""
    scenario = SCENARIOS_OF[kind][name]
    if kind == "async":
        handed_in = summed(gradient, workers) if scenario.options.get("reduction") == "sum" else gradient
        path, path_global = paper.in_order(handed_in, initial(), workers, test_asynchronous.order_of(scenario, workers),
                                           test_asynchronous.method(scenario, workers))
        return path, path_global[-1]
    path, path_global = test_collective.collective(scenario, workers) if kind == "ring" \
        else by_the_paper(SCENARIOS[name], workers)
    return [[w[m] for w in path] for m in range(workers)], path_global[-1]


@pytest.mark.parametrize("transport, kind", [
    ("in process 2", "sync"), ("in process 3", "async"), ("in process 3", "ring"), ("in process 2", "sharded"),
    ("sockets 2+1", "sync"), ("sockets 2+1", "async"), ("MPI 2", "ring"), ("gloo 2", "ring")])
def test_pytorch_follows_the_paper(transport: str, kind: str) -> None:
    if transport.startswith("MPI"):
        pytest.importorskip("mpi4py")
    results = by_torch(transport, kind)
    assert len(NAMES[kind]) > 10
    for name in NAMES[kind]:
        paths, final = in_numpy(kind, name, len(results))
        for m, mine in enumerate(results):
            assert f"{name}/path" in mine, str(mine.get(f"{name}/error"))
            for t, w in enumerate(mine[f"{name}/path"]):
                np.testing.assert_allclose(w, paths[m][t], err_msg=f"{name}, worker {m}, iteration {t}", **CLOSE)
            np.testing.assert_allclose(mine[f"{name}/final"], final, err_msg=f"{name}, worker {m}", **CLOSE)


def test_parts_over_gloo_have_the_bits_of_one_process() -> None:
    """MPI has the same bits (tests/contract/test_sharded.py). Three workers, since their sum has several orders."""
    for mine, its in zip(by_torch("gloo 3", "sharded"), by_torch("in process 3", "sharded")):
        assert len(its) > 20
        for part in its:
            np.testing.assert_array_equal(mine[part], its[part], err_msg=part)


@pytest.mark.parametrize("transport, kind", [("in process 2", "sync"), ("in process 3", "async"),
                                             ("in process 3", "ring"), ("in process 2", "sharded")])
def test_torch_has_the_same_bits_on_numpys_engine_and_on_mxnets_under_gluon(transport: str, kind: str) -> None:
    if importlib.util.find_spec("mxnet") is None:
        pytest.skip("MXNet is not installed")
    ours, mxnets = by_torch(transport, kind), by_torch(transport, kind, "MXNet")
    for mine, its in zip(ours, mxnets):
        for part in its:
            np.testing.assert_array_equal(mine[part], its[part], err_msg=part)
