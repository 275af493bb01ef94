"""Our stores by name in MXNet. One process that does as a user's script does; its MXNet keeps what it was taught."""
import contextlib
import functools
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest

import kvstore
from kvstore import ConfigError
from kvstore.engine._mxnet import mx
from kvstore.fronts.gluon import batch, by_name
from kvstore.transports.in_process import Stage
from tests.jobs import environment, launch

gluon = mx.gluon
amp = importlib.import_module("mxnet.contrib.amp")  # MXNet is first imported above


@pytest.fixture(autouse=True)
def _taught(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvstore.register`, taken back after the test."""
    for owner, name in [(mx.kvstore, "create"), (mx.model, "_create_kvstore"), (mx.module.module, "_create_kvstore"),
                        (gluon.Trainer, "__init__"), (gluon.Trainer, "_init_kvstore"), (mx.nd.NDArray, "backward"),
                        (mx.autograd, "backward"), (mx.mod.Module, "init_optimizer")]:
        monkeypatch.setattr(owner, name, getattr(getattr(owner, name), "__wrapped__", getattr(owner, name)))
    monkeypatch.setattr(mx.kvstore, by_name.TAUGHT, False, raising=False)
    kvstore.register()


def trainer(**options: Any) -> Any:
    net = gluon.nn.Dense(1, in_units=1)
    net.initialize()
    return gluon.Trainer(net.collect_params(), "sgd", **options)


def fit(store: Any) -> None:
    batches = mx.io.NDArrayIter(mx.nd.ones((4, 1)), mx.nd.ones((4, 1)), 2, label_name="out_label")
    net = mx.sym.LinearRegressionOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=1), name="out")
    mx.mod.Module(net, label_names=["out_label"]).fit(batches, kvstore=store, num_epoch=1)


@pytest.mark.parametrize("way", [lambda name: mx.kv.create(name), lambda name: mx.kvstore.create(name),
                                 lambda name: trainer(kvstore=name), fit])
def test_a_name_outside_a_job_or_a_mistyped_one_is_an_error_and_never_mxnets_local_store(way: Any) -> None:
    """MXNet itself makes a store of this process alone, or none; it would train alone, in silence."""
    for name in ("odsgd", "ODSGD"):
        with pytest.raises(ConfigError, match=r"needs a job.*; start the script with `odsgd launch -n 2 -s 1 python"):
            way(name)
    with pytest.raises(ConfigError, match="unknown store `odsdg`; did you mean `odsgd`"):
        way("odsdg")
    with pytest.raises(ConfigError, match="unknown store `dist_snyc`; did you mean `dist_sync`"):
        way("dist_snyc")
    for name in ("local", "device", "local_allreduce_cpu", "teststore"):
        way(name)


def test_mx_kv_create_takes_the_options_of_our_stores() -> None:
    with pytest.raises(ConfigError, match="unknown option"):
        mx.kv.create("odsgd", warmpu=3)
    with pytest.raises(ConfigError, match="unknown option of store odsgd `warmpu`"):
        mx.kv.create("odsgd:warmpu=3")
    with pytest.raises(ConfigError, match="store easgd: T: expected"):
        mx.kv.create("EASGD:T=x")
    with pytest.raises(TypeError, match="warmup"):
        mx.kv.create("dist_sync", warmup=3)  # MXNet's own


def test_names_are_taught_also_where_another_library_has_wrapped_what_makes_stores(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.kvstore, by_name.TAUGHT, False, raising=False)
    monkeypatch.setattr(mx.kvstore, "create", functools.wraps(mx.kvstore.create.__wrapped__)(
        functools.partial(mx.kvstore.create.__wrapped__)))
    kvstore.register()
    with pytest.raises(ConfigError, match="unknown store `odsdg`; did you mean `odsgd`"):
        mx.kv.create("odsdg")


def test_a_trainer_has_the_store_that_it_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made: List[str] = []

    def create(name: str) -> Any:
        made.append(name)
        return kvstore.create("local")

    monkeypatch.setattr(mx.kvstore, by_name.TAUGHT, False, raising=False)
    monkeypatch.setattr(mx.kvstore, "create", mx.kvstore.create.__wrapped__)
    monkeypatch.setattr(gluon.Trainer, "__init__", gluon.Trainer.__init__.__wrapped__)
    by_name.install(mx, create)
    ours, none = trainer(kvstore="odsgd"), trainer(kvstore=None)
    for one in (ours, none):
        one._init_kvstore()
    assert made == ["odsgd"] and ours._kvstore.type == "local" and none._kvstore is None
    by_name.install(mx, create)
    trainer(kvstore="ssgd")
    assert made == ["odsgd", "ssgd"]  # taught twice, asked once


def test_a_trainer_or_a_module_that_would_update_the_weights_itself_is_refused_when_it_is_made(
        monkeypatch: pytest.MonkeyPatch) -> None:
    for store in ("odsgd", kvstore.create("local")):
        with pytest.raises(ConfigError, match="made with update_on_kvstore=False, and these stores update the weights "
                                              "themselves; leave it out, and clip gradients before the step"):
            trainer(kvstore=store, update_on_kvstore=False)
    trainer(kvstore="device", update_on_kvstore=False)
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "0")
    trainer(kvstore=kvstore.create("local"), update_on_kvstore=True)  # which MXNet ranks above the variable
    fit("device")
    for way, store in ((lambda store: trainer(kvstore=store), kvstore.create("local")),
                       (fit, kvstore.create("ssgd", Stage(1).worker(0))), (fit, "odsgd")):
        with pytest.raises(ConfigError, match="made with MXNET_UPDATE_ON_KVSTORE=0 in the environment"):
            way(store)


def test_a_worker_that_would_train_alone_beside_a_store_of_its_job_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    store = kvstore.create("ssgd", Stage(2).worker(0))
    assert store._awaits_model
    trainer(kvstore=None)
    assert not capsys.readouterr().err
    first = trainer()
    assert "a gluon.Trainer with the store `device` trains a network of this worker's own" in capsys.readouterr().err
    ways: List[Callable[[], Any]] = [
        lambda: mx.kv.create("DIST_SYNC"), lambda: trainer(kvstore="dist_sync")._init_kvstore()]
    for way in ways:
        with pytest.raises(ConfigError, match="` is MXNet's own store, whose workers would wait for servers"):
            way()
    capsys.readouterr()
    ours = trainer(kvstore=store)
    trainer()  # of another network, as a GAN has two
    assert ours._kvstore_params["kvstore"] is store and not capsys.readouterr().err
    for one, told in ((trainer(), 1), (first, 0), (trainer(kvstore=None), 0), (ours, 0)):
        one._init_kvstore()  # with its first step, when it begins to train alone; the first was told before
        assert capsys.readouterr().err.count("with the store `device` trains a network of this worker's own") == told


def gluon_step(store: Any, divisor: int, scaled: bool = False) -> None:
    """On three examples."""
    net = gluon.nn.Dense(1, in_units=1, prefix="net_")
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
    if scaled:
        trainer._amp_original_scale = trainer._scale  # as amp.init_trainer
        trainer._amp_loss_scaler = amp.loss_scaler.LossScaler()
    for _ in range(2):
        with mx.autograd.record():
            loss = net(mx.nd.ones((3, 1)))
            with amp.scale_loss(loss, trainer) if scaled else contextlib.nullcontext(loss) as computed:
                computed.backward()
        trainer.step(divisor)


scaled_step = functools.partial(gluon_step, scaled=True)


def module_step(store: Any, divisor: int) -> None:
    net = mx.sym.LinearRegressionOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=1, name="fc"),
                                        name="out")
    batches = mx.io.NDArrayIter(mx.nd.ones((6, 1)), mx.nd.ones((6, 1)), 3, label_name="out_label")
    mx.mod.Module(net, label_names=["out_label"]).fit(
        batches, kvstore=store, num_epoch=1, optimizer_params={"learning_rate": 0.1, "rescale_grad": 1 / divisor})


def test_a_module_with_fixed_parameters_walks_mxnets_path() -> None:
    def train(store: Any) -> Dict[str, float]:
        layer = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=1, name="first")
        net = mx.sym.LinearRegressionOutput(mx.sym.FullyConnected(layer, num_hidden=1, name="last"), name="out")
        module = mx.mod.Module(net, label_names=["out_label"], fixed_param_names=["first_weight", "first_bias"])
        batches = mx.io.NDArrayIter(mx.nd.array([[1], [2], [3], [4]]), mx.nd.ones((4, 1)), 2, label_name="out_label")
        module.fit(batches, kvstore=store, num_epoch=2, initializer=mx.init.Constant(0.5))
        return {name: float(array.asnumpy().sum()) for name, array in module.get_params()[0].items()}

    ours = train(kvstore.create("ssgd", Stage(1).worker(0)))
    assert ours == pytest.approx(train("local"), rel=1e-6)
    assert (ours["first_weight"], ours["first_bias"]) == (0.5, 0) and ours["last_bias"] and ours["last_weight"] != 0.5


@pytest.mark.parametrize("step", [gluon_step, module_step, scaled_step], ids=["gluon", "module", "scaled"])
@pytest.mark.parametrize("store, reduction, divisor, told", [
    ("ssgd", "mean", 6, 1), ("ssgd", "mean", 3, 0), ("ssgd", "sum", 6, 0), ("asgd", "mean", 6, 0),
    ("decoupled", "mean", 6, 1)])
def test_a_script_that_divides_by_all_workers_examples_is_told_once_where_the_store_takes_their_mean(
        step: Any, store: str, reduction: str, divisor: int, told: int, capfd: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers."""
    monkeypatch.setattr(batch, "_here", batch._Here())  # nothing of earlier tests
    options = {"reduction": reduction} if store == "ssgd" else {}
    Stage(2).run(lambda transport: step(kvstore.create(store, transport, **options), divisor))
    said = capfd.readouterr().err
    assert said.count(f"divided by 6, which is 2 workers times 3 examples, and `{store}` takes") == told
    assert said.count("or make the store with reduction=\"sum\"") == (told if store == "ssgd" else 0)


def test_the_examples_of_an_earlier_store_are_not_those_of_a_later_one(capfd: pytest.CaptureFixture[str]) -> None:
    def run(transport: Any) -> None:
        gluon_step(kvstore.create("ssgd", Stage(1).worker(0), reduction="sum"), 3)
        gluon_step(kvstore.create("ssgd", transport), 18)  # twice 9: two batches of the first store, one of its own

    Stage(2).run(run)
    assert "examples" not in capfd.readouterr().err


def test_a_script_that_imports_odsgd_before_mxnet_has_the_names(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text('import odsgd\nimport sys\nassert "mxnet" not in sys.modules\nimport mxnet as mx\n'
                      'mx.kv.create("odsgd")\n', encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "odsgd launch -n 2 -s 1 python script.py" in done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_a_script_of_mxnets_stores_in_a_job_is_told_to_import_odsgd(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text('import numpy\nnumpy.bool = bool\nimport mxnet as mx\nnet = mx.gluon.nn.Dense(1, in_units=1)\n'
                      'net.initialize()\n'
                      'mx.gluon.Trainer(net.collect_params(), "sgd", kvstore="dist_sync")._init_kvstore()\n'
                      'mx.nd.waitall()\n', encoding="utf-8")
    done = launch(1, 1, [sys.executable, str(script)])
    assert done.returncode == 70
    assert "put `import odsgd` before `import mxnet` in it and ask for a store of odsgd's: `ssgd`" in done.stderr
