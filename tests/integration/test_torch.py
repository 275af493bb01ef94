"""PyTorch scripts as jobs: the one of the documentation, and one whose workers differ."""
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract.test_algorithms import CLOSE
from tests.contract.test_torch import NAMES, by_torch
from tests.jobs import ROOT, environment, load

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(400)

SCRIPT = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "pytorch.md").read_text(encoding="utf-8"), re.DOTALL)[0]


def launched(folder: Path, code: str, *flags: str) -> Any:
    (folder / "train.py").write_text(code, encoding="utf-8")
    return subprocess.run([sys.executable, str(ROOT / "scripts" / "launch.py"), "-n", "2", *flags, "train.py"],
                          cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_script_of_the_documentation_trains_also_with_a_loader_that_forks(tmp_path: Path) -> None:
    import torch
    done = launched(tmp_path, SCRIPT.replace("drop_last=True", "drop_last=True, num_workers=1, "
                                             "persistent_workers=True"), "-s", "1")
    assert done.returncode == 0, done.stderr
    found = re.search(r"worker 0 \| accuracy ([\d.]+) after 560 iterations", done.stdout)
    assert found and float(found.group(1)) > 0.97, done.stdout
    assert "2.weight" not in torch.load(tmp_path / "weights.pt") and "3.weight" in torch.load(tmp_path / "weights.pt")


@pytest.mark.slow
def test_under_torchrun_a_ring_of_its_own_walks_the_path_of_one_process(tmp_path: Path) -> None:
    """Nothing of ours is started beside it."""
    code = ("import os, odsgd, numpy as np\nfrom tests.torch_scenarios import run_all\nrank = int(os.environ['RANK'])\n"
            f"np.savez(f'{{rank}}.npz', **run_all(rank, {NAMES['ring']}, 'ring'))\n")
    (tmp_path / "train.py").write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"],
                          cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for m, expected in enumerate(by_torch("in process 2", "ring")):
        found = load(tmp_path / f"{m}.npz")
        for part, array in expected.items():
            np.testing.assert_allclose(found[part], array, err_msg=f"{part}, worker {m}", **CLOSE)


def test_workers_with_different_models_are_told_what_differs(tmp_path: Path) -> None:
    done = launched(tmp_path, SCRIPT.replace("Linear(64, 128)", "Linear(64, 128, bias=rank == 0)"), "-s", "1")
    assert done.returncode == 70
    assert "workers 0 and 1 differ in the model and its settings:" in done.stderr
    assert re.search(r"-0\.bias shape \(128,\) torch\.float32", done.stderr)
