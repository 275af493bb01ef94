"""Workers side by side (`scripts/reproduction/gpu`) against a store's job of threads; also on a GPU, if there is
one.
"""
import argparse
import time
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.optimizers import formulas
from kvstore.transports.in_process import Stage

torch = pytest.importorskip("torch")

import odsgd.torch as od  # noqa: E402
from odsgd.config.train import TrainConfig  # noqa: E402
from odsgd.training.data.data import in_memory, random_bits, shift_and_mirror  # noqa: E402
from odsgd.training.schedule import Schedule  # noqa: E402
from scripts.examples.networks import make  # noqa: E402
from scripts.reproduction.declarations import Cell, Item, Scale, Trial  # noqa: E402
from scripts.reproduction.gpu.__main__ import Several  # noqa: E402
from scripts.reproduction.gpu.images import Images  # noqa: E402
from scripts.reproduction.gpu.run import Run  # noqa: E402
from scripts.reproduction.gpu.tensors import Applied, Flat  # noqa: E402
from scripts.reproduction.gpu.times import virtual_seconds  # noqa: E402
from scripts.reproduction.run import configuration  # noqa: E402

WORKERS = 3
MLP = {"model": "mlp", "dataset": "synthetic", "image_shape": [1, 4, 4], "num_classes": 4, "num_examples": 96,
       "batch_size": 4, "epochs": 2, "wd": 0.01, "seed": 0}
RESNET = {**MLP, "model": "cifar_resnet20_v1", "image_shape": [3, 8, 8], "num_examples": 24}
DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]

CELLS: Dict[str, Dict[str, Any]] = {
    "ssgd": {**MLP, "kvstore": "ssgd", "lr": 0.1, "momentum": 0.9},
    "delayed": {**MLP, "kvstore": "delayed", "lr": 0.1, "momentum": 0.9},
    "sgd": {**MLP, "kvstore": "odsgd", "lr": 0.1, "lr_step_epochs": [1], "lr_local": 0.2, "warmup": 3},
    "c": {**MLP, "kvstore": "odsgd", "lr": 0.1, "momentum": 0.9, "optimizer_local": "dcasgd_c", "lamda": 0.5,
          "lr_local": 0.2, "warmup": 3},
    "a": {**MLP, "kvstore": "odsgd", "lr": 0.1, "momentum": 0.9, "optimizer_local": "dcasgd_a", "lamda": 0.5,
          "lr_local": 0.2, "warmup": 0},
    "poly": {**MLP, "kvstore": "odsgd", "lr": 0.1, "lr_decay": "poly", "lr_warmup": 3, "lr_local": 0.2, "warmup": 2},
    "pooled": {**MLP, "model": "caffe_cifar10", "image_shape": [3, 16, 16], "kvstore": "delayed", "lr": 0.02},
    "images": {**RESNET, "kvstore": "odsgd", "lr": 0.01, "momentum": 0.9, "lr_local": 0.01, "warmup": 1}}


def trial_of(options: Dict[str, Any], seed: int = 0) -> Trial:
    cluster = {"workers": WORKERS, "compute": {"iteration": "100ms"}}
    return Trial(Item("od-sgd", "table-0", "", "run", cluster=cluster), Scale("small"), Cell("one", "", options), seed)


def made(options: Dict[str, Any], tmp_path: Path, device: str = "cpu") -> Run:
    trial = trial_of(options)
    config = configuration(trial, tmp_path, None)
    streams = [torch.cuda.Stream() for _ in range(3)] if device == "cuda" else ()
    run = Run(trial, config, Images(config, torch.device(device)), streams)
    run.sources.append("commit tree")
    return run


def by_store(config: TrainConfig, images: Images, run: Run) -> List[np.ndarray]:
    """The global weights after a job of threads."""
    stage, networks = Stage(WORKERS), []
    for _ in range(WORKERS):
        torch.manual_seed(config.seed)
        networks.append(make(config.model, config.input_shape, config.classes, config.thumbnail))

    def train(wire: Any) -> List[np.ndarray]:
        store = od.create(config.kvstore, wire, **config.options.in_iterations(run.each).plain())
        network = networks[wire.worker_rank]
        given = torch.optim.SGD(network.parameters(), config.lr, config.momentum, weight_decay=config.wd)
        optimizer = od.Optimizer(given, network, store)
        for t in range(run.total):
            epoch, index = divmod(t, run.each)
            optimizer.param_groups[0]["lr"], store.lr_local = Schedule(config, run.each, WORKERS).rates(t)
            optimizer.zero_grad()
            pixels, labels = images.batch(images.plan(run.shards, epoch)[index, wire.worker_rank])
            torch.nn.functional.cross_entropy(network(pixels), labels).backward()
            optimizer.step()
        with store.global_weights():
            return [one.detach().numpy().copy() for one in network.parameters()]

    return stage.run(train, stage.worker)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CELLS)
def test_workers_side_by_side_are_a_stores_job(name: str, device: str, tmp_path: Path) -> None:
    run = made(CELLS[name], tmp_path, device)
    first = run.w.clone()
    while not run.over:
        run.advance()
    theirs = by_store(run.config, Images(run.config, torch.device("cpu")), run)
    run._test()  # shows the global weights
    for mine, its in zip(run.shown.parameters, theirs):
        np.testing.assert_allclose(mine.detach().cpu().numpy(), its, rtol=1e-3, atol=2e-5)
    assert float((run.w - first).abs().max()) > 1e-2  # or the comparison would say nothing


@pytest.mark.parametrize("name, settings", [
    ("sgd", {}), ("sgd", {"momentum": 0.9}), ("dcasgd_c", {"lamda": 0.5}),
    ("dcasgd_a", {"lamda": 0.5, "m": 0.9, "epsilon": 1e-7})])
def test_the_optimizers_are_the_stores_whatever_the_rate(name: str, settings: Dict[str, float]) -> None:
    formula = {"sgd": formulas.SGD, "dcasgd_c": formulas.DCASGD_C, "dcasgd_a": formulas.DCASGD_A}[name](**settings)
    random = np.random.RandomState(0)
    w, out = random.randn(2, 50).astype(np.float32)
    mine, mine_out = (torch.tensor(one).as_subclass(Flat) for one in (w, out))
    applied = Applied(name, **{"momentum": 0.0, "wd": 0.01, **settings})
    applied.start(mine)
    state = {one: np.zeros_like(w) for one in formula.names()}
    state.update({"w_read": w.copy()} if "w_read" in state else {})
    for t in range(1, 6):
        g, moved = random.randn(2, 50).astype(np.float32)
        formula.apply(formulas.Now(np.float32(0.5), 0.3 / t, 0.01, t), w, g, list(state.values()), out, None)
        applied(mine, torch.tensor(g), torch.tensor(0.3 / t), 0.5, out=mine_out)
        w += moved  # as the global weights
        mine += torch.tensor(moved)
        np.testing.assert_allclose(mine_out.numpy(), out, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["a", "images"])
def test_a_run_that_was_stopped_goes_on(name: str, tmp_path: Path) -> None:
    whole, first, then = (made(CELLS[name], tmp_path) for _ in range(3))
    while not whole.over:
        whole.advance()
    for _ in range(whole.total // 2 + 1):
        first.advance()
    first.pause()
    first.save(tmp_path)
    then.load(tmp_path)
    while not then.over:
        then.advance()
    assert torch.equal(whole.w, then.w) and torch.equal(whole.table, then.table)


def test_the_result_has_the_clusters_times_and_what_was_learned(tmp_path: Path) -> None:
    run = made(CELLS["c"], tmp_path)
    while not run.over:
        run.advance()
    virtual = virtual_seconds(run.trial.asked, run.config, run.each)
    result = run.result(virtual, {}, {"cpu": "CPU"})
    assert result.versions == {"commit": "commit", "tree": "tree"} and result.starts == 1
    assert result.column("iteration") == [run.each, run.total]
    assert result.column("virtual_seconds") == pytest.approx([0.1 * run.each, 0.1 * run.total], rel=0.05)
    assert result.column("train_loss")[1] < result.column("train_loss")[0]
    assert 0.5 < result.column("test_accuracy")[1] <= 1


def test_runs_share_a_device_and_the_next_takes_the_place_of_one_that_is_over(tmp_path: Path) -> None:
    asked = argparse.Namespace(jobs=2, source="commit tree", data_dir=None, results=tmp_path, runs=tmp_path / "runs")
    trials = [trial_of(CELLS["c"], seed) for seed in range(3)]
    Several(asked, list(trials)).go_on(time.monotonic() + 120)
    results = [one.result(tmp_path) for one in trials]
    assert not virtual_seconds.__module__.endswith("__main__"), "a process that multiprocessing starts cannot import it"
    assert all(results) and len({tuple(one.column("train_loss")) for one in results if one}) == 3


def test_statistics_are_those_of_the_batches_as_mxnet_counts_them(tmp_path: Path) -> None:
    run = made(CELLS["images"], tmp_path)
    torch.manual_seed(run.config.seed)
    replica, theirs = run.replicas[0], make(run.config.model, run.config.input_shape, run.config.classes)
    batch = run.images.batch(run.images.plan(run.shards, 0)[0, 0])
    replica.gradient(*batch, out=run.grads[0])
    theirs(batch[0])
    count = batch[0].shape[0] * 8 * 8
    mine, its = replica.network[1], theirs[1]
    torch.testing.assert_close(mine.running_mean, its.running_mean)
    torch.testing.assert_close(mine.running_var - 0.9, (its.running_var - 0.9) * (count - 1) / count)


def test_what_only_a_stores_job_does_is_refused(tmp_path: Path) -> None:
    for options in ({"kvstore": "asgd"}, {"kvstore": "pipesgd"}, {"kvstore": "ssgd", "codec": "float16"}):
        with pytest.raises(ConfigError, match="run it by scripts/reproduce"):
            made({**MLP, "lr": 0.1, **options}, tmp_path)


def test_images_are_shifted_and_mirrored_as_for_odsgd_train(tmp_path: Path) -> None:
    run = made(CELLS["images"], tmp_path)
    object.__setattr__(run.config, "augment", True)  # which synthetic images have not
    images, plain = Images(run.config, torch.device("cpu")), run.images
    order, arrays = run.shards.order(3), in_memory(run.config)
    assert arrays is not None
    for m in range(WORKERS):
        examples = run.shards.batch(order, 1, m)
        pixels, labels = images.batch(images.plan(run.shards, 3)[1, m])
        its = shift_and_mirror(arrays.train.images[examples], random_bits(0, 3, examples))
        assert torch.equal(labels, plain.labels[examples])
        mean, std = (one.numpy()[:, None, None] for one in (images.mean, images.std))
        np.testing.assert_allclose(pixels.numpy(), (its - mean) / std, atol=1e-5)
