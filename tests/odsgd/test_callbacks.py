"""The global weights from MXNet's own loops: two workers of OD-SGD, whose own weights are a local step ahead."""
from pathlib import Path
from typing import Any, Callable, List

import numpy as np
import pytest

import kvstore
from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError
from kvstore.fronts import base
from kvstore.transports.in_process import InProcess, Stage
from odsgd import callbacks
from tests.jobs import train_once

EPOCHS = 2


def data(rank: int) -> Any:
    generator = np.random.RandomState(rank)
    return (generator.randn(16, 5).astype(np.float32), generator.randint(0, 3, 16).astype(np.float32))


def test_an_estimators_handler_saves_and_evaluates_the_global_weights(tmp_path: Path) -> None:
    seen: List[np.ndarray] = []

    def train(transport: InProcess) -> "tuple[np.ndarray, np.ndarray]":
        net = mx.gluon.nn.Dense(3, in_units=5, prefix="net_")
        net.initialize(mx.init.Constant(0.1))
        store = kvstore.create("odsgd", transport=transport, warmup=0)
        trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
        loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
        estimator = callbacks.events.Estimator(net, loss, trainer=trainer, context=mx.cpu(),
                                               val_metrics=mx.metric.Accuracy())
        estimator.logger.setLevel("ERROR")
        batches = mx.gluon.data.DataLoader(mx.gluon.data.ArrayDataset(*data(transport.worker_rank)), batch_size=4)
        estimator.evaluate = lambda _: seen.append(net.weight.data().asnumpy())
        handler = callbacks.Shared(str(tmp_path / "new" / "net"), val_data=batches)
        estimator.fit(batches, epochs=EPOCHS, event_handlers=[handler])
        own = net.weight.data().asnumpy()
        with store.global_weights():
            return own, net.weight.data().asnumpy()

    (own, shared), (other, same) = Stage(2).run(train)
    assert np.array_equal(shared, same) and not np.array_equal(own, other) and not np.array_equal(own, shared)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["net-0001.params", "net-0002.params"]
    assert np.array_equal(mx.nd.load(str(tmp_path / "new" / "net-0002.params"))["weight"].asnumpy(), shared)
    assert len(seen) == 2 * EPOCHS and all(np.array_equal(weights, shared) for weights in seen[-2:])


def symbol() -> Any:
    normalised = mx.sym.BatchNorm(mx.sym.Variable("data"), name="norm")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(normalised, num_hidden=3, name="last"), name="softmax")


def with_statistics() -> Any:
    return mx.mod.Module(symbol())


def in_buckets() -> Any:
    return mx.mod.BucketingModule(lambda _: (symbol(), ("data",), ("softmax_label",)), default_bucket_key=4)


class Buckets(mx.io.NDArrayIter):
    """Every other batch is of another bucket."""

    def next(self) -> Any:
        batch = super().next()
        batch.bucket_key = self.cursor % 8
        batch.provide_data, batch.provide_label = self.provide_data, self.provide_label
        return batch


@pytest.mark.parametrize("make", [with_statistics, in_buckets])
def test_a_modules_callback_saves_the_global_weights_and_the_mean_of_the_statistics(
        make: Callable[[], Any], tmp_path: Path) -> None:
    def train(transport: InProcess) -> "tuple[np.ndarray, np.ndarray, np.ndarray]":
        module = make()
        store = kvstore.create("odsgd", transport=transport, warmup=0)
        images, labels = data(transport.worker_rank)
        module.fit(Buckets(images, labels, batch_size=4), num_epoch=EPOCHS, kvstore=store,
                   initializer=mx.init.Constant(0.1), optimizer_params={"learning_rate": 0.1},
                   epoch_end_callback=callbacks.do_checkpoint(module, str(tmp_path / "net"), period=2))
        own, statistics = module.get_params()
        own, statistics = own["last_weight"].asnumpy(), statistics["norm_moving_mean"].asnumpy()
        with callbacks.global_weights(module) as (arguments, _):
            shared = arguments["last_weight"].asnumpy()
        assert np.array_equal(module.get_params()[0]["last_weight"].asnumpy(), own)  # back again
        return own, shared, statistics

    (own, shared, first), (other, same, second) = Stage(2).run(train)
    assert np.array_equal(shared, same) and not np.array_equal(own, other) and not np.array_equal(own, shared)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net-0002.params", "net-symbol.json"]
    _, arguments, statistics = mx.model.load_checkpoint(str(tmp_path / "net"), 2)
    assert np.array_equal(arguments["last_weight"].asnumpy(), shared)
    np.testing.assert_allclose(statistics["norm_moving_mean"].asnumpy(), (first + second) / 2, rtol=1e-6)
    assert not np.array_equal(first, second)


class Losing(Stage):
    lost = False  # one worker, which is no part of sums any more

    def total(self, worker_rank: int, array: np.ndarray) -> np.ndarray:
        return array if self.lost else super().total(worker_rank, array)


def test_when_a_worker_is_lost_the_statistics_are_the_mean_of_those_that_are_left() -> None:
    def train(transport: InProcess) -> None:
        module, store = with_statistics(), kvstore.create("asgd", transport=transport)
        module.fit(mx.io.NDArrayIter(*data(transport.worker_rank), batch_size=4), num_epoch=1, kvstore=store)
        store.barrier()
        if transport.worker_rank == 0:
            own = module.get_params()[1]["norm_moving_mean"].asnumpy()
            stage.lost = True
            with callbacks.global_weights(module) as (_, statistics):
                np.testing.assert_array_equal(statistics["norm_moving_mean"].asnumpy(), own)

    stage = Losing(2)
    stage.run(train)


def export(net: Any, file: str) -> None:
    net.hybridize()
    net(mx.nd.ones((1, 1)))
    net.export(file)


def checkpoint_module(net: Any, file: str) -> None:
    module = mx.mod.Module(net(mx.sym.Variable("data")), label_names=None)
    module.bind([("data", (1, 1))])
    module.init_params()
    mx.callback.module_checkpoint(module, file)(0)


@pytest.mark.parametrize("save", [lambda net, file: net.collect_params().save(file), export, checkpoint_module])
def test_every_way_to_save_a_workers_own_weights_warns(save: Callable[[Any, str], None], tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    base.warn_once.cache_clear()

    def train(transport: InProcess) -> None:
        net = mx.gluon.nn.Dense(1, in_units=1)
        net.initialize()
        store = kvstore.create("odsgd", transport=transport)
        train_once(net, store)
        with store.global_weights():
            save(net, str(tmp_path / "file"))
        assert "warning" not in capsys.readouterr().err
        save(net, str(tmp_path / "file"))
        store.close()

    Stage(1).run(train)
    assert capsys.readouterr().err.count("warning: what is saved are this worker's own weights") == 1


@pytest.mark.parametrize("name, warns", [("odsgd", True), ("asgd", True), ("ssgd", False)])
def test_saving_a_workers_own_weights_warns_once(name: str, warns: bool, tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    base.warn_once.cache_clear()  # another test may have been told

    def train(transport: InProcess) -> None:
        net, other = (mx.gluon.nn.Dense(1, in_units=1, prefix=f"{name}_{which}_") for which in ("net", "other"))
        net.initialize()
        other.initialize()
        store = kvstore.create(name, transport=transport)
        file = str(tmp_path / "file")
        net.save_parameters(file)  # nothing has been trained
        train_once(net, store)
        other.save_parameters(file)
        with store.global_weights():
            net.save_parameters(file)
        assert capsys.readouterr().err == ""
        net.save_parameters(file)
        net.save_parameters(file)
        mx.callback.do_checkpoint(file)(0, None, {f"{name}_net_weight": net.weight.data()}, {})
        store.close()
        net.save_parameters(file)

    Stage(1).run(train)
    said = capsys.readouterr().err
    assert said.count("warning: what is saved are this worker's own weights") == said.count("\n") == warns, said


def test_another_store_is_refused() -> None:
    class Trained:
        _kvstore = None

    with pytest.raises(ConfigError, match="none of odsgd's stores"), callbacks.global_weights(Trained()):
        pass
