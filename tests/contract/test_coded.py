"""Messages with codecs on servers, on every transport that has them: bits against NumPy, and between transports."""
from typing import Any, Dict, Tuple

import numpy as np
import pytest

from tests import paper
from tests.contract.outcomes import EVERYTHING, WITH_CODECS, Job, NamedJob, on, results
from tests.contract.test_algorithms import CLOSE, by_the_paper, follow
from tests.contract.test_asynchronous import method, order_of
from tests.scenarios import CODED_ASYNC, CODED_SYNC, WAYS, Scenario, gradient, initial

CODES = ("codec", "codec_threshold", "codec_weights")
FEW: Dict[str, Any] = {"2bit": paper.in_two_bits, "1bit": paper.in_one_bit}


def codes(options: Dict[str, Any]) -> Tuple[Any, Any]:
    """What becomes of pushes, and a function that makes what becomes of answers."""
    name, threshold = options.get("codec", "none"), options.get("codec_threshold", 0.5)
    if name in FEW:
        push: Any = paper.Residuals(lambda x: FEW[name](x, threshold))
    else:
        def push(m: int, g: np.ndarray) -> np.ndarray:
            return paper.LEFT[name](g)
    back = options.get("codec_weights", "none")
    return push, lambda: (lambda w: w) if back == "none" else paper.Changes(paper.LEFT[back], initial())


def plain(scenario: Scenario) -> Scenario:
    """The same without codecs."""
    return Scenario(**{**vars(scenario), "options": {key: value for key, value in scenario.options.items()
                                                     if key not in CODES}})


@pytest.fixture(params=list(WITH_CODECS))
def coded_job(request: pytest.FixtureRequest) -> Job:
    return results(request.param, "coded")


@pytest.fixture(params=list(WITH_CODECS))
def coded_async_job(request: pytest.FixtureRequest) -> Job:
    return results(request.param, "coded async")


def assert_bits(got: np.ndarray, expected: np.ndarray, workers: int, what: str) -> None:
    """A mean over three workers rounds otherwise in the server's fewer operations."""
    if workers < 3:
        np.testing.assert_array_equal(got, expected, err_msg=what)
    else:
        np.testing.assert_allclose(got, expected, err_msg=what, **CLOSE)


IN_NUMPY = [f"{store}_{way}" for store in ("ssgd", "odsgd", "delayed") for way in WAYS]


@pytest.mark.parametrize("coded_job, name", on(WITH_CODECS, "coded", IN_NUMPY), indirect=["coded_job"])
def test_every_iteration_of_every_worker_has_the_bits_of_numpy(coded_job: Job, name: str) -> None:
    workers = len(coded_job)
    push, answers = codes(CODED_SYNC[name].options)
    path, path_global = by_the_paper(plain(CODED_SYNC[name]), workers, push=push, answer=answers())
    for m, result in enumerate(coded_job):
        for t, w in enumerate(result[f"{name}/path"]):
            assert_bits(w, path[t][m], workers, f"worker {m}, iteration {t}")
        assert_bits(result[f"{name}/final"], path_global[-1], workers, "global weights")


@pytest.mark.parametrize("coded_async_job, name", on(
    WITH_CODECS, "coded async", [name for name in CODED_ASYNC if not name.startswith("downpour")]),
    indirect=["coded_async_job"])
def test_every_turn_of_every_worker_has_the_bits_of_numpy(coded_async_job: Job, name: str) -> None:
    scenario, workers = CODED_ASYNC[name], len(coded_async_job)
    push, answers = codes(scenario.options)
    turns = paper.CodedTurns(method(plain(scenario), workers), push, [answers() for _ in range(workers)])
    path, path_global = paper.in_order(gradient, initial(), workers, order_of(scenario, workers), turns)
    follow(coded_async_job, name, path, path_global)


@pytest.mark.parametrize("coded_job", [name for name in WITH_CODECS if name in EVERYTHING], indirect=True)
def test_a_codec_changes_the_path_and_each_in_its_own_way(coded_job: Job) -> None:
    paths = {way: coded_job[0][f"ssgd_{way}/path"] for way in WAYS}
    for one in WAYS:
        for other in WAYS:
            assert one == other or np.abs(paths[one] - paths[other]).max() > 1e-5, f"{one} is {other}"


@pytest.mark.parametrize("name", ["ssgd_2bit", "odsgd_float16"])
def test_buckets_do_not_matter_where_a_code_is_of_one_float(coded_job: Job, name: str) -> None:
    for result in coded_job:
        np.testing.assert_array_equal(result[f"{name}_tiny/path"], result[f"{name}/path"])


@pytest.mark.parametrize("kind", ["coded", "coded async"])
@pytest.mark.parametrize("one, other", [("in process 1", "ps-lite 1+1"), ("in process 2", "ps-lite 2+1"),
                                        ("in process 2", "ps-lite 2+2"), ("in process 3", "ps-lite 3+1")])
def test_servers_and_one_process_give_the_same_bits(named_job: NamedJob, one: str, other: str, kind: str) -> None:
    """Of three workers, too: their pushes are added in the order of their ranks."""
    for mine, theirs in zip(named_job(one, kind), named_job(other, kind)):
        for key in theirs:
            np.testing.assert_array_equal(mine[key], theirs[key], err_msg=key)


def test_global_weights_are_the_same_bits_on_every_worker(coded_job: Job) -> None:
    for name in coded_job.names:
        for result in coded_job[1:]:
            np.testing.assert_array_equal(result[f"{name}/final"], coded_job[0][f"{name}/final"], err_msg=name)
