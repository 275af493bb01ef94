"""DiLoCo and its other forms: paths worked out by hand, the identities that tie them together, and what goes on."""
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np
import pytest

import kvstore
from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError, DivergedError
from kvstore.messages.seam import Saved
from kvstore.methods.async_diloco import AsyncDiLoCo
from kvstore.methods.contract import Worker
from kvstore.methods.diloco import DiLoCo
from kvstore.transports.in_process import Stage
from tests import paper
from tests.jobs import alone
from tests.scripted import ScriptedStage

WAYS = ["worker", "ring_worker", "sharded_worker"]
"""Of a stage: the ends of its transports."""

SHORT = {"H": 2, "lr_outer": 0.5, "momentum_outer": 0.5}
Grads = Callable[[int, int, np.ndarray], np.ndarray]


def drawn(size: int) -> Grads:
    """Of quadratics with other targets on every worker and in every iteration."""
    def gradient(m: int, t: int, w: np.ndarray) -> np.ndarray:
        random = np.random.RandomState(1000 * m + t)
        c, a = random.uniform(0.5, 1.5, size), random.normal(size=size)
        return (c * (w - a)).astype(np.float32)
    return gradient


def walk(name: str, workers: int, steps: Any, gradient: Grads, w_0: np.ndarray, lr: float = 0.1, way: str = "worker",
         momentum: float = 0.0, states: Any = None, order: Any = None,
         examples: Callable[[int, int], int] = lambda m, t: 1, **options: Any
         ) -> List[Tuple[np.ndarray, np.ndarray, Any]]:
    """Of each worker its path, the global weights at its end, and both states. `states`: to go on from; `steps`: of all
    workers, or of each; `order`: of their exchanges; `examples`: of a batch, over which a gradient is the mean."""
    stage = ScriptedStage(workers, order, timeout_s=60)

    def train(transport: Any) -> Tuple[np.ndarray, np.ndarray, Any]:
        store = kvstore.create(name, transport, **options)
        optimizer = mx.optimizer.SGD(learning_rate=lr, momentum=momentum)
        store.set_optimizer(optimizer)
        m = transport.worker_rank
        w = mx.nd.array(w_0)
        if states is not None:
            store.load_state(*states[m])
            w = mx.nd.array(states[m][0][0]["local/w"])
        store.broadcast("w", w, w)
        store.begin()
        path, first = [w.asnumpy()], store.iteration
        for t in range(first, first + (steps if isinstance(steps, int) else steps[m])):
            optimizer.rescale_grad = 1 / examples(m, t)
            store.pushpull("w", mx.nd.array(gradient(m, t, w.asnumpy()) * examples(m, t)), w)
            path.append(w.asnumpy())
        if "uneven" in options:
            store.join()
            path.append(w.asnumpy())
        with store.global_weights():
            final = w.asnumpy()
        np.testing.assert_array_equal(w.asnumpy(), path[-1])
        mine: Saved = store.worker_state()
        theirs = store.server_state() if m == 0 or store.state_is_shared else None
        (store.close if "uneven" in options else store.barrier)()
        return np.array(path), final, (mine, theirs)

    return stage.run(train, getattr(stage, way))


def alike(ways: Sequence[Any], others: Sequence[Any], since: int = 0, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Paths, from a step of the first ones on, and global weights at their ends; to the bit unless said otherwise."""
    for one, other in zip(ways, others):
        np.testing.assert_allclose(one[0][since:], other[0], rtol, atol)
        np.testing.assert_allclose(one[1], other[1], rtol, atol)


@pytest.mark.parametrize("way", WAYS)
def test_two_workers_of_diloco_follow_the_hand_computed_path(way: str) -> None:
    """g = w - m, inner rate 1/2, H = 1: a step goes half the way to m. Outer rate 1/2, momentum 1/2.

        t  theta  x_0  x_1  Delta        v          theta
        1  4      2    2.5  1.75         1.75       4 - (1.75 + 0.875) / 2           = 2.6875
        2  2.6875 ...       1.09375      1.96875    2.6875 - (1.09375 + 0.984375) / 2 = 1.6484375
        3  1.6484375 ...    0.57421875   1.55859375 1.6484375 - (0.57421875 + 0.779296875) / 2 = 0.9716796875
    """
    ways = walk("diloco", 2, 3, lambda m, t, w: w - m, np.full(1, 4, np.float32), 0.5, way,
                H=1, lr_outer=0.5, momentum_outer=0.5)
    for path, final, _ in ways:
        np.testing.assert_array_equal(path[:, 0], [4, 2.6875, 1.6484375, 0.9716796875])
        assert final == path[-1]


@pytest.mark.parametrize("way", WAYS)
def test_two_workers_of_eager_diloco_follow_the_hand_computed_path(way: str) -> None:
    """As above without momentum, local_scale 1/2: theta_m = Theta(t - 1) - 1/4 Delta_m(t), Theta of all that was sent.

        t  theta_0, theta_1    Delta_0, Delta_1         Theta(t - 1)    theta_0, theta_1 then
        1  4, 4                2, 1.5                   4               3.5, 3.625
        2  3.5, 3.625          1.75, 1.3125             3.125           2.6875, 2.796875
        3  2.6875, 2.796875    1.34375, 0.8984375       2.359375        2.0234375, 2.134765625
    """
    ways = walk("eager", 2, 3, lambda m, t, w: w - m, np.full(1, 4, np.float32), 0.5, way, H=1, lr_outer=0.5)
    np.testing.assert_array_equal(ways[0][0][:, 0], [4, 3.5, 2.6875, 2.0234375])
    np.testing.assert_array_equal(ways[1][0][:, 0], [4, 3.625, 2.796875, 2.134765625])
    for _, final, _ in ways:
        assert final == 2.359375 - (1.34375 + 0.8984375) / 4


@pytest.mark.parametrize("workers, local_scale", [(2, None), (3, 0.0)])
def test_the_papers_eager_rule_and_ours_agree_over_100_rounds(workers: int, local_scale: Any) -> None:
    """The paper's has an outer optimizer on every worker, ours one of all and a filter on every worker."""
    size, H = 20, 2
    w_0 = np.random.RandomState(1).normal(size=size).astype(np.float32)
    ours = walk("eager", workers, 100 * H, drawn(size), w_0, H=H, lr_outer=0.4, momentum_outer=0.9,
                **({} if local_scale is None else {"local_scale": local_scale}))
    inner = [paper.Sgd(0.1) for _ in range(workers)]
    theirs, W = paper.eager(drawn(size), w_0, workers, 100 * H, inner, H, 0.4, 0.9, local_scale)
    apart = max(np.abs(ours[m][0][t] - theirs[t][m]).max() for m in range(workers) for t in range(100 * H + 1))
    assert apart < 1e-5 and np.abs(ours[0][1] - W[-1]).max() < 1e-5, apart


def test_a_worker_of_asynchronous_diloco_follows_the_hand_computed_path() -> None:
    """g = w, inner rate 1/2, H = 1: an outer gradient is w / 2. Outer rate 1/2, momentum 1/2, N = 2, c = 1/4.

        outer gradient  Delta       m      theta
        2               2           0      4 - (0 + 2 / 2) / 2                                          = 3.5
        1.75            3.75, 0     1.875  3.5 - ((1 - 1/2 + 1/4) 0.9375 + 1.75 / 2) / 2                = 2.7109375
        1.35546875      1.35546875  1.875  2.7109375 - (1/4 0.9375 + 1.35546875 / 2) / 2                = 2.2548828125
    """
    path, final, _ = walk("async_diloco", 1, 3, lambda m, t, w: w, np.full(1, 4, np.float32), 0.5, H=1, lr_outer=0.5,
                          momentum_outer=0.5, N=2, c=0.25)[0]
    np.testing.assert_array_equal(path[:, 0], [4, 3.5, 2.7109375, 2.2548828125])
    assert final == path[-1]


def test_asynchronous_diloco_that_collects_one_outer_gradient_is_diloco() -> None:
    one, other = (walk(name, 1, 9, drawn(5), np.ones(5, np.float32), H=2, lr_outer=0.5, momentum_outer=0.9)[0]
                  for name in ("async_diloco", "diloco"))
    np.testing.assert_allclose(one[0], other[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(one[1], other[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("workers", [2, 3])
def test_outer_gradients_of_one_base_come_to_their_mean(workers: int) -> None:
    """Without momentum; each worker has sent one when they meet."""
    w_0 = np.ones(5, np.float32)
    one, other = (walk(name, workers, 2, drawn(5), w_0, H=2, lr_outer=0.5)[0][1] for name in ("async_diloco", "diloco"))
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_an_asynchronous_worker_whose_round_is_not_finite_goes_on_from_the_global_weights() -> None:
    still = np.ones(5, np.float32)
    ways = walk("async_diloco", 1, 2, lambda m, t, w: np.full_like(w, np.nan), still, H=2, on_nan="skip")
    np.testing.assert_array_equal(ways[0][0], [still] * 3)
    with pytest.raises(DivergedError, match="worker 0, iteration 2"):
        walk("async_diloco", 1, 2, lambda m, t, w: np.full_like(w, np.nan), still, H=2)


def test_an_asynchronous_run_goes_on_to_the_same_bits() -> None:
    w_0 = np.ones(5, np.float32)
    settings: Dict[str, Any] = {**SHORT, "H": 2, "momentum": 0.9, "N": 2, "c": 0.25}
    whole = walk("async_diloco", 1, 11, drawn(5), w_0, **settings)[0]
    first = walk("async_diloco", 1, 7, drawn(5), w_0, **settings)[0]
    then = walk("async_diloco", 1, 4, drawn(5), w_0, states=[first[2]], **settings)[0]
    np.testing.assert_array_equal(whole[0][7:], then[0])
    np.testing.assert_array_equal(whole[1], then[1])


def test_eager_diloco_of_one_worker_is_diloco() -> None:
    w_0 = np.ones(5, np.float32)
    one, other = (walk(name, 1, 9, drawn(5), w_0, H=2, lr_outer=0.5, momentum_outer=0.9)[0]
                  for name in ("eager", "diloco"))
    np.testing.assert_allclose(one[0], other[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(one[1], other[1])


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_eager_diloco_of_one_step_is_od_sgd_with_a_share_of_the_rate(workers: int) -> None:
    w_0, lr = np.ones(5, np.float32), 0.2
    eager = walk("eager", workers, 20, drawn(5), w_0, 1.0, H=1, lr_outer=lr)
    odsgd = walk("odsgd", workers, 20, drawn(5), w_0, lr, warmup=0, lr_local=lr / workers)
    alike(eager, odsgd, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_sent_with_a_delay_is_applied_that_many_steps_later(way: str) -> None:
    """As above without momentum, H = 2, delay 1, mix 1/2.

        t   x_0, x_1                          sent and Theta of it            x_0, x_1 then
        1   2, 2.5
        2   1, 1.75                           3, 2.25: 4 - 2.625 / 2          the same
        3   0.5, 1.375                                                        + 2.6875, halved: 1.59375, 2.03125
        4   0.796875, 1.515625                1.890625, 1.171875: 1.921875    the same
    """
    ways = walk("diloco", 2, 4, lambda m, t, w: w - m, np.full(1, 4, np.float32), 0.5, way, H=2, lr_outer=0.5, delay=1)
    np.testing.assert_array_equal(ways[0][0][:, 0], [4, 2, 1, 1.59375, 0.796875])
    np.testing.assert_array_equal(ways[1][0][:, 0], [4, 2.5, 1.75, 2.03125, 1.515625])
    assert [float(final[0]) for _, final, _ in ways] == [1.921875, 1.921875]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name, options", [("diloco", {}), ("diloco", {"delay": 3}), ("eager", {})])
def test_a_run_that_stops_between_two_exchanges_goes_on_to_the_same_bits(name: str, options: Any, way: str) -> None:
    w_0 = np.ones(5, np.float32)
    settings: Dict[str, Any] = {**SHORT, "H": 4, "momentum": 0.9, "way": way, **options}
    whole = walk(name, 2, 11, drawn(5), w_0, **settings)
    first = walk(name, 2, 6, drawn(5), w_0, **settings)
    then = walk(name, 2, 5, drawn(5), w_0, states=[ends[2] for ends in first], **settings)
    alike(whole, then, since=6)


@pytest.mark.parametrize("H, dylu, steps", [(24, (0.7, 0.7), [24, 24]), (24, (0.4, 0.3), [24, 18]),
                                            (500, (1.1, 0.55), [500, 250]), (10, (3.0, 2.0, 0.1), [10, 6, 1])])
def test_the_fastest_worker_takes_all_steps_and_others_their_share(H: int, dylu: Tuple[float, ...],
                                                                   steps: List[int]) -> None:
    options = AsyncDiLoCo.Options(H=H, dylu=dylu)
    assert [AsyncDiLoCo.of_worker(options, rank).H for rank in range(len(dylu))] == steps


def test_a_worker_that_is_alone_keeps_what_its_optimizer_does_between_two_exchanges() -> None:
    """Nothing of the store is in these weights: they are Gluon's without one, to the bit."""
    w_0 = np.ones(5, np.float32)
    path = walk("diloco", 1, 5, drawn(5), w_0, momentum=0.9, H=6)[0][0]
    update, w, state = mx.optimizer.SGD(learning_rate=0.1, momentum=0.9), mx.nd.array(w_0), None
    for t in range(5):
        state = update.create_state(0, w) if state is None else state
        update.update(0, w, mx.nd.array(drawn(5)(0, t, w.asnumpy())), state)
        np.testing.assert_array_equal(path[t + 1], w.asnumpy())


def memory_of(name: str, **options: Any) -> Dict[str, int]:
    stage = Stage(1)
    store = kvstore.create(name, stage.worker(0), **options)
    alone(store, mx.nd.ones(5), momentum=0.9)
    store.begin()
    found: Dict[str, int] = store.memory()
    return found


def test_what_a_worker_keeps_is_told() -> None:
    own = {"local weights: what the trainer's optimizer makes of them": 20, "state of the local optimizer": 20,
           "theta: the global weights that the last exchange brought": 20,
           "in flight: what the next one sends and brings": 20}
    assert memory_of("diloco") == own
    assert memory_of("eager", H=2) == {"anchor: where this worker's round began": 20, **own}
    assert memory_of("eager")["b: momentum of its own outer gradients"] == 20


@pytest.mark.parametrize("given, says", [
    ({"H": 0}, "H"), ({"lr_outer": -1}, "lr_outer"), ({"momentum_outer": 1}, "momentum_outer"),
    ({"fragments": 0}, "fragments")])
def test_options_out_of_range_are_refused_in_a_line(given: Dict[str, Any], says: str) -> None:
    for name in ("diloco", "eager"):
        with pytest.raises(ConfigError, match=f"{says}.*expected") as error:
            kvstore.create(name, Stage(1).worker(0), **given)
        assert "\n" not in str(error.value)
    for name, more, said in (("eager", {"local_scale": 1.5}, "local_scale.*expected"),
                             ("eager", {"on_nan": "skip"}, "on_nan `skip` leaves a round out"),
                             ("diloco", {"H": 2, "delay": 2}, "delay is 2, expected less than H, which is 2"),
                             ("async_diloco", {"N": 3, "c": 0.5}, "c is 0.5, expected at most 1 / N, and N is 3"),
                             ("async_diloco", {"dylu": [0]}, "dylu.*above 0"),
                             ("async_diloco", {"uneven": "join"}, "whose workers wait for nobody"),
                             ("diloco", {"mix": 1.5}, "mix.*expected"), ("diloco", {"delay": -1}, "delay.*expected")):
        with pytest.raises(ConfigError, match=said):
            kvstore.create(name, Stage(1).worker(0), **more)
    with pytest.raises(ConfigError, match="dylu has 1 speeds, and the job has 2 workers"):
        kvstore.create("async_diloco", Stage(2).worker(0), dylu=[1.0])
    with pytest.raises(ConfigError, match="`fragments` is 2, and the model has 1 trained parameters"):
        walk("diloco", 1, 1, drawn(5), np.ones(5, np.float32), fragments=2)


def test_a_short_round_has_no_outer_momentum_unless_it_is_given_and_a_line_says_so(
        capfd: pytest.CaptureFixture[str]) -> None:
    for options, momentum, says in (({"H": 99}, 0.0, 1), ({"H": 99, "momentum_outer": 0.9}, 0.9, 0), ({}, 0.9, 0)):
        store = kvstore.create("diloco", Stage(1).worker(0), **options)
        alone(store, mx.nd.ones(5))
        store.begin()
        assert store.session.method.options.momentum == momentum
        assert capfd.readouterr().err.count("below H = 100 successive outer gradients point the same way") == says


def test_nothing_is_asked_between_two_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: List[int] = []
    transport = Stage(1).worker(0)
    exchange = transport.exchange

    def counted(*given: Any) -> Any:
        asked.append(store.iteration)
        return exchange(*given)

    monkeypatch.setattr(transport, "exchange", counted)
    store = kvstore.create("diloco", transport, H=3)
    w = alone(store, mx.nd.ones(5))
    store.begin()
    for _ in range(7):
        store.pushpull("w", w.copy(), w)
    assert asked == [3, 6]


@pytest.mark.parametrize("way", WAYS)
def test_a_round_is_the_mean_over_the_workers_that_took_a_step_in_it(way: str) -> None:
    """g = w - m, inner rate 1/2, H = 2, outer rate 1/2. Worker 1 has data for 3 steps: it takes part in two rounds.

        t      x_0, x_1          Delta             theta
        1, 2   1, 1.75           3, 2.25           4 - 2.625 / 2                = 2.6875
        3      1.34375, 1.84375
        4      0.671875, -       2.015625, 0.84375 2.6875 - 1.4296875 / 2       = 1.97265625
        5, 6   0.4931640625, -   1.4794921875      1.97265625 - 1.4794921875 / 2 = 1.23291015625
    """
    ways = walk("diloco", 2, [6, 3], lambda m, t, w: w - m, np.full(1, 4, np.float32), 0.5, way, H=2, lr_outer=0.5,
                uneven="join")
    assert [float(final[0]) for _, final, _ in ways] == [1.23291015625] * 2
    np.testing.assert_array_equal(ways[0][0][[2, 4, 6], 0], [2.6875, 1.97265625, 1.23291015625])


class Turns(Worker):
    def iterate(self, x: Any, step: Any) -> Any:
        moved = step.counts * (self.last_exchange.result() - x)
        self.last_exchange = self.weights_holder.exchange(self.bucket, moved, 1.0)
        return self.last_exchange.result()


class PostLocal(DiLoCo):
    """An exchange in every step until the sixth, then in every fourth."""

    name, worker = "post_local", Turns

    @classmethod
    def due(cls, options: Any, t: int, fragment: int) -> bool:
        return t <= 6 or t % 4 == 0


@pytest.mark.usefixtures("own_methods")
@pytest.mark.parametrize("steps, lacks", [(5, 0), (7, 1)])
def test_a_round_begins_where_a_method_has_sent_and_not_where_its_interval_says(steps: int, lacks: int,
                                                                                capfd: Any) -> None:
    """g = 1, inner rate 1/2: a step moves W by 1/2, also once worker 1's data have ended, and after a restart."""
    kvstore.register_method(PostLocal)
    options: Any = {"H": 4, "lr_outer": 1.0, "momentum_outer": 0.0, "uneven": "join"}
    w_0 = np.full(1, 4, np.float32)
    ways = walk("post_local", 2, [steps, 2], lambda m, t, w: w ** 0, w_0, 0.5, **options)
    np.testing.assert_array_equal(ways[0][0][:steps, 0], w_0 - np.arange(steps) / 2)
    assert capfd.readouterr().err.count(f"lack {lacks} step since") == (lacks > 0)
    states = [(states[0], ways[0][2][1] if m == 0 else None) for m, (_, _, states) in enumerate(ways)]
    walk("post_local", 2, [0, 0], lambda m, t, w: w ** 0, w_0, 0.5, states=states, **options)
    assert capfd.readouterr().err.count(f"lack {lacks} step since") == (lacks > 0)


@pytest.mark.parametrize("way", WAYS)
def test_with_a_delay_a_worker_whose_data_have_ended_sends_nothing(way: str) -> None:
    """g = w - m, inner rate 1/2, H = 2, delay 1, outer rate 1, mix 1/2. Worker 1 has data for 2 steps.

        t     x_0, x_1           Delta            theta               x after it
        1, 2  1, 1.75            3, 2.25          4 - 2.625 = 1.375
        3     0.5, 1.75                                               (0.5 + 1.375) / 2 = 0.9375, 1.375
        4     0.46875, 1.375     0.90625, 0       1.375 - 0.90625 = 0.46875
        5, 6  0.234375, 1.375                                         (0.234375 + 0.46875) / 2 = 0.3515625, 0.46875
              0.17578125         0.29296875, 0    0.46875 - 0.29296875 = 0.17578125
    """
    ways = walk("diloco", 2, [6, 2], lambda m, t, w: w - m, np.full(1, 4, np.float32), 0.5, way, H=2, delay=1,
                lr_outer=1.0, uneven="join")
    assert [float(final[0]) for _, final, _ in ways] == [0.17578125] * 2


def test_a_given_share_of_a_worker_s_own_moves_does_not_grow_as_others_end() -> None:
    def gradient(m: int, t: int, w: np.ndarray) -> np.ndarray:
        return w - m

    options: Dict[str, Any] = {"H": 1, "lr_outer": 0.5, "local_scale": 0.5, "momentum_outer": 0.5}
    w_0 = np.ones(5, np.float32)
    three = walk("eager", 3, [8, 8, 0], gradient, w_0, uneven="join", **options)
    two = walk("eager", 2, [8, 8], gradient, w_0, uneven="join", **options)
    for one, other in zip(three, two):
        np.testing.assert_allclose(one[0], other[0], rtol=1e-6)


def spoiled(m: int, t: int, w: np.ndarray) -> np.ndarray:
    """Worker 1's third gradient is not a number."""
    return np.full_like(w, np.nan) if (m, t) == (1, 2) else drawn(5)(m, t, w)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["diloco", "eager"])
def test_weights_that_are_not_finite_stop_the_job_at_their_exchange(name: str, way: str) -> None:
    with pytest.raises(DivergedError, match=r"worker 1, iteration 4.*w.*not"):
        walk(name, 2, 6, spoiled, np.ones(5, np.float32), way=way, H=4)


@pytest.mark.parametrize("way", ["worker", "ring_worker"])
def test_a_step_that_is_not_finite_is_left_out_of_a_round(way: str, capfd: pytest.CaptureFixture[str]) -> None:
    w_0 = np.ones(5, np.float32)
    ways = walk("diloco", 2, 8, spoiled, w_0, way=way, H=4, on_nan="skip")
    np.testing.assert_array_equal(ways[1][0][3], ways[1][0][2])
    assert np.isfinite(ways[0][0]).all() and "worker 1, iteration 3" in capfd.readouterr().err
    still = walk("diloco", 2, 8, lambda m, t, w: 0 * w if (m, t) == (1, 2) else drawn(5)(m, t, w), w_0, way=way, H=4)
    np.testing.assert_array_equal(ways[0][1], still[0][1])


@pytest.mark.parametrize("codec", ["float16", "quantize", "2bit"])
def test_outer_gradients_travel_by_a_codec_as_gradients_do(codec: str) -> None:
    w_0, threshold = np.ones(5, np.float32), 0.1
    push: Any = paper.Residuals(lambda x: paper.in_two_bits(x, threshold))
    options: Dict[str, Any] = {**SHORT, "codec": codec, **({"codec_threshold": threshold} if codec == "2bit" else {})}
    ours = walk("diloco", 2, 9, drawn(5), w_0, **options)
    theirs, _ = paper.diloco(drawn(5), w_0, 2, 9, [paper.Sgd(0.1)] * 2, 2, 0.5, 0.5,
                             push if codec == "2bit" else lambda m, delta: paper.LEFT[codec](delta))
    for m in range(2):
        np.testing.assert_allclose(ours[m][0], [x[m] for x in theirs], rtol=1e-5, atol=1e-6)
    plain: Dict[str, Any] = SHORT
    ends = [walk("eager", 2, 9, drawn(5), w_0, **{**plain, "codec": one})[0][1] for one in ("none", "float16")]
    assert 0 < np.abs(ends[1] - ends[0]).max() < 1e-3


@pytest.mark.parametrize("name", ["diloco", "eager"])
def test_a_round_that_was_saved_after_one_worker_s_data_had_ended_counts_as_if_it_had_gone_on(name: str) -> None:
    options: Any = {"H": 10, "lr_outer": 1.0, "uneven": "join"}
    whole = walk(name, 2, [10, 3], drawn(1), np.zeros(1, np.float32), **options)
    part = walk(name, 2, [6, 3], drawn(1), np.zeros(1, np.float32), **options)
    states = [(states[0], part[0][2][1] if m == 0 else None) for m, (_, _, states) in enumerate(part)]
    resumed = walk(name, 2, [4, 0], drawn(1), np.zeros(1, np.float32), states=states, **options)
    np.testing.assert_array_equal(resumed[0][1], whole[0][1])
    assert part[0][2][0][1]["counted"] == [1.0] * 3 + [2.0] * 3
