"""Half precision in real jobs: MXNet's `amp` in a script of one's own, and `odsgd train --dtype float16`."""
import json
import sys
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest

from kvstore.engine._mxnet import mx
from tests.jobs import launch

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import tests.lean
import odsgd
import mxnet as mx
from mxnet.contrib import amp
amp.init("bfloat16")
mx.random.seed(1)

class Scaled(mx.gluon.HybridBlock):  # what amp computes in bfloat16, Dense and Conv2D, not every processor can
    def __init__(self):
        super().__init__()
        self.weight = self.params.get("weight", shape=(4, 64))

    def hybrid_forward(self, F, x, weight):
        return F.broadcast_mul(x, weight)

net = Scaled()
net.initialize()
net.hybridize()
trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore=sys.argv[1])
amp.init_trainer(trainer)
rank = trainer._kvstore_params["kvstore"].rank
x = mx.nd.random.uniform(shape=(4, 64)) * (rank + 1)
for t in range(6):
    before = net.weight.data().asnumpy()
    with mx.autograd.record():
        loss = (net(x) ** 2).mean() * (1e38 if (t, rank) == (3, 1) else 1)
        with amp.scale_loss(loss, trainer) as scaled:
            mx.autograd.backward(scaled)
    trainer.step(4)
    same = (net.weight.data().asnumpy() == before).all()
    print("iteration", t, "kept" if same else "moved", trainer._amp_loss_scaler._next_loss_scale, flush=True)
"""


@pytest.mark.parametrize("asked, options", [("odsgd", []), ("dist_sync", ["--store", "ssgd"])])
def test_amp_leaves_an_iteration_out_on_all_workers_and_halves_all_scales(tmp_path: Path, asked: str,
                                                                          options: List[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = launch(2, 1, [sys.executable, str(script), asked], extra=options)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        told = [line.split()[5:] for line in done.stdout.splitlines() if line.startswith(f"worker {rank} | iteration")]
        assert told == [["moved", "65536.0"]] * 3 + [["kept", "32768.0"]] + [["moved", "32768.0"]] * 2


def records(out: Path) -> List[Dict[str, Any]]:
    return [record for record in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
            if record["event"] == "epoch"]


def weights(out: Path, iteration: int) -> Dict[str, np.ndarray]:
    loaded = mx.nd.load(str(out / "checkpoints" / str(iteration) / "weights.params"))
    return {name: array.asnumpy() for name, array in loaded.items()}


def test_a_run_in_half_precision_learns_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    def train(out: Path, *more: str) -> None:
        done = launch(2, 1, [sys.executable, "-m", "odsgd", "train", "--dtype", "float16", "--batch-size", "32", "--lr",
                             "0.1", "--warmup", "5", "--epochs", "4", "--out", str(out), *more])
        assert done.returncode == 0, done.stderr

    train(tmp_path / "whole")
    train(tmp_path / "parts", "--iterations", "30")
    train(tmp_path / "parts", "--resume")
    whole, last = weights(tmp_path / "whole", 88), records(tmp_path / "whole")[-1]
    assert {array.dtype for array in whole.values()} == {np.dtype(np.float16)}
    assert last["test_accuracy"] > 0.85 and last["left_out"] > 0, last
    for name, array in weights(tmp_path / "parts", 88).items():
        np.testing.assert_array_equal(array, whole[name])
