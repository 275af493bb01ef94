"""A store of PyTorch's where a script goes wrong, goes on, or lets go."""
import gc
import weakref
from typing import Any, List

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from kvstore.errors import ConfigError
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
