"""Real jobs for tests: scheduler, servers and workers as processes of this machine, started by the launcher.

A worker runs one of this module's functions by name and leaves its result as an .npz file.
"""
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
Result = Dict[str, np.ndarray]
PATIENCE_S = 500.0
"""How long a job may take, on a machine that is busy with other work: it bounds a hang."""


def until(condition: Callable[[], Any], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.01)


def run_job(function: str, workers: int, servers: int, *arguments: Any, timeout_s: float = PATIENCE_S,
            extra: Sequence[str] = ()) -> List[Result]:
    """Run ``function(worker_rank, *arguments)`` (``module:name``) on every worker; the results by rank."""
    with tempfile.TemporaryDirectory() as folder:
        command = worker_command(function, folder, *arguments)
        try:
            done = launch(workers, servers, command, timeout_s=timeout_s, extra=extra)
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"the job was still there after {timeout_s:g} s\n{late.stdout!r}\n{late.stderr!r}"
                                 ) from None
        assert done.returncode == 0, f"the job ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return [load(Path(folder) / f"worker-{rank}.npz") for rank in range(workers)]


def worker_command(function: str, folder: str, *arguments: Any) -> List[str]:
    return [sys.executable, "-m", "tests.jobs", function, folder, json.dumps(arguments)]


def launch(workers: int, servers: int, command: Sequence[str], timeout_s: float = PATIENCE_S,
           extra: Sequence[str] = ()) -> "subprocess.CompletedProcess[str]":
    """`odsgd launch` in a process of its own."""
    return subprocess.run(launch_command(workers, servers, command, extra), cwd=ROOT, env=environment(),
                          capture_output=True, text=True, timeout=timeout_s)


def launch_command(workers: int, servers: int, command: Sequence[str], extra: Sequence[str] = ()) -> List[str]:
    return [sys.executable, str(ROOT / "scripts" / "launch.py"), "-n", str(workers), "-s", str(servers), *extra,
            *command]


def environment() -> Dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def load(path: Path) -> Result:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def main(function: str, folder: str, arguments: str) -> None:
    import importlib

    import tests.lean  # noqa: F401
    # isort: split
    if not function.startswith("tests.stock:"):
        import odsgd  # noqa: F401  first, as every script does

    rank = int(os.environ.get("ODSGD_WORKER_RANK") or os.environ["DMLC_WORKER_ID"])
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(rank, *json.loads(arguments))
    np.savez(Path(folder) / f"worker-{rank}.npz", **(result or {}))


def train_each(worker_rank: int, runs: List[Dict[str, Any]]) -> None:
    """One training after another, from the options of each: they share a job's connection and its start."""
    from odsgd.config.train import TrainConfig
    from odsgd.training import loop
    for options in runs:
        assert loop.run(TrainConfig(**options)) == 0, json.dumps(options)


def alone(store: Any, w: Any, **settings: Any) -> Any:
    """An array that this store trains alone, as `w`, by an SGD of these settings."""
    from kvstore.engine._mxnet import mx
    store.set_optimizer(mx.optimizer.SGD(**settings))
    store.broadcast("w", w, w)
    return w


def take_step(trainer: Any, loss: Callable[..., Any], *inputs: Any, batch: int = 1) -> None:
    """One step of a trainer of Gluon's."""
    from kvstore.engine._mxnet import mx
    with mx.autograd.record():
        result = loss(*inputs)
    result.backward()
    trainer.step(batch)


def train_once(net: Any, store: Any) -> None:
    """A trainer's first step, of a network with one input."""
    from kvstore.engine._mxnet import mx
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
    take_step(trainer, net, mx.nd.ones((1, 1)))


if __name__ == "__main__":
    main(*sys.argv[1:])
