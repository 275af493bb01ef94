"""Where the method takes weights, the script's own optimizer steps: any of PyTorch's, alone between two exchanges."""
import copy
import functools
import itertools
import types
from typing import Any, Callable, Dict, List

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvstore.errors import ConfigError, ProtocolError  # noqa: E402
from kvstore.fronts import base  # noqa: E402
from kvstore.fronts.torch import lanes  # noqa: E402
from kvstore.fronts.torch.optimizer import GradScaler, Optimizer  # noqa: E402
from kvstore.fronts.torch.store import create  # noqa: E402
from kvstore.job.pulse import pulse  # noqa: E402
from kvstore.messages import finite  # noqa: E402
from kvstore.methods import register_method  # noqa: E402
from kvstore.methods.contract import Worker  # noqa: E402
from kvstore.methods.diloco import DiLoCo  # noqa: E402
from kvstore.transports.in_process import Stage  # noqa: E402
from tests import methods, paper  # noqa: E402

OUTER = {"H": 3, "lr_outer": 0.5, "momentum_outer": 0.5}
WAYS = ["worker", "ring_worker", "sharded_worker"]


def model() -> Any:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Linear(6, 1))


def batch(m: int, t: int) -> Any:
    random = torch.Generator().manual_seed(100 * m + t)
    return torch.randn(8, 4, generator=random), torch.randn(8, 1, generator=random)


def flat(of: Any) -> np.ndarray:
    return np.concatenate([one.detach().float().reshape(-1).numpy() for one in of.parameters()])


def step(net: Any, optimizer: Any, m: int, t: int) -> None:
    optimizer.zero_grad()
    x, y = batch(m, t)
    ((net(x) - y) ** 2).mean().backward()
    optimizer.step()


KINDS: Dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda of: torch.optim.AdamW(of, lr=0.01),
    "NAdam": lambda of: torch.optim.NAdam(of, lr=0.01, betas=(np.float32(0.9), 0.999)),
    "Adagrad": lambda of: torch.optim.Adagrad(of, lr=0.05),  # it has a state when it is made
    "SGD with dampening": lambda of: torch.optim.SGD(of, lr=0.05, momentum=0.9, dampening=0.1),
    "Adam, amsgrad": lambda of: torch.optim.Adam(of, lr=0.01, amsgrad=True)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_optimizer_of_pytorch_steps_by_itself_and_every_h_steps_the_weights_are_exchanged(kind: str,
                                                                                              way: str) -> None:
    stage = Stage(2, timeout_s=60)

    def train(transport: Any) -> List[np.ndarray]:
        net = model()
        optimizer = Optimizer(KINDS[kind](net.parameters()), net, create("diloco", transport, **OUTER))
        path = [flat(net)]
        for t in range(8):
            step(net, optimizer, transport.worker_rank, t)
            path.append(flat(net))
        return path

    def by_hand() -> List[List[np.ndarray]]:
        nets = [model() for _ in range(2)]
        optimizers = [KINDS[kind](net.parameters()) for net in nets]
        outer, theta, paths = paper.Nesterov(0.5, 0.5), flat(nets[0]), [[flat(net)] for net in nets]
        for t in range(8):
            for m, net in enumerate(nets):
                step(net, optimizers[m], m, t)
            if t % 3 == 2:
                theta = outer(theta, paper.mean([theta - flat(net) for net in nets]))
                for net in nets:
                    torch.nn.utils.vector_to_parameters(torch.from_numpy(theta.copy()), net.parameters())
            for m, net in enumerate(nets):
                paths[m].append(flat(net))
        return paths

    for ours, theirs in zip(stage.run(train, getattr(stage, way)), by_hand()):
        np.testing.assert_array_equal(ours[2], theirs[2])  # nothing of the store's is in it
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["diloco", "eager"])
def test_a_run_goes_on_from_a_state_dict_to_the_same_bits(name: str) -> None:
    def train(steps: range, transport: Any, state: Any = None) -> Any:
        net = model()
        optimizer = Optimizer(torch.optim.AdamW(net.parameters(), lr=0.1), net, create(name, transport, **OUTER))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        if state is not None:
            optimizer.load_state_dict(state[0])
            schedule.load_state_dict(state[1])
        for t in steps:
            step(net, optimizer, transport.worker_rank, t)
            schedule.step()
        return flat(net), copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))

    def run(steps: range, states: Any = (None, None)) -> List[Any]:
        return Stage(2, timeout_s=60).run(lambda one: train(steps, one, states[one.worker_rank]))

    whole, first = run(range(11)), run(range(7))
    assert first[0][1][0]["state"] and first[0][1][0]["store"]["worker"]["facts"]["iteration"] == 7
    for one, other in zip(whole, run(range(7, 11), [state for _, state in first])):
        np.testing.assert_array_equal(one[0], other[0])


class Counting(torch.optim.SGD):  # type: ignore[name-defined]  # torch is what importorskip gives
    """What it knows is in its `state_dict`, and not in `state` alone."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)

    def state_dict(self) -> Any:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.steps = state_dict["steps"]


def test_an_optimizer_of_the_scripts_own_saves_and_loads_itself() -> None:
    def steps(saved: Any = None) -> Any:
        net = model()
        given = Counting(net.parameters(), lr=0.1)
        optimizer = Optimizer(given, net, create("diloco", Stage(1).worker(0), **OUTER))
        if saved is not None:
            optimizer.load_state_dict(saved)
        step(net, optimizer, 0, 0)
        return given.steps, optimizer.state_dict()

    assert steps(steps()[1])[0] == 2


def test_a_worker_saves_its_own_weights_also_where_the_model_holds_the_global_ones() -> None:
    def train(transport: Any) -> Any:
        net = model()
        store = create("diloco", transport, **OUTER)
        optimizer = Optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, store)
        for t in range(4):
            step(net, optimizer, transport.worker_rank, t)
        own, outside = flat(net).copy(), copy.deepcopy(optimizer.state_dict())
        with store.global_weights():
            inside = [copy.deepcopy(optimizer.state_dict()) for _ in range(2)]
        np.testing.assert_array_equal(flat(net), own)
        for one in inside:
            for name, array in outside["store"]["worker"]["arrays"].items():
                np.testing.assert_array_equal(one["store"]["worker"]["arrays"][name], array)

    Stage(2, timeout_s=60).run(train)


def test_global_weights_are_the_last_exchanges_and_this_workers_own_come_back() -> None:
    def train(transport: Any) -> Any:
        net = model()
        store = create("diloco", transport, **OUTER)
        optimizer = Optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, store)
        at = []
        for t in range(5):
            step(net, optimizer, transport.worker_rank, t)
            at.append(flat(net))
        with store.global_weights():
            shared, mean = flat(net), net[1].running_mean.numpy().copy()
        np.testing.assert_array_equal(flat(net), at[-1])
        np.testing.assert_array_equal(shared, at[2])
        nbytes = 4 * flat(net).size
        assert store.shows_own and store.memory() == {
            "theta: the global weights that the last exchange brought": nbytes,
            "in flight: what the next one sends and brings": nbytes}
        step(net, optimizer, transport.worker_rank, 5)
        return flat(net), mean

    one, other = Stage(2, timeout_s=60).run(train)
    np.testing.assert_array_equal(one[0], other[0])
    np.testing.assert_array_equal(one[1], other[1])


@pytest.mark.parametrize("H, said", [(7, ""), (
    4, "lack 3 steps since the last exchange (iteration 4); take them after a multiple of 4 steps")])
def test_what_global_weights_lack_is_told_once_by_worker_0(H: int, said: str,
                                                           capfd: pytest.CaptureFixture[str]) -> None:
    def train(transport: Any) -> None:
        net = model()
        store = create("diloco", transport, H=H, momentum_outer=0.0)
        optimizer = Optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, store)
        for t in range(7):
            step(net, optimizer, transport.worker_rank, t)
        for _ in range(2):
            with store.global_weights():
                pass

    Stage(2, timeout_s=60).run(train)
    told = capfd.readouterr().err
    assert told.count("the global weights lack") == (said != "") and said in told


def test_workers_whose_data_end_earlier_wait_for_nobody_and_hold_nobody_up() -> None:
    def train(transport: Any) -> Any:
        net = model()
        store = create("diloco", transport, uneven="join", **OUTER)
        optimizer = Optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, store)
        for t in range(4 if transport.worker_rank else 9):
            step(net, optimizer, transport.worker_rank, t)
        store.join()
        done = flat(net), store.iteration
        store.close()
        return done

    one, other = Stage(2, timeout_s=60).run(train)
    np.testing.assert_array_equal(one[0], other[0])
    assert one[1] == other[1] == 9


@pytest.mark.parametrize("way", ["worker", "ring_worker"])
def test_weights_that_are_not_finite_leave_their_round_out(way: str, capfd: pytest.CaptureFixture[str]) -> None:
    stage = Stage(2, timeout_s=60)

    def train(transport: Any) -> Any:
        net = model()
        store = create("diloco", transport, on_nan="skip", **OUTER)
        optimizer = Optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, store)
        path = [flat(net)]
        for t in range(6):
            step(net, optimizer, transport.worker_rank, t)
            path.append(flat(net))
            if transport.worker_rank and t == 1:
                with torch.no_grad():
                    net[0].bias[0] = np.nan
        return path

    one, other = stage.run(train, getattr(stage, way))
    np.testing.assert_array_equal(one[3], one[0])  # of the round there is nothing, on no worker
    np.testing.assert_array_equal(one[6], other[6])
    assert np.isfinite(one[6]).all() and not np.array_equal(one[6], one[0])
    assert "worker 1, iteration 3" in capfd.readouterr().err


def test_fragments_leave_at_steps_of_their_own_and_come_back_after_the_delay() -> None:
    """H = 4: fragment 0 is sent at 4, fragment 1 at 2 and 6; what came of it is there a step later."""
    def train(transport: Any) -> Any:
        net = model()
        store = create("diloco", transport, H=4, fragments=2, delay=1, mix=0.0, lr_outer=0.5)
        optimizer = Optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, store)
        path = []
        for t in range(7):
            step(net, optimizer, transport.worker_rank, t)
            path.append({name: one.detach().numpy().copy() for name, one in net.named_parameters()})
        return path, {segment.parameter.name: lane.bucket.first.fragment for lane in store.lanes
                      for segment in lane.bucket.segments}

    (one, fragments), (other, _) = Stage(2, timeout_s=60).run(train)
    assert fragments == {"0.weight": 0, "0.bias": 1, "1.weight": 1, "1.bias": 1, "3.weight": 1, "3.bias": 0}
    for t in range(7):
        for name, fragment in fragments.items():
            if name == "0.bias":
                continue  # BatchNorm takes its gradient away
            assert np.array_equal(one[t][name], other[t][name]) is (t + 1 in ((5,), (3, 7))[fragment]), (t, name)


def test_an_overflow_of_one_worker_leaves_its_own_step_out_and_no_round() -> None:
    def train(transport: Any) -> Any:
        net = model()
        optimizer = Optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, create("diloco", transport, **OUTER))
        path = []
        for t in range(3):
            step_of = flat(net)
            optimizer.zero_grad()
            x, y = batch(transport.worker_rank, t)
            ((net(x) - y) ** 2).mean().mul(4.0).backward()
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(
                float(t == 1 and transport.worker_rank == 0))  # as torch.amp.GradScaler tells an optimizer
            optimizer.step()
            path.append(np.array_equal(flat(net), step_of))
        return path, flat(net)

    one, other = Stage(2, timeout_s=60).run(train)
    assert (one[0], other[0]) == ([False, True, False], [False, False, False])
    np.testing.assert_array_equal(one[1], other[1])


@pytest.mark.parametrize("scaler_of, way, alone", [
    (torch.amp.GradScaler, "step", True), (torch.amp.GradScaler, "unscale", True), (GradScaler, "step", True),
    (GradScaler, "unscale", False), (GradScaler, "clip the mean", False)])
def test_a_scaler_skips_the_step_of_one_worker_or_after_unscale_of_all(scaler_of: Any, way: str, alone: bool) -> None:
    """On worker 0 the second step of six overflows; nobody is asked where it skips alone."""
    def train(transport: Any) -> Any:
        net = model()
        optimizer = Optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, create("diloco", transport, **OUTER))
        scaler, total = scaler_of("cpu", init_scale=4.0), transport.total
        path: List[bool] = []
        sums: List[int] = []
        transport.total = lambda array: sums.append(len(path)) or total(array)
        for t in range(6):
            optimizer.zero_grad()
            x, y = batch(transport.worker_rank, t)
            scaler.scale(((net(x) - y) ** 2).mean()).backward()
            if t == 1 and transport.worker_rank == 0:
                net[0].weight.grad[0, 0] = float("inf")
            before = flat(net)
            if way != "step":
                scaler.unscale_(optimizer)
            if way == "clip the mean":
                optimizer.synchronize_grads()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            path.append(np.array_equal(flat(net), before))
        return path, flat(net), scaler.get_scale(), sums

    one, other = Stage(2, timeout_s=60).run(train)
    second = [t == 1 for t in range(6)]
    assert (one[0], other[0]) == (second, [False] * 6 if alone else second)
    assert (one[2], other[2]) == (2.0, 4.0 if alone else 2.0)
    assert not alone or set(one[3] + other[3]) <= {0}  # when the workers meet for the first time
    np.testing.assert_array_equal(one[1], other[1])
    assert np.isfinite(one[1]).all()


def test_a_scaler_that_is_not_enabled_takes_any_optimizer() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    weight.sum().backward()
    GradScaler("cpu", enabled=False).step(torch.optim.SGD([weight], lr=0.5))
    assert weight.item() == 0.5


@pytest.mark.parametrize("closes", [False, True])
def test_a_gradient_that_is_not_finite_is_no_inner_step_with_on_nan_skip(closes: bool, capfd: Any,
                                                                               monkeypatch: Any) -> None:
    """Else Adam keeps it in its state, and all later rounds of the worker are left out."""
    monkeypatch.setattr(finite, "_lines", itertools.count(1))

    def train(transport: Any, bad: bool) -> Any:
        net = model()
        optimizer = Optimizer(torch.optim.Adam(net.parameters(), lr=0.01), net,
                              create("diloco", transport, on_nan="skip", **OUTER))
        for t in range(6):
            closure = functools.partial(backward, net, optimizer, transport.worker_rank, t, bad)
            if closes:
                assert np.isnan(optimizer.step(closure)) == (bad and (transport.worker_rank, t) == (1, 1))
            else:
                closure()
                optimizer.step()
        return flat(net)

    def backward(net: Any, optimizer: Any, m: int, t: int, bad: bool) -> float:
        optimizer.zero_grad()
        x, y = batch(m, t)
        loss = ((net(x) - y) ** 2).mean().mul(float("nan") if bad and (m, t) == (1, 1) else 1.0)
        if (m, t) != (1, 1) or bad:
            loss.backward()
        return loss.item()

    left_out, expected = (Stage(2, timeout_s=60).run(functools.partial(train, bad=bad)) for bad in (True, False))
    for one in (*left_out, expected[1]):
        np.testing.assert_array_equal(one, expected[0])
    assert not np.array_equal(expected[0], flat(model()))
    told = capfd.readouterr().err
    assert told.count("worker 1, iteration 2: ") == 1 and "0.weight" in told and "are skipped" in told


def test_an_optimizer_with_a_state_is_refused() -> None:
    net = model()
    used = torch.optim.AdamW(net.parameters())
    step(net, used, 0, 0)
    with pytest.raises(ConfigError, match="this AdamW has a state already"):
        Optimizer(used, net, create("diloco", Stage(1).worker(0)))


def made(transport: Any, kind: Any = torch.optim.SGD, dtype: Any = torch.float32, name: str = "diloco", lr: float = 1.0,
         **options: Any) -> Any:
    """A weight of 1, its optimizer and its store."""
    net = torch.nn.Linear(1, 1, bias=False).to(dtype)
    with torch.no_grad():
        net.weight.fill_(1.0)
    store = create(name, transport, **options)
    return net, Optimizer(kind(net.parameters(), lr=lr), net, store), store


def stepped(net: Any, optimizer: Any, grad: float) -> float:
    net.weight.grad = torch.full_like(net.weight, grad)
    optimizer.step()
    return float(net.weight.detach())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrong", [0, None])
def test_saved_states_of_different_moments_are_an_error(way: str, wrong: Any) -> None:
    def save(transport: Any) -> List[Any]:
        net, optimizer, _ = made(transport, H=2)
        states = []
        for t in range(6):
            stepped(net, optimizer, 0.1 * transport.worker_rank)
            states += [copy.deepcopy(optimizer.state_dict())] if t % 3 == 2 else []
        return states

    stage = Stage(2, timeout_s=60)
    saved = stage.run(save, getattr(stage, way))

    def go_on(transport: Any, of: Any) -> int:
        net, optimizer, store = made(transport, H=2)
        if of is not None:
            optimizer.load_state_dict(saved[transport.worker_rank][of])
        stepped(net, optimizer, 0.0)
        return int(store.iteration)

    stage = Stage(2, timeout_s=60)
    assert stage.run(lambda wire: go_on(wire, 1), getattr(stage, way)) == [7, 7]
    stage = Stage(2, timeout_s=60)
    with pytest.raises(ProtocolError, match=r"differ in the (saved|weights at)"):
        stage.run(lambda wire: go_on(wire, wrong if wire.worker_rank else 1), getattr(stage, way))


def test_what_half_precision_does_not_hold_is_no_step_and_adds_up() -> None:
    """One of four workers moves by one unit in the last place in each round."""
    def train(transport: Any, dtype: Any, saves: bool = False) -> Any:
        net, optimizer, store = made(transport, dtype=dtype, H=1, lr_outer=0.7, momentum_outer=0.0)
        for _ in range(30):
            stepped(net, optimizer, -2.0 ** -7 if transport.worker_rank == 0 else 0.0)
        state = copy.deepcopy(optimizer.state_dict())
        if saves:
            return state
        with store.global_weights():
            return float(net.weight.detach())

    exact = Stage(4).run(lambda wire: train(wire, torch.float32))[0]
    half = Stage(4).run(lambda wire: train(wire, torch.bfloat16))[0]
    assert exact > 1.03 and abs(half - exact) <= 2.0 ** -8
    state = Stage(4).run(lambda wire: train(wire, torch.bfloat16, True))[0]
    assert any(name.startswith("rest/") for name in state["store"]["worker"]["arrays"])


def test_weights_that_one_worker_alone_has_loaded_are_an_error_on_servers_too() -> None:
    def train(transport: Any) -> None:
        net, optimizer, _ = made(transport, H=2)
        if transport.worker_rank == 0:
            with torch.no_grad():
                net.weight.fill_(10.0)
        stepped(net, optimizer, 0.0)

    with pytest.raises(ProtocolError, match="differ in the weights at the first step"):
        Stage(2).run(train)


def test_the_optimizer_that_was_given_steps_for_the_store_alone() -> None:
    def train(transport: Any) -> None:
        net, optimizer, _ = made(transport, H=2)
        for _ in range(3):
            stepped(net, optimizer, 0.0)
            with pytest.raises(ConfigError, match=r"^step of the optimizer that od\.Optimizer was made of"):
                optimizer._given.step()

    Stage(1).run(train)


@pytest.mark.parametrize("other", [{"lr": 0.1}, {"kind": torch.optim.AdamW},
                                   {"kind": functools.partial(torch.optim.SGD, momentum=0.5)}])
def test_optimizers_of_the_script_that_differ_are_an_error(other: Dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="the script's own steps"):
        Stage(2).run(lambda wire: made(wire, **(other if wire.worker_rank else {})))


def test_weights_loaded_in_mid_run_and_steps_that_were_not_sent_are_told(capsys: Any) -> None:
    def train(transport: Any) -> None:
        net, optimizer, store = made(transport, H=3)
        net.load_state_dict(net.state_dict())  # before the first step nothing is said
        assert "loaded" not in capsys.readouterr().err
        for _ in range(4):
            stepped(net, optimizer, 0.0)
        net.load_state_dict(net.state_dict())
        store.close()

    base.warn_once.cache_clear()
    Stage(1).run(train)
    said = capsys.readouterr().err
    assert "weights were loaded into the model after the first step" in said
    assert "lack 1 step since the last exchange (iteration 3)" in said


def test_a_copy_of_the_model_is_the_scripts_own(capsys: Any) -> None:
    def train(transport: Any) -> None:
        net, optimizer, _ = made(transport, H=3)
        before = copy.deepcopy(net)
        stepped(net, optimizer, 1.0)
        for average in (before, copy.deepcopy(net)):
            average.load_state_dict(net.state_dict())

    base.warn_once.cache_clear()
    Stage(1).run(train)
    assert "were loaded" not in capsys.readouterr().err


def test_a_state_of_half_precision_in_a_model_of_single_precision_moves_nothing() -> None:
    def train(transport: Any) -> float:
        net, optimizer, _ = made(transport, dtype=torch.bfloat16, H=1, momentum_outer=0.0)
        for _ in range(3):
            stepped(net, optimizer, 2.0 ** -7)
        state = copy.deepcopy(optimizer.state_dict())
        net, optimizer, _ = made(transport, H=1, momentum_outer=0.0)
        optimizer.load_state_dict(state)
        first = stepped(net, optimizer, 0.0)
        assert all(stepped(net, optimizer, 0.0) == first for _ in range(20))
        return first

    assert Stage(1).run(train)[0] != 1.0


def test_a_joiner_leaves_out_the_step_at_its_own_weights_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODSGD_JOINED", "1")
    monkeypatch.setenv("ODSGD_JOINED_AT", "9")

    def train(transport: Any) -> List[float]:
        transport.joins = True
        net = torch.nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            net.weight.fill_(0.0)
        store = create("async_diloco", transport, H=100)
        store.session.resume(9)
        optimizer = Optimizer(torch.optim.SGD(net.parameters(), lr=1.0), net, store)
        return [stepped(net, optimizer, -1.0) for _ in range(3)]

    assert Stage(1).run(train) == [[0.0, 1.0, 2.0]]


class Pulling(Worker):
    def iterate(self, x: Any, step: Any) -> Any:
        assert step.lr_local == step.lr
        return x - step.lr * (x - self.last_exchange.result())


class Proximal(DiLoCo):
    """After each step of the script's a step back towards W_0, at the same rate."""

    name, worker = "proximal", Pulling


def test_a_method_that_takes_weights_is_told_each_groups_rate_of_now() -> None:
    """g = 1: x <- x - lr, then x <- x - lr (x - 1)."""
    def train(transport: Any) -> Any:
        net = torch.nn.Linear(1, 1)
        for one in net.parameters():
            torch.nn.init.ones_(one)
        groups = [{"params": [net.weight], "lr": 0.5}, {"params": [net.bias], "lr": 0.25}]
        optimizer = Optimizer(torch.optim.SGD(groups), net, create("proximal", transport, H=1))
        path = []
        for _ in range(2):
            for one in net.parameters():
                one.grad = torch.ones_like(one)
            optimizer.step()
            path.append([float(one.detach()) for one in net.parameters()])
            for group in optimizer.param_groups:
                group["lr"] /= 2
        return path

    with methods.as_they_were():
        register_method(Proximal)
        assert Stage(1).run(train) == [[[0.75, 0.8125], [0.625, 0.7265625]]]


@pytest.mark.parametrize("name", ["ssgd", "diloco"])
def test_a_beat_tells_how_long_a_script_has_waited_for_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = types.SimpleNamespace(monotonic=itertools.count().__next__)  # a wait takes from one call to the next

    def train(transport: Any) -> None:
        net = torch.nn.Linear(1, 1)
        store = create(name, transport, **({"H": 1} if name == "diloco" else {}))
        optimizer = Optimizer(torch.optim.SGD(net.parameters(), lr=1.0), net, store)
        stepped(net, optimizer, 0.0)
        net(torch.ones(1, 1))
        monkeypatch.setattr(lanes, "time", clock)
        for _ in range(3):
            before = pulse.more["waited_s"]()
            stepped(net, optimizer, 0.0)
            net(torch.ones(1, 1))
            net(torch.ones(1, 1))  # has its weights already
            assert pulse.more["waited_s"]() - before == pytest.approx(1.0)

    Stage(1).run(train)
