"""For MXNet's own loops, Gluon's Estimator and Module: global weights, evaluated and saved; and TensorBoard.

What a script holds while it trains are a worker's own weights: OD-SGD's are a local step ahead, an asynchronous
worker's are as old as its last answer. At the end of an epoch these two take the weights that all workers share:

    estimator.fit(train_data, epochs=9, event_handlers=[callbacks.Shared("runs/net", val_data=test_data)])
    module.fit(train_data, kvstore="odsgd", epoch_end_callback=callbacks.do_checkpoint(module, "runs/net"))

All workers have them, with the same arguments: the global weights are collective. Worker 0 writes. An Estimator's
metrics go to TensorBoard by `OnBoard()`, another of its event handlers.
"""
import contextlib
import importlib
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError
from kvstore.fronts.gluon.store import Store
from odsgd import board

events = importlib.import_module("mxnet.gluon.contrib.estimator")  # mx.gluon.contrib has it only after that


class Shared(events.TrainBegin, events.EpochEnd):  # type: ignore[name-defined]
    """For an Estimator: at the end of every `period` epochs, evaluate the global weights on `val_data` and save them.

    The metrics of the evaluation are the estimator's `val_metrics`. Files are ``PREFIX-EPOCH.params``, for
    `net.load_parameters`.
    """

    def __init__(self, prefix: Optional[str] = None, val_data: Any = None, period: int = 1) -> None:
        self._prefix, self._val_data, self._period = prefix, val_data, period
        self._epoch = 0

    def train_begin(self, estimator: Any, *_: Any, **__: Any) -> None:
        self._epoch = 0

    def epoch_end(self, estimator: Any, *_: Any, **__: Any) -> None:
        self._epoch += 1
        if self._epoch % self._period:
            return
        store = _store(estimator.trainer._kvstore)
        with store.global_weights():
            if self._val_data is not None:
                estimator.evaluate(self._val_data)
            if self._prefix is not None and store.leads:
                Path(self._prefix).parent.mkdir(parents=True, exist_ok=True)
                estimator.net.save_parameters(f"{self._prefix}-{self._epoch:04d}.params")


class OnBoard(events.TrainBegin, events.BatchEnd, events.EpochEnd):  # type: ignore[name-defined]
    """For an Estimator: its training metrics every `interval` iterations, and its evaluation's every epoch, go
    to TensorBoard (`odsgd.board`). Numbers are this worker's.
    """

    def __init__(self, interval: int = 50) -> None:
        self._interval, self._iteration = interval, 0

    def train_begin(self, estimator: Any, *_: Any, **__: Any) -> None:
        self._iteration = 0

    def batch_end(self, estimator: Any, *_: Any, **__: Any) -> None:
        self._iteration += 1
        if self._iteration % self._interval == 0:
            metrics = {**_numbers("train", estimator.train_metrics), "rates/lr": estimator.trainer.learning_rate}
            board.log(self._iteration, metrics)

    def epoch_end(self, estimator: Any, *_: Any, **__: Any) -> None:
        board.log(self._iteration, _numbers("test", estimator.val_metrics))


def _numbers(kind: str, metrics: Any) -> Dict[str, float]:
    """The metrics that have been measured, by the last word of their names."""
    found = {f"{kind}/{name.split()[-1]}": value for name, value in (metric.get() for metric in metrics)}
    return {name: value for name, value in found.items() if value == value}


def do_checkpoint(module: Any, prefix: str, period: int = 1) -> Callable[..., None]:
    """For Module's `fit`, in the place of ``mx.callback.do_checkpoint``: the same files, of the global weights.

    Statistics of BatchNorm, which Module keeps to itself, are the mean over the workers.
    """
    def save(epoch: int, symbol: Any, *_: Any) -> None:
        if (epoch + 1) % period:
            return
        with global_weights(module) as (arguments, statistics):
            if _of_module(module).leads:
                Path(prefix).parent.mkdir(parents=True, exist_ok=True)
                mx.model.save_checkpoint(prefix, epoch + 1, symbol, arguments, statistics)
    return save


@contextlib.contextmanager
def global_weights(module: Any) -> Iterator[Tuple[Dict[str, Any], Dict[str, Any]]]:
    """Inside, a Module computes with the global weights, ``module.score(...)`` say. Collective; waits.

    Gives what ``module.get_params()`` does, with the mean of the statistics over the workers.
    """
    store = _of_module(module)
    with store.global_weights():
        module._params_dirty = True  # else it gives what it has read earlier
        arguments, statistics = module.get_params()
        yield arguments, {name: mx.nd.array(store.session.mean(array.asnumpy()))
                          for name, array in sorted(statistics.items())}
    module._params_dirty = True


def _of_module(module: Any) -> Store:
    """Its store; a BucketingModule leaves that to its modules, which share one."""
    return _store(getattr(module, "_curr_module", module)._kvstore)


def _store(kvstore: Any) -> Store:
    if not isinstance(kvstore, Store):
        raise ConfigError(f"the weights are trained with {kvstore!r}, which is none of odsgd's stores; these callbacks "
                          "are for those")
    return kvstore
