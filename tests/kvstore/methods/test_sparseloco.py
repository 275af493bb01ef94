"""SparseLoCo: the paper's rule, what it is when all travels, and what its messages leave out."""
from typing import Any, Dict

import numpy as np
import pytest

pytest.importorskip("kvstore.engine._mxnet")

import kvstore
from kvstore.errors import ConfigError
from kvstore.transports.in_process import Stage
from tests import paper
from tests.kvstore.methods.test_diloco import drawn, walk

SIZE = 5000  # two chunks
W_0 = np.random.RandomState(1).normal(size=SIZE).astype(np.float32)


@pytest.mark.parametrize("bits", [2, 32])
@pytest.mark.parametrize("beta", [0.95, 0.0])
def test_every_iteration_of_every_worker_follows_the_paper(bits: int, beta: float) -> None:
    ours = walk("sparseloco", 2, 9, drawn(SIZE), W_0, H=2, k=64, bits=bits, beta=beta, lr_outer=0.5)
    push = paper.Residuals(lambda x: paper.largest(x, 64, few=bits == 2), beta)
    theirs, path_global = paper.diloco(drawn(SIZE), W_0, 2, 9, [paper.Sgd(0.1)] * 2, 2, 0.5, 0.0, push)
    for m in range(2):
        np.testing.assert_allclose(ours[m][0], [x[m] for x in theirs], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(ours[m][1], path_global[-1], rtol=1e-5, atol=1e-6)


def test_a_worker_follows_the_hand_computed_path() -> None:
    """g = w, inner rate 1/2, H = 1, one of two floats travels, beta 1/2, outer rate 1.

        theta    x         Delta     e           q       then
        4, 3     2, 1.5    2, 1.5    2, 1.5      2, 0    2, 3
        2, 3     1, 1.5    1, 1.5    1, 2.25     0, 2.25 2, 0.75
        2, 0.75  1, 0.375  1, 0.375  1.5, 0.375  1.5, 0  0.5, 0.75
    """
    path = walk("sparseloco", 1, 3, lambda m, t, w: w, np.array([4, 3], np.float32), 0.5, H=1, k=1, beta=0.5)[0][0]
    np.testing.assert_array_equal(path, np.array([[4, 3], [2, 3], [2, 0.75], [0.5, 0.75]]))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_where_all_travels_it_averages_models(workers: int) -> None:
    settings: Dict[str, Any] = {"H": 2, "momentum": 0.9}
    ours = walk("sparseloco", workers, 7, drawn(5), np.ones(5, np.float32), k=4096, bits=32, beta=0.0, **settings)
    theirs = walk("diloco", workers, 7, drawn(5), np.ones(5, np.float32), lr_outer=1.0, momentum_outer=0.0, **settings)
    for one, other in zip(ours, theirs):
        np.testing.assert_array_equal(one[0], other[0])


def test_what_is_not_sent_lasts_over_a_restart() -> None:
    settings: Dict[str, Any] = {"H": 2, "k": 1, "momentum": 0.9}
    w_0 = np.ones(5, np.float32)
    whole = walk("sparseloco", 2, 11, drawn(5), w_0, **settings)
    first = walk("sparseloco", 2, 7, drawn(5), w_0, **settings)
    then = walk("sparseloco", 2, 4, drawn(5), w_0, states=[ends[2] for ends in first], **settings)
    for one, other in zip(whole, then):
        np.testing.assert_array_equal(one[0][7:], other[0])


@pytest.mark.parametrize("given, says", [
    ({"bits": 3}, "bits is 3, expected"), ({"k": 4097}, "k is 4097"), ({"k": 0}, r"k.*expected"),
    ({"beta": 1.1}, r"beta.*expected"), ({"codec": "float16"}, "codec has no meaning with a store that has its own")])
def test_options_that_do_not_go_together_are_refused_in_a_line(given: Dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        kvstore.create("sparseloco", Stage(2).worker(0), **given)
    assert "\n" not in str(error.value)
