"""The collective family, in one process and on real ranks, against the papers' algorithms in NumPy and the servers'."""
from typing import Any, Tuple

import numpy as np
import pytest

from tests import paper
from tests.contract.outcomes import EVERYTHING, RINGS, Job, NamedJob, assert_same_bits, on
from tests.contract.test_algorithms import CLOSE, by_the_paper, changing, follow, multipliers, rates, scheduled, summed
from tests.scenarios import CODED, LONG, RING, SCENARIOS, SCENARIOS_OF, Scenario, gradient, initial

WHOLE = [name for name in RINGS if name in EVERYTHING]
IN_NUMPY = [name for name, scenario in RING.items()
            if scenario.store is not None and scenario.optimizer == "sgd" and scenario.devices == 1]


def collective(scenario: Scenario, workers: int) -> paper.Path:
    """What the papers' algorithms make of `scenario`."""
    options, params = dict(scenario.options), scenario.optimizer_params
    for key in ("bucket_nbytes", "transport", "codec"):
        options.pop(key, None)
    if scenario.store in ("odsgd", "delayed", "diloco", "eager"):  # what carries messages is nothing to the algorithm
        return by_the_paper(Scenario(scenario.store, options, **{
            key: getattr(scenario, key) for key in ("optimizer_params", "iterations", "multipliers", "schedule",
                                                    "lr_at", "optimizer_at", "states_at")}), workers)
    lr = scheduled(scenario) if scenario.schedule else rates(params["learning_rate"], scenario.lr_at)
    lr_mult, wd_mult = multipliers(scenario)
    wd = params.get("wd", 0) * wd_mult
    if scenario.store == "sasgd":
        gamma = rates(options["lr_local"], scenario.lr_local_at) if "lr_local" in options else lr
        gamma_p = options.get("gamma_p")  # follows the trainer's rate
        return paper.sasgd(gradient, initial(), workers, scenario.iterations, options.get("T", 1),
                           lambda t: paper.F(gamma(t)) * lr_mult,
                           lambda t: paper.F(gamma(t) / workers if gamma_p is None else gamma_p * lr(t) / lr(0))
                           * lr_mult, wd)
    handed_in = summed(gradient, workers) if options.get("reduction") == "sum" else gradient
    if scenario.store == "acco":
        return paper.acco(handed_in, initial(), workers, scenario.iterations, changing(scenario, paper.Sgd(
            lr, params.get("momentum", 0), wd, lr_mult=lr_mult)))
    K = 1 if scenario.store == "dsync" else options.get("K", 2)
    update = changing(scenario, paper.Sgd(lr, params.get("momentum", 0), wd, lr_mult=lr_mult), delay=K - 1)
    return paper.pipe_sgd(handed_in, initial(), workers, scenario.iterations, update, K, options.get("warmup", 0))


@pytest.mark.parametrize("ring_job, name", on(RINGS, "ring", IN_NUMPY), indirect=["ring_job"])
def test_every_iteration_of_every_worker_follows_the_paper(ring_job: Job, name: str) -> None:
    path, path_global = collective(RING[name], len(ring_job))
    follow(ring_job, name, list(zip(*path)), path_global)


@pytest.mark.parametrize("ring_job, name", on(RINGS, "ring", ["pipesgd_truncate", "pipesgd_quantize",
                                                              "dsync_truncate", "dsync_quantize"]),
                         indirect=["ring_job"])
def test_a_codec_changes_the_first_update_by_as_much_as_it_may(ring_job: Job, name: str) -> None:
    """`error`: of one hop, relative to the largest magnitude there. Partial sums of 1, 2 … M gradients travel."""
    first = 2 if name.startswith("pipesgd") else 1
    error = 1 / 128 if name.endswith("truncate") else 1 / 254
    workers, scenario = len(ring_job), CODED[name]
    path, _ = collective(scenario, workers)
    gap = np.abs(ring_job[0][f"{name}/path"][first] - path[first][0]).max()
    if workers == 1:  # nothing travels
        assert gap < CLOSE["atol"]
        return
    largest = max(np.abs(gradient(m, 0, initial())).max() for m in range(workers))
    assert 1e-4 < gap < scenario.optimizer_params["learning_rate"] * error * largest * (workers + 1) / 2


@pytest.mark.parametrize("ring_job", WHOLE, indirect=True)
def test_the_scenarios_tell_neighbouring_methods_apart(ring_job: Job) -> None:
    if len(ring_job) == 1:
        pytest.skip("one worker is plain SGD with most of them")
    different = ["dsync", "dsync_plain", "dsync_adam", "dsync_schedule", "dsync_mult", "pipesgd", "pipesgd_plain",
                 "pipesgd_lr_at", "pipesgd_3", "pipesgd_warmup", "pipesgd_truncate", "pipesgd_quantize", "sasgd_decay",
                 "sasgd_3", "sasgd_rates", "sasgd_local", "odsgd", "odsgd_a", "acco"]
    for i, one in enumerate(different):
        for other in different[i + 1:]:
            gap = np.abs(ring_job[0][f"{one}/path"] - ring_job[0][f"{other}/path"]).max()
            assert gap > 50 * CLOSE["rtol"], f"{one} and {other} differ by {gap} only"


def test_global_weights_are_the_same_bits_on_every_worker(ring_job: Job) -> None:
    for name in ring_job.names:
        if SCENARIOS_OF["ring"][name].store is not None:
            for result in ring_job[1:]:
                np.testing.assert_array_equal(result[f"{name}/final"], ring_job[0][f"{name}/final"], err_msg=name)


@pytest.mark.parametrize("ring_job, name", on(RINGS, "ring", LONG), indirect=["ring_job"])
def test_after_200_iterations_the_workers_still_have_the_same_bits(ring_job: Job, name: str) -> None:
    for result in ring_job:
        assert result[f"{name}/path"].shape[0] == 201 and np.isfinite(result[f"{name}/path"]).all()
        np.testing.assert_array_equal(result[f"{name}/path"], ring_job[0][f"{name}/path"])


@pytest.mark.parametrize("ring_job, names", on(RINGS, "ring", [
    ("sasgd", "dsync_plain"),                # identity 4
    ("pipesgd_1", "dsync"),
    ("pipesgd_1_truncate", "dsync_truncate"),
    ("pipesgd_1_quantize", "dsync_quantize"),
    ("pipesgd_all_warmup", "dsync"),
    ("odsgd_none", "delayed"),               # 2
]), indirect=["ring_job"])
def test_identity(ring_job: Job, names: Tuple[str, str]) -> None:
    one, other = names
    for result in ring_job:
        for part in ("path", "final"):
            np.testing.assert_array_equal(result[f"{one}/{part}"], result[f"{other}/{part}"])


@pytest.mark.parametrize("ring_job, names", on(RINGS, "ring", [
    ("pipesgd_plain", "delayed_plain"), ("pipesgd", "delayed"), ("pipesgd_lr_at", "delayed_lr_at")]),
    indirect=["ring_job"])
def test_pipe_sgd_of_two_is_the_delayed_update(ring_job: Job, names: Tuple[str, str]) -> None:
    """Identity 2, with any optimizer. The global weights differ: the delayed update's have the last sum in them."""
    one, other = names
    for result in ring_job:
        np.testing.assert_array_equal(result[f"{one}/path"], result[f"{other}/path"])
        np.testing.assert_array_equal(result[f"{one}/final"], result[f"{one}/path"][-1])


@pytest.mark.parametrize("ring_job, names", on(RINGS, "ring", [
    ("acco_tiny", "acco"),
    ("dsync_tiny", "dsync"), ("sasgd_tiny", "sasgd_3"), ("odsgd_tiny", "odsgd"), ("dsync_two_devices", "dsync")]),
    indirect=["ring_job"])
def test_layouts_make_no_difference(ring_job: Job, names: Tuple[str, str]) -> None:
    """Identity 9. A ring adds the workers' parts of a block in an order of its own, so three workers round."""
    one, other = names
    for result in ring_job:
        same = np.testing.assert_array_equal if len(ring_job) < 3 and "devices" not in one else closely
        same(result[f"{one}/path"], result[f"{other}/path"])


@pytest.mark.parametrize("ring_job", WHOLE, indirect=True)
def test_diloco_of_rate_1_without_momentum_averages_models_as_sasgd_does(ring_job: Job) -> None:
    for result in ring_job:
        closely(result["diloco_average/path"], result["sasgd_3/path"])


def closely(got: Any, expected: Any, err_msg: str = "") -> None:
    np.testing.assert_allclose(got, expected, err_msg=err_msg, **CLOSE)


@pytest.mark.parametrize("ring_job, names", on(["in process 1", "MPI 1"], "ring", [
    ("dsync", "gluon"), ("dsync_adam", "gluon_adam"), ("sasgd", "gluon_plain")]), indirect=["ring_job"])
def test_one_worker_is_gluon_without_a_store(ring_job: Job, names: Tuple[str, str]) -> None:
    """Identity 5."""
    one, other = names
    result = ring_job[0]
    np.testing.assert_array_equal(result[f"{one}/path"], result[f"{other}/path"])


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_servers_and_a_ring_walk_the_same_path(named_job: NamedJob, workers: int) -> None:
    """Identities 4 and 7, on real processes: to the bit where a sum has one order only."""
    servers, ring = named_job(f"ps-lite {workers}+1"), named_job(f"MPI {workers}", "ring")
    pairs = {"ssgd": "dsync", "ssgd_adam": "dsync_adam", "ssgd_lamb": "dsync_lamb", "ssgd_schedule": "dsync_schedule",
             "ssgd_mult": "dsync_mult", "ssgd_plain": "sasgd"}
    pairs.update({name: name for name in RING if name in SCENARIOS and name.startswith(("odsgd", "delayed"))})
    same = np.testing.assert_array_equal if workers < 3 else closely
    both = {one: other for one, other in pairs.items() if one in servers.names and other in ring.names}
    assert len(both) > 4
    for one, other in both.items():
        for m in range(workers):
            for part in ("path", "final"):
                same(servers[m][f"{one}/{part}"], ring[m][f"{other}/{part}"], err_msg=f"{one}, {other}, worker {m}")


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_real_ranks_and_one_process_walk_the_same_path_to_the_bit(named_job: NamedJob, workers: int) -> None:
    assert_same_bits(named_job(f"MPI {workers}", "ring"), named_job(f"in process {workers}", "ring"))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_virtual_time_changes_no_bit_on_a_ring(named_job: NamedJob, workers: int) -> None:
    virtual, in_process = named_job(f"virtual {workers}", "ring"), named_job(f"in process {workers}", "ring")
    for name in virtual.names:
        for m in range(workers):
            for part in ("path", "final"):
                np.testing.assert_array_equal(virtual[m][f"{name}/{part}"], in_process[m][f"{name}/{part}"])
