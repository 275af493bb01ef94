"""The compensated optimizers by hand, as a worker's own step, and optimizers as text."""
import contextlib
import json
from typing import Any, Dict, List, Sequence

import numpy as np
import pytest

import kvstore
import kvstore.optimizers.compensated  # which names its optimizers
from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError
from kvstore.optimizers import described
from kvstore.optimizers.apply import QueuedOptimizer
from kvstore.transports.in_process import Stage
from tests import paper


def local_path(optimizer: Any, w_globals: Sequence[float], grads: Sequence[float]) -> List[float]:
    """The weights after each local step of a one-element bucket, at the optimizer's own rate and scale."""
    local, w_bak = QueuedOptimizer(optimizer, 0, None), mx.nd.zeros(1)
    local.start(mx.nd.array([w_globals[0]]))
    lr, share = optimizer.lr, optimizer.rescale_grad
    return [local(mx.nd.array([w]), mx.nd.array([g]), lr, share, out=w_bak).asscalar()
            for w, g in zip(w_globals, grads)]


def test_sgd_starts_from_the_global_weights_each_time() -> None:
    # lr 1/2.  8 - 1/2 * 4 = 6;  10 - 1/2 * 2 = 9: the first result leaves no trace in the second.
    assert local_path(mx.optimizer.SGD(learning_rate=0.5), [8, 10], [4, 2]) == [6, 9]


def test_dcasgd_c_by_hand() -> None:
    # lr 1/2, lamda 1/4. First call: w_read = W = 8, no compensation: 8 - 1/2 * 4 = 6.
    # Then W = 10, g = 2 taken at 6: g + 1/4 * 2 * 2 * (10 - 6) = 6; 10 - 1/2 * 6 = 7.
    # Then W = 9, g = 2 taken at 7: g + 1/4 * 4 * (9 - 7) = 4; 9 - 1/2 * 4 = 7.
    optimizer = mx.optimizer.create("dcasgd_c", learning_rate=0.5, lamda=0.25)
    assert local_path(optimizer, [8, 10, 9], [4, 2, 2]) == [6, 7, 7]


def test_dcasgd_a_by_hand() -> None:
    # lr 1/2, lamda 2, m 3/4, epsilon 0. MS: 1/4 * 16 = 4;  3/4 * 4 + 1/4 * 4 = 4.
    # First call at w_read = W: 8 - 1/2 * 4 = 6.  Then W = 10, g = 2: g + 2 / sqrt(4) * 4 * (10 - 6) = 18; 10 - 9 = 1.
    optimizer = mx.optimizer.create("dcasgd_a", learning_rate=0.5, lamda=2, m=0.75, epsilon=0)
    assert local_path(optimizer, [8, 10], [4, 2]) == [6, 1]


def test_local_momentum_by_hand() -> None:
    # lr 1/2, momentum 1/2: v = -2, then 1/2 * -2 - 1/2 * 2 = -2.
    assert local_path(mx.optimizer.SGD(learning_rate=0.5, momentum=0.5), [8, 10], [4, 2]) == [6, 8]


@pytest.mark.parametrize("name", ["dcasgd_c", "dcasgd_a"])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "wd": 0.1}])
def test_on_one_machine_they_are_plain_sgd(name: str, options: Dict[str, float]) -> None:
    def path(optimizer: Any) -> np.ndarray:
        updater = mx.optimizer.get_updater(optimizer)
        w = mx.nd.array([1.0, -2.0, 3.0])
        for t in range(5):
            updater(0, mx.nd.array([t, 1.0, -t]), w)
        return w.asnumpy()
    compensated = path(mx.optimizer.create(name, learning_rate=0.1, **options))
    np.testing.assert_array_equal(compensated, path(mx.optimizer.SGD(learning_rate=0.1, **options)))


def test_gradients_are_rescaled_and_clipped_before_they_are_compensated() -> None:
    optimizer = mx.optimizer.create("dcasgd_c", learning_rate=0.5, lamda=0.25, rescale_grad=0.5, clip_gradient=2)
    assert local_path(optimizer, [8, 10], [4, 100]) == [7, 10 - 0.5 * (2 + 0.25 * 4 * 3)]


@pytest.mark.parametrize("name", ["dcasgd_c", "dcasgd_a"])
def test_the_local_update_is_the_papers_on_random_numbers(name: str) -> None:
    random = np.random.RandomState(0)
    w, g = random.normal(size=(2, 20, 1)).astype(np.float32)
    settings = dict(lamda=0.7, momentum=0.5, wd=0.01)
    by_hand = paper.OPTIMIZERS[name](0.1, **settings)
    expected, w_read = [], w[0]
    for t in range(20):
        w_read = by_hand(w[t], g[t], t, w_read)
        expected.append(w_read[0])
    optimizer = mx.optimizer.create(name, learning_rate=0.1, **settings)
    np.testing.assert_allclose(local_path(optimizer, w[:, 0], g[:, 0]), expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["sgd", "nag", "adam", "adagrad", "rmsprop", "ftrl", "lamb", "dcasgd_a", "signum",
                                  "nadam"])
def test_an_optimizer_survives_as_text(name: str) -> None:
    optimizer = mx.optimizer.create(name, learning_rate=0.123, wd=0.4)
    copy = described.build(json.loads(json.dumps(described.describe(optimizer))), trusted=False)
    assert type(copy) is type(optimizer)
    assert described.describe(copy) == described.describe(optimizer)
    w, copied = mx.nd.array([1.0, 2.0]), mx.nd.array([1.0, 2.0])
    for one, weight in ((optimizer, w), (copy, copied)):
        state = one.create_state_multi_precision(0, weight)
        for _ in range(3):
            one.update_multi_precision(0, weight, mx.nd.array([0.5, -1.0]), state)
    np.testing.assert_array_equal(w.asnumpy(), copied.asnumpy())


def test_numbers_of_numpy_are_settings_as_pythons_are() -> None:
    optimizer = mx.optimizer.SGD(learning_rate=np.float32(0.5), wd=np.float32(0.25), momentum=np.float16(0.75))
    assert described.describe(optimizer) == described.describe(mx.optimizer.SGD(0.75, learning_rate=0.5, wd=0.25))
    before = described.settings(optimizer)
    optimizer.wd = np.float32(0.125)
    assert described.settings(optimizer) != before


def test_an_optimizer_with_a_setting_that_is_no_json_is_refused_by_name() -> None:
    optimizer = mx.optimizer.SGD()
    optimizer.callback = print
    with pytest.raises(ConfigError, match="optimizer SGD: `callback` is a builtin_function_or_method"):
        described.describe(optimizer)


def test_strangers_are_not_imported_without_a_secret() -> None:
    with pytest.raises(ConfigError, match=r"optimizer subprocess\.Popen is not MXNet's"):
        described.build({"class": "subprocess:Popen", "settings": {}}, trusted=False)


@pytest.mark.parametrize("name", ["kvstore.weights.servers.server:Server", "kvstore.weights.servers.__main__:main",
                                  "mxnet.optimizer:nothing"])
def test_only_optimizers_are_built(name: str) -> None:
    with pytest.raises(ConfigError, match="is not an optimizer; expected a subclass"):
        described.build({"class": name, "settings": {}}, trusted=False)


@pytest.mark.parametrize("name", ["signum", "nag", "sgd", "dcasgd_c"])
def test_a_local_momentum_of_0_is_0_whatever_the_optimizers_own_default(name: str) -> None:
    assert described.create_local(name, {"momentum": 0.0}, mx.optimizer.SGD()).momentum == 0.0
    assert described.create_local(name, {"momentum": 0.5}, mx.optimizer.SGD()).momentum == 0.5
    described.create_local("adam", {"momentum": 0.0}, mx.optimizer.SGD())
    with pytest.raises(ConfigError, match="optimizer_local `adam` does not take these options"):
        described.create_local("adam", {"momentum": 0.5}, mx.optimizer.SGD())


def test_mxnets_dcasgd_with_momentum_which_fails_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="fails with momentum; set that to 0, or take `dcasgd_c`"):
        described.create_local("dcasgd", {"momentum": 0.5}, mx.optimizer.SGD())
    with pytest.raises(ConfigError, match="fails with momentum"):
        described.describe(mx.optimizer.DCASGD(momentum=0.5))


@pytest.mark.parametrize("settings, says", [
    ({"batch_scale": 2}, "batch_scale above 1 keeps"), ({"warmup_strategy": "lars"}, "gradients that are not scaled")])
def test_what_lbsgd_does_with_gradients_as_they_come_is_refused(settings: Dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        described.describe(mx.optimizer.create("lbsgd", **settings))


def test_an_unknown_local_optimizer_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="unknown optimizer_local `dcasgd_x`; did you mean `dcasgd_"):
        described.create_local("dcasgd_x", {}, mx.optimizer.SGD())


def test_an_option_the_local_optimizer_does_not_take_is_named() -> None:
    with pytest.raises(ConfigError, match=r"`sgd` does not take .*lamda"):
        described.create_local("sgd", {"lamda": 1}, mx.optimizer.SGD())


class Subclass(mx.optimizer.SGD):
    """May look at whole parameters, for all we know."""


@pytest.mark.parametrize("optimizer, together", [
    (mx.optimizer.SGD(), True), (mx.optimizer.Adam(), True), (None, True), (mx.optimizer.create("lamb"), False),
    (mx.optimizer.create("lars"), False), (mx.optimizer.create("nadam"), False), (Subclass(), False)])
def test_only_optimizers_known_to_be_elementwise_share_buckets(optimizer: Any, together: bool) -> None:
    assert described.elementwise(optimizer) is together


@pytest.mark.parametrize("name, settings, goes", [
    ("lamb", {}, False), ("adagrad", {}, False), ("adadelta", {}, False), ("ftrl", {}, False), ("lars", {}, False),
    ("dcasgd", {}, False), ("adamw", {}, False), ("signum", {"momentum": 0.0}, False), ("signum", {}, True),
    ("sgd", {}, True), ("adam", {}, True), ("rmsprop", {}, True), ("dcasgd_c", {}, True)])
def test_decay_that_an_optimizer_keeps_apart_does_not_go_where_gradients_have_it(
        name: str, settings: Dict[str, float], goes: bool) -> None:
    """Where it goes, a step along g + wd w without decay is one along g with it."""
    def stepped(wd: float) -> float:
        optimizer, w = mx.optimizer.create(name, wd=wd, learning_rate=0.5, **settings), mx.nd.array([2.0, 3.0])
        local = QueuedOptimizer(optimizer, 0, (2,))
        local.start(w)
        for _ in range(2):
            local(w, 1 + (0.25 - wd) * w, 0.5)
        return float(w.asnumpy()[0])

    assert goes == (stepped(0.25) == pytest.approx(stepped(0.0), rel=1e-6))
    store, decaying = kvstore.create("downpour", Stage(1).worker(0)), mx.optimizer.create(name, wd=0.25, **settings)
    store.set_optimizer(mx.optimizer.create(name, **settings))
    said = f"adds weight decay to gradients, and {type(decaying).__name__} keeps it apart"
    with contextlib.nullcontext() if goes else pytest.raises(ConfigError, match=said):
        store.set_optimizer(decaying)


@pytest.mark.parametrize("keys, idx2name", [
    (["a_weight", "a_bias"], {0: "a_weight", 1: "a_bias"}), ([0, 1], {0: "a_weight", 1: "a_bias"}), ([0, 1], {})])
@pytest.mark.parametrize("store, way", [("ssgd", "worker"), ("dsync", "ring_worker"), ("diloco", "worker")])
def test_lars_leaves_out_biases_of_which_it_knows_the_name(
        store: str, way: str, keys: List[Any], idx2name: Dict[int, str]) -> None:
    """As MXNet's: a Module's keys are names, and a Gluon Trainer gives none."""
    def made() -> Any:
        return mx.optimizer.create("lars", learning_rate=0.5, momentum=0.5, wd=0.25, param_idx2name=idx2name)

    grads, ours, theirs = [mx.nd.ones(3), mx.nd.ones(2)], *[[mx.nd.array([4, 2, 1]), mx.nd.ones(2)] for _ in range(2)]
    options: Any = {"H": 1, "lr_outer": 1.0} if store == "diloco" else {}
    made_store = kvstore.create(store, getattr(Stage(1), way)(0), **options)
    made_store.set_optimizer(made())
    made_store.init(keys, ours)
    updater = mx.optimizer.get_updater(made())
    for _ in range(3):
        made_store.push(keys, grads)
        for key, grad, w in zip(keys, grads, theirs):
            updater(key, grad.copy(), w)
    made_store.pull(keys, ours)
    for one, other in zip(ours, theirs):
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), rtol=1e-5)


def test_a_local_lars_leaves_out_biases_beside_a_global_optimizer_that_asks_for_no_name() -> None:
    w = mx.nd.ones(2)
    store = kvstore.create("odsgd", Stage(1).worker(0), optimizer_local="lars", lr_local=0.5, warmup=0)
    store.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.5))
    store.init(["a_bias"], [w])
    store.push(["a_bias"], [mx.nd.ones(2)])
    store.pull(["a_bias"], [w])
    np.testing.assert_allclose(w.asnumpy(), 0.5)  # the local step at its own rate, not at a trust ratio of 0.001


@pytest.mark.parametrize("scheduler", [mx.lr_scheduler.PolyScheduler, mx.lr_scheduler.CosineScheduler])
def test_a_schedule_that_is_new_after_its_end_gives_its_last_rate(scheduler: Any) -> None:
    def rate(lr_scheduler: Any, num_update: int) -> float:
        return described.learning_rate(mx.optimizer.create("sgd", lr_scheduler=lr_scheduler), num_update)

    whole = scheduler(10, base_lr=0.1, final_lr=0.001)
    assert [rate(whole, t) for t in range(1, 16)][14] == rate(scheduler(10, base_lr=0.1, final_lr=0.001), 15)
