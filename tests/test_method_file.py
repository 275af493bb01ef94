"""The worked example of docs/contributing.md, a method in one file, run from the page."""
from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator, List

import numpy as np
import pytest

import kvstore
from kvstore import methods
from kvstore.engine._mxnet import mx
from kvstore.transports.in_process import Stage
from tests.jobs import ROOT, Result, alone, environment, run_job

TARGETS = (0.0, 2.0)
LR, CLIP, STEPS = 0.5, 1.5, 6


@pytest.fixture
def method_file(tmp_path: Path) -> Iterator[Path]:
    """`clipped.py` as the page has it, in a folder of its own."""
    page = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    code, = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    file = tmp_path / "clipped.py"
    file.write_text(code, encoding="utf-8")
    yield file
    methods.METHODS.pop("clipped", None)


def by_numpy(workers: int) -> List[float]:
    """W after each iteration; worker m descends (w - target_m)^2 / 2 from 4."""
    w: Any = np.float32(4.0)
    path: List[float] = []
    for _ in range(STEPS):
        mean = float(np.mean([w - target for target in TARGETS[:workers]]))
        w = np.float32(w - LR * mean * min(1.0, CLIP / abs(mean)))
        path.append(float(w))
    return path


def path_of(store: Any, worker_rank: int) -> List[float]:
    w, path = alone(store, mx.nd.array([4.0]), learning_rate=LR), []
    for _ in range(STEPS):
        store.pushpull("w", w - TARGETS[worker_rank], w)
        path.append(float(w.asscalar()))
    return path


def train(worker_rank: int, file: str) -> Result:
    """A worker of a real job, whose script registers the method."""
    kvstore.register_method(methods.load(file))
    store = kvstore.create("clipped", clip_norm=CLIP)
    path = path_of(store, worker_rank)
    _, meta = store.server_state()
    store.close()
    return {"path": np.array(path), "clipped": np.array(meta["w@0"]["rule"]["clipped"])}


def test_the_example_clips_in_one_process(method_file: Path) -> None:
    methods.load(str(method_file))
    paths = Stage(2).run(
        lambda transport: path_of(kvstore.create("clipped", transport, clip_norm=CLIP), transport.worker_rank))
    np.testing.assert_allclose(paths, [by_numpy(2)] * 2, rtol=1e-6)
    assert paths[0] != Stage(2).run(
        lambda transport: path_of(kvstore.create("ssgd", transport), transport.worker_rank))[0]


@pytest.mark.parametrize("workers, servers", [(2, 1), (2, 2)])
def test_the_example_clips_on_ps_lite(method_file: Path, workers: int, servers: int) -> None:
    for result in run_job("tests.test_method_file:train", workers, servers, str(method_file)):
        np.testing.assert_allclose(result["path"], by_numpy(workers), rtol=1e-6)
        assert result["clipped"] == 2


def test_its_option_is_a_flag_of_a_whole_job_and_a_line_of_the_help(method_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    launch = [sys.executable, "scripts/launch.py", "-n", "2", "-s", "1", sys.executable, "-m", "odsgd", "train"]
    words = ["--method-file", str(method_file), "--clip_norm", "0.25", "--iterations", "5", "--out", str(out)]
    done = subprocess.run([*launch, *words], cwd=ROOT, env=environment(), timeout=300, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert "kvstore: clipped" in done.stdout and "clip_norm: 0.25" in (out / "config.yaml").read_text()
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "end"
    help = subprocess.run([sys.executable, "-m", "odsgd", "train", *words[:2], "--help"], cwd=ROOT, env=environment(),
                          timeout=300, stdout=subprocess.PIPE, text=True)
    assert "largest norm of a bucket's mean gradient (default: 1)" in " ".join(help.stdout.split())
    wrong = subprocess.run([*launch, *words[:2], "--clip-nrm", "1"], cwd=ROOT, env=environment(), timeout=300,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert wrong.returncode == 64 and "did you mean `--clip-norm`?" in wrong.stdout


def test_a_package_offers_it_by_an_entry_point(method_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = method_file.parent / "odsgd_clipped-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: odsgd-clipped\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[odsgd.methods]\nclipped = clipped:ClippedSGD\n")
    monkeypatch.syspath_prepend(str(method_file.parent))
    importlib.invalidate_caches()
    assert methods.find("clipped").name == "clipped"
    sys.modules.pop("clipped")
