"""A dynamic loss scale of MXNet's: where the gradient of one worker overflows, no worker has an iteration."""
import importlib
import json
from typing import Any, List, Optional, Tuple

import numpy as np
import pytest

import kvstore
from kvstore import ConfigError, DivergedError
from kvstore.engine._mxnet import mx
from kvstore.transports.in_process import Stage

amp = importlib.import_module("mxnet.contrib.amp")  # MXNet is first imported above
TARGETS, ITERATIONS = (0.0, 2.0, 5.0), 7
OVERFLOWS = {(1, 2), (0, 4), (2, 4)}  # (worker, iteration)
LR, LR_LOCAL, W_0 = 0.5, 0.25, 4.0


def by_numpy(delay: bool) -> Tuple[List[List[float]], float]:
    """What each worker computes on, iteration by iteration, and after the last one W; and the scale of the loss.

    W <- W - lr mean of the gradients, where all are finite; worker m's is w^m - a_m, at w^m = W, or with a delay at W
    of the iteration before less a step along its own gradient. The scale is halved where one is not.
    """
    W, w, scale = W_0, [W_0] * len(TARGETS), 2.0 ** 16
    paths: List[List[float]] = [[] for _ in TARGETS]
    for t in range(ITERATIONS):
        for path, mine in zip(paths, w):
            path.append(mine)
        if any(when == t for _, when in OVERFLOWS):
            scale /= 2
            continue
        grads = [mine - a for mine, a in zip(w, TARGETS)]
        before, W = W, W - LR * sum(grads) / len(grads)
        w = [before - LR_LOCAL * grad if delay else W for grad in grads]
    return [[*path, W] for path in paths], scale


def a_trainer(store: Any) -> Tuple[Any, Any]:
    w = mx.gluon.Parameter("w", shape=(1,), init=mx.init.Constant(W_0))
    w.initialize()
    trainer = mx.gluon.Trainer([w], "sgd", {"learning_rate": LR}, kvstore=store)
    trainer._amp_original_scale = trainer._scale  # as amp.init_trainer
    trainer._amp_loss_scaler = amp.loss_scaler.LossScaler()
    return w, trainer


def step(w: Any, trainer: Any, target: float, times: float, examples: int = 1, unscale: bool = False) -> None:
    with mx.autograd.record():
        loss = times * (w.data() - target) ** 2 / 2
        with amp.scale_loss(loss, trainer) as scaled:
            mx.autograd.backward(scaled)
    if unscale:
        amp.unscale(trainer)
    trainer.step(examples)


@pytest.mark.parametrize("name, kind, options", [
    ("ssgd", None, {}), ("ssgd", "sharded", {}), ("dsync", "ring", {}),
    ("odsgd", None, {"warmup": 0, "lr_local": LR_LOCAL}), ("odsgd", "ring", {"warmup": 0, "lr_local": LR_LOCAL}),
    ("ssgd", None, {"codec": "2bit", "codec_threshold": 0.5})])
def test_an_overflow_leaves_out_the_iteration_on_all_workers(name: str, kind: Optional[str], options: Any) -> None:
    stage = Stage(len(TARGETS))
    make = {"ring": stage.ring_worker, "sharded": stage.sharded_worker}.get(kind or "", stage.worker)

    def work(transport: Any) -> Tuple[List[float], List[float]]:
        store = kvstore.create(name, transport, **options)
        w, trainer = a_trainer(store)
        rank, seen = store.rank, []
        for t in range(ITERATIONS):
            seen.append(w.data().asscalar())
            step(w, trainer, TARGETS[rank], 1e38 if (rank, t) in OVERFLOWS else 1.0)
        assert store.iteration == ITERATIONS
        with store.global_weights():
            seen.append(w.data().asscalar())
        scale = trainer._amp_loss_scaler
        store.close()
        return seen, [scale._next_loss_scale, scale._unskipped]

    paths, scale = by_numpy(delay=name == "odsgd")
    for (mine, scales), path in zip(stage.run(work, make), paths):
        assert scales == [scale, ITERATIONS - 1 - max(t for _, t in OVERFLOWS)]
        if "codec" not in options:
            np.testing.assert_allclose(mine, path, rtol=1e-6)
        assert np.isfinite(mine).all()


def test_workers_that_wait_for_nobody_scale_each_for_itself() -> None:
    stage = Stage(2)

    def work(transport: Any) -> float:
        store = kvstore.create("asgd", transport)
        w, trainer = a_trainer(store)
        for t in range(4):
            step(w, trainer, 0.0, 1e38 if (store.rank, t) == (1, 1) else 1.0)
        assert np.isfinite(w.data().asscalar())
        store.close()
        return float(trainer._amp_loss_scaler.loss_scale)

    assert stage.run(work) == [2.0 ** 16, 2.0 ** 15]


@pytest.mark.parametrize("unscale", [False, True])
def test_the_examples_of_a_step_are_its_own_whatever_becomes_of_the_scale(unscale: bool) -> None:
    store = kvstore.create("local")
    w, trainer = a_trainer(store)
    for times in (1.0, 1e38, 1.0, 1.0):  # the scale moves with the step after the overflow
        step(w, trainer, 0.0, times, examples=4, unscale=unscale)
        assert store.session.samples == 4.0


def test_a_resumed_run_has_the_scale_and_the_iterations_that_were_saved() -> None:
    store = kvstore.create("local")
    w, trainer = a_trainer(store)
    for times in (1.0, 1e38, 1.0):
        step(w, trainer, 0.0, times)
    arrays, meta = store.worker_state()
    server, at = store.server_state(), w.data().asnumpy()
    again = kvstore.create("local")
    w, trainer = a_trainer(again)
    w.set_data(mx.nd.array(at))
    again.load_state((arrays, json.loads(json.dumps(meta))), server)
    assert (again.iteration, trainer._amp_loss_scaler.loss_scale) == (3, 2.0 ** 15)
    step(w, trainer, 0.0, 1.0)
    assert (again.iteration, trainer._amp_loss_scaler._unskipped) == (4, 2)


def test_overflows_that_no_scale_mends_stop_the_job() -> None:
    w, trainer = a_trainer(kvstore.create("local"))
    for _ in range(27):
        step(w, trainer, 0.0, float("nan"))
    with pytest.raises(DivergedError, match=r"infinite or not a number even with a loss scale of 0\.000488281"):
        step(w, trainer, 0.0, float("nan"))


def test_a_trainer_has_one_scale() -> None:
    _, trainer = a_trainer(kvstore.create("local"))
    with pytest.raises(ConfigError, match="has a loss scale already"):
        trainer._amp_loss_scaler = amp.loss_scaler.LossScaler()
    with pytest.raises(ConfigError, match="do not go together"):
        a_trainer(kvstore.create("local", uneven="join"))
