"""A checkpoint whose servers' state arrives in pieces while a real job goes on holds what it held when it was begun."""
from pathlib import Path

import numpy as np

from kvstore.state.npz import read_npz
from tests.jobs import Result, run_job, take_step

WIDTH = 1024  # 4 MiB of momentum: several pieces


def train_beside(worker_rank: int, folder: str) -> Result:
    """Three steps, a checkpoint, and three steps while it arrives; on worker 0 the state as it was between."""
    import kvstore
    from kvstore.engine._mxnet import mx
    from odsgd.training.checkpoint import checkpoint

    store = kvstore.create("odsgd", warmup=1)
    net = mx.gluon.nn.Dense(WIDTH, in_units=WIDTH)
    net.initialize()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=store)

    def step() -> None:
        take_step(trainer, lambda x: (net(x) ** 2).mean(), mx.nd.ones((1, WIDTH)) * (1 + worker_rank))

    for _ in range(3):
        step()
    store.barrier()
    then = store.server_state()[0] if worker_rank == 0 else {}
    unfinished = checkpoint.UnfinishedCheckpoint(Path(folder), store, net, {}, keep=1)
    left = [unfinished._export.left]
    for iteration in range(4, 7):
        step()
        assert not unfinished.advance(iteration)
        left.append(unfinished._export.left)
    unfinished.finish()
    return {**then, "left": np.array(left)}


def test_the_state_that_arrives_beside_the_training_is_that_of_the_beginning(tmp_path: Path) -> None:
    first, second = run_job("tests.integration.test_unfinished_checkpoints:train_beside", 2, 1, str(tmp_path))
    left = list(first.pop("left"))
    assert left[0] > left[1] > left[2] > 0 and not any(second["left"])
    arrays, _ = read_npz(tmp_path / "3" / "servers.npz")
    assert set(arrays) == set(first) and any(array.any() for array in arrays.values())
    assert all(np.array_equal(arrays[name], first[name]) for name in arrays)
