"""The compensated optimizers by hand, and optimizers as text."""
import json

import numpy as np
import pytest

from kvstore.buckets import Keys, Parameter, plan
from kvstore.engine import updaters
from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError
from tests import paper

BUCKET = plan([Parameter(0, "w", (1,))], Keys(1))[0]


def local_path(optimizer, w_globals, grads):
    """The weights after each local update of a one-element bucket."""
    local = updaters.LocalUpdate(BUCKET, optimizer)
    return [local(mx.nd.array([w]), mx.nd.array([g])).asscalar() for w, g in zip(w_globals, grads)]


def test_sgd_starts_from_the_global_weights_each_time():
    # lr 1/2.  8 - 1/2 * 4 = 6;  10 - 1/2 * 2 = 9: the first result leaves no trace in the second.
    assert local_path(mx.optimizer.SGD(learning_rate=0.5), [8, 10], [4, 2]) == [6, 9]


def test_dcasgd_c_by_hand():
    # lr 1/2, lamda 1/4. First call: w_read = W = 8, no compensation: 8 - 1/2 * 4 = 6.
    # Then W = 10, g = 2 taken at 6: g + 1/4 * 2 * 2 * (10 - 6) = 6; 10 - 1/2 * 6 = 7.
    # Then W = 9, g = 2 taken at 7: g + 1/4 * 4 * (9 - 7) = 4; 9 - 1/2 * 4 = 7.
    optimizer = mx.optimizer.create("dcasgd_c", learning_rate=0.5, lamda=0.25)
    assert local_path(optimizer, [8, 10, 9], [4, 2, 2]) == [6, 7, 7]


def test_dcasgd_a_by_hand():
    # lr 1/2, lamda 2, m 3/4, epsilon 0. MS: 1/4 * 16 = 4;  3/4 * 4 + 1/4 * 4 = 4.
    # First call at w_read = W: 8 - 1/2 * 4 = 6.  Then W = 10, g = 2: g + 2 / sqrt(4) * 4 * (10 - 6) = 18; 10 - 9 = 1.
    optimizer = mx.optimizer.create("dcasgd_a", learning_rate=0.5, lamda=2, m=0.75, epsilon=0)
    assert local_path(optimizer, [8, 10], [4, 2]) == [6, 1]


def test_local_momentum_by_hand():
    # lr 1/2, momentum 1/2: v = -2, then 1/2 * -2 - 1/2 * 2 = -2.
    assert local_path(mx.optimizer.SGD(learning_rate=0.5, momentum=0.5), [8, 10], [4, 2]) == [6, 8]


@pytest.mark.parametrize("name", ["dcasgd_c", "dcasgd_a"])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "wd": 0.1}])
def test_on_one_machine_they_are_plain_sgd(name, options):
    def path(optimizer):
        updater = mx.optimizer.get_updater(optimizer)
        w = mx.nd.array([1.0, -2.0, 3.0])
        for t in range(5):
            updater(0, mx.nd.array([t, 1.0, -t]), w)
        return w.asnumpy()
    compensated = path(mx.optimizer.create(name, learning_rate=0.1, **options))
    np.testing.assert_array_equal(compensated, path(mx.optimizer.SGD(learning_rate=0.1, **options)))


def test_gradients_are_rescaled_and_clipped_before_they_are_compensated():
    optimizer = mx.optimizer.create("dcasgd_c", learning_rate=0.5, lamda=0.25, rescale_grad=0.5, clip_gradient=2)
    assert local_path(optimizer, [8, 10], [4, 100]) == [7, 10 - 0.5 * (2 + 0.25 * 4 * 3)]


@pytest.mark.parametrize("name", ["dcasgd_c", "dcasgd_a"])
def test_the_local_update_is_the_papers_on_random_numbers(name):
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
def test_an_optimizer_survives_as_text(name):
    optimizer = mx.optimizer.create(name, learning_rate=0.123, wd=0.4)
    copy = updaters.build(json.loads(json.dumps(updaters.describe(optimizer))), trusted=False)
    assert type(copy) is type(optimizer)
    assert updaters.describe(copy) == updaters.describe(optimizer)
    w, copied = mx.nd.array([1.0, 2.0]), mx.nd.array([1.0, 2.0])
    for one, weight in ((optimizer, w), (copy, copied)):
        state = one.create_state_multi_precision(0, weight)
        for _ in range(3):
            updaters.apply(one, 0, weight, mx.nd.array([0.5, -1.0]), state, None)
    np.testing.assert_array_equal(w.asnumpy(), copied.asnumpy())


def test_an_optimizer_with_a_setting_that_is_no_json_is_refused_by_name():
    optimizer = mx.optimizer.SGD()
    optimizer.callback = print
    with pytest.raises(ConfigError, match="optimizer SGD: `callback` is a builtin_function_or_method"):
        updaters.describe(optimizer)


def test_strangers_are_not_imported_without_a_secret(monkeypatch):
    monkeypatch.delenv("ODSGD_SECRET", raising=False)
    with pytest.raises(ConfigError, match="subprocess.Popen is not MXNet's"):
        updaters.build({"class": "subprocess:Popen", "settings": {}}, trusted=False)


@pytest.mark.parametrize("name", ["kvstore.server.server:Server", "kvstore.server.server:main",
                                  "mxnet.optimizer:nothing"])
def test_only_optimizers_are_built(name):
    with pytest.raises(ConfigError, match="is not an optimizer; expected a subclass"):
        updaters.build({"class": name, "settings": {}}, trusted=False)


@pytest.mark.parametrize("name", ["signum", "nag", "sgd", "dcasgd_c"])
def test_a_local_momentum_of_0_is_0_whatever_the_optimizers_own_default(name):
    assert updaters.create_local(name, {"momentum": 0.0}).momentum == 0.0
    assert updaters.create_local(name, {"momentum": 0.5}).momentum == 0.5
    updaters.create_local("adam", {"momentum": 0.0})
    with pytest.raises(ConfigError, match="optimizer_local `adam` does not take these options"):
        updaters.create_local("adam", {"momentum": 0.5})


def test_an_unknown_local_optimizer_gets_the_nearest_name():
    with pytest.raises(ConfigError, match="unknown optimizer_local `dcasgd_x`; did you mean `dcasgd_"):
        updaters.create_local("dcasgd_x", {})


def test_an_option_the_local_optimizer_does_not_take_is_named():
    with pytest.raises(ConfigError, match="`sgd` does not take .*lamda"):
        updaters.create_local("sgd", {"lamda": 1})


class Subclass(mx.optimizer.SGD):
    """May look at whole parameters, for all we know."""


@pytest.mark.parametrize("optimizer, together", [
    (mx.optimizer.SGD(), True), (mx.optimizer.Adam(), True), (None, True), (mx.optimizer.create("lamb"), False),
    (mx.optimizer.create("lars"), False), (mx.optimizer.create("nadam"), False), (Subclass(), False)])
def test_only_optimizers_known_to_be_elementwise_share_buckets(optimizer, together):
    assert updaters.elementwise(optimizer) is together


# -- SGD in NumPy ------------------------------------------------------------------------------------------------------

def at_once(optimizer, weight, grad, state):
    updaters.apply_at_once(optimizer, 0, weight, grad.copy(), state, None)
    return weight


def queued_in_place(optimizer, weight, grad, state):
    updaters.queue(optimizer, 0, weight, grad, state, None, weight)
    return weight


def queued(optimizer, weight, grad, state):
    out, before = mx.nd.zeros_like(weight), [weight.asnumpy(), grad.asnumpy()]
    updaters.queue(optimizer, 0, weight, grad, state, None, out)
    out.wait_to_read()
    for array, was in zip([weight, grad], before):
        np.testing.assert_array_equal(array.asnumpy(), was)
    return out


WAYS = pytest.mark.parametrize("way", [at_once, queued_in_place, queued])


@WAYS
@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.37])
@pytest.mark.parametrize("wd", [0.0, 0.01, 1e-4])
def test_sgd_in_numpy_has_the_bits_of_mxnets(momentum, wd, way):
    random = np.random.RandomState(5)
    ours, theirs = [mx.optimizer.SGD(momentum=momentum, wd=wd) for _ in range(2)]
    ours.set_lr_mult({0: 0.7})
    theirs.set_lr_mult({0: 0.7})
    weights = [mx.nd.array(one) for one in [random.normal(size=1000)] * 2]
    states = [one.create_state_multi_precision(0, weight) for one, weight in zip((ours, theirs), weights)]
    for _ in range(50):
        ours.lr = theirs.lr = random.uniform(1e-4, 1)
        ours.rescale_grad = theirs.rescale_grad = random.choice([1.0, 1 / 3])
        grad = mx.nd.array(random.normal(size=1000))
        updaters.apply(theirs, 0, weights[1], grad, states[1], None)
        weights[0] = way(ours, weights[0], grad, states[0])
        np.testing.assert_array_equal(*[weight.asnumpy() for weight in weights])
    assert ours.num_update == theirs.num_update == 50


@pytest.mark.parametrize("name, options", [("sgd", {"clip_gradient": 0.1}), ("nag", {"momentum": 0.9}), ("adam", {})])
@WAYS
def test_other_optimizers_are_mxnets(name, options, way):
    def by_mxnet(optimizer, weight, grad, state):
        updaters.apply(optimizer, 0, weight, grad, state, None)
        return weight

    def updated(way):
        optimizer, weight = mx.optimizer.create(name, **options), mx.nd.array([1.0, -2.0, 3.0])
        state = optimizer.create_state_multi_precision(0, weight)
        return way(optimizer, weight, mx.nd.array([0.5, 1.0, -4.0]), state).asnumpy()
    np.testing.assert_array_equal(updated(by_mxnet), updated(way))
