"""An optimizer's steps on a bucket: SGD in NumPy beside MXNet's, and every other as MXNet has it."""
import dataclasses
import inspect
from typing import Any, Callable, Dict, List, Optional

import numpy as np
import pytest

import kvstore
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import ConfigError
from kvstore.methods import local_optimizers
from kvstore.optimizers import compensated as registered
from kvstore.optimizers import described, torch_formulas
from kvstore.optimizers.apply import ImmediateOptimizer, QueuedOptimizer
from kvstore.transports.in_process import Stage
from tests.jobs import alone

Way = Callable[[Any, NDArray, NDArray, Any], NDArray]
"""How an optimizer is applied, at its own rate: (optimizer, weights, gradient, state) -> the new weights."""


def by_mxnet(optimizer: Any, weight: NDArray, grad: NDArray, state: Any) -> NDArray:
    optimizer.update_multi_precision(0, weight, grad, state)
    return weight


def at_once(optimizer: Any, weight: NDArray, grad: NDArray, state: Any) -> NDArray:
    update = ImmediateOptimizer(optimizer, 0, None)
    update.state = state
    update(*update.bind(weight, grad.copy()), optimizer.lr, optimizer.rescale_grad)
    return weight


def step(optimizer: Any, state: Any) -> QueuedOptimizer:
    made = QueuedOptimizer(optimizer, 0, None)
    made.state = state
    return made


def queued_in_place(optimizer: Any, weight: NDArray, grad: NDArray, state: Any) -> NDArray:
    return step(optimizer, state)(weight, grad, optimizer.lr, optimizer.rescale_grad)


def queued(optimizer: Any, weight: NDArray, grad: NDArray, state: Any) -> NDArray:
    out, before = mx.nd.zeros_like(weight), [weight.asnumpy(), grad.asnumpy()]
    assert step(optimizer, state)(weight, grad, optimizer.lr, optimizer.rescale_grad, out=out) is out
    out.wait_to_read()
    for array, was in zip([weight, grad], before):
        np.testing.assert_array_equal(array.asnumpy(), was)
    return out


WAYS = pytest.mark.parametrize("way", [at_once, queued_in_place, queued])


@WAYS
@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.37])
@pytest.mark.parametrize("wd", [0.0, 0.01, 1e-4])
def test_sgd_in_numpy_has_the_bits_of_mxnets(momentum: float, wd: float, way: Way) -> None:
    random = np.random.RandomState(5)
    ours, theirs = (mx.optimizer.SGD(momentum=momentum, wd=wd) for _ in range(2))
    ours.set_lr_mult({0: 0.7})
    theirs.set_lr_mult({0: 0.7})
    weights = [mx.nd.array(one) for one in [random.normal(size=1000)] * 2]
    states = [one.create_state_multi_precision(0, weight) for one, weight in zip((ours, theirs), weights)]
    for _ in range(50):
        ours.lr = theirs.lr = random.uniform(1e-4, 1)
        ours.rescale_grad = theirs.rescale_grad = random.choice([1.0, 1 / 3])
        grad = mx.nd.array(random.normal(size=1000))
        by_mxnet(theirs, weights[1], grad, states[1])
        weights[0] = way(ours, weights[0], grad, states[0])
        np.testing.assert_array_equal(*[weight.asnumpy() for weight in weights])
    assert ours.num_update == theirs.num_update == 50


@pytest.mark.parametrize("name, options", [("sgd", {"clip_gradient": 0.1}), ("nag", {"momentum": 0.9}), ("adam", {})])
@WAYS
def test_other_optimizers_are_mxnets(name: str, options: Dict[str, float], way: Way) -> None:
    def updated(way: Way) -> np.ndarray:
        optimizer, weight = mx.optimizer.create(name, **options), mx.nd.array([1.0, -2.0, 3.0])
        state = optimizer.create_state_multi_precision(0, weight)
        return np.asarray(way(optimizer, weight, mx.nd.array([0.5, 1.0, -4.0]), state).asnumpy())
    np.testing.assert_array_equal(updated(by_mxnet), updated(way))


@pytest.mark.parametrize("kind", [ImmediateOptimizer, QueuedOptimizer])
def test_the_rate_and_the_share_of_a_step_are_those_it_is_called_with(kind: Any) -> None:
    optimizer = mx.optimizer.SGD(learning_rate=100.0, rescale_grad=100.0)
    update, w, grad = kind(optimizer, 0, None), mx.nd.array([4.0]), mx.nd.array([8.0])
    update.start(w)
    before = update.bind(w, grad) if kind is ImmediateOptimizer else (w, grad)
    update(*before, 0.5, 0.25)
    assert w.asscalar() == 4 - 0.5 * 0.25 * 8


@pytest.mark.parametrize("name, arrays", [
    ("sgd", []), ("nag", ["state"]), ("adam", ["state/0", "state/1"]), ("dcasgd_c", ["state/w_read"]),
    ("dcasgd_a", ["state/w_read", "state/momentum", "state/mean_square"])])
def test_the_state_of_an_optimizer_is_kept_by_names_and_put_back(name: str, arrays: list) -> None:
    settings = {"momentum": 0.5} if name in ("nag", "dcasgd_a") else {}

    def made() -> QueuedOptimizer:
        step = QueuedOptimizer(mx.optimizer.create(name, learning_rate=0.1, **settings), 0, None)
        step.start(mx.nd.ones(3))
        return step
    whole, w = made(), mx.nd.ones(3)
    for t in range(3):
        whole(w, mx.nd.array([t, 1.0, -t]), 0.1)
    assert list(whole.arrays()) == arrays
    resumed, w_resumed = made(), w.copy()
    resumed.restore({key: array.asnumpy() for key, array in whole.arrays().items()}, whole.facts())
    for step, weight in ((whole, w), (resumed, w_resumed)):
        step(weight, mx.nd.array([1.0, 2.0, 3.0]), 0.1)
    np.testing.assert_array_equal(w.asnumpy(), w_resumed.asnumpy())
    assert whole.facts() == resumed.facts() and whole.facts()["count"] == 4


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_rule_may_hand_over_a_gradient_of_its_own(name: str) -> None:
    """With any optimizer the gradient that counts is the one that is given, not the one that was pushed."""
    def after(grad: float, factor: float) -> np.ndarray:
        update = ImmediateOptimizer(mx.optimizer.create(name), 0, None)
        w, g = mx.nd.ones(3), mx.nd.ones(3) * grad
        update.start(w)
        seen, pushed = update.bind(w, g)
        for _ in range(2):
            pushed[:] = grad  # an update may overwrite it
            update(seen, np.float32(factor) * pushed, 0.1)
        return np.array(seen)

    np.testing.assert_array_equal(after(4.0, 0.5), after(2.0, 1.0))
    assert not np.array_equal(after(4.0, 0.5), after(-2.0, 1.0))


class Keeping(mx.optimizer.Optimizer):
    """One of a script's own that keeps the gradient."""

    def create_state(self, index: int, weight: NDArray) -> None:
        pass

    def update(self, index: int, weight: NDArray, grad: NDArray, state: Any) -> None:
        self.kept = grad


def test_a_gradient_that_a_script_s_optimizer_keeps_on_a_server_stays_as_it_was() -> None:
    optimizer, message = Keeping(), mx.nd.ones(3)
    update = ImmediateOptimizer(optimizer, 0, None)
    update.start(message)
    update(*update.bind(mx.nd.ones(3), message), 0.1)
    message[:] = 5
    np.testing.assert_array_equal(optimizer.kept.asnumpy(), np.ones(3))


def test_a_trial_leaves_momentum_and_count_as_they_were() -> None:
    """Else the steps that follow would be others."""
    paths = []
    for looks in (False, True):
        update = QueuedOptimizer(mx.optimizer.SGD(learning_rate=0.5, momentum=0.9), 0, None)
        w, path = mx.nd.ones(3), []
        update.start(w)
        for _ in range(3):
            if looks:
                update.trial(w, mx.nd.full(3, 7), 0.5, 1.0, out=w.copy())
            path.append(update(w, mx.nd.ones(3), 0.5).asnumpy().tolist())
        paths.append([path, update.facts()["count"]])
    assert paths[0] == paths[1]


REGISTRY = mx.optimizer.Optimizer.opt_registry


def test_mxnet_has_every_optimizer_listed_and_momentum_where_we_say() -> None:
    assert not set(local_optimizers.NAMES) - set(REGISTRY)
    with_momentum = {name for name in local_optimizers.NAMES
                     if "momentum" in inspect.signature(REGISTRY[name]).parameters}
    assert {*with_momentum, *local_optimizers.COMPENSATED} == set(local_optimizers.WITH_MOMENTUM)


class OwnState(mx.optimizer.SGD):
    made: Any = None

    def create_state(self, index: int, weight: NDArray) -> Any:
        return [mx.nd.zeros(weight.shape), self.made]

    def update_multi_precision(self, index: int, weight: NDArray, grad: NDArray, state: Any) -> None:
        state[1] = [state[1]] if isinstance(state[1], float) else state[1]


@pytest.mark.parametrize("made, what", [
    (0.9, "more than arrays that changes"), (mx.nd.zeros(1), "an array of 1 floats"),
    (mx.nd.zeros((2, 2, 3)), "an array of 12 floats"), ((True, "kept", 3), None)])
def test_a_state_of_which_a_part_would_be_lost_is_not_saved(made: Any, what: Optional[str]) -> None:
    OwnState.made = made
    update = QueuedOptimizer(OwnState(), 0, (2, 3))
    update.start(mx.nd.zeros(6))
    update.trial(mx.nd.ones(6), mx.nd.ones(6), 0.1, 1.0, out=mx.nd.ones(6))  # saves nothing
    if what is None:
        assert list(update.arrays()) == ["state/0"] and update.facts()["count"] == 0
        return
    with pytest.raises(ConfigError, match=f"the state of optimizer OwnState has {what}, which cannot be"):
        update.facts()


class LARS(mx.optimizer.SGD):
    """A script's own, without the rates of MXNet's."""


def test_an_optimizer_of_the_scripts_is_not_taken_for_mxnets_by_its_name() -> None:
    update = QueuedOptimizer(LARS(), 0, None)
    update.start(mx.nd.zeros(6))
    assert update.facts()["count"] == 0 and not described.decays_apart(LARS())


@pytest.mark.parametrize("name", local_optimizers.MXNET)
def test_the_state_of_each_listed_optimizer_is_saved(name: str) -> None:
    update = QueuedOptimizer(mx.optimizer.create(name), 0, (2, 3))
    update.start(mx.nd.zeros(6))
    assert update.facts()["count"] == 0 and all(array.size == 6 for array in update.arrays().values())


@pytest.mark.parametrize("name", local_optimizers.COMPENSATED)
def test_defaults_of_delay_compensation_are_those_of_the_stores(name: str) -> None:
    options = {field.name: field.default for field in dataclasses.fields(local_optimizers.COMPENSATED[name])
               if field.name in local_optimizers.COMPENSATION}
    made = REGISTRY[name]()
    assert options and {key: getattr(made, key) for key in options} == options


@mx.optimizer.register
class OwnLocal(mx.optimizer.SGD):
    """As a script may register it."""


def test_a_script_s_own_optimizer_takes_the_local_steps() -> None:
    def path(name: str) -> float:
        store = kvstore.create("odsgd", Stage(1).worker(0), warmup=0, optimizer_local=name)
        w = alone(store, mx.nd.array([4.0]), learning_rate=0.5)
        for _ in range(3):
            store.pushpull("w", w, w)
        return float(w.asscalar())

    assert path("ownlocal") == path("sgd") != path("none")


@pytest.mark.parametrize("asked, made", [("SGD", "sgd"), ("DCASGD_A", "dcasgd_a"), ("OwnLocal", "ownlocal")])
def test_names_of_local_optimizers_are_known_in_capitals_too(asked: str, made: str) -> None:
    options = kvstore.create("odsgd", Stage(1).worker(0), optimizer_local=asked, momentum_local=0.5).options
    assert options.optimizer_local == made and options.momentum_local == 0.5


def test_ours_take_their_arguments_in_the_order_of_mxnets() -> None:
    made = registered.DCASGD_A(0.3, 0.5, 1.5, 0.9, 1e-3)
    assert (made.lr, made.momentum, made.lamda, made.m, made.epsilon) == (0.3, 0.5, 1.5, 0.9, 1e-3)
    made = registered.DCASGD_C(0.3, 0.5, 1.5)
    assert (made.lr, made.momentum, made.lamda) == (0.3, 0.5, 1.5)


class Scaling(mx.optimizer.SGD):
    """One of a script's own that writes to the gradient, as a Trainer's next backward pass allows."""

    def update_multi_precision(self, index: int, weight: NDArray, grad: NDArray, state: Any) -> None:
        grad *= self.rescale_grad
        weight -= grad


@pytest.mark.parametrize("kind", [mx.optimizer.AdaDelta, Scaling])
def test_a_gradient_that_is_read_again_is_not_scaled_in_place(kind: Any) -> None:
    """As MXNet's AdaDelta does, and may one of a script's own: a trial step, or a local one before the push."""
    grad = mx.nd.ones(4)
    made = QueuedOptimizer(kind(), 0, None)
    made.start(mx.nd.ones(4))
    made(mx.nd.ones(4), grad, 0.1, 0.5)
    np.testing.assert_array_equal(grad.asnumpy(), np.ones(4, np.float32))


def test_a_step_that_is_left_out_does_not_count_in_the_correction_of_adam() -> None:
    def walk(*grads: float) -> float:
        adam = torch_formulas.Adam(learning_rate=0.5)
        made, w = QueuedOptimizer(adam, 0, None), mx.nd.ones(1)
        made.start(w)
        made.skips = lambda grad: not np.isfinite(grad).all()
        for grad in grads:
            made(w, mx.nd.array([grad]), 0.5)
        return float(w.asscalar())

    assert walk(0.5, np.nan, 0.25) == walk(0.5, 0.25)


@pytest.mark.parametrize("formula, name", [
    (torch_formulas.Adam(beta1=0.0), "exp_avg"), (torch_formulas.RMSprop(alpha=0.0, centered=True), "grad_avg")])
def test_a_mean_that_forgets_all_is_the_gradient_however_large_it_was(formula: torch_formulas.TorchFormula,
                                                                      name: str) -> None:
    state = {each: np.full(1, 1e8, np.float32) for each in formula.names()}
    formula.move(np.ones(1, np.float32), state, 0.1, 2)
    assert state[name].tolist() == [1.0]


def test_the_momentum_of_lars_follows_the_rate_in_each_bucket_also_after_a_resume() -> None:
    """MXNet's moves cur_lr and last_lr in each call, which has all of up to four parameters."""
    def made() -> List[QueuedOptimizer]:
        lars = mx.optimizer.create("lars", momentum=0.5, eta=0.5)
        buckets = [QueuedOptimizer(lars, index, (2,)) for index in range(2)]
        for bucket in buckets:
            bucket.start(mx.nd.zeros(2))
        return buckets

    ours, weights = made(), [mx.nd.array([4.0, 2.0]), mx.nd.array([1.0, 3.0])]
    theirs, whole = mx.optimizer.create("lars", momentum=0.5, eta=0.5), [w.copy() for w in weights]
    states = [theirs.create_state_multi_precision(index, w) for index, w in enumerate(whole)]
    for t, theirs.lr in enumerate([0.1, 0.4, 0.2, 0.3]):
        grads = [mx.nd.array([t, 1.0]), mx.nd.array([1.0, -t])]
        theirs.update_multi_precision([0, 1], whole, [grad.copy() for grad in grads], states)
        for bucket, w, grad in zip(ours, weights, grads):
            bucket(w, grad, theirs.lr)
        if t == 1:
            before, ours = ours, made()
            for was, bucket in zip(before, ours):
                bucket.restore({name: array.asnumpy() for name, array in was.arrays().items()}, was.facts())
    np.testing.assert_allclose([w.asnumpy() for w in weights], [w.asnumpy() for w in whole], rtol=1e-5)
