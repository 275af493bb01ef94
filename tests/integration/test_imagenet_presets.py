"""The presets for ImageNet, which is not here: three iterations on generated records of its shape."""
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore.engine._mxnet import mx
from odsgd.config.train import TrainConfig
from tests.jobs import PATIENCE_S, ROOT, environment

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs of 256x256 pixels, with labels below 1000."""
    import cv2
    folder = tmp_path_factory.mktemp("imagenet")
    random = np.random.RandomState(0)
    for part, count in (("train", 6), ("val", 2)):
        file = mx.recordio.MXIndexedRecordIO(str(folder / f"{part}.idx"), str(folder / f"{part}.rec"), "w")
        for number in range(count):
            header = mx.recordio.IRHeader(0, float(random.randint(1000)), number, 0)
            image = random.randint(0, 255, (256, 256, 3), dtype=np.uint8)
            file.write_idx(number, mx.recordio.pack(header, cv2.imencode(".jpg", image)[1].tobytes()))
        file.close()
    return folder


CROP, SMALL = "--image-shape 3,112,112", "--image-shape 3,64,64"
"""AlexNet's first dense layer is then a ninth of what it is with 224, with which two workers take 6 GB and 40 s. The
networks that average before their last layer have the same parameters with any shape; one of them runs with 224."""
ALIKE = {"imagenet_resnet50_k80": "imagenet_resnet50_v100", "imagenet_resnet50_v100_warmup": "imagenet_resnet50_v100",
         "imagenet_alexnet_pipesgd": "imagenet_alexnet_softsync"}
"""Presets that do not run here: the same network, data and kind of optimizer as in one that does."""

RESNET50, RESNET18, ALEXNET, VGG_F = 25575912, 11689512, 27546408, 32541544
"""Parameters that learn, for 1000 classes; AlexNet's and VGG-F's with that crop."""


@pytest.mark.parametrize("preset, parameters, flags", [
    pytest.param("imagenet_resnet50_v100", RESNET50, SMALL, marks=pytest.mark.again),
    ("imagenet_resnet18_pipesgd", RESNET18, f"--warmup 1 --codec quantize {SMALL}"),
    ("imagenet_resnet18_delayed", RESNET18, ""),
    pytest.param("imagenet_vggf_delayed", VGG_F, CROP, marks=pytest.mark.again),
    pytest.param("imagenet_alexnet_softsync", ALEXNET, f"--n 1 {CROP}", marks=pytest.mark.again),
], ids=lambda value: value if isinstance(value, str) and value.startswith("imagenet") else "")
def test_a_preset_trains_on_records(tmp_path: Path, records: Path, preset: str, parameters: int, flags: str) -> None:
    smaller = "--num-gpus 0 --batch-size 1 --data-threads 1 --iterations 3 --eval-every 0 --workers 1 --cluster virtual"
    done = subprocess.run(
        [sys.executable, "-m", "odsgd", "train", "--config", f"configs/{preset}.yaml", *smaller.split(), *flags.split(),
         "--data-dir", str(records), "--out", str(tmp_path / "run")], cwd=ROOT, env=environment(), capture_output=True,
        text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    start, = (event for event in events if event["event"] == "start")
    assert start["parameters"] == parameters
    assert "--image-shape" in flags or start["config"]["image_shape"] == [3, 224, 224]
    assert [event["iteration"] for event in events if event["event"] == "end"] == [3]
    shutil.rmtree(tmp_path / "run")  # a checkpoint of 400 MB


@pytest.mark.parametrize("preset", ALIKE)
def test_a_preset_that_does_not_run_here_is_like_one_that_does(preset: str) -> None:
    one, other = (TrainConfig.from_flags(["--config", f"{ROOT}/configs/{name}.yaml", "--data-dir", "DIR"])
                  for name in (preset, ALIKE[preset]))
    for name in ("model", "dataset", "image_shape", "optimizer", "dtype", "hybridize"):
        assert getattr(one, name) == getattr(other, name), name


def test_every_preset_for_imagenet_runs_here_or_is_like_one_that_does() -> None:
    marks = test_a_preset_trains_on_records.pytestmark  # type: ignore[attr-defined]
    run = {(case.values if hasattr(case, "values") else case)[0] for mark in marks for case in mark.args[1]}
    assert {path.stem for path in (ROOT / "configs").glob("imagenet_*.yaml")} == run | set(ALIKE)
    assert set(ALIKE.values()) <= run
