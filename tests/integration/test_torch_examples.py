"""The scripts of scripts/examples, and PyTorch's trainer: each trains with two workers, on the presets' networks."""
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest

from tests.jobs import ROOT, environment

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow]


def run(folder: Path, script: str, *words: str) -> Any:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "launch.py"), "-n", "2", "-s", "1",
                           str(ROOT / "scripts" / script), *words],
                          cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def test_a_preset_trains_on_pytorch_as_well_and_leaves_its_metrics(tmp_path: Path) -> None:
    run(tmp_path, "train_torch.py", "--config", str(ROOT / "configs" / "digits_odsgd.yaml"), "--epochs", "4", "--out",
        "run")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["event"] == "end" and records[-1]["iteration"] == 4 * 22
    assert records[-1]["test_accuracy"] > 0.9
    assert (tmp_path / "run" / "weights.pt").exists()


def test_what_the_trainer_lacks_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "train_torch.py"), "--kvstore", "local", "--model",
                           "lenet"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 64 and "model lenet: scripts/train_torch.py has mlp, resnet18_v1" in done.stderr
    assert "Traceback" not in done.stderr


def test_resnet18_trains_on_images_from_cifar10s_files_or_made_up(tmp_path: Path) -> None:
    done = run(tmp_path, "examples/resnet18_cifar10.py", "--iterations", "3", "--batch-size", "16", "--examples", "64",
               "--save", "weights.pt")
    line = r"worker 0 \| epoch 1: loss [\d.]+, \d+ ms per iteration, test accuracy [\d.]+% after 3 iterations"
    assert re.search(line, done.stdout)
    assert (tmp_path / "weights.pt").exists()


def test_a_transformer_learns_text_with_clipped_gradients(tmp_path: Path) -> None:
    done = run(tmp_path, "examples/transformer_text.py", "--iterations", "60", "--width", "32", "--layers", "1",
               "--batch-size", "64", "--clip", "1")
    loss = re.search(r"worker 0 \| iteration 60: loss ([\d.]+)", done.stdout)
    assert loss and float(loss.group(1)) < 2.0  # ln 13 is 2.6
    assert "of the digits of unseen sums are right" in done.stdout


@pytest.mark.parametrize("kind, package, most", [
    ("ddp", "torch", 4), ("mnist", "torch", 5), ("accelerate", "accelerate", 4), ("huggingface", "transformers", 2),
    ("lightning", "lightning", 2)])
@pytest.mark.parametrize("by", ["launch", "torchrun", "torchrun, as it was"])
def test_a_script_that_was_none_of_ours_trains_with_five_lines_changed_or_less(by: str, kind: str, package: str,
                                                                              most: int, tmp_path: Path) -> None:
    """Its changed lines are marked, and without them it trains by PyTorch alone."""
    pytest.importorskip(package)
    code = (ROOT / "scripts" / "examples" / f"{kind}_torch.py").read_text()
    assert code.count("\n") < 60 and len(re.findall(r"# new$|# was: ", code, re.MULTILINE)) == most
    if "as it was" in by:
        code = re.sub(r"^.*# new\n", "", code, flags=re.MULTILINE)
        code = re.sub(r"^( *)# was: (.*\n).*\n", r"\1\2", code, flags=re.MULTILINE)
        assert not re.search(r"\bod\b|odsgd\.|store\b", code.split('"""')[2])
    (tmp_path / "train.py").write_text(code)
    words = [str(ROOT / "scripts" / "launch.py"), "-n", "2", "-s", "1"] if by == "launch" else \
        ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    for _ in range(3):
        done = subprocess.run([sys.executable, *words, "train.py"], cwd=tmp_path, env=environment(),
                              capture_output=True, text=True, timeout=300)
        if "as it was" not in by or "terminate called without an active exception" not in done.stderr:
            break  # else PyTorch alone has aborted as it ended, which it does now and then
    assert done.returncode == 0, done.stderr
    found = re.findall(r"([\d.]+)% are right", done.stdout)
    assert found and float(found[-1]) > 85, done.stdout


@pytest.mark.parametrize("script", ["diloco_torch", "diloco_gluon"])
def test_two_workers_that_exchange_weights_seldom_learn_with_either_framework(script: str, tmp_path: Path) -> None:
    if script == "diloco_gluon":
        pytest.importorskip("kvstore.engine._mxnet")
    done = run(tmp_path, f"examples/{script}.py")
    right = re.findall(r"worker (\d) \| ([\d.]+)% of unseen points are right", done.stdout)
    assert sorted(rank for rank, _ in right) == ["0", "1"] and min(float(one) for _, one in right) > 90


@pytest.mark.parametrize("name, dataset, thumbnail", [
    ("mlp", "digits", False), ("resnet18_v1", "cifar10", True), ("resnet18_v2", "cifar10", False),
    ("cifar_resnet20_v1", "cifar10", False), ("mobilenet1.0", "mnist", False), ("resnet50_v1", "imagenet", False)])
@pytest.mark.usefixtures("gives_memory_back")
def test_networks_compute_as_those_of_gluons_presets(name: str, dataset: str, thumbnail: bool, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights in the same order give the same outputs."""
    import torch

    mx = pytest.importorskip("kvstore.engine._mxnet").mx
    from odsgd.config.train import TrainConfig
    from odsgd.training import models
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "examples"))
    networks = __import__("networks")
    folder: Dict[str, Any] = {} if dataset == "digits" else {"data_dir": str(tmp_path)}
    config = TrainConfig(model=name, dataset=dataset, thumbnail=thumbnail, trainable="last", **folder)  # few gradients
    theirs = models.create(config)
    ours = networks.make(name, config.input_shape, config.classes, thumbnail).eval()
    state = [tensor for key, tensor in ours.state_dict().items() if not key.endswith("num_batches_tracked")]
    parameters = list(theirs.collect_params().values())
    assert [tuple(tensor.shape) for tensor in state] == [tuple(parameter.shape) for parameter in parameters]
    random = np.random.RandomState(0)
    for parameter, tensor in zip(parameters, state):
        if not parameter.name.endswith(("gamma", "running_var")):
            parameter.set_data(mx.nd.array(0.05 * random.normal(size=parameter.shape)))
        tensor.copy_(torch.from_numpy(parameter.list_data()[0].asnumpy()))
    x = random.normal(size=(1, *config.input_shape)).astype(np.float32)
    with torch.inference_mode():
        output = ours(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(output, theirs(mx.nd.array(x)).asnumpy(), rtol=1e-3, atol=1e-5 * np.abs(output).max())
