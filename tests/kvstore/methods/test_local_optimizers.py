"""Names and defaults of optimizers, known without MXNet, beside MXNet's own."""
import dataclasses
import inspect

import pytest

import kvstore
from kvstore.engine._mxnet import mx
from kvstore.methods import local_optimizers
from kvstore.optimizers import compensated as registered
from kvstore.transports.in_process import Stage

REGISTRY = mx.optimizer.Optimizer.opt_registry


def test_mxnet_has_every_optimizer_listed_and_momentum_where_we_say() -> None:
    assert not set(local_optimizers.NAMES) - set(REGISTRY)
    with_momentum = {name for name in local_optimizers.NAMES
                     if "momentum" in inspect.signature(REGISTRY[name]).parameters}
    assert {*with_momentum, *local_optimizers.COMPENSATED} == set(local_optimizers.WITH_MOMENTUM)


@pytest.mark.parametrize("name", local_optimizers.COMPENSATED)
def test_defaults_of_delay_compensation_are_those_of_the_stores(name: str) -> None:
    options = {field.name: field.default for field in dataclasses.fields(local_optimizers.COMPENSATED[name])
               if field.name in local_optimizers.COMPENSATION}
    made = REGISTRY[name]()
    assert options and {key: getattr(made, key) for key in options} == options


@mx.optimizer.register
class OwnLocal(mx.optimizer.SGD):
    """As a script may register it."""


def test_a_script_s_own_optimizer_takes_the_local_steps() -> None:
    def path(name: str) -> float:
        store = kvstore.create("odsgd", Stage(1).worker(0), warmup=0, optimizer_local=name)
        store.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
        w = mx.nd.array([4.0])
        store.broadcast("w", w, w)
        for _ in range(3):
            store.pushpull("w", w, w)
        return float(w.asscalar())

    assert path("ownlocal") == path("sgd") != path("none")


@pytest.mark.parametrize("asked, made", [("SGD", "sgd"), ("DCASGD_A", "dcasgd_a"), ("OwnLocal", "ownlocal")])
def test_names_of_local_optimizers_are_known_in_capitals_too(asked: str, made: str) -> None:
    options = kvstore.create("odsgd", Stage(1).worker(0), optimizer_local=asked, momentum_local=0.5).options
    assert options.optimizer_local == made and options.momentum_local == 0.5


def test_ours_take_their_arguments_in_the_order_of_mxnets() -> None:
    made = registered.DCASGD_A(0.3, 0.5, 1.5, 0.9, 1e-3)
    assert (made.lr, made.momentum, made.lamda, made.m, made.epsilon) == (0.3, 0.5, 1.5, 0.9, 1e-3)
    made = registered.DCASGD_C(0.3, 0.5, 1.5)
    assert (made.lr, made.momentum, made.lamda) == (0.3, 0.5, 1.5)

