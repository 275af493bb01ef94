"""The presets for ImageNet, which is not here: three iterations on generated records of its shape."""
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore.engine._mxnet import mx
from tests.jobs import PATIENCE_S, ROOT, environment

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs of 256x256 pixels, with labels below 1000."""
    folder = tmp_path_factory.mktemp("imagenet")
    random = np.random.RandomState(0)
    for part, count in (("train", 6), ("val", 2)):
        file = mx.recordio.MXIndexedRecordIO(str(folder / f"{part}.idx"), str(folder / f"{part}.rec"), "w")
        for number in range(count):
            header = mx.recordio.IRHeader(0, float(random.randint(1000)), number, 0)
            file.write_idx(number, mx.recordio.pack_img(header, random.randint(0, 255, (256, 256, 3), dtype=np.uint8)))
        file.close()
    return folder


@pytest.mark.parametrize("preset", ["imagenet_resnet50_k80", "imagenet_resnet50_v100", "imagenet_resnet50_v100_warmup"])
def test_a_preset_trains_on_records(tmp_path: Path, records: Path, preset: str) -> None:
    smaller = "--num-gpus 0 --batch-size 1 --data-threads 1 --iterations 3 --eval-every 0 --workers 2 --cluster virtual"
    done = subprocess.run(
        [sys.executable, "-m", "odsgd", "train", "--config", f"configs/{preset}.yaml", *smaller.split(), "--data-dir",
         str(records), "--out", str(tmp_path / "run")], cwd=ROOT, env=environment(), capture_output=True, text=True,
        timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    start, = (event for event in events if event["event"] == "start")
    assert start["parameters"] == 25575912 and start["config"]["image_shape"] == [3, 224, 224]
    assert [event["iteration"] for event in events if event["event"] == "end"] == [3]
