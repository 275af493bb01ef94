"""The store in one process: Gluon's calls, mistakes, types, devices, state."""
import contextlib
import functools
import gc
import re
import weakref
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
import pytest

import kvstore
from kvstore import ConfigError, ProtocolError, RoundTimeoutError, StoreClosedError
from kvstore.engine._mxnet import NDArray, mx
from kvstore.fronts import base, sums
from kvstore.fronts.gluon.lanes import FLATS
from kvstore.fronts.gluon.legacy import LegacyStore
from kvstore.messages.seam import Ring, Saved, Transport
from kvstore.transports.in_process import Stage
from tests.jobs import take_step
from tests.scripted import ScriptedStage

autograd, gluon = mx.autograd, mx.gluon


def make(name: str = "ssgd", workers: int = 1, transport: Optional[Transport] = None,
         optimizer: Optional[Callable[[], Any]] = None, **options: Any) -> LegacyStore:
    store = kvstore.create(name, transport or Stage(workers).worker(0), **options)
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.5) if optimizer is None else optimizer())
    return store


def single(*arguments: Any, w: Sequence[float] = (4.0,), **options: Any) -> Tuple[LegacyStore, NDArray]:
    """A store that trains one array, `w`, and this array."""
    store, array = make(*arguments, **options), mx.nd.array(w)
    store.broadcast("w", array, array)
    return store, array


def path(name: str, targets: Sequence[float], iterations: int, order: Optional[Sequence[int]] = None,
         **options: Any) -> List[List[float]]:
    """Global weights after each iteration: worker m descends (w - targets[m])^2 / 2 from w = 4 with lr 1/2."""
    cluster = ScriptedStage(len(targets), order)

    def work(transport: Transport) -> List[float]:
        store, w = single(name, transport=transport, **options)
        seen: List[float] = []
        for _ in range(iterations):
            store.pushpull("w", w - targets[transport.worker_rank], w)
            with store.global_weights():
                seen.append(w.asscalar())
        return seen
    return cluster.run(work)


def test_two_workers_on_a_quadratic_follow_the_hand_computed_path() -> None:
    # f_m(w) = (w - a_m)^2 / 2, W_0 = 4, lr = 1/2, lr_local = 1/4, warmup = 0. Means of g_t: 3, 9/4, 15/16.
    # lr_local = lr would prove nothing here: synchronous SGD then walks the same path (2.5, 1.75, 1.375).
    assert path("odsgd", (0, 2), 3, lr_local=0.25, warmup=0) == [[2.5, 1.375, 0.90625]] * 2
    assert path("ssgd", (0, 2), 3) == [[2.5, 1.75, 1.375]] * 2
    assert path("delayed", (0, 2), 3) == [[2.5, 1.0, 0.25]] * 2


@pytest.mark.parametrize("name, options", [("asgd", {}), ("downpour", {}), ("easgd", {"T": 1})])
def test_all_workers_of_an_asynchronous_store_see_the_same_global_weights(name: str, options: Dict[str, Any]) -> None:
    """Worker 0 would go on to its next push before the other has fetched."""
    first, second = path(name, (0, 2), 6, **options)
    assert first == second


def elastic_path(name: str, targets: Sequence[float], iterations: int, **options: Any) -> List[List[float]]:
    """As `path`, by turns: the weights that each worker takes its next gradient at, and the centre at the end."""
    cluster = ScriptedStage(len(targets), list(range(len(targets))) * iterations)

    def work(transport: Transport) -> List[float]:
        store, w = single(name, transport=transport, T=1, alpha=0.5, **options)
        seen = []
        for _ in range(iterations):
            store.pushpull("w", w - targets[transport.worker_rank], w)
            seen.append(w.asscalar())
        with store.global_weights():
            return [*seen, w.asscalar()]
    return cluster.run(work)


def test_elastic_averaging_takes_its_gradient_before_the_elastic_move() -> None:
    # Algorithm 1, T = 1, alpha = 1/2, X = 4. x before the move -> after it, then -1/2 times the gradient at the first:
    # worker 0, target 0: 4 -> 4, 4 - 2 = 2 -> 3,   3 - 1 = 2 -> 2 5/8,   2 5/8 - 1 = 1 5/8
    # worker 1, target 3: 4 -> 4, 3 1/2 -> 3 1/4,   3 1/4 - 1/4 = 3 -> 2 13/16,   2 13/16 - 0
    # X, by turns: 3, 3 1/4, 2 5/8, 2 13/16, 2 7/32, 2 33/64.
    assert elastic_path("easgd", (0, 3), 3) == [[2.0, 2.0, 1.625, 2.515625], [3.5, 3.0, 2.8125, 2.515625]]
    # Algorithm 2, delta = 1/2: v = -2, -3/2; x = 2 -> 3, then 3/2; X = 3, 9/4; gradients at x + v/2 before the move.
    assert elastic_path("eamsgd", (0,), 2, delta=0.5) == [[1.0, 0.75, 2.25]]


@pytest.mark.parametrize("order", [[0, 1] * 3, [1, 0] * 3, [1, 0, 0, 1, 1, 0]])
def test_the_order_of_arrival_does_not_change_a_synchronous_path(order: List[int]) -> None:
    assert path("ssgd", (0, 2), 3, order) == [[2.5, 1.75, 1.375]] * 2


def test_an_order_that_cannot_happen_is_told_and_not_waited_for_ever() -> None:
    cluster = ScriptedStage(2, order=[0, 0], timeout_s=2.0)

    def work(transport: Transport) -> None:
        store, w = single(transport=transport)
        store.pushpull("w", w, w)
    with pytest.raises(RoundTimeoutError, match=r"worker 0, bucket 0 .w.: the answer|worker 1's turn"):
        cluster.run(work)


def test_one_worker_may_be_an_iteration_ahead_in_odsgd_and_not_in_ssgd() -> None:
    """The scripted order lets worker 0 send its next gradient only after both have sent this one."""
    assert path("odsgd", (0, 2), 2, [0, 1, 0, 1], lr_local=0.25, warmup=0) == [[2.5, 1.375]] * 2
    seen: List[Tuple[int, float]] = []

    def work(transport: Transport) -> None:
        store, w = single("odsgd", transport=transport, warmup=0, lr_local=0.25)
        store.pushpull("w", w, w)   # returns before worker 1 has pushed, with a local step already taken
        seen.append((transport.worker_rank, w.asscalar()))
        store.wait()
    ScriptedStage(2, order=[0, 1]).run(work)
    assert seen == [(0, 3.0), (1, 3.0)]


def test_unknown_names_and_options_are_told_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown store `odsdg`; did you mean `odsgd`\?"):
        kvstore.create("odsdg")
    with pytest.raises(ConfigError, match=r"unknown option of store odsgd `lr_locl`; did you mean `lr_local`\?"):
        kvstore.create("odsgd", lr_locl=1)


def test_a_store_outside_a_job_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DMLC_PS_ROOT_URI", "DMLC_ROLE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"\(DMLC_PS_ROOT_URI is not set\); start the script with `odsgd launch"):
        kvstore.create("ssgd")


def test_a_job_without_servers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "1",
                        "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="needs servers, and this job has none"):
        kvstore.create("ssgd")


def two_keys(store: LegacyStore) -> Dict[str, NDArray]:
    arrays = {key: mx.nd.ones(3) for key in "ab"}
    for key, array in arrays.items():
        store.broadcast(key, array, array)
    return arrays


def test_a_parameter_handed_in_twice_in_an_iteration_is_an_error() -> None:
    store = make()
    arrays = two_keys(store)
    store.pushpull("a", arrays["a"], arrays["a"])
    with pytest.raises(ProtocolError, match=r"parameter a was handed in twice in iteration 1, with others .* \(1\)"):
        store.pushpull("a", arrays["a"], arrays["a"])


@pytest.mark.parametrize("grad, out, said", [
    (20, 10, r"the gradient of w has the shape \(20,\), expected \(10,\)"),
    (10, 20, r"the array for the weights of w has the shape \(20,\), expected \(10,\)")])
def test_an_array_of_another_size_than_its_parameters_is_refused(grad: int, out: int, said: str) -> None:
    store, _ = single(w=[1.0] * 10)
    with pytest.raises(ConfigError, match=said):
        store.pushpull("w", mx.nd.ones(grad), mx.nd.ones(out))


def test_a_late_parameter_is_an_error() -> None:
    store = make()
    arrays = two_keys(store)
    store.begin()
    with pytest.raises(ConfigError, match="parameter c appears after the first step"):
        store.broadcast("c", arrays["a"], arrays["a"])


def test_what_a_closed_store_held_goes_with_it_and_waits_for_no_collector_of_cycles() -> None:
    """Which comes seldom, and meanwhile there would be the arrays of many stores."""
    store, w = single(w=[1.0] * 3)
    store.pushpull("w", w.copy(), w)
    held = [weakref.ref(one) for one in (*store.lanes, *store.session.transport.stage.shards)]  # type: ignore[attr-defined]
    gc.collect()
    gc.disable()
    try:
        store.close()
        del store
        assert len(held) == 2 and [one() for one in held] == [None, None]
    finally:
        gc.enable()


def test_a_closed_store_is_closed() -> None:
    store = make()
    two_keys(store)
    store.close()
    store.close()
    with pytest.raises(StoreClosedError, match="`ssgd` store of worker 0"):
        store.barrier()


def test_state_before_the_first_step_and_of_another_store_is_refused() -> None:
    store = make()
    with pytest.raises(ConfigError, match="worker_state before the first step"):
        store.worker_state()
    with pytest.raises(ConfigError, match=r"^save_optimizer_states \(trainer\.save_states\) before the first step"):
        store.save_optimizer_states("never written")
    with pytest.raises(ConfigError, match="the saved state is of a `odsgd` store, this one is `ssgd`"):
        store.load_state(({}, {"store": "odsgd", "iteration": 3, "lr": 0.1, "lr_local": 0.1, "arrays": {"w@0": []},
                               "facts": {"w@0": {}}, "optimizer_local": {}, "versions": {}}))


def test_workers_with_different_settings_are_told_apart() -> None:
    def work(transport: Transport) -> None:
        store = make("odsgd", transport=transport, warmup=transport.worker_rank)
        two_keys(store)
    with pytest.raises(ProtocolError) as caught:
        Stage(2).run(work)
    assert "workers 0 and 1 differ in the model and its settings" in str(caught.value)
    assert "warmup=0" in str(caught.value) and "warmup=1" in str(caught.value)


def a_trainer(transport: Transport, shapes: Dict[str, Tuple[int, ...]]) -> Any:
    """Parameters that begin with 5 and the worker's rank, as its trainer has handed them in."""
    parameters = gluon.ParameterDict()
    for name, shape in shapes.items():
        parameters.get(name, shape=shape, init=mx.init.Constant(float(transport.worker_rank + 5)),
                       dtype="float16" if name.startswith("half") else "float32")
    parameters.initialize()
    trainer = gluon.Trainer(parameters, "sgd", {}, kvstore=kvstore.create("ssgd", transport))
    trainer._init_kvstore()
    trainer._init_params()
    return parameters


def test_the_initial_weights_of_a_trainer_travel_together_and_are_worker_0_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "TOGETHER", 100)
    sizes: List[int] = []

    def work(transport: Transport) -> List[float]:
        total = transport.total
        transport.total = lambda array: sizes.append(array.size) or total(array)  # type: ignore[method-assign]
        shapes: Dict[str, Tuple[int, ...]] = {"big": (15, 10), "half": (3,), **{f"w{n}": (2, 5) for n in range(18)}}
        parameters = a_trainer(transport, shapes)
        assert {tuple(parameter.shape) for parameter in parameters.values()} == {(15, 10), (3,), (2, 5)}
        return sorted({float(value) for one in parameters.values() for value in one.data().asnumpy().reshape(-1)})
    assert Stage(2).run(work) == [[5.0], [5.0]]
    weights = sorted(sizes[4:])[-6:]  # two workers; besides, the sums with which they compare their models
    assert weights == [90, 90, 93, 93, 150, 150]


def test_constants_that_single_precision_does_not_have_keep_every_bit() -> None:
    """Where they are sent, and inside `global_weights`, which a checkpoint's weights come from."""
    constants = [np.array([[2 ** 24 + 1, 2 ** 62 + 1]]), np.array([1 / 3, 1e300]), np.array([7, 255], np.uint8)]

    def work(transport: Transport) -> List[Any]:
        mine = [values if transport.worker_rank == 0 else np.zeros_like(values) for values in constants]
        parameters = [gluon.Parameter("w", shape=(1,)), *(
            gluon.Constant(f"c{number}", mx.nd.array(one, dtype=one.dtype)) for number, one in enumerate(mine))]
        for parameter in parameters:
            parameter.initialize()
        store = kvstore.create("ssgd", transport)
        trainer = gluon.Trainer(parameters, "sgd", kvstore=store)
        take_step(trainer, lambda: parameters[0].data() * 2)
        after = [constant.data().asnumpy() for constant in parameters[1:]]
        with store.global_weights():
            return [after, [constant.data().asnumpy() for constant in parameters[1:]]]
    for seen in Stage(3).run(work):
        for arrays in seen:
            for array, constant in zip(arrays, constants):
                assert array.dtype == constant.dtype and np.array_equal(array, constant)


def test_arrays_of_a_script_hold_worker_0_s_values_at_once_one_by_one_or_as_a_list() -> None:
    def work(transport: Transport) -> List[List[float]]:
        store = make(transport=transport)
        arrays = [mx.nd.full(2, transport.worker_rank + number) for number in range(3)]
        store.broadcast("first", arrays[0], arrays[0])
        first = arrays[0].asnumpy().tolist()
        store.broadcast(["second", "third"], arrays[1:], arrays[1:])
        return [first, *(array.asnumpy().tolist() for array in arrays[1:])]
    assert Stage(2).run(work) == [[[0, 0], [1, 1], [2, 2]]] * 2


def test_lists_of_arrays_that_differ_between_workers_are_told_apart() -> None:
    def work(transport: Transport) -> None:
        store = make(transport=transport)
        arrays = [mx.nd.zeros(3), mx.nd.zeros(3 + transport.worker_rank)]
        store.broadcast(["a", "b"], arrays, arrays)
    with pytest.raises(ProtocolError, match=r"differ in their parameters; all(.|\n)*-parameter b shape \(3,\) float32"
                                            r"(.|\n)*\+parameter b shape \(4,\) float32"):
        Stage(2).run(work)


def test_an_array_that_the_caller_replaces_is_followed() -> None:
    store, w = single()
    store.pushpull("w", mx.nd.array([2.0]), w)
    other = mx.nd.zeros(1)
    store.pushpull("w", mx.nd.array([1.0]), other)
    assert (w.asscalar(), other.asscalar()) == (3.0, 2.5)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_gradients_are_summed_over_devices_and_weights_sent_to_all(devices: int) -> None:
    store = make(bucket_nbytes=16)
    contexts = [mx.cpu(i) for i in range(devices)]
    w = [mx.nd.ones((5, 2), ctx=context) * 4 for context in contexts]
    store.broadcast("w", w[0], w)
    store.pushpull("w", [mx.nd.ones((5, 2), ctx=context) * (i + 1) for i, context in enumerate(contexts)], w)
    for array in w:
        np.testing.assert_array_equal(array.asnumpy(), 4 - 0.5 * sum(range(1, devices + 1)))


def test_half_precision_parameters_are_updated_in_single_precision() -> None:
    store = make()
    w = mx.nd.ones(4, dtype="float16")
    store.broadcast("w", w, w)
    for _ in range(64):
        store.pushpull("w", mx.nd.ones(4, dtype="float16") * 2 ** -13, w)  # 1 - 2**-14 is not a half-precision number
    store.wait()
    assert w.dtype == np.float16
    np.testing.assert_array_equal(w.asnumpy(), np.float16(1 - 64 * 2 ** -14))


@pytest.mark.parametrize("name, transport", [("ssgd", "server"), ("odsgd", "server"), ("odsgd", "ring")])
def test_masters_of_a_half_precision_model_are_those_of_a_single_precision_one(name: str, transport: str) -> None:
    """With gradients that half precision holds exactly, and optimizer settings of Gluon's mixed-precision scripts."""
    def work(wire: Transport, dtype: str, multi_precision: bool) -> Tuple[np.ndarray, np.ndarray]:
        parameters = gluon.ParameterDict()
        parameters.get("w", shape=(3,), init=mx.init.One(), dtype=dtype)
        parameters.initialize()
        settings = {"learning_rate": 2.0 ** -11, "momentum": 0.5, "multi_precision": multi_precision}
        store = kvstore.create(name, wire, **({"warmup": 0} if name == "odsgd" else {}))
        trainer = gluon.Trainer(parameters, "sgd", settings, kvstore=store)
        for t in range(6):
            parameters["w"].grad()[:] = 1.0 + wire.worker_rank + t
            parameters["w"].data()._fresh_grad = True
            trainer.step(1)
        computed_on = parameters["w"].data().asnumpy()
        return store.worker_state()[0]["global/w"], computed_on

    made = []
    for dtype, multi_precision in (("float32", False), ("float16", True)):
        job = functools.partial(work, dtype=dtype, multi_precision=multi_precision)
        stage = Stage(2)
        made.append(stage.run(job, stage.ring_worker if transport == "ring" else stage.worker))
    for (single, single_on), (half, half_on) in zip(*made):
        np.testing.assert_array_equal(half, single)
        assert half.dtype == np.float32 and half_on.dtype == np.float16 and np.any(half != half.astype(np.float16))
        np.testing.assert_array_equal(half_on, single_on.astype(np.float16))


def convolutions() -> Any:
    mx.random.seed(1)
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(gluon.nn.Conv2D(16, 3, in_channels=8), gluon.nn.BatchNorm(in_channels=16), gluon.nn.Activation("relu"),
                gluon.nn.Conv2D(32, 3, in_channels=16), gluon.nn.Dense(5, in_units=32 * 16))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def convolution_path(store: str, steps: int = 4) -> List[np.ndarray]:
    net = convolutions()
    kv = None if store == "none" else kvstore.create("local", bucket_nbytes=2000)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9}, kvstore=kv)
    random = np.random.RandomState(0)
    losses = []
    for _ in range(steps):
        x, y = mx.nd.array(random.rand(4, 8, 8, 8)), mx.nd.array(random.randint(0, 5, 4))
        take_step(trainer, lambda x, y: gluon.loss.SoftmaxCrossEntropyLoss()(net(x), y), x, y, batch=4)
        losses.append(net(x).asnumpy())  # in inference mode oneDNN keeps weights in a layout of its own
    return losses


def test_a_convolutional_network_walks_gluons_own_path_to_the_bit() -> None:
    for ours, gluons in zip(convolution_path("local"), convolution_path("none")):
        np.testing.assert_array_equal(ours, gluons)


@pytest.mark.parametrize("then", [
    lambda net: None, lambda net: net.cast("float32"), lambda net: net.collect_params().reset_ctx(mx.cpu())],
    ids=["as it is", "cast", "moved"])
def test_statistics_without_gradient_are_averaged_for_evaluation_and_given_back(then: Callable[[Any], None]) -> None:
    """Also where the network has got other arrays since the first step."""
    def work(transport: Transport) -> Tuple[np.ndarray, np.ndarray]:
        net = convolutions()
        store = kvstore.create("ssgd", transport)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05}, kvstore=store)
        x = mx.nd.array(np.random.RandomState(transport.worker_rank).rand(4, 8, 8, 8))
        for _ in range(2):
            take_step(trainer, lambda x: net(x).sum(), x, batch=4)
            then(net)
        mean = net.collect_params()["net_batchnorm0_running_mean"]
        own = mean.data().asnumpy()
        with store.global_weights():
            shared = mean.data().asnumpy()
        np.testing.assert_array_equal(mean.data().asnumpy(), own)
        np.testing.assert_array_equal(store.worker_state()[0]["aux/0/net_batchnorm0_running_mean"], own)
        return own, shared
    (own_0, shared_0), (own_1, shared_1) = Stage(2).run(work)
    assert np.abs(own_0 - own_1).max() > 1e-3
    np.testing.assert_array_equal(shared_0, shared_1)
    np.testing.assert_allclose(shared_0, (own_0 + own_1) / 2, rtol=1e-6)


def test_a_frozen_convolution_is_averaged_whatever_layout_onednn_keeps_it_in() -> None:
    net = convolutions()
    net[0].weight.grad_req = "null"
    net(mx.nd.ones((4, 8, 8, 8))).wait_to_read()  # inference may reorder weights in place
    store = kvstore.create("local")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05}, kvstore=store)
    take_step(trainer, lambda: net(mx.nd.ones((4, 8, 8, 8))).sum(), batch=4)
    before = net[0].weight.data().asnumpy()
    net(mx.nd.ones((4, 8, 8, 8))).wait_to_read()
    with store.global_weights():
        np.testing.assert_array_equal(net[0].weight.data().asnumpy(), before)


def test_two_trainers_share_a_job() -> None:
    """As in a GAN: two stores on one cluster's transports do not meet."""
    cluster = Stage(1)
    first, second = make(transport=cluster.worker(0)), make(transport=cluster.worker(0))
    for store, start in ((first, 4.0), (second, 8.0)):
        w = mx.nd.array([start])
        store.broadcast("w", w, w)
        store.pushpull("w", mx.nd.array([1.0]), w)
        assert w.asscalar() == start - 0.5


def test_trainer_saves_and_loads_optimizer_states(tmp_path: Path) -> None:
    def train(steps: int, load: Optional[str] = None, weights: float = 4.0) -> Tuple[str, float]:
        net = gluon.nn.Dense(1, in_units=1, use_bias=False, prefix="net_")
        net.initialize(mx.init.Constant(weights))
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9},
                                kvstore=kvstore.create("local"))
        if load:
            trainer.load_states(load)
        for _ in range(steps):
            take_step(trainer, lambda x: net(x) ** 2, mx.nd.ones((1, 1)))
        file = str(tmp_path / f"states-{steps}")
        trainer.save_states(file)
        return file, net.weight.data().asscalar()
    file, middle = train(3)
    _, resumed = train(2, file, middle)
    _, straight = train(5)
    assert resumed == straight


def stepping(store: Any, optimizer: Any = "sgd", **params: Any) -> Tuple[Any, Any, Callable[[], float]]:
    """A weight, its trainer, and a step of both by a gradient of 1."""
    net = gluon.nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.Constant(4.0))
    return (net, *trained(net, store, optimizer, **params))


def trained(net: Any, store: Any, optimizer: Any = "sgd", **params: Any) -> Tuple[Any, Callable[[], float]]:
    trainer = gluon.Trainer(net.collect_params(), optimizer, params, kvstore=store)

    def step() -> float:
        take_step(trainer, net, mx.nd.full((2, 1), 1.0), batch=2)
        return float(net.weight.data().asnumpy()[0, 0])

    return trainer, step


@pytest.mark.parametrize("optimizer, options, said", [
    ("adam", {}, "`odsgd` takes local steps by sgd at the rate of adam, which are far smaller than adam's own, so"),
    ("adam", {"optimizer_local": "adam"}, ""),
    ("adam", {"optimizer_local": "none"}, ""),
    ("adam", {"lr_local": 0.1}, ""),
    ("nag", {}, ""),
    ("lars", {}, ""),  # plain steps at its rate are far larger
])
def test_local_steps_that_are_next_to_none_are_told_of_once(capfd: pytest.CaptureFixture[str], optimizer: str,
                                                            options: Dict[str, Any], said: str) -> None:
    _, _, step = stepping(kvstore.create("odsgd", transport=Stage(1).worker(0), **options), optimizer)
    step()
    step()
    told = capfd.readouterr().err
    assert told.count("warning") == bool(said) and said in told
    assert not said or told.endswith('make the store with optimizer_local="adam", or give lr_local\n')


def test_a_trainer_goes_on_with_the_optimizer_that_its_store_is_given() -> None:
    """It divides by the batch, and sets rates, on that one."""
    store = kvstore.create("local")
    _, trainer, step = stepping(store, learning_rate=0.5)
    assert step() == 3.5
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.25, momentum=0.5))
    assert (trainer.learning_rate, step(), step()) == (0.25, 3.25, 2.875)
    trainer.set_learning_rate(1.0)
    assert step() == 2.875 - 0.1875 - 1


def test_trainers_that_share_an_optimizer_have_each_their_own_network() -> None:
    kvstore.register()
    shared, store = mx.optimizer.SGD(learning_rate=0.5), kvstore.create("local")
    (net, _, step), (other, _, steps_too) = stepping(store, shared), stepping(kvstore.create("local"), shared)
    alone, _, steps_alone = stepping(None, shared)
    alone.weight.lr_mult = 0.5
    assert (step(), steps_too(), steps_too(), steps_alone()) == (3.5, 3.5, 3.0, 3.75)
    with store.global_weights():
        assert (net.weight.data().asscalar(), other.weight.data().asscalar()) == (3.5, 3.0)
    assert f"global/{net.weight.name}" in store.worker_state()[0]


def test_local_steps_have_the_settings_of_the_first_step() -> None:
    """Which may be others than when the store got the optimizer, here as `load_states` gives it."""
    _, trainer, step = stepping(kvstore.create("odsgd", Stage(1).worker(0), warmup=0), learning_rate=0.5)
    trainer._init_kvstore()
    trainer.optimizer.wd = 0.5
    assert step() == 4 - 0.5 * (1 + 0.5 * 4)


def test_what_a_trainer_may_not_do_after_the_first_step_is_one_line() -> None:
    store = kvstore.create("local")
    net, _, step = stepping(store)
    step()
    with pytest.raises(ConfigError, match="for other parameters: this store trains those it began with"):
        stepping(store)[2]()
    net.weight.set_data(mx.nd.ones((1, 1)))
    with pytest.raises(ConfigError, match=r"parameters were set after the first step \(set_data, load_parameters\)"):
        step()


def test_weights_that_are_set_after_the_last_step_are_not_taken_for_the_global_ones() -> None:
    store = kvstore.create("local")
    net, _, step = stepping(store)
    step()
    net.weight.set_data(mx.nd.ones((1, 1)))
    for look in (store.global_weights().__enter__, store.worker_state):
        with pytest.raises(ConfigError, match=r"parameters were set after the first step"):
            look()
    assert float(net.weight.data().asnumpy()[0, 0]) == 1.0


@pytest.mark.parametrize("renew", [lambda net: net.collect_params().reset_ctx(mx.cpu(1)),
                                   lambda net: net.initialize(mx.init.One(), force_reinit=True)])
def test_global_weights_are_shown_in_the_arrays_that_a_network_has_now(renew: Callable[[Any], None]) -> None:
    store = kvstore.create("odsgd", Stage(1).worker(0), warmup=0, lr_local=0.5)
    net, _, step = stepping(store, learning_rate=0.25)
    step()
    renew(net)
    with store.global_weights():
        assert net.weight.list_data()[0].asscalar() == 3.75
    assert net.weight.list_data()[0].asscalar() == 3.5


def test_a_network_that_was_cast_after_the_first_step_asks_for_a_new_store() -> None:
    store = kvstore.create("local")
    net, _, step = stepping(store)
    step()
    net.cast("float16")
    said = f"the array for the weights of {net.weight.name} is float16, and was float32 before; after you cast"
    with pytest.raises(ConfigError, match=said):
        store.global_weights().__enter__()


@pytest.mark.parametrize("saved_first", [False, True])
def test_a_closed_store_leaves_own_weights_of_which_a_script_that_saves_them_is_told(saved_first: bool) -> None:
    """Unless it has loaded what it saved as the global ones."""
    store = kvstore.create("odsgd", Stage(1).worker(0), warmup=0)
    net, _, step = stepping(store)
    step()
    store.close()
    if saved_first:
        net.weight.set_data(mx.nd.ones((1, 1)))
    assert store.holds_own([net.weight.name]) != saved_first


def test_two_trainers_of_one_store_are_told_apart() -> None:
    store = kvstore.create("local")
    net, _, step = stepping(store)
    step()
    with pytest.raises(ConfigError, match=r"^a second trainer was made with this store for the same network"):
        trained(net, store)[1]()
    store = kvstore.create("local")
    first, (_, _, second_steps) = stepping(store), stepping(store)
    first[1]._init_kvstore()
    first[1]._init_params()
    with pytest.raises(ConfigError, match=r"^set_optimizer for other parameters: this store has those of another"):
        second_steps()


@pytest.mark.parametrize("options, own", [({"H": 1}, False), ({"H": 1, "mix": 0.5}, True), ({"H": 2}, True)])
def test_parameters_hold_a_workers_own_weights_between_exchanges_and_after_one_with_a_mix(
        options: Dict[str, Any], own: bool) -> None:
    store = kvstore.create("diloco", Stage(1).worker(0), **options)
    net, _, step = stepping(store)
    step()
    assert store.holds_own([net.weight.name]) == own


def test_a_store_that_takes_a_network_over_tells_what_is_lost(capfd: pytest.CaptureFixture[str]) -> None:
    stores = [kvstore.create("local"), *(kvstore.create(name, Stage(1).worker(0)) for name in ("easgd", "ssgd"))]
    net, _, step = stepping(stores[0])
    step()
    for store, lost in zip(stores[1:], (False, True)):
        capfd.readouterr()
        trained(net, store)[1]()
        assert ("another store, `easgd`, has trained this network" in capfd.readouterr().err) == lost
    assert not stores[1].holds_own([net.weight.name]) and stores[1].shows_own
    with pytest.raises(ConfigError, match=f"^the global weights of this `easgd` store are old: another store has "
                                          f"trained {net.weight.name} since"):
        stores[1].global_weights().__enter__()
    easgd = kvstore.create("easgd", Stage(1).worker(0))
    net, _, step = stepping(easgd)
    step()
    net.weight.set_data(mx.nd.ones((1, 1)))  # what has been saved, say
    capfd.readouterr()
    trained(net, kvstore.create("local"))[1]()
    assert "another store" not in capfd.readouterr().err


def test_a_parameter_that_had_no_gradient_in_the_first_step_is_named() -> None:
    store = kvstore.create("local")
    net = gluon.nn.Dense(1, in_units=1)
    net.initialize()
    net.bias.grad_req = "null"
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=store)
    for grad_req, error in (("null", None), ("write", f"pushpull of {net.bias.name}, which had no gradient in")):
        net.bias.grad_req = grad_req
        with pytest.raises(ConfigError, match=error) if error else contextlib.nullcontext():
            take_step(trainer, net, mx.nd.ones((1, 1)))


@pytest.mark.parametrize("change, said", [
    (lambda net, trainer: setattr(trainer.optimizer, "wd", 0.5), "wd from 0.0 to 0.5"),
    (lambda net, trainer: setattr(trainer.optimizer, "momentum", 0.5), "momentum from 0.0 to 0.5"),
    (lambda net, trainer: setattr(trainer.optimizer, "clip_gradient", 0.5), "clip_gradient from None to 0.5"),
    (lambda net, trainer: setattr(net.weight, "lr_mult", 0.0), r"dense\d+_weight from \(1.0, 1.0\) to \(0.0, 1.0\)"),
    (lambda net, trainer: trainer.optimizer.set_lr_mult({0: 0.5}), r"lr_mult from \{\} to \{0: 0.5\}")])
def test_settings_that_change_after_the_first_step_are_told(change: Callable[[Any, Any], None], said: str) -> None:
    """Servers would go on with the old ones."""
    net, trainer, step = stepping(kvstore.create("local"))
    step()
    trainer.set_learning_rate(0.25)
    step()
    change(net, trainer)
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"^iteration 3 has not taken place: the optimizer's settings have "
                                              f"changed, {said}"):
            step()


def test_a_step_that_settings_have_broken_off_is_taken_with_the_optimizer_that_is_given_then() -> None:
    store = kvstore.create("local")
    _, trainer, step = stepping(store, learning_rate=0.5)
    step()
    trainer.optimizer.wd = 0.5
    with pytest.raises(ConfigError, match=r"give a new optimizer to store\.set_optimizer"):
        step()
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.5, wd=0.5))
    assert step() == 3.5 - 0.5 * (1 + 0.5 * 3.5)


def test_global_weights_before_the_first_step_are_those_of_worker_0_and_none_takes_a_step_inside() -> None:
    def work(transport: Transport) -> List[float]:
        store, w = make(transport=transport), mx.nd.array([float(transport.worker_rank)])
        store.broadcast("w", mx.nd.array([4.0 + transport.worker_rank]), w)
        with store.global_weights():
            seen = [w.asscalar()]
            with pytest.raises(ProtocolError, match=r"^a step inside `with store.global_weights"):
                store.pushpull("w", w, w)
        store.pushpull("w", w, w)
        return [*seen, w.asscalar()]

    assert Stage(2).run(work) == [[4.0, 2.0]] * 2


def test_adamw_clips_gradients_as_the_optimizers_of_mxnet_do() -> None:
    def walk(grads: Sequence[float], **options: Any) -> float:
        store, w = single(optimizer=lambda: mx.optimizer.create("adamw", learning_rate=0.5, **options))
        for grad in grads:
            store.pushpull("w", mx.nd.array([grad]), w)
        return float(w.asscalar())

    assert walk([0.25, -2.0], clip_gradient=0.5) == walk([0.25, -0.5]) != walk([0.25, -2.0])


def test_arrays_of_mxnets_numpy_are_refused_in_one_line() -> None:
    store, w = make(), mx.np.ones(1)
    with pytest.raises(ConfigError, match=r"^parameter w is one of MXNet's NumPy arrays \(npx.set_np\(\)\)"):
        store.broadcast("w", w, w)


def test_a_layer_that_is_frozen_after_the_first_step_asks_for_a_new_store() -> None:
    net = gluon.nn.Sequential(prefix="net_")
    with net.name_scope():
        net.add(gluon.nn.Dense(1, in_units=1), gluon.nn.Dense(1, in_units=1))
    net.initialize(mx.init.One())

    def trainer() -> Any:
        return gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kvstore.create("local"))

    def step(by: Any) -> List[float]:
        take_step(by, net, mx.nd.ones((1, 1)))
        return [layer.weight.data().asscalar() for layer in net]

    first = trainer()
    before = step(first)
    net[0].collect_params().setattr("grad_req", "null")
    assert step(first) == before
    with pytest.raises(ConfigError, match=r"iteration 2 has not taken place: net_dense0_bias had a gradient in the "
                                          r"first step and has none now .* make a new store and a new trainer"):
        step(first)
    after = step(trainer())
    assert after[0] == before[0] and after[1] < before[1]


def test_what_the_trainer_can_ask_for_and_a_store_cannot_do_is_told() -> None:
    def trainer(**options: Any) -> Any:
        net = gluon.nn.Dense(1, in_units=1)
        net.initialize()
        made = gluon.Trainer(net.collect_params(), "sgd", kvstore=kvstore.create("local"), **options)
        with autograd.record():
            loss = net(mx.nd.ones((1, 1)))
        loss.backward()
        return made
    with pytest.raises(ConfigError, match="compression_params has no `type`; expected"):
        trainer(compression_params={"threshold": 0.5}).step(1)
    with pytest.raises(ConfigError, match="unknown entry of compression_params `treshold`; did you mean `threshold`"):
        trainer(compression_params={"type": "2bit", "treshold": 0.5}).step(1)
    with pytest.raises(ConfigError, match="unknown codec `4bit`"):
        trainer(compression_params={"type": "4bit"}).step(1)


def test_gradient_compression_of_mxnet_is_a_codec() -> None:
    net = gluon.nn.Dense(1, in_units=1)
    net.initialize(mx.init.Constant(1.0))
    store = kvstore.create("local")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, kvstore=store,
                            compression_params={"type": "2bit", "threshold": 0.25})
    seen = []
    for _ in range(4):
        take_step(trainer, lambda x: 0.125 * net(x), mx.nd.ones((1, 1)))
        seen.append(net.weight.data().asscalar())
    assert seen == [1.0, 0.75, 0.75, 0.5]  # of every two gradients one is sent, as large as both
    assert (store.options.codec, store.options.codec_threshold) == ("2bit", 0.25)
    again = kvstore.create("ssgd", Stage(1).worker(0), codec="2bit", codec_threshold=0.25)
    for compression, threshold in (({"type": "2bit", "threshold": 0.5}, 0.5), ({"type": "2bit", "threshold": 2.0}, 2.0),
                                   ({"type": "none", "threshold": 0.5}, 0.5)):
        again.set_gradient_compression(compression)
        assert (again.options.codec, again.options.codec_threshold) == (compression["type"], threshold)
    with pytest.raises(ConfigError, match="set_gradient_compression after the first step; make a new store"):
        store.set_gradient_compression({"type": "1bit"})
    (arrays, _), counted = store.worker_state(), store.memory()
    assert {name for name in arrays if "wire" in name} == {f"wire/residual/{name}" for name in net.collect_params()}
    assert counted["residual: what the codec has left of the gradients"] == 8


# -- without servers -------------------------------------------------------------------------------------------------

def ring_path(name: str, targets: Sequence[float], iterations: int, optimizer: Optional[Callable[[], Any]] = None,
              **options: Any) -> List[List[Tuple[float, float]]]:
    """As `path`, on a ring; beside each iteration's global weights, the worker's own."""
    cluster = Stage(len(targets))

    def work(transport: Transport) -> List[Tuple[float, float]]:
        store, w = single(name, transport=transport, optimizer=optimizer, **options)
        seen: List[Tuple[float, float]] = []
        for _ in range(iterations):
            store.pushpull("w", w - targets[transport.worker_rank], w)
            own = w.asscalar()
            with store.global_weights():
                seen.append((w.asscalar(), own))
            assert w.asscalar() == own
        return seen
    return cluster.run(work, cluster.ring_worker)


def test_an_interval_of_sasgd_follows_the_hand_computed_path_and_evaluation_leaves_it_alone() -> None:
    # lr 1/2, gamma_p = 1/4 = lr / 2: the mean of the workers' weights. w_0 = 4, targets 0 and 2.
    # worker 0: 4 -> 2 -> 1 -> 1/2, gradients 4, 2, 1; worker 1: 4 -> 3 -> 5/2 -> 9/4, gradients 2, 1, 1/2.
    assert ring_path("sasgd", (0, 2), 4, T=3) == [
        [(2.5, 2.0), (1.75, 1.0), (1.375, 1.375), (1.1875, 0.6875)],
        [(2.5, 3.0), (1.75, 2.5), (1.375, 1.375), (1.1875, 1.6875)]]
    assert ring_path("sasgd", (0, 2), 3, T=3, gamma_p=0.125, lr_local=0.5)[0][2] == (4 - 10.5 / 8, 4 - 10.5 / 8)


@pytest.mark.parametrize("in_scheduler", [False, True])
def test_a_given_rate_of_aggregation_follows_the_schedule_of_the_local_steps(in_scheduler: bool) -> None:
    # All gradients 1, T = 1, two workers: x moves by -2 gamma_p = 1/8, and by half when lr is halved at t = 2.
    def work(transport: Transport, first: int = 0) -> List[float]:
        optimizer = mx.optimizer.SGD(learning_rate=0.5)
        if in_scheduler:  # which has the rate alone
            optimizer = mx.optimizer.SGD(lr_scheduler=mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.5))
        store, w = single("sasgd", transport=transport, optimizer=lambda: optimizer, gamma_p=0.0625)
        seen = []
        for t in range(4):
            if t == 2 and not in_scheduler:
                optimizer.set_learning_rate(0.25)
            store.pushpull("w", mx.nd.ones(1), w)
            seen.append(w.asscalar())
        return seen
    cluster = Stage(2)
    assert cluster.run(work, cluster.ring_worker) == [[3.875, 3.75, 3.6875, 3.625]] * 2


@pytest.mark.parametrize("given, weights", [(0.5, [3.9, 3.7, 3.6]),
                                            (0.0, "that rate was 0 when the optimizer was made; make it with")])
def test_a_schedule_that_begins_before_the_first_step_is_a_factor_of_the_trainers_own_rate(given: float, weights: Any
                                                                                          ) -> None:
    # Gradients 1, T = 1, gamma_p = 0.2: the rate is half of the given one in the first step, and then the given one.
    def work(transport: Transport) -> List[float]:
        net = gluon.nn.Dense(1, in_units=1, use_bias=False)
        net.initialize(mx.init.Constant(4))
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": given},
                                kvstore=kvstore.create("sasgd", transport, gamma_p=0.2))
        seen = []
        for rate in (0.25, 0.5, 1.0):
            if rate == 1.0:  # another optimizer's own rate, with a schedule of its own
                trainer._kvstore.set_optimizer(mx.optimizer.SGD(learning_rate=2.0))
            trainer.set_learning_rate(rate)
            take_step(trainer, net, mx.nd.ones((1, 1)))
            seen.append(net.weight.data().asscalar())
        return seen

    kvstore.register()
    cluster = Stage(1)
    if given:
        assert cluster.run(work, cluster.ring_worker) == [pytest.approx(weights)]
    else:
        with pytest.raises(ConfigError, match=weights):
            cluster.run(work, cluster.ring_worker)


def test_noise_that_each_worker_draws_is_refused_where_all_take_the_same_steps() -> None:
    with pytest.raises(ConfigError, match="SGLD draws noise on each"):
        ring_path("dsync", (0, 2), 1, optimizer=mx.optimizer.SGLD)


def test_pipe_sgd_follows_the_hand_computed_path() -> None:
    # Means of gradients at w: w - 1. K = 3: two iterations wait for their sums; then each lacks the last two.
    seen = [own for _, own in ring_path("pipesgd", (0, 2), 5, K=3)[0]]
    assert seen == [4.0, 4.0, 2.5, 1.0, -0.5]
    assert [own for _, own in ring_path("pipesgd", (0, 2), 5, K=3, warmup=2)[1]] == [2.5, 1.75, 1.75, 1.75, 1.375]
    assert [own for _, own in ring_path("dsync", (0, 2), 3)[1]] == [2.5, 1.75, 1.375]


def test_acco_follows_the_hand_computed_path() -> None:
    """Gradients at w: w - m, and 1 more in the second iteration of two. W_0 = 4, rate 1/2.

        theta       g~ there    guess   g       theta then
        4           3           2.5     4       4 - 3.5 / 2         = 2.25
        2.25        1.5         1.5     2.25    2.25 - 1.875 / 2    = 1.3125
    """
    def work(transport: Transport) -> List[float]:
        store, w = single("acco", transport=transport, optimizer=lambda: mx.optimizer.SGD(learning_rate=0.5))
        seen = []
        for t in range(5):
            store.pushpull("w", w - 2 * transport.worker_rank + t % 2, w)
            seen.append(w.asscalar())
        return seen
    cluster = Stage(2)
    assert cluster.run(work, cluster.ring_worker) == [[4.0, 2.5, 2.25, 1.5, 1.3125]] * 2


def test_momentum_waits_for_the_first_sum_and_a_rate_goes_with_its_gradient() -> None:
    def momentum() -> Any:
        return mx.optimizer.SGD(learning_rate=0.5, momentum=0.5, wd=0.5)

    pipe = [own for _, own in ring_path("pipesgd", (0, 2), 4, momentum)[0]]
    delayed = [own for _, own in ring_path("delayed", (0, 2), 4, momentum)[0]]
    assert pipe == delayed and pipe[0] == 4.0 and len(set(pipe)) == 4


def test_trainers_with_different_learning_rates_are_told_apart_at_the_next_evaluation() -> None:
    rates = iter([0.5, 0.25])
    with pytest.raises(ProtocolError, match="differ in the learning rates of the global weights") as caught:
        ring_path("dsync", (0, 2), 1, lambda: mx.optimizer.SGD(
            lr_scheduler=mx.lr_scheduler.FactorScheduler(1, base_lr=next(rates))))
    assert "the last one: 0.5" in str(caught.value) and "the last one: 0.25" in str(caught.value)


def test_rates_that_differed_once_are_told_apart_though_the_last_ones_agree() -> None:
    def work(transport: Transport) -> None:
        optimizer = mx.optimizer.SGD(learning_rate=0.5)
        store, w = single("dsync", transport=transport, optimizer=lambda: optimizer)
        for rate in (0.25 if transport.worker_rank else 0.5, 0.5):
            optimizer.lr = rate
            store.pushpull("w", w - 1, w)
        with store.global_weights():
            pass

    cluster = Stage(2)
    with pytest.raises(ProtocolError, match="all so far, as a checksum"):
        cluster.run(work, cluster.ring_worker)


@pytest.mark.parametrize("name, options", [("sasgd", {"T": 3}), ("pipesgd", {"K": 3}), ("acco", {}),
                                           ("odsgd", {"warmup": 2})])
def test_a_ring_goes_on_from_a_saved_state_to_the_same_bits(name: str, options: Dict[str, Any]) -> None:
    def run(steps: int, saved: Sequence[Optional[Tuple[Saved, Saved]]] = (None, None)) -> List[Any]:
        cluster = Stage(2)

        def work(transport: Transport) -> Tuple[List[Any], Tuple[Saved, Saved]]:
            state = saved[transport.worker_rank]
            store = make(name, transport=transport, optimizer=lambda: mx.optimizer.SGD(learning_rate=0.3), **options)
            w = mx.nd.array([4.0] if state is None else state[0][0]["local/w"])
            if state is not None:
                store.load_state(*state)
            store.broadcast("w", w, w)
            store.begin()
            seen: List[Any] = []
            for step in range(steps + 1):
                with store.global_weights():
                    seen.append((w.asscalar(), store.iteration))
                seen.append(w.asscalar())
                if step < steps:
                    store.pushpull("w", w - store.iteration - transport.worker_rank, w)
            return seen, (store.worker_state(), store.server_state())
        return cluster.run(work, cluster.ring_worker)

    whole, first = run(9), run(5)
    rest = run(4, [state for _, state in first])
    for worker in range(2):
        assert first[worker][0][:-2] + rest[worker][0] == whole[worker][0]


def test_local_rates_of_sasgd_may_differ_between_workers_where_they_are_not_its_gamma_p_too() -> None:
    def work(transport: Transport, gamma_p: Optional[float]) -> float:
        store, w = single("sasgd", transport=transport, gamma_p=gamma_p)
        store.lr_local = 0.5 / (1 + transport.worker_rank)
        store.pushpull("w", w - 1, w)
        with store.global_weights():
            seen: float = w.asscalar()
        return seen

    cluster = Stage(2)
    assert cluster.run(lambda transport: work(transport, 0.25), cluster.ring_worker) == [2.5, 2.5]
    cluster = Stage(2)
    with pytest.raises(ProtocolError, match="differ in the learning rates of the global weights"):
        cluster.run(lambda transport: work(transport, None), cluster.ring_worker)


def test_a_store_and_a_transport_that_do_not_go_together_are_told() -> None:
    cluster = Stage(1)
    with pytest.raises(ConfigError, match="store pipesgd runs on transport ring, not on `server`"):
        kvstore.create("pipesgd", cluster.worker(0))
    with pytest.raises(ConfigError, match="runs on transport server or sharded, not on `ring`"):
        kvstore.create("ssgd", cluster.ring_worker(0))
    with pytest.raises(ConfigError, match=r"unknown transport of store [a-z]+ `rign`; did you mean `ring`\?"):
        kvstore.create("odsgd", transport="rign")
    with pytest.raises(ConfigError, match="store ssgd runs on transport server or sharded, not on `ring`"):
        kvstore.create("ssgd", transport="ring")
    with pytest.raises(ConfigError, match="store pipesgd runs on transport ring, not on `server`"):
        kvstore.create("pipesgd", transport="server")
    assert isinstance(kvstore.create("odsgd", cluster.ring_worker(0)).session.transport, Ring)


def test_a_ring_sends_what_the_codec_of_the_store_leaves_of_a_gradient() -> None:
    # The gradient 1 + 2^-10 keeps 7 bits of its mantissa: 1. Added to the other's it is 2 + 2^-10, of which 2 is left.
    target = 3 - 2 ** -10
    assert ring_path("pipesgd", (target, target), 1, K=1)[0][0][1] == 4 - 0.5 * (1 + 2 ** -10)
    assert ring_path("pipesgd", (target, target), 1, K=1, codec="truncate")[0][0][1] == 3.5


@pytest.mark.parametrize("name, options, said", [
    ("sasgd", {"T": 0}, "store sasgd: T: expected a whole number, 1 or more and below 2^31, got `0`"),
    ("sasgd", {"T": 2.5}, "store sasgd: T: expected a whole number, 1 or more and below 2^31, got `2.5`"),
    ("pipesgd", {"K": 0}, "store pipesgd: K: expected a whole number, 1 or more and below 2^31, got `0`"),
    ("sasgd", {"gamma_p": -1}, "store sasgd: gamma_p: expected a number, at least 0, got `-1`"),
    ("pipesgd", {"warmup": -1}, "store pipesgd: warmup: expected iterations (200) or epochs (2epochs), got `-1`"),
    ("odsgd", {"warmup": -1}, "store odsgd: warmup: expected iterations (200) or epochs (2epochs), got `-1`"),
    ("ssgd", {"warmup": 1}, "unknown option of store ssgd `warmup`"),
    ("pipesgd", {"warmup": "1epoch"}, "store pipesgd: `1epoch`: only a training run knows how long an epoch is"),
    ("pipesgd", {"codec": "zip"}, "store pipesgd: codec: unknown codec `zip`"),
    ("dsync", {"K": 2}, "unknown option of store dsync `K`"),
    ("dsync", {"bucket_nbytes": 0},
     "store dsync: bucket_nbytes: expected a whole number, 1 or more and below 2^31, got `0`"),
    ("dsync", {"timeout_s": 0}, "store dsync: timeout_s: expected a number, above 0 and at most 2e+06, got `0`"),
    ("softsync", {"modulate": 1}, "store softsync: modulate: expected true or false, got `1`"),
    ("easgd", {"alpha": 0.5, "beta": 0.5}, "store easgd: beta has no meaning beside alpha; leave one of them out"),
    ("odsgd", {"optimizer_local": "none", "lr_local": 1.0}, "lr_local has no meaning with optimizer_local `none`"),
    ("odsgd", {"optimizer_local": "sgd", "lamda": 1.0}, "lamda goes with optimizer_local dcasgd_c or dcasgd_a"),
])
def test_an_option_that_cannot_be_is_told_before_anything_starts(name: str, options: Dict[str, Any],
                                                                 said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kvstore.create(name, **options)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_sasgd_takes_no_other_optimizer() -> None:
    for optimizer in (mx.optimizer.SGD(momentum=0.9), mx.optimizer.Adam(), mx.optimizer.SGD(clip_gradient=1)):
        with pytest.raises(ConfigError, match="store `sasgd` takes SGD steps of its own"):
            make("sasgd", transport=Stage(1).ring_worker(0), optimizer=lambda: optimizer)  # noqa: B023


@pytest.mark.parametrize("name", ["dsync", "odsgd"])
def test_optimizer_states_of_worker_0_reach_every_worker_of_a_ring(tmp_path: Path, name: str) -> None:
    file = str(tmp_path / "states")
    options = {} if name == "dsync" else {"warmup": 100}

    def run(steps: int, start: float, load: bool = False, save: bool = False) -> List[float]:
        cluster = Stage(2)

        def work(transport: Transport) -> float:
            store = make(name, transport=transport, optimizer=lambda: mx.optimizer.SGD(learning_rate=0.5, momentum=0.5),
                         bucket_nbytes=8, **options)
            w = mx.nd.array([start] * 5)
            if load and transport.worker_rank == 0:
                store.load_optimizer_states(file)
            store.broadcast("w", w, w)
            for _ in range(steps):
                store.pushpull("w", w - transport.worker_rank, w)
            store.wait()
            if save and transport.worker_rank == 0:
                store.save_optimizer_states(file)
            return float(w.asnumpy()[0])
        return cluster.run(work, cluster.ring_worker)
    middle = run(3, 4.0, save=True)[0]
    assert run(2, middle, load=True) == run(5, 4.0) != run(2, middle)


def test_a_schedule_may_come_and_go_between_two_steps() -> None:
    optimizer = mx.optimizer.SGD(learning_rate=0.5)
    store, w = single(optimizer=lambda: optimizer)
    seen = []
    for schedule in (None, mx.lr_scheduler.FactorScheduler(1, 0.5, base_lr=0.5), None):
        optimizer.lr_scheduler = schedule
        store.pushpull("w", mx.nd.ones(1), w)
        seen.append(w.asscalar())
    assert seen == [3.5, 3.25, 2.75]


def test_global_weights_before_there_are_any_name_what_is_missing() -> None:
    store = kvstore.create("ssgd", Stage(1).worker(0))
    for _ in range(2):
        with pytest.raises(ConfigError, match="nothing has been trained with this `ssgd` sto"), store.global_weights():
            pass
        store.set_optimizer(mx.optimizer.SGD())


@pytest.mark.parametrize("name, options", [("downpour", {"T": 2}), ("easgd", {"T": 2}), ("diloco", {"H": 2})])
def test_global_weights_between_two_exchanges_say_what_they_lack(
        capsys: pytest.CaptureFixture[str], name: str, options: Dict[str, Any]) -> None:
    store, w = single(name, **options, w=[1.0])
    lacks = []
    for _ in range(3):
        store.pushpull("w", mx.nd.ones(1), w)
        with store.global_weights():
            lacks += re.findall(r"lack (\d) step since the last exchange \(iteration (\d)\)",
                                capsys.readouterr().err)
    assert lacks == [("1", "0")]  # once


def test_global_weights_of_sasgd_lack_nothing_between_two_exchanges(capsys: pytest.CaptureFixture[str]) -> None:
    store, w = single("sasgd", transport=Stage(1).ring_worker(0), T=4)
    store.pushpull("w", mx.nd.ones(1), w)
    with store.global_weights():
        assert w.asscalar() == 3.5 and not capsys.readouterr().err


def test_states_of_an_optimizer_that_steps_on_workers_are_not_the_stores_to_load(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base.warn_once.cache_clear()  # which warns once
    store, file = make("diloco", H=1), str(tmp_path / "states")
    w = two_keys(store)
    store.pushpull(list(w), list(w.values()), list(w.values()))
    for _ in range(2):
        store.save_optimizer_states(file)
    assert capsys.readouterr().err.count("saved optimizer states alone will not continue this `diloco` run in") == 1
    with pytest.raises(ConfigError, match="do not continue a `diloco` run, which keeps more than them"):
        store.load_optimizer_states(file)


@pytest.mark.parametrize("name", ["sasgd", "pipesgd"])
def test_optimizer_states_alone_do_not_continue_what_keeps_more(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"do not continue a `{name}` run"):
        make(name, transport=Stage(1).ring_worker(0)).load_optimizer_states(str(tmp_path / "none"))


def test_a_ring_has_no_counts_of_staleness() -> None:
    store = make("dsync", transport=Stage(1).ring_worker(0))
    two_keys(store)
    store.begin()
    with pytest.raises(ConfigError, match="statistics are for asynchronous stores"):
        store.statistics()


def test_weights_that_come_in_ever_new_arrays_are_not_all_kept() -> None:
    """As from a method that returns `w - lr * grad`, a new array in each iteration."""
    store = make()
    arrays = two_keys(store)
    store.begin()
    for t in range(5 * FLATS):
        for lane in store.lanes:
            lane.show(mx.nd.ones(lane.bucket.size) * t)
            assert len(lane._scattering[0]._kept) <= FLATS
            assert arrays["a"].asnumpy().tolist() == [t] * 3


def test_a_snapshot_is_of_its_time_and_no_affair_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store, net = make("asgd"), gluon.nn.BatchNorm(in_channels=1, momentum=0.0)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, kvstore=store)

    def step(*x: float) -> None:
        take_step(trainer, lambda: net(mx.nd.array(x).reshape(-1, 1)).sum())

    def held() -> List[float]:
        return [net.beta.data().asscalar(), net.running_mean.data().asscalar()]

    step(1, 3)
    then = store.snapshot()
    step(5, 9, 10)
    for _ in range(2):
        with store.showing(then):
            assert held() == [-1.0, 2.0]
            with store.showing(store.snapshot()):
                assert held() == [-2.5, 2.0]
            assert held() == [-1.0, 2.0] and not store.holds_own([net.beta.name])
            net.running_mean.data()[:] = 7
            with store.showing(store.snapshot()):
                pass
            assert held() == [-1.0, 7.0]
        assert held() == [-2.5, 8.0] and store.holds_own([net.beta.name])
    with pytest.raises(KeyError), store.showing(then._replace(aux={})):
        pass
    assert held() == [-2.5, 8.0] and store.holds_own([net.beta.name])
    with monkeypatch.context() as patched, pytest.raises(KeyError, match="way back"), store.showing(then):
        patched.setattr(store, "_set_aux", lambda aux: aux["way back"])
    step(1, 3)
    synchronous, _ = single()
    synchronous.begin()
    with pytest.raises(ConfigError, match="for asynchronous stores, and `ssgd` is synchronous; use global_weights"):
        synchronous.snapshot()
