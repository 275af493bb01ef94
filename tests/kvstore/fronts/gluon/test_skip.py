"""on_nan `skip`: a round with a gradient that is not finite changes nothing, on all workers alike."""
import itertools
from typing import Any, List, Optional

import numpy as np
import pytest

import kvstore
from kvstore import ConfigError, methods
from kvstore.engine._mxnet import mx
from kvstore.errors import DivergedError
from kvstore.messages import finite
from kvstore.transports.in_process import InProcess, Stage
from tests.jobs import alone
from tests.scripted import ScriptedStage

TARGETS = (0.0, 2.0, 5.0)
LR, LR_LOCAL, MOMENTUM, W_0, STEPS = 0.25, 0.125, 0.5, 4.0, 6
BAD, WORST = 2, 1
"""The iteration, and the worker, whose gradient is none."""


def synchronous(delay: bool) -> List[List[float]]:
    """Each worker's weights, iteration by iteration: V <- momentum V - lr mean g, W <- W + V, but not in round BAD."""
    W, V, w, paths = W_0, 0.0, [W_0] * len(TARGETS), [[W_0] for _ in TARGETS]
    for t in range(STEPS):
        grads = [w[m] - target for m, target in enumerate(TARGETS)]
        before = W
        if t != BAD:
            V = MOMENTUM * V - LR * sum(grads) / len(TARGETS)
            W = W + V
        w = [before - LR_LOCAL * grads[m] * ((t, m) != (BAD, WORST)) if delay else W for m in range(len(TARGETS))]
        for path, one in zip(paths, w):
            path.append(one)
    return paths


def by_turns(compensated: bool) -> List[List[float]]:
    """Each push is an update by itself, W <- W + V, workers in turn; with lamda g^2 (W - what the worker last got)."""
    W, V, w, paths = W_0, 0.0, [W_0] * len(TARGETS), [[W_0] for _ in TARGETS]
    for t in range(STEPS):
        for m, target in enumerate(TARGETS):
            if (t, m) != (BAD, WORST):
                g = w[m] - target
                V = MOMENTUM * V - LR * (g + 0.04 * g * g * (W - w[m]) * compensated)
                W = W + V
            w[m] = W
            paths[m].append(W)
    return paths


def in_intervals(averages: bool) -> List[List[float]]:
    """Two own steps, then W - LR sum of their gradients (downpour, in turn), or the mean of the workers (sasgd)."""
    W, w, sums, paths = W_0, [W_0] * len(TARGETS), [0.0] * len(TARGETS), [[W_0] for _ in TARGETS]
    for t in range(STEPS):
        for m, target in enumerate(TARGETS):
            g = (w[m] - target) * ((t, m) != (BAD, WORST))
            w[m], sums[m] = w[m] - LR * g, sums[m] + g
            if t % 2 and not averages:
                W = w[m] = W - LR * sums[m]
        if t % 2 and averages:
            W = W - LR * sum(sums) / len(TARGETS)
            w = [W] * len(TARGETS)
        sums = [0.0] * len(TARGETS) if t % 2 else sums
        for path, one in zip(paths, w):
            path.append(one)
    return paths


@pytest.mark.parametrize("name, kind, options, expected", [
    ("ssgd", None, {}, synchronous(delay=False)), ("ssgd", None, {"codec": "truncate"}, None),
    ("odsgd", None, {"warmup": 0, "lr_local": LR_LOCAL}, synchronous(delay=True)),
    ("odsgd", "ring", {"warmup": 0, "lr_local": LR_LOCAL}, synchronous(delay=True)),
    ("dsync", "ring", {}, synchronous(delay=False)), ("asgd", None, {}, by_turns(compensated=False)),
    ("dcasgd_c", None, {}, by_turns(compensated=True)), ("downpour", None, {"T": 2}, in_intervals(averages=False)),
    ("sasgd", "ring", {"T": 2}, in_intervals(averages=True))])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_round_that_is_not_finite_is_left_out(name: str, kind: Optional[str], options: Any, expected: Any, bad: float,
                                                capfd: pytest.CaptureFixture[str],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "_lines", itertools.count(1))
    order = list(range(len(TARGETS))) * STEPS if methods.find(name).asynchronous else None
    stage = ScriptedStage(len(TARGETS), order)

    def work(transport: Any) -> List[float]:
        store = kvstore.create(name, transport, on_nan="skip", **options)
        w = alone(store, mx.nd.full(2000, W_0), learning_rate=LR, momentum=0.0 if "T" in options else MOMENTUM)
        seen = [W_0]
        for t in range(STEPS):
            grad = w - TARGETS[transport.worker_rank]
            if (t, transport.worker_rank) == (BAD, WORST):
                grad[1500] = bad
            store.pushpull("w", grad, w)
            assert np.ptp(w.asnumpy()) == 0  # a bucket is left out as a whole
            seen.append(w[0].asscalar())
        store.wait()
        return seen

    paths = stage.run(work, stage.ring_worker if kind == "ring" else None)
    assert f"worker 1, iteration 3: 1 elements of the gradient of w are infinite or not a number (the first: {bad})" \
           in capfd.readouterr().err
    assert np.isfinite(paths).all()
    if expected is not None:
        np.testing.assert_allclose(paths, expected, rtol=1e-5)


@pytest.mark.parametrize("codec", ["2bit", "1bit"])
def test_what_a_codec_of_few_bits_would_hide_from_the_servers_stops_the_job(
        codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcess, "checks_all", False)  # as with real servers
    store = kvstore.create("ssgd", Stage(1).worker(0), codec=codec)
    w, grad = alone(store, mx.nd.ones(2000)), mx.nd.ones(2000)
    grad[1999] = np.nan
    with pytest.raises(DivergedError, match="worker 0, iteration 1: 1 elements of the gradient of w"):
        store.pushpull("w", grad, w)


@pytest.mark.parametrize("name, options, optimizer, says", [
    ("diloco", {"H": 2, "delay": 1}, "sgd", "mix 0.5 would keep the weights of a worker that are not finite"),
    ("decoupled", {}, "sgd", "mix 0.5 would keep the weights of a worker that are not finite"),
    ("sparseloco", {}, "sgd", "does not go with a store that looks for the largest floats"),
    ("easgd", {}, "sgd", "on_nan `skip` has no meaning in elastic averaging"),
    ("ssgd", {"codec": "2bit"}, "sgd", "does not go with codec `2bit`, which knows finite numbers alone"),
    ("odsgd", {"optimizer_local": "adam"}, "sgd", "leave out only those of `sgd` without clip_gradient"),
])
def test_what_cannot_skip_says_so(name: str, options: Any, optimizer: str, says: str) -> None:
    def begin() -> None:
        store = kvstore.create(name, Stage(1).worker(0), on_nan="skip", **options)
        store.set_optimizer(mx.optimizer.create(optimizer))

    with pytest.raises(ConfigError, match=says):
        begin()
