"""A store of PyTorch's where a script goes wrong, goes on, or lets go."""
import copy
import functools
import gc
import io
import weakref
from typing import Any, List

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from kvstore.errors import ConfigError, ProtocolError, RoundTimeoutError, StoreClosedError
from kvstore.fronts import base
from kvstore.fronts.torch.optimizer import GradScaler, Optimizer
from kvstore.fronts.torch.store import create
from kvstore.transports.in_process import Stage


class Net(torch.nn.Module):
    """`late` is no part of the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.late = (torch.nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Any) -> Any:
        return self.second(torch.tanh(self.first(x)))


def by_store(net: Any, name: str = "local", transport: Any = None, **options: Any) -> Any:
    return Optimizer(torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), net, create(name, transport, **options))


def backward(net: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    net(torch.ones(2, 3)).square().sum().backward()


def train(net: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        backward(net, optimizer)
        optimizer.step()


def flat(net: Any) -> np.ndarray:
    return np.concatenate([one.detach().reshape(-1).numpy().copy() for one in net.parameters()])


@pytest.mark.parametrize("name", ["odsgd", "diloco"])
def test_pytorchs_checkpoint_of_an_optimizer_takes_no_step_in_silence(name: str) -> None:
    of = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    if not hasattr(of, "get_optimizer_state_dict"):
        pytest.skip("this PyTorch has no get_optimizer_state_dict")
    net = Net()
    optimizer = by_store(net, name, Stage(1).worker(0))
    train(net, optimizer, 2)
    before = optimizer.store.iteration
    optimizer.zero_grad()
    if not optimizer.state:  # else it takes none
        with pytest.raises(ConfigError, match=r"save and load the store itself, dcp.save\("):
            of.get_optimizer_state_dict(net, optimizer)
    assert optimizer.store.iteration == before


def test_a_model_keeps_what_it_shows_when_nobody_holds_the_store_any_more() -> None:
    def run(transport: Any) -> List[np.ndarray]:
        net = Net()
        optimizer = by_store(net, "odsgd", transport, warmup=0)
        train(net, optimizer, 3)
        optimizer.store.show_global()
        shown = flat(net)
        optimizer.store.close()
        del optimizer
        gc.collect()
        return [shown, flat(net)]

    ways = Stage(2).run(run)
    for shown, kept in ways:
        np.testing.assert_array_equal(kept, shown)
    np.testing.assert_array_equal(ways[0][0], ways[1][0])


def test_a_step_that_failed_is_whole_when_it_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    nets = Net(), Net()
    ours, theirs = map(by_store, nets)
    train(nets[0], ours, 2)
    train(nets[1], theirs, 2)
    with ours.no_sync():
        backward(nets[0], ours)
    send = ours._send

    def fails(number: int) -> None:
        monkeypatch.setattr(ours, "_send", send)
        raise OSError("no room, made up")

    monkeypatch.setattr(ours, "_send", fails)
    with pytest.raises(OSError, match="made up"):
        ours.step()
    ours.step()
    train(nets[1], theirs, 1)
    for optimizer in (ours, theirs):
        optimizer.synchronize()
    np.testing.assert_array_equal(flat(nets[0]), flat(nets[1]))


def test_after_a_backward_pass_that_failed_zero_grad_begins_anew() -> None:
    nets = Net(), Net()
    ours, theirs = map(by_store, nets)
    train(nets[0], ours, 2)
    train(nets[1], theirs, 2)

    def fails(_: Any) -> None:
        raise RuntimeError("no room, made up")

    handle = nets[0].second.bias.register_post_accumulate_grad_hook(fails)
    with pytest.raises(RuntimeError, match="made up"):
        backward(nets[0], ours)
    handle.remove()
    train(nets[0], ours, 2)
    train(nets[1], theirs, 2)
    for optimizer in (ours, theirs):
        optimizer.synchronize()
    np.testing.assert_array_equal(flat(nets[0]), flat(nets[1]))


def test_a_store_that_was_never_closed_is_let_go() -> None:
    net = Net()
    optimizer = by_store(net)
    train(net, optimizer, 2)
    gone = weakref.ref(optimizer.store), weakref.ref(net)
    del net, optimizer
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_a_closed_store_goes_with_its_optimizer_and_waits_for_no_collector_of_cycles() -> None:
    net = Net()
    optimizer = by_store(net)
    train(net, optimizer, 2)
    store, gone = optimizer.store, weakref.ref(optimizer.store)
    store.close()
    with pytest.raises(StoreClosedError, match="is closed"):
        store.state_dict()
    gc.collect()
    gc.disable()
    try:
        del store, optimizer
        assert gone() is None
    finally:
        gc.enable()


def test_a_module_that_is_called_by_itself_has_the_weights_of_now() -> None:
    net = Net()
    optimizer = Optimizer(torch.optim.SGD(net.parameters(), 0.1, weight_decay=0.5), net, create("local"))
    train(net, optimizer, 2)
    with torch.no_grad():
        early = net.late(torch.ones(3))
        optimizer.synchronize()
        np.testing.assert_array_equal(early.numpy(), net.late(torch.ones(3)).numpy())


def test_a_layer_that_is_replaced_in_mid_run_is_told() -> None:
    net = Net()
    optimizer = by_store(net)
    train(net, optimizer, 2)
    net.second = torch.nn.Linear(3, 3)
    with pytest.raises(ConfigError, match=r"second\.weight is another tensor than when od\.Optimizer was made"):
        train(net, optimizer, 16)


def test_a_scaler_of_ours_steps_a_plain_optimizer_as_pytorchs_does() -> None:
    net, scaler = Net(), GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    before = flat(net)
    scaler.scale(net(torch.ones(2, 3)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (flat(net) != before).any()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_does_not_keep_weights_that_are_on_their_way() -> None:
    net = Net()
    optimizer = by_store(net)
    train(net, optimizer, 2)
    with pytest.raises(ProtocolError, match=r"traced while its next weights .*; call optimizer\.synchronize\(\) first"):
        torch.jit.trace(net, torch.ones(2, 3), check_trace=False)
    optimizer.synchronize()
    torch.jit.trace(net, torch.ones(2, 3), check_trace=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name, whole", [("odsgd", False), ("diloco", True)])
def test_what_torchscript_has_compiled_trains_alike(name: str, whole: bool) -> None:
    def run(scripted: bool, transport: Any) -> np.ndarray:
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
        if scripted:
            net[2] = torch.jit.script(net[2])
            net = torch.jit.script(net) if whole else net
        train(net, by_store(net, name, transport, **{"H": 2} if name == "diloco" else {"warmup": 1}), 5)
        return np.concatenate([one.numpy().reshape(-1) for one in net.state_dict().values()])

    for ours, theirs in zip(*(Stage(2).run(functools.partial(run, scripted)) for scripted in (True, False))):
        np.testing.assert_allclose(ours, theirs, 1e-5)


def test_global_weights_between_backward_and_step_are_refused_which_are_those_of_no_step() -> None:
    net, store = Net(), create("ssgd", transport=Stage(1).worker(0), bucket_nbytes=64)
    optimizer = Optimizer(torch.optim.SGD(net.parameters(), 0.1), net, store)
    train(net, optimizer, 1)
    with optimizer.no_sync():
        backward(net, optimizer)
    with store.global_weights():  # nothing has left
        pass
    backward(net, optimizer)
    with pytest.raises(ProtocolError, match="global_weights in the middle of an iteration"), store.global_weights():
        pass
    optimizer.step()
    with store.global_weights():
        pass


@pytest.mark.parametrize("name", ["ssgd", "odsgd", "diloco"])
def test_a_state_that_worker_0_alone_saves_is_told(name: str) -> None:
    def run(transport: Any) -> None:
        net = Net()
        optimizer = by_store(net, name, transport)
        train(net, optimizer, 2)
        if transport.worker_rank == 0:
            optimizer.state_dict()
        with optimizer.store.global_weights():
            pass

    with pytest.raises((ProtocolError, RoundTimeoutError)):
        Stage(2).run(run)


@pytest.mark.parametrize("name", ["odsgd", "diloco"])
def test_a_state_that_was_loaded_is_saved_again_before_the_first_step(name: str) -> None:
    def run(transport: Any, saved: Any = None) -> Any:
        net = Net()
        optimizer = by_store(net, name, transport)
        if saved is None:
            train(net, optimizer, 3)
            return optimizer.state_dict()
        optimizer.load_state_dict(saved[transport.worker_rank])
        again, within = copy.deepcopy(optimizer.state_dict()), optimizer.store.state_dict()
        train(net, optimizer, 1)
        return again, within, optimizer.state_dict()

    def resumed(saved: Any) -> Any:
        return Stage(2).run(functools.partial(run, saved=saved))

    saved = Stage(2).run(run)
    first = resumed(saved)
    second = resumed([one[0] for one in first])
    third = resumed([torch.load(io.BytesIO(*one[1].values()), weights_only=True) for one in second])
    for runs in (second, third):
        for one, other in zip(first, runs):
            assert one[2]["store"]["worker"]["facts"] == other[2]["store"]["worker"]["facts"]
            for key, array in one[2]["store"]["worker"]["arrays"].items():
                assert torch.equal(array, other[2]["store"]["worker"]["arrays"][key]), key


def test_a_state_of_another_number_of_workers_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def run(transport: Any, saved: Any = None) -> Any:
        net = Net()
        optimizer = by_store(net, "odsgd", transport)
        if saved is not None:
            optimizer.load_state_dict(saved)
        train(net, optimizer, 1)
        return optimizer.state_dict()

    saved = Stage(2).run(run)[0]
    told = "the saved state is of 2 workers, and here are 1: what each of the others kept for itself is lost"
    Stage(1).run(functools.partial(run, saved=saved))
    assert capsys.readouterr().err.count(told) == 1
    base.warn_once.cache_clear()
    del saved["store"]["worker"]["facts"]["num_workers"]  # as older ones are
    Stage(1).run(functools.partial(run, saved=saved))
    assert told not in capsys.readouterr().err


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_an_optimizer_beside_the_stores_is_told_and_weights_without_one_are_not(
        is_wrapped: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def run(transport: Any) -> None:
        net = Net()
        parts = [Optimizer(torch.optim.SGD(net.first.parameters(), 0.1), net, create("ssgd", transport)),
                 torch.optim.Adam(net.second.parameters())]  # and `late` has none
        if is_wrapped:
            parts[1] = Optimizer(parts[1], net, create("ssgd", transport.stage.worker(transport.worker_rank)))
        for _ in range(3):
            net.zero_grad()
            (net(torch.ones(2, 3)).square().sum() + net.late(torch.ones(3)).sum()).backward()
            for one in parts:
                one.step()

    Stage(2).run(run)
    told = "second.weight, second.bias of the model: the script changes it, and no store has it"
    assert capsys.readouterr().err.count(told) == (not is_wrapped)


def test_frozen_weights_that_one_worker_loads_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    def run(transport: Any) -> None:
        net = Net()
        net.late.requires_grad_(False)
        optimizer = Optimizer(torch.optim.SGD([*net.first.parameters()], 0.1), net, create("ssgd", transport))
        if transport.worker_rank == 0:
            net.late.load_state_dict({name: tensor + 1 for name, tensor in net.late.state_dict().items()})
        train(net, optimizer, 1)

    Stage(2).run(run)
    told = "late.weight, late.bias of the model, which no store trains, is not what it is on worker 0"
    assert capsys.readouterr().err.count(told) == 1


def test_stores_of_parts_of_a_model_begin_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    """What one has trained may be each worker's own when the other begins; and so may an average of weights."""
    def run(transport: Any) -> None:
        net = Net()
        net.average = torch.optim.swa_utils.AveragedModel(net.first)
        parts = [Optimizer(torch.optim.SGD(part.parameters(), 0.1), net, create("diloco", one, H=2))
                 for part, one in ((net.first, transport), (net.second, transport.stage.worker(transport.worker_rank)))]
        for one in (parts[0], parts[0], parts[1], parts[1]):
            net.zero_grad()
            net(torch.full((2, 3), 1.0 + transport.worker_rank)).square().sum().backward()
            one.step()
            net.average.update_parameters(net.first)

    Stage(2).run(run)
    assert "no store has it" not in capsys.readouterr().err


@pytest.mark.parametrize("change, line", [
    (lambda optimizer: optimizer.param_groups[0].update(maximize=True), "maximize of the optimizer was False when"),
    (lambda optimizer: optimizer.param_groups[0]["params"].pop(), "number of parameters of the optimizer was 6 when"),
    (lambda optimizer: optimizer.state[optimizer.param_groups[0]["params"][0]].update(momentum_buffer=1),
     "the state of an od.Optimizer was set by the script, and it is the store that has it"),
    (copy.deepcopy, r"an od.Optimizer cannot be copied or saved whole; save optimizer.state_dict\(\)"),
    (lambda optimizer: torch.save(optimizer, io.BytesIO()), "an od.Optimizer cannot be copied or saved whole")])
def test_what_an_optimizer_would_not_do_is_told(change: Any, line: str) -> None:
    net = Net()
    optimizer = by_store(net)
    train(net, optimizer, 2)

    def go_on() -> None:
        change(optimizer)
        train(net, optimizer, 1)

    with pytest.raises(ConfigError, match=line):
        go_on()


def test_what_cannot_be_trained_is_told_before_anything_is() -> None:
    net = Net()
    with pytest.raises(ConfigError, match=r"the model is a generator; expected the torch.nn.Module whose parameters"):
        Optimizer(torch.optim.SGD(net.parameters(), 0.1), net.parameters(), create("local"))
    optimizer = by_store(net)
    net.double()
    net(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    with pytest.raises(ConfigError, match=r"parameter first.weight has become torch.float64 since od.Optimizer was"):
        optimizer.step()
