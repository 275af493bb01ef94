"""A job from Python: ``odsgd.launch(function, num_workers=2)``, in a script or a notebook.

Every worker is a process that calls the function; the results come back by rank. The function travels by cloudpickle,
in a folder that only its user can read; so the script itself may define it.
"""
from __future__ import annotations

import os
import pickle
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, Callable, List, Optional, Sequence, Tuple

import cloudpickle

from kvstore.errors import EXIT_INTERRUPTED, ConfigError, KVStoreError

TASK, RESULT = "task", "worker-{}"


class JobError(KVStoreError):
    """A job has failed; `__cause__` is a worker's exception, if there was one."""


def call(function: Callable[..., Any], *arguments: Any, num_workers: int = 2, num_servers: Optional[int] = None,
         options: Sequence[str] = (), **keywords: Any) -> List[Any]:
    """Run a local job whose workers call ``function(*arguments, **keywords)``; returns their results, by rank.

    Blocks until the job has ended; Ctrl-C ends it where this is called on the main thread. The workers' output is shown
    as `odsgd launch` shows it.

    Parameters
    ----------
    num_workers, num_servers
        as ``-n`` and ``-s`` of `odsgd launch`; None: as many servers as workers
    options
        further words for `odsgd launch`, e.g. ``["--env", "MXNET_CPU_WORKER_NTHREADS:2"]``

    Raises
    ------
    JobError
        a process has failed. If a worker raised an exception, it is the ``__cause__``.
    """
    from odsgd.launch import command, supervisor
    with tempfile.TemporaryDirectory(prefix="odsgd-function-") as name:
        folder = Path(name)
        (folder / TASK).write_bytes(cloudpickle.dumps((function, arguments, keywords)))
        servers = [] if num_servers is None else ["-s", str(num_servers)]
        job = command.parse(["-n", str(num_workers), *servers, *options, sys.executable, "-m", __name__, name])
        if job.launcher != "local":
            raise ConfigError(f"options {list(options)}: a function runs on this machine only; put it into a script "
                              "and start the script with `odsgd launch`")
        code = supervisor.run(job)
        if code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        results = [_read(folder / RESULT.format(rank)) for rank in range(num_workers)]
        if code:
            raised = [(rank, error) for rank, (_, error) in enumerate(results) if error is not None]
            where = f"worker {raised[0][0]} raised {raised[0][1]!r}" if raised else "its output says why"
            raise JobError(f"the job ended with exit code {code}; {where}") from (raised[0][1] if raised else None)
        return [result for result, _ in results]


def _read(path: Path) -> Tuple[Any, Optional[BaseException]]:
    """The result of a worker, or the exception that ended it; (None, None) if it had no time to write one."""
    return pickle.loads(path.read_bytes()) if path.exists() else (None, None)


def _write(path: Path, result: Any, error: Optional[BaseException]) -> None:
    """Write what became of a worker, whole or not at all."""
    draft = path.with_suffix(".new")
    draft.write_bytes(cloudpickle.dumps((result, error)))
    os.replace(draft, path)


def _work(folder: Path) -> None:
    """Be a worker."""
    import odsgd  # noqa: F401  before the function imports MXNet
    path = folder / RESULT.format(os.environ["ODSGD_WORKER_RANK"])
    try:
        function, arguments, keywords = pickle.loads((folder / TASK).read_bytes())
        _write(path, function(*arguments, **keywords), None)
    except Exception as error:
        text = traceback.format_exc()
        try:
            pickle.loads(cloudpickle.dumps(error))
            _write(path, None, error)
        except Exception:  # the exception cannot be copied
            _write(path, None, RuntimeError(text))
        raise


if __name__ == "__main__":
    _work(Path(sys.argv[1]))
