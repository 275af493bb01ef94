"""PyTorch's front end beside Gluon's: the same paths on the same losses, hence those of the papers."""
import functools
from typing import List, Tuple

import numpy as np
import pytest

from kvstore.transports.in_process import Stage
from tests.contract.outcomes import INPROCESS, RINGS, TRANSPORTS, NamedJob
from tests.contract.test_algorithms import CLOSE
from tests.jobs import Result, run_job
from tests.scenarios import ASYNC, RING, SCENARIOS, SCENARIOS_OF, SHARDED, Scenario

pytest.importorskip("torch")

# MXNet's momentum holds the learning rates that its steps had, PyTorch's takes the one of now: they agree where the
# rate stays.
NAMES = {kind: [name for name, one in scenarios.items() if one.store and one.optimizer == "sgd" and one.devices == 1
                and not one.schedule and one.batch == 4 and not (one.lr_at and one.optimizer_params.get("momentum"))
                and not one.optimizer_at and not one.states_at]
         for kind, scenarios in (("sync", SCENARIOS), ("async", ASYNC), ("ring", RING), ("sharded", SHARDED))}


@functools.lru_cache(maxsize=None)
def by_torch(transport: str, kind: str) -> List[Result]:
    from tests.torch_scenarios import train
    workers, servers = {**TRANSPORTS, **RINGS}[transport]
    if transport not in INPROCESS:
        return run_job("tests.torch_scenarios:run_all", workers, servers, NAMES[kind], kind)
    merged: List[Result] = [{} for _ in range(workers)]
    for name in NAMES[kind]:
        stage = Stage(workers)
        make = {"ring": stage.ring_worker, "sharded": stage.sharded_worker}.get(kind, stage.worker)

        def run(wire: object, scenario: Scenario = SCENARIOS_OF[kind][name]) -> Result:
            return train(scenario, wire.worker_rank, wire)  # type: ignore[attr-defined]

        for result, part in zip(merged, stage.run(run, make)):
            result.update({f"{name}/{what}": array for what, array in part.items()})
    return merged


JOBS = [("in process 2", "sync"), ("in process 3", "async"), ("in process 3", "ring"), ("in process 2", "sharded"),
        ("ps-lite 2+1", "sync"), ("MPI 2", "ring")]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_pytorch_and_gluon_walk_the_same_path(named_job: NamedJob, job: Tuple[str, str]) -> None:
    ours, gluons = by_torch(*job), named_job(*job)
    assert len(NAMES[job[1]]) > 10
    for name in NAMES[job[1]]:
        for m, (mine, its) in enumerate(zip(ours, gluons)):
            for part in ("path", "final"):
                assert f"{name}/{part}" in mine, str(mine.get(f"{name}/error"))
                np.testing.assert_allclose(mine[f"{name}/{part}"], its[f"{name}/{part}"],
                                           err_msg=f"{name}, worker {m}", **CLOSE)
