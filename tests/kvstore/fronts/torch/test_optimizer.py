"""`odsgd.torch.Optimizer` in one process: beside torch.optim alone, and between workers that take turns."""
import contextlib
import copy
import functools
import os
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from kvstore.errors import ConfigError, ProtocolError, StoreClosedError
from kvstore.fronts import base
from kvstore.fronts.torch.optimizer import GradScaler, Optimizer
from kvstore.fronts.torch.store import create
from kvstore.transports.in_process import Stage

STEPS = 20
optim = torch.optim


class Net(torch.nn.Module):
    """Has what a front end may stumble on: a kernel that lies in another order and spans buckets, buffers, a weight
    with two owners, one that its module does not compute with itself, one that is frozen, one that is never used. It
    has no bias whose gradient is 0, on whose rounding errors Adam would train."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = torch.nn.Conv2d(3, 16, 3, padding=1, bias=False).to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm2d(16)
        self.attention = torch.nn.MultiheadAttention(16, 2, bias=False, batch_first=True)
        self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.frozen = torch.nn.Linear(16, 16).requires_grad_(False)
        self.unused = torch.nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.norm(self.conv(x))).mean(3).transpose(1, 2)
        x, _ = self.attention(x, x, x)
        return self.frozen(self.second(torch.tanh(self.first(x)))).mean(1)


def batches(seed: int = 0, number: int = STEPS) -> List[Any]:
    random = np.random.RandomState(seed)
    return [torch.tensor(random.normal(size=(4, 3, 6, 6)).astype(np.float32)) for _ in range(number)]


def train(net: Any, optimizer: Any, xs: List[Any], scheduler: Any = None,
          before: Callable[[int], None] = lambda t: None) -> None:
    for t, x in enumerate(xs):
        before(t)
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def state_of(net: Any) -> Dict[str, np.ndarray]:
    return {name: tensor.detach().numpy().copy() for name, tensor in net.state_dict().items()}


def assert_close(ours: Any, theirs: Any) -> None:
    """To rounding, but for what was never used: alone it keeps its weights, with a store it decays."""
    for name, array in state_of(theirs).items():
        if not name.startswith("unused"):
            np.testing.assert_allclose(state_of(ours)[name], array, 1e-4, atol=1e-5, err_msg=name)


OPTIMIZERS: Dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: optim.SGD(p, 0.05), "decay": lambda p: optim.SGD(p, 0.05, weight_decay=0.01),
    "momentum": lambda p: optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: optim.Adam(p, 0.01, weight_decay=0.01), "adamw": lambda p: optim.AdamW(p, 0.01, (0.8, 0.99)),
    "rmsprop": lambda p: optim.RMSprop(p, 0.01, weight_decay=0.01),
    "rmsprop_all": lambda p: optim.RMSprop(p, 0.01, 0.9, momentum=0.5, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, 0.01, lr_decay=0.1, initial_accumulator_value=0.5),
    "adadelta": lambda p: optim.Adadelta(p, 1.0, 0.8, weight_decay=0.01)}


class Linear(torch.nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(batches(9, 1)[0])

    def forward(self, grad: Any) -> Any:
        return (self.w * grad).sum()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_formula_is_torchs_to_rounding(name: str) -> None:
    ours, alone = Linear(), Linear()
    theirs = OPTIMIZERS[name](alone.parameters())
    optimizer = Optimizer(OPTIMIZERS[name](ours.parameters()), ours, create("local"))
    for t, grad in enumerate(batches()):
        for net, one in ((alone, theirs), (ours, optimizer)):
            one.param_groups[0]["lr"] = 0.02 / (1 + t)
            one.zero_grad()
            net(grad).backward()
            one.step()
    optimizer.synchronize()
    np.testing.assert_allclose(ours.w.detach(), alone.w.detach(), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_one_worker_is_torch_alone(name: str) -> None:
    """With a schedule, and buckets that cut most parameters."""
    ours, alone = Net(), Net()
    theirs = OPTIMIZERS[name](alone.parameters())
    optimizer = Optimizer(OPTIMIZERS[name](ours.parameters()), ours, create("local", bucket_nbytes=400))
    for net, one in ((alone, theirs), (ours, optimizer)):
        train(net, one, batches(), optim.lr_scheduler.StepLR(one, 5, 0.5))
    assert_close(ours, alone)
    assert not np.allclose(state_of(ours)["conv.weight"], state_of(Net())["conv.weight"], atol=1e-3)  # it has moved


def grouped(net: Any) -> Any:
    groups = [{"params": net.conv.parameters(), "lr": 0.1, "weight_decay": 0.0},
              {"params": [*net.first.parameters(), net.second.bias], "weight_decay": 0.1}]
    return optim.SGD(groups, lr=0.02, momentum=0.9)


def test_groups_have_rates_and_decays_of_their_own_also_where_a_schedule_parts_them() -> None:
    ours, alone = Net(), Net()
    theirs, optimizer = grouped(alone), Optimizer(grouped(ours), ours, create("local"))
    for net, one in ((alone, theirs), (ours, optimizer)):
        schedule = optim.lr_scheduler.LambdaLR(one, [lambda t: t / 10, lambda t: 1 / (1 + t)])
        train(net, one, batches(), schedule)
    assert_close(ours, alone)
    np.testing.assert_array_equal(state_of(ours)["norm.weight"], state_of(Net())["norm.weight"])  # in no group


def test_accumulated_and_clipped_gradients_are_those_of_torch() -> None:
    ours, alone = Net(), Net()
    theirs = optim.SGD(alone.parameters(), 0.05)
    optimizer = Optimizer(optim.SGD(ours.parameters(), 0.05), ours, create("local"))
    for x, y in zip(batches(0), batches(1)):
        for net, one in ((alone, theirs), (ours, optimizer)):
            one.zero_grad()
            if one is optimizer:
                with optimizer.no_sync():
                    net(x).square().sum().backward()
                    net(y).square().sum().backward()
                optimizer.synchronize_grads()
            else:
                net(x).square().sum().backward()
                net(y).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            one.step()
    assert_close(ours, alone)


def test_a_scaler_skips_the_step_of_all_workers_when_one_overflows() -> None:
    def run(transport: Any) -> Dict[str, np.ndarray]:
        net = Net()
        optimizer = Optimizer(optim.SGD(net.parameters(), 0.05), net, create("ssgd", transport))
        scaler = GradScaler("cpu", init_scale=8.0, growth_interval=3)
        scales = []
        for t, x in enumerate(batches(transport.worker_rank, 6)):
            optimizer.zero_grad()
            with optimizer.no_sync():
                scaler.scale(net(x).square().sum()).backward()
            if (t, transport.worker_rank) == (2, 1):
                net.conv.weight.grad[0, 0, 0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            if t == 2:
                assert optimizer.store.iteration == 2
        assert scales == [8, 8, 4, 4, 4, 8]  # on both, though one of them has not seen the overflow
        return state_of(net)

    assert_leaves_out_the_third(run)


def assert_leaves_out_the_third(run: Callable[[Any], Dict[str, np.ndarray]]) -> None:
    """`run` comes to what `ssgd` does without the third iteration's step."""
    def without(transport: Any) -> Dict[str, np.ndarray]:
        net = Net()
        optimizer = Optimizer(optim.SGD(net.parameters(), 0.05), net, create("ssgd", transport))
        for t, x in enumerate(batches(transport.worker_rank, 6)):
            loss = net(x).square().sum()
            if t != 2:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return state_of(net)

    for one, other in zip(Stage(2).run(run), Stage(2).run(without)):
        for name, array in other.items():
            np.testing.assert_allclose(one[name], array, 1e-5, atol=1e-6, err_msg=name)


def test_workers_of_an_asynchronous_store_skip_by_themselves_and_may_take_other_numbers_of_steps() -> None:
    def run(transport: Any) -> Any:
        net, rank = Net(), transport.worker_rank
        optimizer = Optimizer(optim.SGD(net.parameters(), 0.05), net, create("asgd", transport))
        scaler = GradScaler("cpu", init_scale=8.0)
        for t, x in enumerate(batches(rank, 3 + 2 * rank)):
            optimizer.zero_grad()
            with optimizer.no_sync():
                scaler.scale(net(x).square().sum()).backward()
            if (t, rank) == (1, 1):
                net.conv.weight.grad[0, 0, 0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        return optimizer.store.iteration, scaler.get_scale()

    assert Stage(2).run(run) == [(3, 8.0), (4, 4.0)]


def test_a_scaler_of_torchs_is_refused_since_it_knows_one_worker_alone() -> None:
    net = Net()
    optimizer = local(net)
    scaler = torch.amp.GradScaler("cpu")
    with optimizer.no_sync():
        scaler.scale(net(batches()[0]).square().sum()).backward()
    with pytest.raises(ConfigError, match=r"take odsgd\.torch\.GradScaler in its place"):
        scaler.step(optimizer)


def test_a_loss_that_is_not_a_number_is_left_out_on_all_workers_if_that_is_asked_for() -> None:
    def run(transport: Any) -> Dict[str, np.ndarray]:
        net = Net()
        optimizer = Optimizer(optim.SGD(net.parameters(), 0.05), net, create("ssgd", transport, on_nan="skip"))
        for t, x in enumerate(batches(transport.worker_rank, 6)):
            optimizer.zero_grad()
            (net(x).square().sum() * (float("nan") if (t, transport.worker_rank) == (2, 1) else 1.0)).backward()
            optimizer.step()
        return state_of(net)

    assert_leaves_out_the_third(run)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_parameters_in_half_precision_are_updated_in_single_and_shown_rounded(dtype: Any) -> None:
    """Two workers. Steps of 2^-13 of a weight are too small for either type, and add up all the same."""
    def run(transport: Any) -> Any:
        net = torch.nn.Linear(4, 3, bias=False, dtype=dtype)
        torch.nn.init.ones_(net.weight)
        optimizer = Optimizer(optim.SGD(net.parameters(), 2.0 ** -13), net, create("ssgd", transport))
        for _ in range(200):
            optimizer.zero_grad()
            net(torch.full((1, 4), float(2 * transport.worker_rank), dtype=dtype)).sum().backward()
            optimizer.step()
        with optimizer.store.global_weights():
            return net.weight.detach().float().numpy()

    expected = torch.full((3, 4), 1 - 200 * 2.0 ** -13).to(dtype).float().numpy()
    for weights in Stage(2).run(run):
        np.testing.assert_array_equal(weights, expected)
    assert expected.max() < 1


def test_a_snapshot_is_shown_where_own_weights_are_still_to_come() -> None:
    """No module has been called since the step."""
    def run(transport: Any) -> None:
        net, x, store = torch.nn.Linear(2, 1, bias=False), torch.ones(1, 2), create("asgd", transport)
        torch.nn.init.ones_(net.weight)
        optimizer = Optimizer(optim.SGD(net.parameters(), 0.5), net, store)

        def step() -> None:
            optimizer.zero_grad()
            net(x).sum().backward()
            optimizer.step()

        step()
        then = store.snapshot()
        step()
        with store.showing(then):
            assert net(x).item() == 1.0
        assert net(x).item() == 0.0

    Stage(1).run(run)


def test_a_weight_that_one_worker_does_not_use_gets_the_others_gradient_beside_a_zero() -> None:
    def run(transport: Any) -> Any:
        parts = torch.nn.ModuleList([torch.nn.Linear(2, 1, bias=False) for _ in range(2)])
        for part in parts:
            torch.nn.init.ones_(part.weight)
        store = create("ssgd", transport)
        optimizer = Optimizer(optim.SGD(parts.parameters(), 0.5), parts, store)
        for t in range(3):
            optimizer.zero_grad()
            parts[transport.worker_rank if t else 0](torch.ones(1, 2)).sum().backward()
            optimizer.step()
        with store.global_weights():
            return [part.weight.detach().numpy().tolist() for part in parts]

    # The mean gradient of the first is 1, then twice 1/2; that of the second twice 1/2.
    assert Stage(2).run(run) == [[[[0.0, 0.0]], [[0.5, 0.5]]]] * 2


def test_what_is_frozen_or_unfrozen_later_is_told_and_a_rate_of_0_does_it() -> None:
    for name, said in (("frozen.weight", "was frozen when od.Optimizer was made, and is no longer"),
                       ("conv.weight", "was trained when od.Optimizer was made, and is frozen now")):
        net = Net()
        optimizer = local(net)
        train(net, optimizer, batches(0, 1))
        tensor = net.get_parameter(name)
        tensor.requires_grad_(not tensor.requires_grad)
        with pytest.raises(ConfigError, match=f"{name} {said}"):
            train(net, optimizer, batches(0, 1))
    net = Net()
    groups = [{"params": net.first.parameters(), "lr": 0.0}, {"params": net.conv.parameters()}]
    optimizer = local(net, lambda _: optim.AdamW(groups, 0.01))
    for stands_still in (True, False):
        before = state_of(net)
        train(net, optimizer, batches(0, 2))
        assert np.array_equal(state_of(net)["first.weight"], before["first.weight"]) == stands_still
        assert not np.array_equal(state_of(net)["conv.weight"], before["conv.weight"])
        optimizer.param_groups[0]["lr"] = 0.01


def test_a_group_with_the_rate_0_stands_still_whatever_the_local_rate() -> None:
    def run(transport: Any) -> List[float]:
        net = torch.nn.Linear(2, 1)
        torch.nn.init.ones_(net.weight)
        optimizer = Optimizer(optim.SGD([{"params": [net.weight], "lr": 0.0}, {"params": [net.bias]}], 0.1), net,
                              create("odsgd", transport, warmup=0, lr_local=0.5))
        train(net, optimizer, [torch.ones(2)] * 3)
        return list(net.weight.flatten().tolist())

    assert Stage(1).run(run) == [[1.0, 1.0]]


def test_within_an_interval_global_weights_are_at_the_rates_of_each_group() -> None:
    """`sasgd` with T = 4, three steps with the same data on both workers; a resumed run says the same at once."""
    def run(transport: Any, saved: Any = None) -> Any:
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
        optimizer = Optimizer(optim.SGD([{"params": one.parameters()} for one in net], 0.1), net,
                              create("sasgd", transport, T=4))
        begun = state_of(net)
        if saved is None:
            optimizer.param_groups[0]["lr"] = 0.0
            for x in batches(0, 3):
                optimizer.zero_grad()
                net(x.flatten(0, 2)[:, :3]).square().sum().mul(1e-2).backward()
                optimizer.step()
        else:
            optimizer.load_state_dict(saved[transport.worker_rank])
            optimizer.store.begin()
        optimizer.synchronize()
        own, state = state_of(net), copy.deepcopy(optimizer.state_dict())
        with optimizer.store.global_weights():
            return begun, own, state_of(net), state

    stage, other = Stage(2, timeout_s=60), Stage(2, timeout_s=60)
    first = stage.run(run, stage.ring_worker)
    again = other.run(functools.partial(run, saved=[one[-1] for one in first]), other.ring_worker)
    for begun, own, shown, _ in (*first, *again):
        assert [name for name in own if np.array_equal(own[name], begun[name])] == ["0.weight", "0.bias"]
        for name, array in own.items():
            np.testing.assert_allclose(shown[name], array, 1e-6, atol=1e-7, err_msg=name)


def test_workers_begin_as_worker_0_and_share_the_statistics_of_batches_where_they_share_weights() -> None:
    def run(transport: Any) -> List[Dict[str, np.ndarray]]:
        net = Net()
        net.norm.num_batches_tracked += 7
        for tensor in net.state_dict().values():
            tensor += transport.worker_rank
        optimizer = Optimizer(optim.SGD(net.parameters(), 0.05), net, create("odsgd", transport, warmup=0))
        begun = state_of(net)
        train(net, optimizer, batches(transport.worker_rank, 3))
        own = state_of(net)
        with optimizer.store.global_weights():
            shared = state_of(net)
        np.testing.assert_equal(state_of(net), own)
        return [begun, own, shared]

    one, other = Stage(2).run(run)
    np.testing.assert_equal(other[0], one[0])
    assert one[0]["norm.num_batches_tracked"] == 7 and one[0]["norm.weight"].max() == 1
    np.testing.assert_equal(other[2], one[2])
    np.testing.assert_allclose(one[2]["norm.running_mean"],
                               (one[1]["norm.running_mean"] + other[1]["norm.running_mean"]) / 2, rtol=1e-6)
    assert np.abs(one[1]["conv.weight"] - other[1]["conv.weight"]).max() > 1e-4  # local steps apart


class Replacing(torch.nn.Linear):
    """Puts other tensors in the place of its buffers; one of them grows."""

    last: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Any) -> Any:
        self.last, self.seen = 1 * x, torch.cat([self.seen, x])
        return super().forward(x)


def test_a_buffer_that_its_module_replaces_is_shared_and_goes_on() -> None:
    def run(transport: Any) -> Any:
        def made(net: Any) -> Any:
            return Optimizer(optim.SGD(net.parameters(), 0.01), net, create("ssgd", transport))

        net, other = Replacing(), Replacing()
        optimizer, x = made(net), torch.full((3,), 1.0 + transport.worker_rank)
        train(net, optimizer, [x] * 2)
        with torch.inference_mode(), optimizer.store.global_weights():
            shared = net.last.tolist()
            net(x)
        made(other).load_state_dict(optimizer.state_dict())
        return shared, net.last.tolist(), other.last.tolist()

    assert Stage(2).run(run) == [([1.5] * 3, [own] * 3, [own] * 3) for own in (1.0, 2.0)]


@pytest.mark.parametrize("way", ["ring_worker", "sharded_worker", ""])
def test_weights_that_differ_at_the_first_step_are_told(way: str) -> None:
    def run(transport: Any) -> None:
        net = torch.nn.Linear(3, 2)
        optimizer = Optimizer(optim.SGD(net.parameters(), 0.01), net, create("odsgd", transport))
        if transport.worker_rank == 0:
            torch.nn.init.ones_(net.weight)
        train(net, optimizer, [torch.ones(3)])

    stage = Stage(2)
    with pytest.raises(ProtocolError, match=r"(?s)differ in the weights at the first step.*-weight \w{8}\n *\+w"):
        stage.run(run, *([getattr(stage, way)] if way else []))


def test_the_optimizer_that_was_given_is_not_for_the_script() -> None:
    """This worker alone would train by it."""
    net = Net()
    given = optim.SGD(net.parameters(), 0.1)
    optimizer = Optimizer(given, net, create("local"))
    for what, call in (("step", given.step), ("load_state_dict", lambda: given.load_state_dict(given.state_dict()))):
        for x in batches(0, 2):
            with pytest.raises(ConfigError, match=rf"^{what} of the optimizer that od\.Optimizer was made of"):
                call()
            train(net, optimizer, [x])
    given.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(ConfigError, match=r"had 1 parameter group when od\.Optimizer was made, and has 2 now"):
        optimizer.step()
    optimizer.store.close()
    given.step()


def test_a_schedule_of_the_optimizer_that_was_given_goes_on_after_a_resume() -> None:
    def rates(resumes: bool) -> List[float]:
        net = Net()
        given = optim.SGD(net.parameters(), 0.1)
        optimizer = Optimizer(given, net, create("local"))
        schedule = optim.lr_scheduler.StepLR(given, 1, 0.5)
        found = []
        for t in range(4):
            if t == 2 and resumes:
                optimizer._load_own(copy.deepcopy(optim.Optimizer.state_dict(optimizer)))
            found.append(optimizer.param_groups[0]["lr"])
            schedule.step()
        return found

    assert rates(True) == rates(False) == [0.1, 0.05, 0.025, 0.0125]


@pytest.mark.parametrize("store, options", [("odsgd", {"warmup": 2, "momentum_local": 0.5}),
                                            ("ssgd", {"codec": "2bit"}), ("delayed", {"warmup": 0})])
def test_a_run_goes_on_from_its_state_with_the_same_bits(store: str, options: Dict[str, Any]) -> None:
    def made(net: Any, transport: Any) -> Any:
        return Optimizer(optim.AdamW(net.parameters(), 0.01), net, create(store, transport, **options))

    def whole(transport: Any) -> List[Any]:
        net = Net()
        optimizer = made(net, transport)
        train(net, optimizer, batches(transport.worker_rank, 4))
        saved = optimizer.state_dict()
        train(net, optimizer, batches(10 + transport.worker_rank, 4))
        return [saved, state_of(net)]

    def resumed(transport: Any) -> Dict[str, np.ndarray]:
        net = Net()
        optimizer = made(net, transport)
        optimizer.load_state_dict(first[transport.worker_rank][0])
        train(net, optimizer, batches(10 + transport.worker_rank, 4))
        return state_of(net)

    first = Stage(2).run(whole)
    for (_, expected), got in zip(first, Stage(2).run(resumed)):
        for name in expected:
            if name != "norm.num_batches_tracked":  # the model's, which its user saves
                np.testing.assert_array_equal(got[name], expected[name], err_msg=name)
    first = first[:1] * 2
    with pytest.raises(ConfigError, match=r"^the saved state is worker 0's, and this is worker 1"):
        Stage(2).run(resumed)


def local(net: Any, make: Callable[[Any], Any] = OPTIMIZERS["momentum"], **options: Any) -> Any:
    return Optimizer(make(net.parameters()), net, create("local", **options))


def test_a_run_goes_on_with_the_buckets_that_it_had_whatever_its_first_step_shows() -> None:
    def cut(saved: Any = None) -> Any:
        net = Net()
        optimizer = local(net)
        if saved is None:
            optimizer.store.begin()  # before any gradient has appeared
        else:
            optimizer.load_state_dict(saved)
        train(net, optimizer, batches(0, 1))
        return [lane.bucket.segments for lane in optimizer.store.lanes], optimizer.state_dict()

    segments, saved = cut()
    assert cut(saved)[0] == segments


@pytest.mark.parametrize("closes", [False, True])
def test_a_store_leaves_its_model_to_the_next_one_or_to_torch_alone(closes: bool) -> None:
    ours, alone = Net(), Net()
    theirs, former = OPTIMIZERS["momentum"](alone.parameters()), local(ours)
    train(alone, theirs, batches(0, 3))
    train(ours, former, batches(0, 3))
    if closes:
        former.store.close()
        after = OPTIMIZERS["decay"](ours.parameters())
    else:
        after = local(ours, OPTIMIZERS["decay"])
    for net, one in ((ours, after), (alone, OPTIMIZERS["decay"](alone.parameters()))):
        train(net, one, batches(1, 3))
    with pytest.raises(StoreClosedError if closes else ConfigError, match=r"is closed|has left its model"):
        former.step()
    assert_close(ours, alone)


def test_two_stores_may_train_parts_of_one_model() -> None:
    ours, alone = Net(), Net()

    def parts(net: Any) -> Any:
        return [optim.SGD(net.conv.parameters(), 0.05), optim.Adam([*net.first.parameters(), net.second.bias], 0.01)]

    pairs = [[Optimizer(one, ours, create("local")) for one in parts(ours)], parts(alone)]
    for net, (one, other) in zip((ours, alone), pairs):
        for x in batches(0, 4):
            one.zero_grad()
            other.zero_grad()
            net(x).square().sum().backward()
            one.step()
            other.step()
    assert_close(ours, alone)


def test_what_cannot_be_done_is_said_in_one_line() -> None:
    def refuses(match: str, make: Callable[[Any], Any], kind: Any = ConfigError) -> None:
        with pytest.raises(kind, match=match) as caught:
            local(Net(), make)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400

    refuses("expected one of torch.optim's SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta",
            lambda p: optim.Adamax(p))
    refuses("dampening 0.5", lambda p: optim.SGD(p, 0.1, momentum=0.9, dampening=0.5))
    refuses("amsgrad=True", lambda p: optim.Adam(p, amsgrad=True))
    refuses("groups of SGD differ in momentum", lambda p: optim.SGD(
        [{"params": [one], "momentum": number / 100} for number, one in enumerate(p)], 0.1))
    refuses("the optimizer's and not the model's", lambda p: optim.SGD([torch.nn.Parameter(torch.ones(3))], 0.1))
    with pytest.raises(ConfigError, match=r"conv.weight is on the device `meta`, where it has no values"):
        local(Net().to("meta"))
    with pytest.raises(ConfigError, match=r"conv.weight is torch.float64"):
        local(Net().double())
    sparse = Net()
    sparse.register_buffer("adjacency", torch.eye(3).to_sparse())
    with pytest.raises(ConfigError, match=r"adjacency is torch.sparse_coo, and a store has whole arrays alone"):
        local(sparse)
    net = torch.nn.Embedding(3, 2, sparse=True)
    optimizer = local(net)
    net(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="the gradient of weight is sparse"):
        optimizer.step()


def test_a_gradient_that_left_too_early_is_noticed() -> None:
    net = Net()
    optimizer = local(net, bucket_nbytes=400)
    train(net, optimizer, batches(0, 1))
    loss = net(batches()[0]).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ConfigError, match=r"under `with optimizer\.no_sync"):
        optimizer.synchronize_grads()
    with pytest.raises(ProtocolError, match=r"a second gradient of .* before optimizer\.step"):
        loss.backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ConfigError, match="changed between backward"):
        optimizer.step()


def test_a_state_is_saved_between_iterations() -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = local(net)
    train(net, optimizer, [torch.ones(3)])
    net(torch.ones(3)).sum().backward()
    with pytest.raises(ProtocolError, match="saving in the middle of an iteration, when gradients of it"):
        optimizer.state_dict()
    optimizer.step()
    assert optimizer.state_dict()["store"]["worker"]["facts"]["iteration"] == 2


def test_a_state_is_loaded_before_the_first_step() -> None:
    net = Net()
    optimizer = local(net)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.5
    train(net, optimizer, batches(0, 1))
    with pytest.raises(ConfigError, match="load_state_dict after the first step, when the store has its weights; to"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] != 0.5


@pytest.mark.parametrize("make, line", [
    (lambda p: optim.SGD(p, 0.1, momentum=0.9), "momentum of the optimizer was 0.9 when .*, and is 0.95 now; "),
    (lambda p: optim.Adam(p, 0.1), r"betas of the optimizer was \(0.9, 0.999\) when .*, and is \(0.95, 0.999\) now; ")])
def test_a_schedule_of_the_momentum_is_told_with_the_way_out(make: Any, line: str) -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = Optimizer(make(net.parameters()), net, create("local"))
    schedule = optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    with pytest.raises(ConfigError, match=line + ".*OneCycleLR and CyclicLR: cycle_momentum=False"):
        train(net, optimizer, [torch.ones(3)], schedule)


def saved_by(net: Any, name: str, **options: Any) -> Any:
    """The state of a store after two steps."""
    optimizer = Optimizer(optim.SGD(net.parameters(), 0.1), net, create(name, Stage(1).worker(0), **options))
    train(net, optimizer, [torch.ones(3)] * 2)
    return optimizer.state_dict()


def test_a_state_of_another_model_is_told_before_anything_is_written() -> None:
    saved = saved_by(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)), "odsgd")
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(2, 4, bias=False))
    optimizer = Optimizer(optim.SGD(net.parameters(), 0.1), net, create("odsgd", Stage(1).worker(0)))
    before = state_of(net)
    saved["param_groups"] = optimizer.state_dict()["param_groups"]
    with pytest.raises(ConfigError, match=r"`local/1.weight` of shape \(4, 2\) and .* state one of shape \(2, 4\);"):
        optimizer.load_state_dict(saved)
    for name, array in state_of(net).items():
        np.testing.assert_array_equal(array, before[name])
    with pytest.raises(ConfigError, match=r"no state of an optimizer: it has 0.weight, 0.bias, 1.weight; give what"):
        optimizer.load_state_dict(net.state_dict())


def test_weights_that_are_loaded_over_a_state_are_told() -> None:
    net = torch.nn.Linear(3, 2)
    saved, other = saved_by(net, "odsgd", warmup=0), copy.deepcopy(net.state_dict())
    other["bias"] += 1
    for loads_first in (True, False):
        net = torch.nn.Linear(3, 2)
        optimizer = Optimizer(optim.SGD(net.parameters(), 0.1), net, create("odsgd", Stage(1).worker(0), warmup=0))
        if loads_first:
            net.load_state_dict(other)
        optimizer.load_state_dict(saved)
        if loads_first:
            train(net, optimizer, [torch.ones(3)])
            continue
        net.load_state_dict(other)
        with pytest.raises(ProtocolError, match=r"weights of bias are others than the saved state's at the first"):
            train(net, optimizer, [torch.ones(3)])


@pytest.mark.parametrize("name, was, now, said", [
    ("odsgd", {"momentum_local": 0.9}, {"momentum_local": 0.1}, "a local optimizer with momentum 0.9, and .* has 0.1"),
    ("odsgd", {"optimizer_local": "dcasgd_c", "lamda": 0.5}, {"optimizer_local": "dcasgd_c", "lamda": 2.0},
     "a local optimizer with lamda 0.5, and this store's has 2.0"),
    ("diloco", {"H": 1, "momentum_outer": 0.9}, {"H": 1, "momentum_outer": 0.5},
     "an outer optimizer with momentum 0.9, and .* has 0.5")])
def test_options_that_differ_from_a_saved_states_are_told(name: str, was: Any, now: Any, said: str) -> None:
    saved = saved_by(torch.nn.Linear(3, 2), name, **was)
    for options in (was, now):
        net = torch.nn.Linear(3, 2)
        optimizer = Optimizer(optim.SGD(net.parameters(), 0.1), net, create(name, Stage(1).worker(0), **options))
        optimizer.load_state_dict(saved)
        if options == was:
            train(net, optimizer, [torch.ones(3)])
            continue
        with pytest.raises(ConfigError, match=said):
            train(net, optimizer, [torch.ones(3)])


def test_a_child_is_told_that_weights_on_their_way_will_not_come() -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = local(net)
    train(net, optimizer, [torch.ones(3)])
    optimizer.store._pid = -1  # as in a child
    for call in (lambda: net(torch.ones(3)), optimizer.synchronize, optimizer.store.wait):
        with pytest.raises(ProtocolError, match=r"was forked while the next weights were on .* before the fork"):
            call()
    optimizer.store._pid = os.getpid()
    optimizer.synchronize()
    optimizer.store._pid = -1
    net(torch.ones(3))


def test_what_has_no_gradient_at_the_first_step_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def said(absent: Callable[[Any], Any]) -> str:
        net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
        optimizer = local(net)
        for t in range(2):
            loss = net(torch.ones(3)).sum()
            if absent(net) is not None:
                loss.backward()
                for one in absent(net) if t == 0 else ():
                    one.grad = None
            optimizer.step()
            optimizer.zero_grad()
        return capsys.readouterr().err

    assert said(lambda net: []) == ""
    assert said(lambda net: None).count("no parameter has a gradient at the first step(); was backward() called?") == 1
    assert said(lambda net: [net[1].bias]).count(
        "no gradient at the first step() for 1.bias on this worker: the store takes") == 1


def test_a_parameter_that_a_module_gets_later_is_no_error_and_what_is_expanded_is_named() -> None:
    net = torch.nn.Linear(3, 1)
    net.bias = torch.nn.Parameter(torch.zeros(2)[::2])  # one element, and a stride
    optimizer = local(net)
    net.register_parameter("late", torch.nn.Parameter(torch.zeros(2), requires_grad=False))
    train(net, optimizer, [torch.ones(3)] * 2)
    net = torch.nn.Linear(3, 2)
    net.register_buffer("k", torch.ones(1).expand(4))
    with pytest.raises(ConfigError, match=r"several elements of k are one place in memory .*\.clone\(\)"):
        local(net)


def test_a_state_with_other_settings_is_told_where_it_is_loaded() -> None:
    def made(decay: float) -> Any:
        net = torch.nn.Linear(3, 2)
        return Optimizer(optim.SGD(net.parameters(), 0.1, weight_decay=decay), net, create("local"))

    with pytest.raises(ConfigError, match=r"weight_decay of the optimizer was 0.2 when .*, and is 0.1 in the state to"):
        made(0.2).load_state_dict(made(0.1).state_dict())


@pytest.mark.parametrize("name", ["local", "diloco"])
@pytest.mark.parametrize("replace", [
    lambda net: net.__setitem__(1, torch.nn.Linear(3, 2)),
    lambda net: net.load_state_dict({key: tensor + 1 for key, tensor in net.state_dict().items()}, assign=True)],
    ids=["a layer", "assign=True"])
def test_a_parameter_that_is_replaced_before_the_first_step_is_told(replace: Any, name: str) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    store = create(name, Stage(1).worker(0) if name == "diloco" else None)
    optimizer = Optimizer(optim.SGD(net.parameters(), 0.01), net, store)
    replace(net)
    with pytest.raises(ConfigError, match=r"[01].weight is another tensor than when od.Optimizer was made"):
        train(net, optimizer, [torch.ones(3)])


def test_a_backward_pass_goes_through_another_model_under_its_no_sync() -> None:
    def run(stores: bool) -> List[Any]:
        torch.manual_seed(3)
        made, judge = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
        by_g, by_d = optim.SGD(made.parameters(), 0.1), optim.SGD(judge.parameters(), 0.1)  # type: Any, Any
        if stores:
            by_g, by_d = Optimizer(by_g, made, create("local")), Optimizer(by_d, judge, create("local"))
        for x in torch.randn(5, 4, 3):
            by_d.zero_grad()
            (judge(x).square() - judge(made(x).detach()).tanh()).mean().backward()
            by_d.step()
            by_g.zero_grad()
            with by_d.no_sync() if stores else contextlib.nullcontext():
                judge(made(x)).tanh().mean().backward()
            by_g.step()
        return [made, judge]

    for ours, theirs in zip(run(True), run(False)):
        assert_close(ours, theirs)


def test_parameters_are_up_to_date_wherever_they_are_asked_for() -> None:
    """In its module's forward pass a weight is waited for; elsewhere by `synchronize`, and by `state_dict`."""
    net = Net()
    optimizer = local(net)
    train(net, optimizer, batches(0, 2))
    before = net.conv.weight.detach().clone()
    assert (net.state_dict()["conv.weight"] != before).any()
    train(net, optimizer, batches(0, 1))
    with torch.inference_mode():
        net(batches()[0])
    seen = net.conv.weight.detach().clone()
    optimizer.synchronize()
    assert (net.conv.weight == seen).all()


def test_a_compiled_model_trains_alike() -> None:
    ours, alone = Net(), Net()
    compiled = torch.compile(ours, backend="eager")
    optimizer = Optimizer(optim.SGD(compiled.parameters(), 0.05), compiled, create("local"))
    train(compiled, optimizer, batches(0, 4))
    train(alone, optim.SGD(alone.parameters(), 0.05), batches(0, 4))
    assert_close(ours, alone)


class Unused(torch.nn.Linear):
    """Where nothing leaves before `step`, since a gradient of the one bucket does not appear."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.unused = torch.nn.Linear(2, 2)


@pytest.mark.parametrize("net", [torch.nn.Linear(3, 2), Unused()], ids=["all leave", "one is unused"])
def test_a_gradient_that_is_changed_before_the_step_is_told(net: Any) -> None:
    optimizer = Optimizer(optim.SGD(net.parameters(), 0.01), net, create("local"))
    train(net, optimizer, [torch.ones(3)])
    optimizer.zero_grad()
    net(torch.ones(3)).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-6)
    with pytest.raises(ProtocolError, match="was changed between backward"):
        optimizer.step()


def test_a_gradient_that_has_not_left_may_be_added_to_and_clipped_where_that_is_told() -> None:
    ours, alone = Unused(), Unused()
    alone.load_state_dict(ours.state_dict())
    optimizer, theirs = local(ours, OPTIMIZERS["sgd"]), OPTIMIZERS["sgd"](alone.parameters())
    for _ in range(3):
        for net, one in ((ours, optimizer), (alone, theirs)):
            one.zero_grad()
            net(torch.ones(3)).square().sum().backward()
            with one.no_sync() if net is ours else contextlib.nullcontext():
                net(torch.ones(3)).square().sum().backward()
            if net is ours:
                one.synchronize_grads()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            one.step()
    assert_close(ours, alone)


def clamp(net: Any) -> None:
    with torch.no_grad():
        for tensor in net.parameters():
            if tensor.requires_grad:
                tensor.clamp_(-0.001, 0.001)


def clamp_data(net: Any) -> None:
    for tensor in net.parameters():
        tensor.data.clamp_(-0.001, 0.001)


def put_others(net: Any) -> None:
    for tensor in net.parameters():
        tensor.data = tensor.data.clamp(-0.001, 0.001)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("name", ["conv.weight", "norm.weight", "first.bias"])
def test_a_change_through_data_is_told_in_each_parameter(name: str, waits: bool) -> None:
    net = Net()
    optimizer = local(net)
    train(net, optimizer, batches(0, 3))
    if waits:
        optimizer.synchronize()
    dict(net.named_parameters())[name].data.clamp_(-0.0001, 0.0001)
    with pytest.raises(ProtocolError, match=f"the weights of {name} were changed by the script"):
        train(net, optimizer, batches(0, 1))


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("change", [clamp, clamp_data, put_others])
@pytest.mark.parametrize("bucket_nbytes", [400, None])
def test_weights_that_the_script_changes_are_told_and_not_overwritten(bucket_nbytes: Any, change: Any,
                                                                      waits: bool) -> None:
    """Right after the step, before the next weights are shown; or after they are, before a gradient leaves."""
    net = Net()
    optimizer = local(net, **({} if bucket_nbytes is None else {"bucket_nbytes": bucket_nbytes}))
    train(net, optimizer, batches(0, 3))
    if waits:
        optimizer.synchronize()
    change(net)
    with pytest.raises(ProtocolError, match=r"the weights of .* were changed by the script") as caught:
        train(net, optimizer, batches(0, 1))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_weight_that_a_bucket_shares_is_told_whichever_part_is_changed() -> None:
    net = Linear()
    optimizer = local(net, bucket_nbytes=400)
    assert net.w.numel() * 4 > 2 * 400
    train(net, optimizer, batches(0, 2))
    optimizer.synchronize()
    with torch.no_grad():
        net.w[-1] += 1
    with pytest.raises(ProtocolError, match=r"the weights of w were changed"):
        train(net, optimizer, batches(0, 1))


def test_what_a_script_may_write_is_no_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    """An average in the place of the weights that comes back, also inside `global_weights`; a state before the first
    step; buffers; gradients. The path stays that of a script that writes nothing."""
    ours, alone = Net(), Net()
    optimizer, theirs = local(ours), local(alone)
    ours.load_state_dict({name: tensor * 0.5 for name, tensor in ours.state_dict().items()})
    alone.load_state_dict(ours.state_dict())
    for x in batches(0, 4):
        train(alone, theirs, [x])
        train(ours, optimizer, [x])
        optimizer.synchronize()
        kept = [tensor.detach().clone() for tensor in ours.parameters()]
        clamp(ours)
        with torch.no_grad():
            for tensor, one in zip(ours.parameters(), kept):
                tensor.copy_(one)
        with optimizer.store.global_weights():
            clamp(ours)
    optimizer.synchronize()
    for name, array in state_of(alone).items():
        np.testing.assert_array_equal(state_of(ours)[name], array, err_msg=name)


def test_weights_changed_in_vain_before_global_weights_are_told() -> None:
    net = Net()
    optimizer = local(net)
    train(net, optimizer, batches(0, 1))
    optimizer.synchronize()
    clamp(net)
    with pytest.raises(ProtocolError, match=r"were changed by the script"), optimizer.store.global_weights():
        pass


def test_what_a_part_of_the_model_saves_after_a_step_is_of_now() -> None:
    net = Net()
    optimizer = local(net)
    train(net, optimizer, batches(0, 2))
    mine = net.first.state_dict()["weight"].clone()
    optimizer.synchronize()
    assert torch.equal(mine, net.first.weight)


@pytest.mark.parametrize("name", ["ssgd", "odsgd", "diloco"])
def test_a_step_inside_global_weights_is_an_error(name: str) -> None:
    def run(transport: Any) -> None:
        net = Called()
        optimizer = Optimizer(optim.SGD(net.parameters(), 0.05), net, create(name, transport))
        train(net, optimizer, [torch.ones(3)] * 2)
        with optimizer.store.global_weights(), pytest.raises(ProtocolError, match="a step inside `with store"):
            train(net, optimizer, [torch.ones(3)])

    Stage(1).run(run)


def test_a_buffer_in_a_weights_memory_leaves_the_global_weights_as_they_are() -> None:
    def run(has_buffer: bool, transport: Any) -> Any:
        net = Linear()
        net.register_buffer("seen", net.w.detach() if has_buffer else None)
        store = create("odsgd", transport, warmup=0)
        train(net, Optimizer(optim.SGD(net.parameters(), 0.05, momentum=0.9), net, store), batches(store.rank, 3))
        with store.global_weights():
            return net.w.detach().clone()

    for has, lacks in zip(*(Stage(2).run(functools.partial(run, has_buffer)) for has_buffer in (True, False))):
        assert torch.equal(has, lacks)


def test_a_buffer_of_one_byte_begins_as_worker_0s_and_has_no_mean() -> None:
    def run(transport: Any) -> Any:
        net = Linear()
        net.register_buffer("codes", torch.full((3,), 1.0 + transport.worker_rank).to(torch.float8_e4m3fn))
        optimizer = Optimizer(optim.SGD(net.parameters(), 0.05), net, create("ssgd", transport))
        train(net, optimizer, batches(0, 2))
        with optimizer.store.global_weights():
            assert not any("codes" in name for name in optimizer.state_dict()["store"]["worker"]["arrays"])
            return net.codes.float().tolist()

    assert Stage(2, timeout_s=60).run(run) == [[1.0] * 3] * 2


@pytest.mark.parametrize("workers", [2, 3])
def test_a_buffer_near_the_largest_float_is_the_same_inside_global_weights(workers: int) -> None:
    """As the mask of an attention is."""
    values = [torch.finfo(torch.float32).min, torch.finfo(torch.float32).max, -float("inf"), 1 / 3, 0.0]

    def run(transport: Any) -> Any:
        net = torch.nn.Linear(3, 3)
        net.register_buffer("mask", torch.tensor(values))
        optimizer = Optimizer(optim.SGD(net.parameters(), 0.05), net, create("ssgd", transport))
        net(torch.ones(3)).square().sum().backward()
        optimizer.step()
        with optimizer.store.global_weights():
            return net.mask.tolist()

    for mask in Stage(workers).run(run):
        assert mask == torch.tensor(values).tolist()


@pytest.mark.parametrize("name, warns", [("odsgd", True), ("asgd", True), ("ssgd", False)])
def test_saving_a_workers_own_weights_warns_once(name: str, warns: bool, capsys: pytest.CaptureFixture[str]) -> None:
    base.warn_once.cache_clear()  # another test may have been told

    def run(transport: Any) -> None:
        net, other = Net(), Net()
        store = create(name, transport)
        optimizer = Optimizer(optim.SGD(net.parameters(), 0.01), net, store)
        net.state_dict()  # nothing has been trained
        train(net, optimizer, batches(0, 1))
        assert capsys.readouterr().err.count(
            "no gradient at the first step() for unused.weight, unused.bias on this worker: ") == 1
        other.state_dict()
        copy.deepcopy(net).state_dict()
        with store.global_weights():
            net.state_dict()
        optimizer.state_dict()
        assert capsys.readouterr().err == ""
        net.state_dict()
        torch.nn.Sequential(net).state_dict()
        store.close()

    Stage(1).run(run)
    said = capsys.readouterr().err
    assert said.count("warning: what is saved are this worker's own weights") == said.count("\n") == warns, said


def test_parameters_on_one_memory_and_an_optimizer_that_is_ours_already_are_refused() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(4, 3, bias=False))
    net[1].weight.data = net[0].weight.data.t()
    with pytest.raises(ConfigError, match=r"0\.weight and 1\.weight share their memory and are two parameters"):
        local(net)
    net = Called()
    with pytest.raises(ConfigError, match=r"is an od\.Optimizer, which trains by a store already"):
        Optimizer(local(net), net, create("local"))


def test_a_model_may_change_the_order_of_its_memory_between_steps() -> None:
    ours, alone = (torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.Conv2d(5, 4, 3)) for _ in range(2))
    alone.load_state_dict(ours.state_dict())
    optimizer, theirs = local(ours, OPTIMIZERS["sgd"]), OPTIMIZERS["sgd"](alone.parameters())
    for x in batches(0, 3):
        train(ours, optimizer, [x])
        ours.to(memory_format=torch.channels_last)
        train(alone, theirs, [x])
    optimizer.synchronize()
    assert_close(ours, alone)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of torch.distributed's, of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_model_that_is_wrapped_is_refused_by_the_wrappers_name() -> None:
    wrapped = torch.nn.parallel.DistributedDataParallel(Called())
    static = torch.nn.parallel.DistributedDataParallel(Called(), static_graph=True)
    for model, name in ((static, "DistributedDataParallel with static_graph=True"),
                        (torch.nn.Sequential(wrapped), "DistributedDataParallel"),
                        (torch.compile(wrapped, backend="eager"), "DistributedDataParallel"),
                        (torch.nn.DataParallel(Called()), "DataParallel")):
        with pytest.raises(ConfigError, match=f"the model is in {name}, which exchanges gradients") as caught:
            local(model)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    inner = Called()
    wrapped = torch.nn.parallel.DistributedDataParallel(inner)
    optimizer = local(inner)
    with pytest.raises(ProtocolError, match="DistributedDataParallel"):
        train(wrapped, optimizer, [torch.ones(3)] * 2)
    wrapped = torch.nn.parallel.DistributedDataParallel(Called())
    local(wrapped)
    with pytest.raises(ConfigError, match='uneven="join"'):
        wrapped.join()


@pytest.mark.usefixtures("group")
def test_after_close_distributed_data_parallel_exchanges_again() -> None:
    wrapped = torch.nn.parallel.DistributedDataParallel(Called(), find_unused_parameters=True)
    first = local(wrapped)
    train(wrapped, first, [torch.ones(3)] * 2)
    second = local(wrapped)  # takes over from the first
    assert not wrapped.require_backward_grad_sync and wrapped.no_sync == second.no_sync
    second.store.close()
    assert wrapped.require_backward_grad_sync and wrapped.require_forward_param_sync
    assert wrapped.no_sync.__func__ is torch.nn.parallel.DistributedDataParallel.no_sync


class Called(torch.nn.Module):
    """Computes in its forward pass, and in a method beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: Any) -> Any:
        return self.beside(x)

    def beside(self, x: Any) -> Any:
        return (x * self.w).sum()


def test_a_gradient_taken_at_weights_of_an_earlier_iteration_is_told() -> None:
    net = Called()
    optimizer = Optimizer(optim.SGD(net.parameters(), 0.01), net, create("local"))
    train(net, optimizer, [torch.ones(3)])
    with pytest.raises(ProtocolError, match="the gradient of w was taken at weights of an earlier iteration"):
        net.beside(torch.ones(3)).backward()
    optimizer.synchronize()
    net.beside(torch.ones(3)).backward()


def test_a_copy_of_the_model_may_compute_in_the_first_iteration() -> None:
    net = Net()
    optimizer = Optimizer(optim.SGD(net.parameters(), 0.01), net, create("local"))
    teacher = copy.deepcopy(net)
    x, = batches(number=1)
    teacher(x)
    train(net, optimizer, [x])
    assert not np.array_equal(state_of(net)["conv.weight"], state_of(teacher)["conv.weight"])


def test_decay_that_adamw_keeps_apart_does_not_go_where_gradients_have_it() -> None:
    def run(transport: Any) -> None:
        net = Net()
        with pytest.raises(ConfigError, match="AdamW keeps it apart"):
            Optimizer(optim.AdamW(net.parameters(), 0.01), net, create("downpour", transport=transport))

    Stage(1).run(run)


def test_a_store_that_trains_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage(2)

    def work(wire: Any) -> None:
        store = create("ssgd", wire)
        with pytest.raises(ConfigError, match="has no model; make od"), store.global_weights():
            pass
        store.close()

    stage.run(work, stage.worker)
    assert capsys.readouterr().err.count("was given no model, so that each worker has trained its own") == 1


def test_a_second_optimizer_of_a_store_is_told_what_it_takes() -> None:
    net, store = Net(), create("local")
    Optimizer(optim.SGD(net.parameters(), 0.1), net, store)
    with pytest.raises(ConfigError, match="already; make a new store for another"):
        Optimizer(optim.SGD(net.parameters(), 0.1), net, store)
