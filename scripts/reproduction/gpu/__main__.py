"""The command."""
from __future__ import annotations

import argparse
import faulthandler
import fnmatch
import gc
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import torch

from kvstore.errors import ConfigError, shown
from odsgd import __version__
from odsgd.cli import ended
from odsgd.config.train import TrainConfig
from odsgd.tools import cpu
from scripts.reproduction import gpu, results
from scripts.reproduction.cli import chosen
from scripts.reproduction.declarations import Trial, named
from scripts.reproduction.gpu import times
from scripts.reproduction.gpu.images import Images
from scripts.reproduction.gpu.run import Run, shards
from scripts.reproduction.run import configuration, source

SAID_S, STILL_S = 60.0, 180.0
"""Between two lines of how far the runs are; without an iteration of any of them, until the process ends and says where
it is.
"""
BESIDE = 4
"""Workers of a run that compute at a time."""
MOST_JOBS = 32 // (BESIDE + 1)
IMAGES = ("dataset", "data_dir", "num_examples", "holdout", "image_shape", "num_classes", "augment")
"""Options that decide what images there are."""


class Several:
    """Runs that share the device, the next of `waiting` in the place of one that is over."""

    def __init__(self, asked: argparse.Namespace, waiting: List[Trial]) -> None:
        self._asked, self._waiting = asked, waiting
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._images: Dict[Any, Images] = {}
        self._running: List[Tuple[Run, Any]] = []
        self._source = asked.source or " ".join(source())
        self._versions = {"odsgd": __version__, "torch": torch.__version__, "numpy": np.__version__,
                          "python": platform.python_version()}
        gpu = f"{torch.cuda.get_device_name()}, " if self._device.type == "cuda" else ""
        # PyTorch has 32 streams, and hands them out again; two graphs that play at a time must not have one in common.
        self._free: List[Sequence[Any]] = [[torch.cuda.Stream() for _ in range(BESIDE + 1)]
                                           for _ in range(asked.jobs if gpu else 0)]
        self._machine = {"cpu": f"{gpu}{cpu()}", "cores": os.cpu_count(), "threads": 1}

    def go_on(self, end: float) -> None:
        """Until all are over, or `end` (`time.monotonic`); then those that are not are saved."""
        several = multiprocessing.get_context("spawn")
        with several.Pool(os.cpu_count()) as pool, tempfile.TemporaryDirectory() as folder:
            waiting = [self._ready(trial, Path(folder), pool) for trial in self._waiting]
            moved = said = watched = 0.0
            faulthandler.dump_traceback_later(STILL_S, exit=True)
            while (waiting or self._running) and time.monotonic() < end:
                if waiting and len(self._running) < self._asked.jobs:
                    self._running.append(self._begun(*waiting.pop(0)))
                advanced = sum(run.advance() for run, _ in self._running)
                if advanced or all(run.over for run, _ in self._running):  # which wait for their virtual times then
                    moved = time.monotonic()
                if not advanced:
                    time.sleep(0.0002)
                if moved - watched > 1:
                    watched = moved
                    faulthandler.dump_traceback_later(STILL_S, exit=True)
                if moved - said > SAID_S:
                    said = moved
                    _say("; ".join(f"{run.trial.cell.name} {run.trial.seed}: {run.t} of {run.total}"
                                   for run, _ in self._running))
                for number in reversed(range(len(self._running))):
                    run, virtual = self._running[number]
                    if virtual.ready() and (run.over or not virtual.successful()):
                        del self._running[number]
                        self._finish(run, virtual.get())
            for run, _ in self._running:
                run.pause()
                run.save(self._asked.runs)
                _say(f"{run.trial}: stopped after iteration {run.t} of {run.total}, {run.seconds:.1f} s")
        faulthandler.cancel_dump_traceback_later()

    def _ready(self, trial: Trial, folder: Path, pool: Any) -> Tuple[Trial, TrainConfig, Any]:
        """The trial, its options, and its virtual times to come: they may take longer than the run itself."""
        config = configuration(trial, folder, self._asked.data_dir)
        each = shards(config, trial, self._images_of(config)).batches_per_epoch
        return trial, config, pool.apply_async(times.virtual_seconds, (trial.asked, config, each))

    def _images_of(self, config: TrainConfig) -> Images:
        key = tuple(str(getattr(config, name)) for name in IMAGES)
        if key not in self._images:
            self._images[key] = Images(config, self._device)
        return self._images[key]

    def _begun(self, trial: Trial, config: TrainConfig, virtual: Any) -> Tuple[Run, Any]:
        if self._device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()  # of runs that are over
        run = Run(trial, config, self._images_of(config), self._free.pop() if self._free else ())
        run.load(self._asked.runs)
        run.sources.append(self._source)
        _say(f"{trial}: begins at iteration {run.t} of {run.total}")
        return run, virtual

    def _finish(self, run: Run, virtual_s: Sequence[float]) -> None:
        result = run.result(virtual_s, self._versions, self._machine)
        results.add(result, self._asked.results / run.trial.file)
        run.forget(self._asked.runs)
        if run.streams:
            self._free.append(run.streams)
        _say(f"{run.trial}: done: test accuracy {result.column('test_accuracy')[-1]:.2%}, {result.seconds:.0f} s")


def _say(text: str) -> None:
    print(text, flush=True)


def main(argv: Sequence[str]) -> int:
    """Run what is asked for; 64 after one line on standard error, if it cannot be done."""
    return ended("python -m scripts.reproduction.gpu", lambda: _main(_parser().parse_args(argv)))


def _main(asked: argparse.Namespace) -> int:
    end = time.monotonic() + asked.seconds
    torch.backends.cudnn.benchmark = True
    trials = chosen(named(asked.items), asked.scale, "*", asked.seeds)
    names = {f"{trial.cell.name}:{trial.seed}": trial for trial in trials}
    wanted = dict.fromkeys(name for glob in asked.cells for name in fnmatch.filter(names, glob))
    if not wanted:
        raise ConfigError(f"no run is called `{shown(' '.join(asked.cells))}`; there are {', '.join(names)}")
    Several(asked, [names[name] for name in wanted if names[name].result(asked.results) is None]).go_on(end)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.reproduction.gpu", description=gpu.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("items", metavar="PAPER/ITEM", nargs="+")
    add("--scale", default="paper")
    add("--cells", metavar="GLOB", nargs="+", default=["*"], help="cells and seeds in their order, e.g. '*-4:0' '*:1'")
    add("--seeds", metavar="N", type=int, default=3)
    add("--jobs", metavar="N", type=int, choices=range(1, MOST_JOBS + 1), default=MOST_JOBS,
        help=f"runs at a time, at most {MOST_JOBS} (default)")
    add("--seconds", metavar="S", type=float, default=float("inf"), help="stop after so long; the same command goes on")
    add("--data-dir", metavar="DIR", type=Path)
    add("--results", metavar="DIR", type=Path, default=Path("docs/results"))
    add("--runs", metavar="DIR", type=Path, default=Path("runs/gpu"), help="of what was stopped")
    add("--source", metavar="'COMMIT TREE'", help="of this code, where git does not say")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
