"""`odsgd launch --store`: scripts that know nothing of odsgd, as they are, beside MXNet's own store."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest

from odsgd.launch import hook
from tests.integration.test_other_launchers import BARE, STOCK_SERVER, Tracker
from tests.jobs import ROOT, environment, launch, load

pytestmark = pytest.mark.slow

STOCK = BARE + "import runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
CLOSE: Any = dict(rtol=1e-4, atol=1e-6)


def weights(folder: Path, name: str) -> List[np.ndarray]:
    return [load(folder / f"{name}-{rank}.npz")["weights"] for rank in range(2)]


@pytest.fixture
def script(tmp_path: Path) -> str:
    """Where nothing of ours lies beside it."""
    return str(shutil.copy(ROOT / "tests" / "foreign.py", tmp_path / "train.py"))


def with_store(store: str, script: str, way: str, asked: str) -> Any:
    command = [sys.executable, script, way, asked, str(Path(script).parent / "ours")]
    done = launch(2, 1, command, extra=["--store", store])
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("way, name", [("trainer", "dist_sync"), ("module", "dist_sync"), ("module", "dist")])
def test_ssgd_gives_what_dist_sync_gives(tmp_path: Path, script: str, way: str, name: str) -> None:
    """Where Module divides by the workers, and where it does not."""
    Tracker(2, 1, STOCK_SERVER, [sys.executable, "-c", STOCK, script, way, name, str(tmp_path / "stock")]).wait()
    done = with_store("ssgd", script, way, name)
    ours, stock = weights(tmp_path, "ours"), weights(tmp_path, "stock")
    np.testing.assert_allclose(ours[0], stock[0], **CLOSE)
    np.testing.assert_array_equal(ours[0], ours[1])
    assert str(load(tmp_path / "ours-0.npz")["kind"]) == name
    assert re.search(rf"^worker 0 \| `ssgd` in place of `{name}`, which the script", done.stderr, re.M)
    if (way, name) == ("module", "dist_sync"):  # a worker's own mean, as odsgd's local step wants it
        with_store("odsgd:warmup=4:lr_local=0", script, "module", name)
        delayed = weights(tmp_path, "ours")
        with_store("odsgd:warmup=20:reduction=sum", script, "module", name)  # by name what it is by default
        np.testing.assert_array_equal(weights(tmp_path, "ours"), ours)
        assert not np.allclose(delayed, ours, **CLOSE)


def test_a_store_of_one_process_becomes_one_of_the_job(tmp_path: Path, script: str) -> None:
    """Trainer's default is `device`: alone, each worker would train by itself."""
    with_store("ssgd:bucket-nbytes=64", script, "device", "")
    done = subprocess.run([sys.executable, "-c", STOCK, script, "device", "", str(tmp_path / "stock")],
                          env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # Both workers have the same data here, and the mean of two gradients alike is theirs.
    np.testing.assert_allclose(load(tmp_path / "ours-0.npz")["weights"], load(tmp_path / "stock-0.npz")["weights"],
                               **CLOSE)


def test_the_hook_imports_nothing_before_mxnet_and_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.theirs = True\n", encoding="utf-8")
    path = os.pathsep.join([hook.FOLDER, str(tmp_path), str(ROOT)])
    program = ("import sys\nassert theirs and not {'numpy', 'odsgd', 'kvstore'} & set(sys.modules)\n"
               "from mxnet import gluon\nimport mxnet, importlib.util\nassert 'odsgd' in sys.modules\n"
               "assert mxnet is sys.modules['mxnet'] and mxnet.__spec__.origin == mxnet.__file__\n"
               "assert importlib.util.find_spec('mxnet.gluon.data')\nprint(mxnet.kv.create.__wrapped__.__name__)")
    done = subprocess.run([sys.executable, "-c", program], env={**environment(), "PYTHONPATH": path},
                          capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "create\n"), done.stderr


def test_workers_who_meet_by_a_store_of_mxnets_own_have_not_failed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import tests.lean, odsgd, mxnet as mx\n"
                      "store, total = mx.kv.create('dist_sync'), mx.nd.zeros(1)\n"
                      "store.init(0, total)\nstore.push(0, mx.nd.ones(1))\nstore.pull(0, total)\n"
                      "print(total.asnumpy().tolist())\n")
    done = launch(2, 1, [sys.executable, str(script)])
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["worker 0 | [2.0]", "worker 1 | [2.0]"]), done
