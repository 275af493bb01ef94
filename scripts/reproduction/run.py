"""Runs trials: each is one ``odsgd train``, in a process or a job of processes and a folder of its own, several side
by side.

A trial that was stopped, by the budget or by a kill, goes on from its newest checkpoint when it is next asked for. One
that is over becomes a line of `results`, and its checkpoints go. A lock in its folder, which the training inherits,
keeps two commands from one trial until its result is written. A result says which source it ran.
"""
from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import yaml

from kvstore.errors import ConfigError, shown
from odsgd.config.train import TrainConfig
from odsgd.config.train_options import DATASETS
from odsgd.lab.processes import GRACE_S
from odsgd.launch import linux
from odsgd.report.runs import METRICS, events_of, read_records
from odsgd.tools import cpu
from odsgd.training.checkpoint.manifests import complete
from scripts.reproduction import results
from scripts.reproduction.declarations import Trial
from scripts.reproduction.results import COLUMNS, Result

POLL_S = 0.2

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MXNET_CPU_WORKER_NTHREADS": "1"}
"""Of every run: one core. Several trials side by side fill the machine better than one on all cores does."""

SOURCES = "sources"
"""File in a run's folder: commit and tree of the code that each of its starts ran, a line each."""

DEPENDS_ON = ("kvstore", "odsgd", "scripts/reproduction")
"""Folders of what a run depends on; the declarations are among them."""

HERE = Path(__file__).resolve().parent

NOT_KEPT = ("data_dir", "out", "cluster", "resume")
"""Options that say where things are on one machine."""


class Folders(NamedTuple):
    """Where data, results and runs are."""

    data: Optional[Path]
    results: Path
    runs: Path


class Counts(NamedTuple):
    """How a command ended: trials that it finished, that failed, and that are left."""

    finished: int
    failed: int
    left: int


@dataclasses.dataclass
class _Running:
    """A trial whose training runs."""

    trial: Trial
    config: TrainConfig
    folder: Path
    process: subprocess.Popen[bytes]
    lock: IO[str]


def check(trials: Sequence[Trial], data: Optional[Path]) -> None:
    """ConfigError if a trial cannot run: an option, or files of data that are missing or damaged."""
    with tempfile.TemporaryDirectory() as folder:
        configs = [configuration(trial, Path(folder), data) for trial in trials]
    from odsgd.training.data import datasets
    for dataset, data_dir in sorted({(config.dataset, config.data_dir) for config in configs if config.data_dir}):
        (datasets.mnist if dataset == "mnist" else datasets.cifar10)(str(data_dir))


def configuration(trial: Trial, folder: Path, data: Optional[Path]) -> TrainConfig:
    """The training of a trial, in `folder`, where the description of its cluster is written, if it is virtual."""
    asked = trial.asked
    options = dict(asked["options"])
    if not trial.cell.real:
        (folder / "cluster.yaml").write_text(yaml.safe_dump(asked["cluster"]), encoding="utf-8")
        options["cluster"] = str(folder / "cluster.yaml")
    if data is not None and "data_dir" in DATASETS[options.get("dataset", "digits")].options:
        own = data / options["dataset"]
        options["data_dir"] = str(own if own.is_dir() else data)
    return TrainConfig(**{**options, "out": str(folder)})


def run(trials: Sequence[Trial], folders: Folders, jobs: int, deadline: float, say: Callable[[str], None]) -> Counts:
    """Run what is not there yet, `jobs` at a time, until `deadline` (`time.monotonic`)."""
    waiting = _missing(trials, folders)
    check(waiting, folders.data)
    source()  # or complain before anything runs
    running: List[_Running] = []
    elsewhere: List[Trial] = []
    finished = failed = 0
    try:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < jobs:
                trial = waiting.pop(0)
                started = _start(trial, folders, say)
                if started:
                    running.append(started)
                else:
                    elsewhere.append(trial)
            time.sleep(POLL_S)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                with one.lock:
                    if one.process.returncode:
                        failed += 1
                        say(f"{one.trial}: failed: {_last_line(one.folder / 'train.log')}")
                    elif _lacks_staleness(one):
                        waiting.insert(0, one.trial)
                    else:
                        finished += 1
                        say(f"{one.trial}: done: {_kept(one, folders)}")
    finally:
        _stop(running)
    left = [*waiting, *(one.trial for one in running), *elsewhere]
    return Counts(finished, failed, len(_missing(left, folders)))


def source(folder: Path = HERE) -> Tuple[str, str]:
    """The commit of the code, and a hash of its tree, that of `git ls-tree HEAD kvstore odsgd scripts/reproduction`;
    ConfigError if what would run is something else.
    """
    changed = _git(folder, "--no-optional-locks", "status", "--porcelain", "--", *(f":/{one}" for one in DEPENDS_ON))
    if changed:
        raise ConfigError(f"a result names the commit that ran, and `{changed.split()[1]}` is in none; commit it, or "
                          "run this in a clone")
    tree = _git(folder, "ls-tree", "--full-tree", "HEAD", *DEPENDS_ON)
    return _git(folder, "rev-parse", "--short", "HEAD").strip(), hashlib.sha256(tree.encode()).hexdigest()[:16]


def _git(folder: Path, *arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or error
        raise ConfigError(f"a result names the commit that ran, and git knows none of `{folder}`: {shown(why)}; run "
                          "this in a clone") from None


def _missing(trials: Sequence[Trial], folders: Folders) -> List[Trial]:
    found = {file: results.read(folders.results / file) for file in {trial.file for trial in trials}}
    return [trial for trial in trials if not trial.among(found[trial.file])]


def again(trial: Trial, folders: Folders, say: Callable[[str], None]) -> Result:
    """Run a trial that is over once more, in a folder that goes again afterwards, unless the run fails."""
    scratch = Path(tempfile.mkdtemp(prefix="odsgd-again-"))
    there = Folders(folders.data, scratch / "results", scratch / "runs")
    failed = 0
    try:
        failed = run([trial], there, 1, float("inf"), say).failed
        result = trial.result(there.results)
    finally:
        if not failed:
            shutil.rmtree(scratch)
    if result is None:
        raise ConfigError(f"{trial}: its second run failed, as said above")
    return result


def _start(trial: Trial, folders: Folders, say: Callable[[str], None]) -> Optional[_Running]:
    """Begin, or go on with, the training of a trial; None while another command runs it, or if one has finished it."""
    folder = folders.runs / trial.folder
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as unless_started:
        lock = unless_started.enter_context(open(folder / "lock", "w", encoding="utf-8"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say(f"{trial}: left to the command that is running it in `{folder}`")
            return None
        if not _missing([trial], folders):
            say(f"{trial}: another command has finished it")
            return None
        config = configuration(trial, folder, folders.data)
        process = _train(trial, config, folder, lock, say)
        unless_started.pop_all()
    return _Running(trial, config, folder, process, lock)


def _train(trial: Trial, config: TrainConfig, folder: Path, lock: IO[str],
           say: Callable[[str], None]) -> subprocess.Popen[bytes]:
    """The process of a training, which goes on from the newest checkpoint in `folder`, if there is one."""
    (folder / "train.yaml").write_text(config.to_yaml(), encoding="utf-8")
    there = complete(folder / "checkpoints")
    say(f"{trial}: {f'goes on from iteration {there[-1]}' if there else 'begins'}")
    program = [sys.executable, "-m", "odsgd"]
    cluster = trial.asked["cluster"]
    command = [*([*program, "launch", "-n", str(cluster["workers"]), "-s", str(cluster["servers"]), "--"]
                 if trial.cell.real else []),
               *program, "train", "--config", str(folder / "train.yaml"), *(["--resume"] if there else [])]
    with open(folder / SOURCES, "a", encoding="utf-8") as sources:
        sources.write(" ".join(source()) + "\n")
    with open(folder / "train.log", "ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                env={**os.environ, **ENVIRONMENT}, pass_fds=(lock.fileno(),),
                                start_new_session=True, preexec_fn=functools.partial(linux.die_with, os.getpid()))


def _stop(running: Sequence[_Running]) -> None:
    """End all trainings; what they have done since their checkpoints is lost."""
    for one in running:
        one.process.terminate()
    for one in running:
        try:
            one.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
        one.lock.close()


def _lacks_staleness(one: _Running) -> bool:
    """Whether an asynchronous training was killed between its last checkpoint and the count of its servers; then that
    checkpoint goes, so that the last epoch is run again.
    """
    if not one.config.asynchronous or read_records(one.folder).staleness:
        return False
    kept = one.folder / "checkpoints"
    shutil.rmtree(kept / str(complete(kept)[-1]))
    return True


def _kept(one: _Running, folders: Folders) -> str:
    """Write the result of a training that is over, and remove its checkpoints; a word about it."""
    result = collected(one.trial, one.folder)
    results.add(result, folders.results / one.trial.file)
    shutil.rmtree(one.folder / "checkpoints")
    accuracy = result.column("test_accuracy")[-1]
    return f"{'' if math.isnan(accuracy) else f'test accuracy {accuracy:.2%}, '}{result.seconds:.0f} s"


def differing(before: Result, now: Result) -> str:
    """Where a result has other numbers than one of the same trial before."""
    if before.numbers() == now.numbers():
        return "the same numbers again"
    others = [(old[0], name, then, today) for old, new in zip(before.rows, now.rows)
              for name, then, today in zip(COLUMNS, old, new) if then != today]
    if not others:
        return "another staleness, or another number of epochs, than before"
    epoch, name, then, today = others[0]
    mine, theirs = (one.machine.get("vectors", "unknown") for one in (now, before))
    why = f"; processors add up in orders of their own (vectors: {mine}, and {theirs} before)" * (mine != theirs)
    return f"other numbers than before, from epoch {epoch} on: {name} {today}, and {then} before{why}"


def vectors() -> str:
    """The widest vectors of the processor, which decide in which order its kernels add up."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("flags")[2].partition("\n")[0].split()
    except OSError:
        flags = []
    return next((name for name in ("avx512f", "avx2", "avx") if name in flags), "unknown")


def collected(trial: Trial, folder: Path) -> Result:
    """The result that a run's folder holds."""
    records = read_records(folder)
    start, counted = records.start, records.staleness
    return Result(
        cell=trial.cell.name, seed=trial.seed, paper=trial.item.paper, item=trial.item.name, scale=trial.scale.name,
        asked=trial.asked,
        config=kept(start["config"]),
        versions={**start["versions"], **from_sources((folder / SOURCES).read_text(encoding="utf-8").splitlines())},
        machine={"cpu": cpu(), "cores": os.cpu_count(), "threads": 1, "vectors": vectors()},
        parameters=start["parameters"],
        starts=sum(event["event"] == "start" for event in events_of(folder / METRICS)),
        seconds=round(sum(epoch["seconds"] for epoch in records.epochs), 1),
        rows=[[rounded(epoch.get(name)) for name in COLUMNS] for epoch in records.epochs],
        staleness={"mean": rounded(counted["staleness_mean"]), "max": counted["staleness_max"],
                   "lr_mean": rounded(counted["lr_mean"]), "histogram": counted["histogram"]} if counted else None)


def kept(config: Mapping[str, Any]) -> Dict[str, Any]:
    """What a result has of a run's options."""
    return {key: value for key, value in config.items() if key not in NOT_KEPT and value is not None}


def from_sources(lines: Sequence[str]) -> Dict[str, str]:
    """The commits and trees of all starts of a run, each once."""
    commits, trees = zip(*map(str.split, lines))
    return {"commit": ", ".join(dict.fromkeys(commits)), "tree": ", ".join(dict.fromkeys(trees))}


def rounded(value: Any) -> Any:
    """Seven digits, which single precision has."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _last_line(log: Path) -> str:
    said = [line for line in log.read_text(encoding="utf-8", errors="replace").split("\n") if line.strip()]
    return f"{said[-1] if said else 'no word'} (all of it is in `{log}`)"
