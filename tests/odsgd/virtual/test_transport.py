"""Workers on a virtual cluster: who comes when decides the values, and the values decide nothing about the times."""
from typing import Any, Callable, Dict, List, Tuple, Type

import numpy as np
import pytest

import kvstore
from kvstore import methods
from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError
from kvstore.messages.buckets import Bucket
from kvstore.methods.contract import Step, Worker
from kvstore.methods.delayed import Delayed
from kvstore.transports.in_process import Asked
from kvstore.transports.turns import LateAnswer
from odsgd.virtual.description import of
from odsgd.virtual.transport import VirtualStage
from tests.jobs import alone
from tests.scenarios import PLAIN, Scenario, train

WORKERS = 4
CLUSTER: Dict[str, Any] = {"workers": WORKERS, "servers": 2, "links": {"goodput": "1mbit"},
                           "compute": {"iteration": "5ms", "draws": "lognormal:0.5"}}
STORES = [name for name, method in methods.METHODS.items() if method.transports != ("process",)]


class LoggedStage(VirtualStage):
    log: List[int]  # whom the servers have answered, in this order

    def _answer(self, bucket: Bucket, round_: List[Asked]) -> None:
        self.log += [worker_rank for worker_rank, _, _ in round_]
        super()._answer(bucket, round_)


def trained(store: str, iterations: int = 12, options: Any = None, **cluster: Any) -> Tuple[
        np.ndarray, List[int], float]:
    """Every worker's path, the order at the asynchronous servers, and the virtual seconds of worker 0."""
    stage = LoggedStage(of({**CLUSTER, **cluster}), timeout_s=60)
    stage.log = []
    scenario = Scenario(store, {"bucket_nbytes": 64, **(options or {})}, optimizer_params=PLAIN, iterations=iterations)

    def run(transport: Any) -> Tuple[np.ndarray, Any]:
        return train(scenario, transport.worker_rank, transport)["path"], transport.seconds()

    ring = scenario.options.pop("transport", methods.find(store).transports[0]) == "ring"
    results = stage.run(run, stage.ring_worker if ring else stage.worker)
    return np.array([path for path, _ in results]), stage.log, results[0][1]


class Asks(Worker):
    """The delayed update, which reads an answer behind the next exchange."""

    def iterate(self, grad: Any, step: Step) -> Any:
        before = self.last_exchange
        self.last_exchange = self.weights_holder.exchange(self.bucket, grad, step.lr)
        return before.result()


class AsksForTooMuch(Asks):
    def iterate(self, grad: Any, step: Step) -> Any:
        if np.abs(grad.asnumpy()).sum():
            super().iterate(grad, step)
        return super().iterate(grad, step)


class AsksForTooLittle(Asks):
    def iterate(self, grad: Any, step: Step) -> Any:
        return self.last_exchange.result() if np.abs(grad.asnumpy()).sum() else super().iterate(grad, step)


class Own(Delayed):
    name = "own"


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Callable[[Type[Worker]], None]:
    """Let the method `own` have such a worker."""
    monkeypatch.setitem(methods.METHODS, "own", Own)
    return lambda worker: monkeypatch.setattr(Own, "worker", worker)


@pytest.mark.parametrize("transport", ["server", "ring"])
def test_an_answer_may_be_read_behind_the_next_exchange(own: Callable[[Type[Worker]], None], transport: str) -> None:
    own(Asks)
    path, _, _ = trained("own", options={"transport": transport})
    np.testing.assert_array_equal(path, trained("delayed", options={"transport": transport})[0])


@pytest.mark.parametrize("transport", ["server", "ring"])
@pytest.mark.parametrize("worker, now, before", [
    (AsksForTooMuch, "{}", "nothing"), (AsksForTooLittle, "nothing", "{}")])
def test_a_method_whose_questions_depend_on_values_is_refused(
        own: Callable[[Type[Worker]], None], transport: str, worker: Type[Worker], now: str, before: str) -> None:
    """Times are found without values, so they would be those of another method."""
    own(worker)
    what = {"server": "exchange", "ring": "sum"}[transport]
    with pytest.raises(ConfigError, match=f"iteration 1, bucket 0: the method asks for {now.format(what)} now, and "
                                          f"asked for {before.format(what)} when it ran on zeros"):
        trained("own", options={"transport": transport})


@pytest.mark.parametrize("store", STORES)
def test_a_run_repeats_to_the_bit_and_the_nanosecond(store: str) -> None:
    (path, order, seconds), again = trained(store), trained(store)
    np.testing.assert_array_equal(path, again[0])
    assert (order, seconds) == again[1:] and seconds > 12 * 0.004


@pytest.mark.parametrize("store, options", [("diloco", {"H": 7}), ("sasgd", {"T": 7}), ("diloco", {"H": 3})])
def test_the_time_after_a_last_iteration_is_known_whether_it_exchanges_or_not(store: str, options: Any) -> None:
    assert 12 * 0.004 < trained(store, options=options)[2] < 1


@pytest.mark.parametrize("store", ["asgd", "softsync", "downpour", "easgd", "dcasgd_a"])
def test_the_times_decide_what_an_asynchronous_server_does(store: str) -> None:
    path, order, _ = trained(store)
    for other in ({"seed": 1}, {"compute": {"iteration": "5ms", "speeds": {0: 3.0}}}):
        changed, another, _ = trained(store, **other)
        assert order != another and not np.array_equal(path, changed)


def begun(stage: VirtualStage, store: Any, away_ns: int) -> Any:
    """The weights of a store that trains on this stage now, where worker 0 fails in its third step for so long."""
    w = mx.nd.ones(3) * 5
    store.broadcast(0, w, w)
    store.begin()
    assert stage.simulation is not None
    stage.simulation.passes.away = lambda m, t: away_ns * ((m, t) == (0, 3))  # type: ignore[method-assign]
    return w


@pytest.mark.parametrize("store, fourth", [
    ("decoupled", 5 - 0.7 * (0.4 + 0.36) - 0.1),  # two rounds of the other's, whose third is open; then its own step
    ("async_diloco", 5 - 3 * 0.7 * 0.4 / 2 - 0.7 * 0.1 / 2)])  # three of the other's; its own step is sent at once
def test_a_worker_that_fails_comes_back_with_the_servers_weights(store: str, fourth: float) -> None:
    """Each step of its own leads down by 0.1. It fails in its third one, with nothing sent."""
    stage = VirtualStage(of({"workers": 2, "links": {"goodput": "10mbit"}, "compute": {"iteration": "5ms"}}))

    def work(transport: Any) -> Tuple[List[float], float]:
        made = kvstore.create(store, transport, H=4, momentum_outer=0.0)
        made.set_optimizer(mx.optimizer.SGD(learning_rate=0.1))
        w, path = begun(stage, made, 10 ** 9), []
        for _ in range(12):
            made.pushpull(0, mx.nd.ones(3), out=w)
            path.append(float(w.asnumpy()[0]))
        return path, transport.seconds()

    (failing, late), (going, early) = stage.run(work)
    assert failing[:3] == pytest.approx([4.9, 4.8, 4.7]) and failing[3] == pytest.approx(fourth)
    assert going[:3] == pytest.approx([4.9, 4.8, 4.7]) and late > 1 > early


@pytest.mark.parametrize("name, settings", [("sgd", {"momentum": 0.9}), ("adam", {})])
def test_a_worker_that_comes_back_begins_its_own_steps_anew(name: str, settings: Dict[str, Any]) -> None:
    """Neither has sent anything when it fails in its third step, so it is back at the first weights."""
    stage = VirtualStage(of({"workers": 2, "links": {"goodput": "10mbit"}, "compute": {"iteration": "5ms"}}))

    def work(transport: Any) -> List[float]:
        made = kvstore.create("async_diloco", transport, H=40)
        made.set_optimizer(mx.optimizer.create(name, learning_rate=0.1, **settings))
        w, path = begun(stage, made, 10 ** 6), []
        for t in range(5):
            made.pushpull(0, mx.nd.ones(3) * (t % 3 + 1), out=w)
            path.append(float(w.asnumpy()[0]))
        return path

    failing, _ = stage.run(work)
    assert failing[3:] == failing[:2] and failing[2] < failing[1]


@pytest.mark.parametrize("store", ["ssgd", "odsgd", "sasgd", "pipesgd"])
def test_a_synchronous_method_has_the_same_bits_whatever_the_times(store: str) -> None:
    path, _, seconds = trained(store)
    changed, _, more = trained(store, compute={"iteration": "50ms", "speeds": {1: 0.3}}, seed=3)
    np.testing.assert_array_equal(path, changed)
    assert more > 2 * seconds


def test_a_bucket_that_waits_is_looked_at_after_answers_to_its_own_worker_only(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def look(late: LateAnswer) -> bool:
        nonlocal looks
        looks += 1
        return bool(late.__dict__["arrived"])

    monkeypatch.setattr(LateAnswer, "arrived", property(look, lambda late, now: late.__dict__.update(arrived=now)),
                        raising=False)
    _, order, _ = trained("asgd", workers=16)
    assert looks < 20 * len(order)  # 10; after every answer to any worker, it is 56


def test_the_time_is_known_however_many_answers_come_before() -> None:
    """Eight workers push 150 layers each, and read no answer."""
    stage = VirtualStage(of({"workers": 8}))

    def work(transport: Any) -> float:
        made = kvstore.create("downpour", transport, bucket_nbytes=4, push_every=1, fetch_every=1000)
        made.set_optimizer(mx.optimizer.SGD(learning_rate=0.1))
        w = mx.nd.ones(1)
        for key in range(150):
            made.broadcast(key, w, w)
        made.begin()
        for key in range(150):
            made.pushpull(key, w, out=w)
        return float(transport.seconds())

    assert stage.run(work) == pytest.approx([0.1] * 8, rel=0.1)


def pushed(latency: str, fetch_every: int, iterations: int) -> List[Tuple[float, int]]:
    """Each worker's global weights, less by all that was pushed, and arrays for messages."""
    stage = VirtualStage(of({"workers": 2, "links": {"latency": latency}, "compute": {"iteration": "5ms"}}))

    def work(transport: Any) -> Tuple[float, int]:
        made = kvstore.create("downpour", transport, push_every=1, fetch_every=fetch_every)
        w = alone(made, mx.nd.zeros(3), learning_rate=1)
        made.begin()
        for t in range(iterations):
            made.pushpull("w", mx.nd.ones(3) * 2 ** (t % 10) * (1 + 256 * transport.worker_rank), out=w)
        with made.global_weights():
            buffers, = transport._buffers.values()
            return float(w.asnumpy()[0]), len(buffers._buffers)

    return stage.run(work)


@pytest.mark.parametrize("latency, fetch_every, iterations, most", [
    ("1s", 6, 20, 7), ("50us", 6, 20, 2), ("50us", 300, 310, 3)])
def test_pushes_all_arrive_and_have_arrays_of_their_own_until_they_are_answered(
        latency: str, fetch_every: int, iterations: int, most: int) -> None:
    for w, messages in pushed(latency, fetch_every, iterations):
        assert w == -iterations // 10 * 1023 * (1 + 257) and messages <= most


def test_too_many_pushes_without_an_answer_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"256 pushes of worker . wait for their answers.* fetch more often"):
        pushed("10s", 300, 310)


def test_a_fast_worker_pushes_more_often_than_a_slow_one() -> None:
    _, order, _ = trained("asgd", compute={"iteration": "500ms", "speeds": {2: 4.0}})
    first = order[:len(order) // 3]
    assert first.count(2) > 2 * max(first.count(m) for m in (0, 1, 3))


def test_what_has_no_times_is_refused_before_the_first_step() -> None:
    stage = VirtualStage(of({"workers": 1}))
    with pytest.raises(ConfigError, match="no transport `sharded`; take `server` or `ring`"):
        stage.sharded_worker(0)
    waiting = Scenario("decoupled", {"quorum": 2}, optimizer_params=PLAIN)
    with pytest.raises(ConfigError, match="quorum is the number of workers"):
        VirtualStage(of({"workers": 2})).run(lambda transport: train(waiting, 0, transport))


def test_a_cluster_trains_one_model_at_a_time() -> None:
    transport = VirtualStage(of({"workers": 1})).worker(0)

    def step(store: Any, size: int) -> None:
        w = alone(store, mx.nd.ones(size), learning_rate=0.1)
        store.pushpull("w", mx.nd.ones(size), out=w)

    step(kvstore.create("ssgd", transport), 3)
    with pytest.raises(ConfigError, match="one model at a time"):
        step(kvstore.create("ssgd", transport), 5)
