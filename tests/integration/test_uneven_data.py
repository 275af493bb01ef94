"""Workers whose data are not of one length, in a script of one's own: who waits for whom is told at once."""
import sys
from pathlib import Path

import pytest

from tests.jobs import launch

SCRIPT = """
import sys
import odsgd
import mxnet as mx
import kvstore

store = kvstore.create("ssgd", timeout_s=15)
net = mx.gluon.nn.Dense(1, in_units=1)
net.initialize()
trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
for t in range(5 if store.rank == 1 else 9):
    with mx.autograd.record():
        loss = net(mx.nd.ones((1, 1)))
    loss.backward()
    trainer.step(1)
    mx.nd.waitall()
if sys.argv[1] == "evaluates":
    store.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("then, where", [("ends", "has ended"), ("evaluates", "waits elsewhere after iteration 5")])
def test_the_worker_that_has_no_more_batches_is_named(then: str, where: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = launch(2, 1, [sys.executable, str(script), then])
    assert done.returncode == 75, done.stderr
    assert f"warning: worker 1 {where}, and worker 0 waits in iteration 6" in done.stderr
