"""TensorBoard's event files: of ``odsgd train --board``, and of any script.

    from odsgd import board

    board.log(iteration, {"train/loss": loss, "test/accuracy": accuracy}, lr=trainer.learning_rate)

and ``tensorboard --logdir runs`` shows them. A script's files lie in ``runs/board``, or where ODSGD_BOARD or
`board.to(folder)` says. Of a job's workers worker 0 writes, and the calls of the others do nothing, so all may make
them. `log` adds what it can tell by itself: the time of an iteration since the call before, and how much of that this
worker has waited for weights. An Estimator has `odsgd.callbacks.OnBoard`.
"""
import atexit
import functools
import importlib
import os
import time
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional, Tuple, Union

from kvstore.errors import ConfigError
from kvstore.job.aside import BackgroundThread, guarded
from kvstore.job.pulse import beyond, pulse

FOLDER = "runs/board"
FLUSH_S = 5
CLOSED_WITHIN_S = 10.0
RANKS = ("ODSGD_WORKER_RANK", "DMLC_WORKER_ID", "RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK",
         "SLURM_PROCID")
"""Variables in which launchers tell a worker's rank; the first that is set counts."""
EVENT_FILE = "TensorBoard's event file"


class Board:
    """Writes one event file below `folder`. What it is given is in the file some seconds later.

    A disk that is full, or hangs, is said once, and what cannot be written is left out. `purge_step`: the first
    iteration of a run that goes on; TensorBoard leaves out what files before this one have from there on.
    """

    def __init__(self, folder: Union[str, Path], purge_step: Optional[int] = None) -> None:
        try:
            self._writer: Any = importlib.import_module("tensorboardX").SummaryWriter(
                str(folder), purge_step=purge_step, flush_secs=FLUSH_S)
        except ImportError:
            raise ConfigError("event files for TensorBoard need tensorboardX: "
                              "pip install 'tensorboardX>=2.6.2,<3'") from None
        except OSError as error:
            raise ConfigError(f"no event files in `{folder}`: {error.strerror}; name another folder") from None
        self._aside = BackgroundThread(EVENT_FILE)
        # The first event starts a thread of the library's, which Python 3.12 refuses once the script has ended.
        self._writer.file_writer.add_event(importlib.import_module("tensorboardX.proto.event_pb2").Event())
        events = self._writer.file_writer.event_writer
        self._end, events.close = events.close, lambda: None  # called at exit, it may wait for ever
        self._last: Optional[Tuple[int, float, float]] = None  # iteration, time, seconds waited

    @guarded(EVENT_FILE)
    def _write(self, call: Callable[..., object], *arguments: Any, **keywords: Any) -> None:
        self._aside.do(functools.partial(call, *arguments, **keywords))

    def add(self, iteration: int, values: Mapping[str, Optional[float]]) -> None:
        """Numbers by their names, which TensorBoard groups by what stands before a `/`; None is left out."""
        now, add = time.time(), self._writer.add_scalar
        for name, value in values.items():
            if value is not None:
                self._write(add, name, float(value), iteration, now)

    def add_counts(self, iteration: int, name: str, counts: Mapping[int, int]) -> None:
        """How often each whole number came, as a histogram with a bar for each."""
        if not counts:
            return
        numbers = range(max(counts) + 1)
        self._write(
            self._writer.add_histogram_raw, name, min=min(counts), max=max(counts), num=sum(counts.values()),
            sum=sum(number * count for number, count in counts.items()),
            sum_squares=sum(number * number * count for number, count in counts.items()),
            bucket_limits=[number + 0.5 for number in numbers], bucket_counts=[counts.get(n, 0) for n in numbers],
            global_step=iteration)

    def log(self, iteration: int, values: Mapping[str, float]) -> None:
        """A caller's numbers, and the time and the waiting of an iteration since the last call."""
        waited_s = pulse.more.get("waited_s", float)()
        before, self._last = self._last, (iteration, time.monotonic(), waited_s)
        own: Dict[str, float] = {}
        if before is not None and iteration > before[0]:
            iterations, *since_s = (now - then for now, then in zip(self._last, before))
            own = {"speed/iteration_ms": 1000 * since_s[0] / iterations,
                   "speed/waiting_ms": 1000 * min(since_s) / iterations}
            self._last = (*self._last[:2], waited_s - beyond(since_s[1], since_s[0]))
        self.add(iteration, {**own, **values})

    @guarded(EVENT_FILE)
    def close(self) -> None:
        """Nothing more will be added."""
        self._aside.finish(self._end, CLOSED_WITHIN_S)


_board: Optional[Board] = None
"""The board of a script."""


def to(folder: Union[str, Path]) -> None:
    """From here on `log` writes to this folder."""
    global _board
    if _writes():
        close()
        _board = Board(folder)
        atexit.unregister(close)
        atexit.register(close)  # after the import of multiprocessing, whose own end would close the queue first


def log(iteration: int, values: Optional[Mapping[str, float]] = None, **more: float) -> None:
    """Write numbers of an iteration by their names. One that is an MXNet array of one element is waited for."""
    if not _writes():
        return
    if _board is None:
        to(os.environ.get("ODSGD_BOARD") or FOLDER)
    assert _board is not None
    _board.log(iteration, {**(values or {}), **more})


def close() -> None:
    """Write the rest to the file; the end of the process does so, too."""
    global _board
    if _board is not None:
        _board.close()
        _board = None


def _writes() -> bool:
    """Whether this process is the one of its job that writes."""
    rank = next(filter(None, map(os.environ.get, RANKS)), "0")
    return os.environ.get("DMLC_ROLE", "worker") == "worker" and rank == "0"
