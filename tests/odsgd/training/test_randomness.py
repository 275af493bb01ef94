"""Which networks draw random numbers, and that each iteration's draws are its own."""
from typing import Any, Tuple

import pytest

from kvstore.engine._mxnet import mx
from odsgd.config.train import TrainConfig
from odsgd.training import randomness
from odsgd.training.models import models

nn = mx.gluon.nn


@pytest.mark.parametrize("layer, random", [(nn.Dropout(0.5), True), (nn.Dropout(0), False), (nn.BatchNorm(), False),
                                           (nn.Lambda(lambda x: mx.nd.Dropout(x, mode="always")), True),
                                           (nn.HybridLambda(lambda F, x: x + F.random.normal(shape=(2, 2))), True),
                                           (nn.HybridLambda(lambda F, x: F.LeakyReLU(x, act_type="rrelu")), True)])
def test_networks_that_draw_are_told_from_those_that_do_not(layer: Any, random: bool) -> None:
    net = nn.HybridSequential() if isinstance(layer, mx.gluon.HybridBlock) else nn.Sequential()
    net.add(nn.Dense(2), layer)
    assert randomness.draws(net) is random


@pytest.mark.parametrize("model, random", [("mlp", False), ("resnet18_v2", False), ("squeezenet1.0", True),
                                           ("cifar_resnet20_v1", False)])
def test_models_of_the_zoos(model: str, random: bool) -> None:
    assert randomness.draws(models._network(TrainConfig(model=model))) is random


def draw() -> Tuple[float, ...]:
    return tuple(mx.nd.Dropout(mx.nd.ones(64), mode="always").asnumpy())


def drawn(seed: int, iteration: int, worker_rank: int) -> Tuple[float, ...]:
    randomness.seed_iteration(seed, iteration, worker_rank)
    return draw()


def test_draws_follow_from_seed_iteration_and_rank() -> None:
    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 11, 1), (0, 1, 11)]
    first = [drawn(*place) for place in places]
    draw()
    assert [drawn(*place) for place in places] == first and len(set(first)) == len(places)
