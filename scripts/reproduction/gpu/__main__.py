"""The command."""
from __future__ import annotations

import argparse
import fnmatch
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

from kvstore import methods
from kvstore.errors import ConfigError, ProtocolError, shown
from kvstore.methods import fit
from odsgd import __version__
from odsgd.cli import ended
from odsgd.config.train import TrainConfig
from odsgd.tools import cpu
from odsgd.virtual import description, times
from odsgd.virtual.costs import NS
from scripts.reproduction import gpu, results
from scripts.reproduction.cli import chosen
from scripts.reproduction.declarations import Trial, named
from scripts.reproduction.gpu.images import Images
from scripts.reproduction.gpu.run import Run
from scripts.reproduction.run import configuration, source

SAID_S, STILL_S = 60.0, 120.0
"""Between two lines of how far the runs are; without an iteration of any of them, until that is an error."""


def virtual_seconds(asked: Dict[str, Any], config: TrainConfig, sizes: Sequence[int], each: int) -> List[float]:
    """When each epoch is over on the trial's cluster, where all workers meet."""
    method = methods.find(config.kvstore)
    cluster = description.of(asked["cluster"])
    job = times.simulation(cluster, method, fit.options_of(method, config.options.in_iterations(each).plain()),
                           times.layers({f"{number:04}": size for number, size in enumerate(sizes)}))
    over = []
    for epoch in range(config.epochs):
        for m in range(cluster.workers):
            for t in range(epoch * each + 1, (epoch + 1) * each + 1):
                job.begin(m, t)
            job.rest(m)
        over.append(job.met() / NS)
    return over


class Several:
    """Runs that share the device, the next of `waiting` in the place of one that is over."""

    def __init__(self, asked: argparse.Namespace, waiting: List[Trial]) -> None:
        self._asked, self._waiting = asked, waiting
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._images: Dict[Any, Images] = {}
        self._running: List[Tuple[Run, Any]] = []
        commit, tree = asked.source.split() if asked.source else source()
        self._versions = {"odsgd": __version__, "torch": torch.__version__, "numpy": np.__version__,
                          "python": platform.python_version(), "commit": commit, "tree": tree}
        gpu = f"{torch.cuda.get_device_name()}, " if self._device.type == "cuda" else ""
        self._machine = {"cpu": f"{gpu}{cpu()}", "cores": os.cpu_count(), "threads": 1}

    def go_on(self, end: float) -> None:
        """Until all are over, or `end` (`time.monotonic`); then those that are not are saved."""
        several = multiprocessing.get_context("spawn")
        with several.Pool(self._asked.jobs) as pool, tempfile.TemporaryDirectory() as folder:
            moved = said = time.monotonic()
            while (self._waiting or self._running) and time.monotonic() < end:
                if self._waiting and len(self._running) < self._asked.jobs:
                    self._running.append(self._begun(self._waiting.pop(0), Path(folder), pool))
                if sum(run.advance() for run, _ in self._running):
                    moved = time.monotonic()
                else:
                    self._rest(moved)
                if moved - said > SAID_S:
                    said = moved
                    _say("; ".join(f"{run.trial.cell.name} {run.trial.seed}: {run.t} of {run.total}"
                                   for run, _ in self._running))
                for number in reversed(range(len(self._running))):
                    if self._running[number][0].over:
                        self._finish(*self._running.pop(number))
            for run, _ in self._running:
                run.pause()
                run.save(self._asked.runs)
                _say(f"{run.trial}: stopped after iteration {run.t} of {run.total}, {run.seconds:.1f} s")

    @staticmethod
    def _rest(moved: float) -> None:
        """Every run has enough queued on the GPU; ProtocolError if that has been so for long."""
        if time.monotonic() - moved > STILL_S:
            raise ProtocolError(f"no run has finished an iteration for {STILL_S:g} s: the GPU stands still; take fewer "
                                "--jobs, and say so in an issue")
        time.sleep(0.0002)

    def _begun(self, trial: Trial, folder: Path, pool: Any) -> Tuple[Run, Any]:
        """The run, and its virtual times to come."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # of runs that are over
        config = configuration(trial, folder, self._asked.data_dir)
        key = config.dataset, config.num_examples, config.augment
        if key not in self._images:
            self._images[key] = Images(config, self._device)
        run = Run(trial, config, self._images[key])
        run.load(self._asked.runs)
        _say(f"{trial}: begins at iteration {run.t} of {run.total}")
        sizes = [one.numel() for one in run.shown.parameters]
        return run, pool.apply_async(virtual_seconds, (trial.asked, config, sizes, run.each))

    def _finish(self, run: Run, virtual: Any) -> None:
        result = run.result(virtual.get(), self._versions, self._machine)
        results.add(result, self._asked.results / run.trial.file)
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
    add("--jobs", metavar="N", type=int, default=6, help="runs at a time (default: 6)")
    add("--seconds", metavar="S", type=float, default=float("inf"), help="stop after so long; the same command goes on")
    add("--data-dir", metavar="DIR", type=Path)
    add("--results", metavar="DIR", type=Path, default=Path("docs/results"))
    add("--runs", metavar="DIR", type=Path, default=Path("runs/gpu"), help="of what was stopped")
    add("--source", metavar="'COMMIT TREE'", help="of this code, where git does not say")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
