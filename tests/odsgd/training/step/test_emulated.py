"""The emulated accelerator: what its operations wait for, in which order gradients appear, and that numerics stay."""
from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from typing import Any, Callable, List, Tuple

import numpy as np
import pytest

from kvstore.engine import engine
from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError
from kvstore.tracing import recorder
from kvstore.transports.in_process import Stage
from odsgd.training.step.emulated import STEP_S, Emulated, factors
from tests import paper
from tests.jobs import ROOT, environment
from tests.scenarios import SHAPES, SIZE, initial
from tests.scenarios import gradient as whole_gradient

LONG_S = 300  # no test lasts so long; a wait that does has failed


def pairs(number: int, size: int = 3) -> List[Tuple[Any, Any]]:
    return [(mx.nd.zeros(size), mx.nd.zeros(size)) for _ in range(number)]


def held_until(event: threading.Event) -> Callable[[], None]:
    """An operation that lasts until then."""
    def wait() -> None:
        assert event.wait(LONG_S)
    return wait


def bounds() -> List[Tuple[int, int]]:
    stops = list(itertools.accumulate(int(np.prod(shape)) for shape in SHAPES.values()))
    return list(zip([0, *stops], stops))


def emulated_path(transport: Any, warmup: int, iterations: int = 6, seconds: float = 0.004) -> List[np.ndarray]:
    """Train with gradients that the device is given; the worker's path."""
    import kvstore
    store = kvstore.create("odsgd", transport, warmup=warmup, lr_local=0.05, bucket_nbytes=16)
    parameters = mx.gluon.ParameterDict("net_")
    for (name, shape), (start, stop) in zip(SHAPES.items(), bounds()):
        parameters.get(name, shape=shape, init=mx.init.Constant(mx.nd.array(initial()[start:stop].reshape(shape))))
    parameters.initialize()
    trainer = mx.gluon.Trainer(parameters, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=store)

    def gradient(t: int, layer: int, w: np.ndarray) -> np.ndarray:
        start, stop = bounds()[layer]
        full = np.zeros(SIZE, np.float32)
        full[start:stop] = w
        return whole_gradient(transport.worker_rank, t, full)[start:stop]

    def flat() -> np.ndarray:
        return np.concatenate([parameters.get(name).data().asnumpy().reshape(-1) for name in SHAPES])

    device = Emulated(parameters.values(), seconds, gradient=gradient)
    path = [flat()]
    for _ in range(iterations):
        device.iteration()
        trainer.step(1)
        path.append(flat())
    store.close()
    return path


def test_training_on_given_gradients_is_the_paper_s() -> None:
    paths = Stage(2).run(lambda transport: emulated_path(transport, warmup=2))
    expected, _ = paper.one_step_delay(whole_gradient, initial(), 2, 6, paper.Sgd(0.1, momentum=0.9), 2,
                                       [paper.Sgd(0.05), paper.Sgd(0.05)])
    for m, path in enumerate(paths):
        np.testing.assert_allclose(path, [weights[m] for weights in expected], rtol=1e-5, atol=1e-6)


def test_gradients_appear_one_after_the_other_last_layer_first() -> None:
    order, release = [], threading.Event()

    def gradient(t: int, layer: int, w: np.ndarray) -> np.ndarray:
        assert layer == 2 or release.wait(LONG_S)
        order.append(layer)
        return np.full(3, 10 * t + layer)

    layers = pairs(3)
    through = Emulated(layers, 6 * STEP_S, gradient=gradient).iteration()
    assert layers[2][1].asnumpy().tolist() == [2, 2, 2]  # while the layer before it is being worked on
    assert order == [2]
    release.set()
    through[0].wait_to_read()
    assert order == [2, 1, 0]


def test_a_waiting_device_leaves_the_engine_s_threads_to_others() -> None:
    release = threading.Event()

    def gradient(t: int, layer: int, w: np.ndarray) -> np.ndarray:
        assert release.wait(LONG_S)
        return w

    device = Emulated(pairs(8), 16 * STEP_S, gradient=gradient)
    for _ in range(3):
        device.iteration()
    others = pairs(1)[0]
    engine.push(lambda: engine.view(others[1]).fill(7), [others[0]], [others[1]])
    assert (others[1] + 1).asnumpy().tolist() == [8, 8, 8]  # a Python operation, and one of MXNet's
    release.set()
    mx.nd.waitall()


def test_a_pass_begins_when_its_weights_have_been_written() -> None:
    seen: List[float] = []
    weights, grad = pairs(1)[0]
    written = threading.Event()

    def write() -> None:
        assert written.wait(LONG_S)
        engine.view(weights).fill(5)

    def gradient(t: int, layer: int, w: np.ndarray) -> np.ndarray:
        seen.append(w[0])
        return w

    engine.push(write, [], [weights])
    device = Emulated([(weights, grad)], STEP_S, gradient=gradient)
    through = device.iteration()
    written.set()
    through[0].wait_to_read()
    assert seen == [5]


def test_a_process_may_end_with_iterations_under_way() -> None:
    script = ("from odsgd.training.step.emulated import Emulated; from kvstore.engine._mxnet import mx; "
              "Emulated([(mx.nd.zeros(9), mx.nd.zeros(9))], 0.2).iteration(); print('last line')")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment(), stdout=subprocess.PIPE,
                          text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "last line\n")


class Seen:
    """The steps of a device as a timeline is told of them, and a signal for the first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(recorder, "on", self)
        self.steps: List[Tuple[str, List[int], float, float]] = []
        self.first = threading.Event()

    def add(self, stage: str, what: str, start_s: float, end_s: float, iteration: int, layers: List[int]) -> None:
        self.steps.append((what, layers, start_s, end_s))
        self.first.set()


def test_the_forward_pass_of_a_layer_waits_for_its_own_weights_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, layers, written = Seen(monkeypatch), pairs(2), threading.Event()
    engine.push(held_until(written), [], [layers[1][0]])
    through = Emulated(layers, 12 * STEP_S).iteration()
    assert seen.first.wait(LONG_S) and seen.steps[0][:2] == ("forward", [0])
    now_s = time.monotonic()
    written.set()
    through[0].wait_to_read()
    mx.nd.waitall()
    assert [step[:2] for step in seen.steps[:3]] == [("forward", [0]), ("forward", [1]), ("backward", [1])]
    assert seen.steps[1][2] >= now_s


def test_lateness_does_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step begins where the one before it ended, not when a thread woke up after that."""
    # Gradients are written again 0.4 s after the last time: as late may threads wake up here.
    seen, layers, queued, others = Seen(monkeypatch), pairs(3), threading.Event(), threading.Event()
    engine.push(held_until(queued), [], [layers[0][0]])
    device = Emulated(layers, 0.6)
    for _ in range(3):
        through = device.iteration()
    engine.push(others.set, [layers[1][0], layers[2][0]], [])  # queued last: what the others wait for has been
    assert others.wait(LONG_S)
    queued.set()
    through[0].wait_to_read()
    mx.nd.waitall()
    steps = seen.steps[:17]
    assert len(steps) == 17
    for before, after in zip(steps, steps[1:]):
        assert after[2] == before[3]
    assert [steps[3 * k + 2][3] - steps[3 * k][2] for k in range(4)] == pytest.approx([0.2, 0.4, 0.2, 0.4])


def test_every_device_of_a_worker_has_its_gradients() -> None:
    parameter = mx.gluon.Parameter("weight", shape=(2, 2), init="zeros")
    still = mx.gluon.Parameter("statistics", shape=(2,), init="zeros", grad_req="null")
    for one in (parameter, still):
        one.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    device = Emulated([still, parameter], STEP_S, gradient=lambda t, layer, w: w + 1)
    assert len(device.iteration()) == 2
    for grad in parameter.list_grad():
        assert (grad.asnumpy() == 1).all()


def test_the_spread_is_seeded_and_keeps_the_mean() -> None:
    def first(number: int, spread: float, seed: Any) -> List[float]:
        return list(itertools.islice(factors(spread, seed), number))
    assert first(3, 0.0, 1) == [1, 1, 1]
    assert first(5, 0.2, [7, 0]) == first(5, 0.2, [7, 0]) != first(5, 0.2, [7, 1])
    drawn = np.array(first(20000, 0.2, 3))
    assert abs(drawn.mean() - 1) < 0.01 and abs(np.log(drawn).std() - 0.2) < 0.01


def test_without_a_layer_to_emulate_that_is_said() -> None:
    with pytest.raises(ConfigError, match="no layer has a gradient"):
        Emulated([], 0.1)
