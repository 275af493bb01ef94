"""Every algorithm, on every transport, against the papers' in NumPy; and the identities between algorithms."""
import copy
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest

from tests import paper
from tests.contract.outcomes import TRANSPORTS, Job, NamedJob, on
from tests.jobs import Result
from tests.scenarios import FRAGMENTS, SCENARIOS, SHAPES, Scenario, gradient, initial

# MXNet fuses a multiplication and an addition where NumPy rounds in between.
CLOSE: Dict[str, Any] = dict(rtol=2e-5, atol=2e-6)

IN_NUMPY = ["ssgd", "ssgd_sum", "ssgd_plain", "ssgd_mult", "ssgd_schedule", "ssgd_batch", "ssgd_lr_at", "odsgd",
            "odsgd_sum", "odsgd_mult",
            "odsgd_schedule", "odsgd_all_warmup", "odsgd_no_warmup", "odsgd_follow",
            "odsgd_local_schedule", "odsgd_momentum", "odsgd_none", "delayed", "odsgd_c", "odsgd_a", "odsgd_c_momentum",
            "diloco", "diloco_rates", "diloco_replaced", "diloco_average", "diloco_1", "diloco_no_momentum", "eager",
            "streaming", "streaming_fragments", "streaming_over", "streaming_plain", "streaming_alone",
            "eager_naive", "eager_1", "ssgd_replaced", "ssgd_states", "odsgd_replaced", "odsgd_states"]


def rates(first: float, changes: Dict[str, float]) -> Any:
    """The rate of iteration t, where it is set anew before some iterations."""
    def rate(t: int) -> float:
        known = [(int(at), lr) for at, lr in changes.items() if int(at) <= t]
        return max(known)[1] if known else first
    return rate


def summed(gradient: Any, workers: int) -> Any:
    """Gradients whose mean over so many is the sum of these."""
    return lambda m, t, w: paper.F(workers) * gradient(m, t, w)


def scheduled(scenario: Scenario) -> Any:
    """MXNet's FactorScheduler: the factor comes in once more after every `step` updates."""
    step, factor = scenario.schedule or (1, 1.0)
    return lambda t: scenario.optimizer_params["learning_rate"] * factor ** (t // step)


def multipliers(scenario: Scenario) -> Tuple[np.ndarray, np.ndarray]:
    """(lr_mult, wd_mult) of every element."""
    rows = [np.tile(scenario.multipliers.get(name, (1.0, 1.0)), (int(np.prod(shape)), 1))
            for name, shape in SHAPES.items()]
    lr_mult, wd_mult = np.concatenate(rows).T.astype(np.float32)
    return lr_mult, wd_mult


def changing(scenario: Scenario, update: Any, delay: int = 0) -> Any:
    """U where a script sets another, or loads its state; updates lag by so many iterations, or turns."""
    if scenario.states_at:
        kept, back = scenario.states_at
        return paper.PutBack(update, kept - delay, back - delay)
    made = {"sgd": paper.Sgd, "adam": paper.Adam}
    return paper.Replaced({0: update, **{
        int(at) - delay: made[name](**{"lr" if key == "learning_rate" else key: value for key, value in params.items()})
        for at, (name, params) in scenario.optimizer_at.items()}})


def followed(scenario: Scenario, local: Any, warmup: int) -> Any:
    """L, without momentum, whose rate and weight decay are those of U."""
    return paper.Replaced({0: local, **{int(at) - warmup: paper.Sgd(params["learning_rate"], wd=params["wd"])
                                        for at, (_, params) in scenario.optimizer_at.items()}})


def by_the_paper(scenario: Scenario, workers: int, **codes: Any) -> paper.Path:
    """What the papers' algorithms make of `scenario`. `codes`: what becomes of messages."""
    params = scenario.optimizer_params
    lr = scheduled(scenario) if scenario.schedule else rates(params["learning_rate"], scenario.lr_at)
    lr_mult, wd_mult = multipliers(scenario)
    sgd = paper.Sgd(lr, params.get("momentum", 0), params.get("wd", 0) * wd_mult, lr_mult=lr_mult)
    update = changing(scenario, sgd)
    common = (gradient, initial(), workers, scenario.iterations, update)
    codes["adds"] = scenario.options.get("reduction") == "sum"
    if scenario.store in ("diloco", "eager"):
        return of_weights(scenario, workers, [copy.deepcopy(update) for _ in range(workers)])
    if scenario.store == "ssgd":
        return paper.synchronous(*common, **codes)
    options = dict(scenario.options)
    options.pop("bucket_nbytes", None)
    options.pop("reduction", None)
    name = "none" if scenario.store == "delayed" else options.pop("optimizer_local", "sgd")
    warmup = options.pop("warmup", 0)
    first = options.pop("lr_local", None)
    local = {"lr": lr if first is None else rates(first, scenario.lr_local_at),
             "momentum": options.pop("momentum_local", 0.0),
             "wd": options.pop("wd_local", params.get("wd", 0.0)) * wd_mult, "lr_mult": lr_mult, **options}
    updates = [None if name == "none" else followed(scenario, paper.OPTIMIZERS[name](**local), warmup)
               for _ in range(workers)]
    return paper.one_step_delay(*common, warmup, updates, **codes)


def of_weights(scenario: Scenario, workers: int, inner: List[Any]) -> paper.Path:
    """The same for methods that take weights."""
    options = dict(scenario.options)
    more = {"local_scale": options["local_scale"]} if "local_scale" in options else {}
    made: Any = paper.diloco if scenario.store == "diloco" else paper.eager
    if {"fragments", "delay"} & set(options):
        parts, delay = FRAGMENTS if options.get("fragments", 1) == 2 else [slice(0, None)], options.get("delay", 0)
        made, more = paper.streaming, {"fragments": parts, "tau": delay, "alpha": options.get("mix", 0.5 * (delay > 0))}
    return made(gradient, initial(), workers, scenario.iterations, inner, options["H"], options.get("lr_outer", 0.7),
                options.get("momentum_outer", 0.0), **more)


def follow(job: Job, name: str, paths: Any, path_global: Any) -> None:
    """Each worker of a job has these weights in each iteration, or turn, and all have the global ones at the end."""
    for m, result in enumerate(job):
        for t, w in enumerate(result[f"{name}/path"]):
            np.testing.assert_allclose(w, paths[m][t], err_msg=f"worker {m}, iteration or turn {t}", **CLOSE)
        np.testing.assert_allclose(result[f"{name}/final"], path_global[-1], **CLOSE)


@pytest.mark.parametrize("job, name", on(TRANSPORTS, "sync", IN_NUMPY), indirect=["job"])
def test_every_iteration_of_every_worker_follows_the_paper(job: Job, name: str) -> None:
    path, path_global = by_the_paper(SCENARIOS[name], len(job))
    follow(job, name, list(zip(*path)), path_global)


def test_the_scenarios_tell_neighbouring_methods_apart(whole_job: Job) -> None:
    """A suite in which two methods happen to walk the same path would prove nothing."""
    different = ["ssgd", "odsgd", "odsgd_no_warmup", "odsgd_local_schedule", "odsgd_momentum", "odsgd_none", "odsgd_c",
                 "odsgd_a", "odsgd_c_momentum", "odsgd_adam", "ssgd_lr_at", "ssgd_schedule", "ssgd_adam", "ssgd_lamb",
                 "ssgd_replaced", "ssgd_states", "odsgd_replaced", "odsgd_states", "diloco_average", "diloco_1",
                 "diloco_no_momentum", "eager_1", "eager_naive", "diloco_replaced",
                 "streaming_fragments", "streaming_over", "streaming_alone"]
    for i, one in enumerate(different):
        for other in different[i + 1:]:
            gap = np.abs(whole_job[0][f"{one}/path"] - whole_job[0][f"{other}/path"]).max()
            assert gap > 100 * CLOSE["rtol"], f"{one} and {other} differ by {gap} only"


def test_global_weights_are_the_same_bits_on_every_worker(job: Job) -> None:
    for name in job.names:
        if SCENARIOS[name].store is not None:
            for result in job[1:]:
                np.testing.assert_array_equal(result[f"{name}/final"], job[0][f"{name}/final"], err_msg=name)


IDENTITIES = [
    ("odsgd_all_warmup", "ssgd"),           # 1  warm-up >= all iterations
    ("odsgd_none", "delayed"),              # 2  no local update
    ("odsgd_c_zero", "odsgd"),              # 3  lambda = 0
    ("odsgd_a_zero", "odsgd"),
]
LAYOUTS = [
    ("ssgd_tiny", "ssgd"),                  # 9  one bucket or many per parameter
    ("odsgd_tiny", "odsgd"),
    ("diloco_tiny", "diloco"),
    ("eager_tiny", "eager"),
    ("streaming_tiny", "streaming"),
    ("streaming_plain", "diloco"),          #    one fragment, no delay, no mix
]


def assert_same_path(one: Result, other: Result, names: Any, workers: int, exact: bool = True) -> None:
    """Bit for bit; with three workers a sum depends on the order in which they arrive."""
    for part in ("path", "final"):
        got, expected = one[f"{names[0]}/{part}"], other[f"{names[1]}/{part}"]
        if exact and workers < 3:
            np.testing.assert_array_equal(got, expected, err_msg=str(names))
        else:
            np.testing.assert_allclose(got, expected, err_msg=str(names), **CLOSE)


@pytest.mark.parametrize("job, names", on(TRANSPORTS, "sync", IDENTITIES + LAYOUTS), indirect=["job"])
def test_identity(job: Job, names: Any) -> None:
    for result in job:
        assert_same_path(result, result, names, len(job))


ALONE = [("ssgd", "gluon"), ("ssgd_adam", "gluon_adam"), ("ssgd_lamb", "gluon_lamb"),
         ("ssgd_schedule", "gluon_schedule"), ("ssgd_mult", "gluon_mult"), ("ssgd_dcasgd_c", "gluon_dcasgd_c"),
         ("ssgd_dcasgd", "gluon_dcasgd"), ("ssgd_batch", "gluon_batch"), ("ssgd_replaced", "gluon_replaced"),
         ("ssgd_states", "gluon_states"), ("ssgd_adam_states", "gluon_adam_states")]


@pytest.mark.parametrize("job, names", on(["in process 1", "ps-lite 1+1"], "sync", ALONE), indirect=["job"])
def test_one_worker_is_gluon_without_a_store(job: Job, names: Any) -> None:
    """Identity 5, for any optimizer, schedule and multipliers."""
    result = job[0]
    # Gluon updates parameters with LAMB in groups, by an operator that rounds differently; and it divides by the batch
    # inside the update, which rounds once less where the batch is no power of two.
    assert_same_path(result, result, names, 1, exact=names[0] not in ("ssgd_lamb", "ssgd_batch"))


@pytest.mark.parametrize("one_server, two_servers", [("ps-lite 2+1", "ps-lite 2+2")])
def test_one_server_or_two_give_the_same_bits(named_job: NamedJob, one_server: str, two_servers: str) -> None:
    """Identity 9."""
    one, two = named_job(one_server), named_job(two_servers)
    for name in two.names:
        if SCENARIOS[name].store is not None:
            for m in range(2):
                assert_same_path(one[m], two[m], (name, name), 2)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_server_and_one_process_walk_the_same_path(named_job: NamedJob, workers: int) -> None:
    ps_lite, in_process = named_job(f"ps-lite {workers}+1"), named_job(f"in process {workers}")
    for name in ps_lite.names:
        for m in range(workers):
            assert_same_path(ps_lite[m], in_process[m], (name, name), workers)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_virtual_time_changes_no_bit(named_job: NamedJob, workers: int) -> None:
    virtual, in_process = named_job(f"virtual {workers}"), named_job(f"in process {workers}")
    for name in virtual.names:
        for m in range(workers):
            assert_same_path(virtual[m], in_process[m], (name, name), workers=1)


@pytest.mark.parametrize("one, other", [("diloco_1", "ssgd_nag"), ("eager_1", "odsgd_half")])
def test_of_one_step_and_plain_sgd(whole_job: Job, one: str, other: str) -> None:
    """DiLoCo is SSGD with Nesterov's momentum; eager DiLoCo is OD-SGD whose lr_local is lr / M."""
    if one == "eager_1" and len(whole_job) != 2:
        pytest.skip("local_scale and lr_local are those of two workers")
    for result in whole_job:
        for part in ("path", "final"):
            np.testing.assert_allclose(result[f"{one}/{part}"], result[f"{other}/{part}"], **CLOSE)


@pytest.mark.parametrize("store", ["ssgd", "odsgd", "diloco"])
def test_two_devices_are_one_device_with_the_whole_batch(job: Job, store: str) -> None:
    """Identity 9, to rounding."""
    for result in job:
        np.testing.assert_allclose(result[f"{store}_two_devices/path"], result[f"{store}/path"], **CLOSE)
