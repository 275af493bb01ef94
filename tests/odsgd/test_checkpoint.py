"""Checkpoints of a script of one's own."""
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

import numpy as np
import pytest

import kvstore
from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError
from kvstore.transports.in_process import Stage
from odsgd import checkpoint
from tests.jobs import take_step

nn = mx.gluon.nn
Values = Dict[str, np.ndarray]


def values(net: Any, device: int) -> Values:
    return {name: parameter.list_data()[device].asnumpy() for name, parameter in net.collect_params().items()}


def train(folder: Path, trained: str, devices: int = 1, freeze: bool = False, lr: Optional[float] = None
          ) -> Tuple[int, Values, Values]:
    """Two steps of a Trainer of some parameters; the iteration it begins at, the values then and afterwards."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(3, in_units=4), nn.BatchNorm(in_channels=3), nn.Dense(2, in_units=3))
    net.initialize(mx.init.Xavier(), ctx=[mx.cpu(number) for number in range(devices)])
    if freeze:
        net[0].collect_params().setattr("grad_req", "null")
    store = kvstore.create("ssgd", Stage(1).worker(0))
    trainer = mx.gluon.Trainer(net.collect_params(trained), "sgd", {"learning_rate": 0.1}, kvstore=store)
    keeper = checkpoint.keep(store, net, folder, every=2)
    if lr is not None:
        trainer.set_learning_rate(lr)
    begun, before = keeper.iteration, values(net, devices - 1)
    for _ in range(2):
        with mx.autograd.record():
            losses = [net(mx.nd.arange(8, ctx=mx.cpu(number)).reshape(2, 4)).square().sum()
                      for number in range(devices)]
        mx.autograd.backward(losses)
        trainer.step(2)
        keeper.step()
    keeper.close()
    return begun, before, values(net, 0)


@pytest.mark.parametrize("trained, again", [
    (".*dense1", {}), (".*(weight|bias|gamma|beta)", {}), (".*", dict(devices=2)), (".*", dict(freeze=True)),
], ids=["one layer", "no statistics", "more devices later", "a layer frozen later"])
def test_whatever_part_of_a_network_is_trained_all_of_it_comes_back(tmp_path: Path, trained: str,
                                                                    again: Dict[str, Any]) -> None:
    _, begun_at, saved = train(tmp_path, trained)
    iteration, before, after = train(tmp_path, trained, **again)
    assert iteration == 2 and checkpoint.latest(tmp_path) == 4
    assert all(np.array_equal(before[name], saved[name]) for name in saved)
    assert not np.array_equal(after["net_dense1_weight"], saved["net_dense1_weight"])
    assert np.array_equal(begun_at["net_dense0_weight"], saved["net_dense0_weight"]) == (trained == ".*dense1")


def test_a_learning_rate_that_the_script_has_set_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, ".*", lr=0.01)
    assert "resumed" not in capsys.readouterr().out
    for iteration in (2, 4):
        train(tmp_path, ".*")
        assert f"resumed from {tmp_path / str(iteration)}, at its learning rate of 0.01 (the trainer had 0.1)\n" \
            in capsys.readouterr().out


def test_a_rate_that_goes_on_is_that_of_the_stores_trainer(tmp_path: Path) -> None:
    rates = []
    for _ in range(2):
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(nn.Dense(2, in_units=2), nn.Dense(1, in_units=2))
        net.initialize()
        store = kvstore.create("ssgd", Stage(1).worker(0))
        body, head = (mx.gluon.Trainer(layer.collect_params(), "sgd", {"learning_rate": lr}, kvstore=its)
                      for layer, lr, its in zip(net, (0.001, 0.1), (None, store)))
        keeper = checkpoint.keep(store, net, tmp_path, every=1)
        rates.append((body.learning_rate, head.learning_rate))
        head.set_learning_rate(0.05)
        with mx.autograd.record():
            loss = net(mx.nd.ones((1, 2)))
        loss.backward()
        for trainer in (body, head):
            trainer.step(1)
        keeper.step()
        keeper.close()
    assert rates == [(0.001, 0.1), (0.001, 0.05)]


def test_two_networks_of_a_script_have_a_folder_each(tmp_path: Path) -> None:
    net, store = nn.Dense(1, in_units=1), kvstore.create("local")
    net.initialize()
    keeper = checkpoint.keep(store, net, tmp_path / "a", every=1)
    checkpoint.keep(store, net, tmp_path / "b", every=1).close()
    with pytest.raises(ConfigError, match="/a` is this script's for another network already"):
        checkpoint.keep(store, net, tmp_path / "b" / ".." / "a", every=1)
    keeper.close()
    checkpoint.keep(store, net, tmp_path / "a", every=1).close()


def test_two_networks_go_on_from_one_iteration_though_one_was_saved_later(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def go_on(name: str, steps: int, newest: Optional[int] = None) -> Any:
        net, store = nn.Dense(1, in_units=1, prefix=f"{name}_"), kvstore.create("local")
        net.initialize()
        trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
        keeper = checkpoint.keep(store, net, tmp_path / name, every=1, newest=newest)
        for _ in range(steps):
            take_step(trainer, net, mx.nd.ones((1, 1)))
            keeper.step()
        return keeper

    for name, steps in (("d", 2), ("g", 1)):
        go_on(name, steps).close()
    for newest, begun, told in ((1, 1, 0), (None, 2, 1), (0, 0, 1)):
        g = go_on("g", 0)
        d = go_on("d", 0, newest)
        assert (g.iteration, d.iteration) == (1, begun)
        assert capsys.readouterr().out.count(f"warning: `{tmp_path / 'd'}` goes on from iteration {begun}, and `"
                                             f"{tmp_path / 'g'}`, another network of this script, from 1; ") == told
        d.close()
        g.close()
    monkeypatch.setenv("ODSGD_RESTARTS", "1")
    monkeypatch.setenv("ODSGD_SAVED", "2")
    assert go_on("d", 0, newest=1).iteration == 1, "2 is not missing: it does not count"


@pytest.mark.parametrize("kind, said", [
    (dict(shape=(2, 0), allow_deferred_init=True), "has no shape or value yet; initialize the network and run"),
    (dict(shape=(2, 3), stype="row_sparse"), "is row_sparse, and only dense weights can be kept"),
])
def test_a_network_that_could_not_be_brought_back_is_refused_at_once(tmp_path: Path, kind: Any, said: str) -> None:
    net = mx.gluon.Block(prefix="net_")
    net.params.get("weight", **kind)
    net.initialize()
    with pytest.raises(ConfigError, match=f"checkpoint.keep: net_weight {said}"):
        checkpoint.keep(kvstore.create("local"), net, tmp_path, every=1)
    with pytest.raises(ConfigError, match="for networks of Gluon, and this is a dict; a script of PyTorch's saves opt"):
        checkpoint.keep(kvstore.create("local"), {}, tmp_path, every=1)
    with pytest.raises(ConfigError, match=r"the store is a KVStore; expected one made by kvstore\.create, which the"):
        checkpoint.keep(mx.kv.create("local"), net, tmp_path, every=1)
    for every in (0, 2.5, "often", None):
        with pytest.raises(ConfigError, match=f"^every {every}, kept 3: expected whole numbers of at least 1"):
            checkpoint.keep(kvstore.create("local"), net, tmp_path, every=every)  # type: ignore[arg-type]
