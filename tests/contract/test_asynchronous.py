"""The asynchronous family in a scripted order, on every transport, against the papers' algorithms in NumPy."""
import copy
from typing import Any, List, Tuple

import numpy as np
import pytest

from tests import paper
from tests.contract.outcomes import TRANSPORTS, Job, NamedJob, assert_same_bits, on
from tests.contract.test_algorithms import CLOSE, changing, follow, multipliers, rates, summed
from tests.scenarios import ASYNC, FRAGMENTS, SHAPES, SIZE, Scenario, gradient, initial

IN_NUMPY = [name for name in ASYNC if not name.startswith("gluon")]


def order_of(scenario: Scenario, workers: int) -> List[int]:
    return [rank for rank in scenario.order if rank < workers]


def method(scenario: Scenario, workers: int) -> Any:
    """The paper's algorithm for a scenario."""
    options, params = dict(scenario.options), scenario.optimizer_params
    options.pop("bucket_nbytes", None)
    lr, (lr_mult, wd_mult) = rates(params["learning_rate"], scenario.lr_at), multipliers(scenario)
    wd = params.get("wd", 0) * wd_mult
    w_0, update = initial(), paper.Sgd(lr, params.get("momentum", 0), wd, lr_mult=lr_mult)
    if scenario.store == "asgd":
        return paper.Asgd(w_0, changing(scenario, update))
    if scenario.store == "async_diloco":
        return paper.AsyncDiloco(w_0, None, [copy.deepcopy(update) for _ in range(workers)], options["H"],
                                 options.get("lr_outer", 0.7), options.get("momentum_outer", 0.0),
                                 options.get("N", workers), options.get("c", 0.0), options.get("dylu", (1, 1, 1)))
    if scenario.store == "decoupled":
        parts = FRAGMENTS if options["fragments"] == 2 else [slice(0, SIZE)]
        delay, ends = options["delay"], np.cumsum([0, *(np.prod(shape) for shape in SHAPES.values())])
        return paper.DecoupledDiloco(
            w_0, None, [copy.deepcopy(update) for _ in range(workers)], options["H"], options["lr_outer"],
            options.get("momentum_outer", 0.0), parts, delay, options.get("mix", 0.5 * (delay > 0)),
            options.get("grace", max(delay - 1, 0)),
            None if "merge" in options else [slice(*two) for two in zip(ends, ends[1:])])
    if scenario.store == "softsync":
        return paper.NSoftsync(w_0, update, workers, options.get("n", workers), options.get("modulate", True))
    if scenario.store == "downpour":
        T = options.get("T", 1)
        update = paper.Sgd(lr, params.get("momentum", 0), lr_mult=lr_mult)
        lr_local = rates(options["lr_local"], scenario.lr_local_at) if "lr_local" in options else lr
        return paper.DownpourSgd(w_0, update, workers, options.get("push_every", T), options.get("fetch_every", T),
                                 paper.Sgd(lr_local, lr_mult=lr_mult), wd)
    if scenario.store in ("easgd", "eamsgd"):
        return paper.ElasticAveraging(w_0, workers, options["T"], options.get("alpha", 0.9 / workers),
                                      paper.Sgd(lr, 0, wd, lr_mult=lr_mult), options.get("delta", 0.0))
    adaptive = (options.get("m", 0.95), 1e-7) if scenario.store == "dcasgd_a" else None
    return paper.DcAsgd(w_0, update, workers, options["lamda"], adaptive)


@pytest.mark.parametrize("async_job, name", on(TRANSPORTS, "async", IN_NUMPY), indirect=["async_job"])
def test_every_turn_of_every_worker_follows_the_paper(async_job: Job, name: str) -> None:
    scenario, workers = ASYNC[name], len(async_job)
    handed_in = summed(gradient, workers) if scenario.options.get("reduction") == "sum" else gradient  # n is 1 there
    path, path_global = paper.in_order(handed_in, initial(), workers, order_of(scenario, workers),
                                       method(scenario, workers))
    follow(async_job, name, path, path_global)


@pytest.mark.parametrize("async_job", ["in process 3"], indirect=True)
def test_the_scenarios_tell_neighbouring_methods_apart(async_job: Job) -> None:
    """Fewer than three workers have no staleness to speak of in every method."""
    different = ["asgd", "asgd_lr_at", "dcasgd_c", "dcasgd_a", "softsync", "softsync_1", "downpour_2", "downpour_apart",
                 "easgd", "easgd_alone", "eamsgd", "async_diloco", "async_diloco_c", "decoupled", "decoupled_mean"]
    for i, one in enumerate(different):
        for other in different[i + 1:]:
            gap = np.abs(async_job[0][f"{one}/path"] - async_job[0][f"{other}/path"]).max()
            assert gap > 100 * CLOSE["rtol"], f"{one} and {other} differ by {gap} only"


IDENTITIES = [
    ("dcasgd_c_zero", "asgd"),      # 3
    ("dcasgd_a_zero", "asgd"),
    ("downpour_bare", "asgd_bare"),  # 6, without weight decay
    ("softsync_off", "asgd"),       # n = M without modulation
    ("asgd_tiny", "asgd"),          # 9
    ("async_diloco_tiny", "async_diloco"),
]


@pytest.mark.parametrize("async_job, names", on(TRANSPORTS, "async", IDENTITIES), indirect=["async_job"])
def test_identity(async_job: Job, names: Tuple[str, str]) -> None:
    one, other = names
    for result in async_job:
        for part in ("path", "final"):
            np.testing.assert_array_equal(result[f"{one}/{part}"], result[f"{other}/{part}"])


def test_asynchronous_diloco_of_one_plain_step_is_asgd(async_job: Job) -> None:
    """Identity 12: an outer gradient of an inner SGD of rate 1 is a gradient. In rounds of one, too."""
    for result in async_job:
        np.testing.assert_allclose(result["async_diloco_1/path"], result["asgd_plain/path"], **CLOSE)
        np.testing.assert_allclose(result["decoupled_1/path"], result["asgd_plain/path"], **CLOSE)


def test_elastic_averaging_without_force_is_independent_runs(async_job: Job) -> None:
    """Identity 6: every worker's path is its own, and the centre stays."""
    for m, result in enumerate(async_job):
        alone = [initial()]
        sgd = paper.Sgd(0.1, 0.0, 0.01)
        for t in range(len(result["easgd_alone/path"]) - 1):
            alone.append(sgd(alone[-1], gradient(m, t, alone[-1]), t, alone[-1]))
        np.testing.assert_allclose(result["easgd_alone/path"], alone, **CLOSE)
        np.testing.assert_array_equal(result["easgd_alone/final"], initial())


@pytest.mark.parametrize("transport", ["in process 1", "ps-lite 1+1"])
@pytest.mark.parametrize("store", ["asgd", "dcasgd_c", "dcasgd_a", "softsync"])
def test_one_worker_is_gluon_without_a_store(named_job: NamedJob, transport: str, store: str) -> None:
    """Identities 5 and 8."""
    result = named_job(transport, "async")[0]
    np.testing.assert_array_equal(result[f"{store}/path"], result["gluon_momentum/path"])


@pytest.mark.parametrize("async_job, names", on(
    ["in process 1", "ps-lite 1+1"], "async", [("downpour_decay", "gluon_decay"), ("downpour", "gluon_momentum")]),
    indirect=["async_job"])
def test_one_worker_of_downpour_is_gluon_with_any_interval_and_weight_decay(async_job: Job,
                                                                            names: Tuple[str, str]) -> None:
    store, alone = names
    result = async_job[0]
    np.testing.assert_allclose(result[f"{store}/path"], result[f"{alone}/path"], **CLOSE)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_server_and_one_process_walk_the_same_path(named_job: NamedJob, workers: int) -> None:
    assert_same_bits(named_job(f"ps-lite {workers}+1", "async"), named_job(f"in process {workers}", "async"))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_virtual_time_changes_no_bit_where_the_order_is_a_scripts(named_job: NamedJob, workers: int) -> None:
    """All workers meet after every turn."""
    assert_same_bits(named_job(f"virtual {workers}", "async"), named_job(f"in process {workers}", "async"))
