"""SSGD, OD-SGD and the delayed update where every worker owns a part, in one process and on real ranks."""
from typing import List, Tuple

import numpy as np
import pytest

from tests.contract.outcomes import WITH_PARTS, Job, NamedJob, assert_same_bits, on
from tests.contract.test_algorithms import IDENTITIES, IN_NUMPY, LAYOUTS, assert_same_path, by_the_paper, follow
from tests.scenarios import SCENARIOS, SHARDED

STORES = [name for name, scenario in SCENARIOS.items() if scenario.store is not None]


def stores(job: Job) -> List[str]:
    return [name for name in job.names if name in STORES]


def test_every_scenario_of_servers_is_here() -> None:
    assert list(SHARDED) == list(SCENARIOS) and len(STORES) > 25
    assert {SHARDED[name].options["transport"] for name in STORES} == {"sharded"}


@pytest.mark.parametrize("sharded_job, name", on(WITH_PARTS, "sharded", IN_NUMPY), indirect=["sharded_job"])
def test_every_iteration_of_every_worker_follows_the_paper(sharded_job: Job, name: str) -> None:
    path, path_global = by_the_paper(SCENARIOS[name], len(sharded_job))
    follow(sharded_job, name, list(zip(*path)), path_global)


def test_global_weights_are_the_same_bits_on_every_worker(sharded_job: Job) -> None:
    for name in stores(sharded_job):
        for result in sharded_job[1:]:
            np.testing.assert_array_equal(result[f"{name}/final"], sharded_job[0][f"{name}/final"], err_msg=name)


@pytest.mark.parametrize("sharded_job, names", on(WITH_PARTS, "sharded", IDENTITIES + LAYOUTS),
                         indirect=["sharded_job"])
def test_identity(sharded_job: Job, names: Tuple[str, str]) -> None:
    for result in sharded_job:
        assert_same_path(result, result, names, len(sharded_job))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_servers_and_parts_walk_the_same_path(named_job: NamedJob, workers: int) -> None:
    """Identity 7: to the bit where a sum has one order only."""
    servers, parts = named_job(f"ps-lite {workers}+1"), named_job(f"MPI {workers}", "sharded")
    for name in set(stores(parts)) & set(servers.names):
        for m in range(workers):
            assert_same_path(servers[m], parts[m], (name, name), workers)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_ring_and_parts_have_the_same_bits(named_job: NamedJob, workers: int) -> None:
    """The sums are those of a ring, in its order, and so are the updates of every element."""
    ring, parts = named_job(f"MPI {workers}", "ring"), named_job(f"MPI {workers}", "sharded")
    pairs = {"ssgd": "dsync", "ssgd_plain": "dsync_plain", "ssgd_adam": "dsync_adam", "ssgd_tiny": "dsync_tiny",
             "ssgd_schedule": "dsync_schedule", "ssgd_mult": "dsync_mult", "delayed": "delayed",
             **{name: name for name in ("odsgd", "odsgd_none", "odsgd_schedule", "odsgd_a", "odsgd_mult",
                                        "odsgd_tiny")}}
    both = {one: other for one, other in pairs.items() if one in parts.names and other in ring.names}
    assert len(both) > 5
    for one, other in both.items():
        for m in range(workers):
            for part in ("path", "final"):
                np.testing.assert_array_equal(parts[m][f"{one}/{part}"], ring[m][f"{other}/{part}"], err_msg=one)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_real_ranks_and_one_process_walk_the_same_path_to_the_bit(named_job: NamedJob, workers: int) -> None:
    assert_same_bits(named_job(f"MPI {workers}", "sharded"), named_job(f"in process {workers}", "sharded"))
