"""What one worker tells of a run: lines (on a terminal also a bar) for its user, and in its folder config.yaml,
metrics.jsonl and, of an asynchronous job, staleness.json. The other workers are silent.

In a job the terminal is the launcher's. It draws the line by the beats of this process (`odsgd.launch.view.overview`),
and says by ODSGD_LIVE that it does.
"""
import datetime
import itertools
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, TextIO

from tqdm import tqdm

from kvstore.job import environment
from kvstore.job.aside import guarded
from kvstore.job.pulse import pulse
from odsgd.board import Board
from odsgd.config.train import TrainConfig
from odsgd.report.runs import METRICS, events_of, still_valid
from odsgd.training.checkpoint.disk import replacing
from odsgd.training.checkpoint.manifests import versions

STALENESS, ROUNDS, EVENTS = "staleness.json", "rounds.json", "events.out.tfevents.*"

ON_BOARD = {
    "interval": {
        "train_loss": "train/loss", "train_accuracy": "train/accuracy", "lr": "rates/lr", "lr_local": "rates/lr_local",
        "samples_per_s": "speed/samples_per_s", "iteration_ms": "speed/iteration_ms", "waiting_ms": "speed/waiting_ms",
        "staleness_mean": "staleness/mean", "updates_per_s": "staleness/updates_per_s",
        "virtual_samples_per_s": "speed/virtual_samples_per_s", "virtual_iteration_ms": "speed/virtual_iteration_ms"},
    "epoch": {
        "train_loss": "epoch/loss", "train_accuracy": "epoch/accuracy", "test_loss": "test/loss",
        "test_accuracy": "test/accuracy"}}
"""Numbers of a record by their names on the board."""

UNUSED = (": null", ": []", ": {}")
"""How the lines of options that this run does not use end in YAML: config.yaml has them, the output has not."""


class RunLog:
    """The lines and the files of a run, which begins with `iteration` of `total`; a silent worker has neither."""

    def __init__(self, config: TrainConfig, silent: bool, iteration: int, total: int) -> None:
        self._config, self._iteration, self._total, self._began = config, iteration, total, time.perf_counter()
        self._folder, self.silent = Path(str(config.out)), silent
        self._file: Optional[TextIO] = None
        self._board: Optional[Board] = None
        self._aside: Optional[Path] = None
        bar = not silent and sys.stderr.isatty()
        self._bar: Optional[Any] = tqdm(total=total, initial=iteration, unit="it", dynamic_ncols=True) if bar else None
        self._show({})
        if silent:
            return
        if config.resume or environment.has_begun():
            self._open(purge_step=iteration + 1)
        else:
            self._aside = set_aside(self._folder)
            self._open()

    def _open(self, purge_step: Optional[int] = None) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with replacing(self._folder / "config.yaml") as temporary:
            temporary.write_text(self._config.to_yaml(), encoding="utf-8")
        metrics = self._folder / METRICS
        if metrics.is_file():  # a run that was killed may have left half a line, which would spoil the next one
            os.truncate(metrics, metrics.read_bytes().rfind(b"\n") + 1)
        self._file = open(metrics, "a", encoding="utf-8")  # noqa: SIM115  as long as this object
        self._board = Board(self._folder, purge_step) if self._config.board else None

    def _show(self, record: Dict[str, Any]) -> None:
        """On the line that is redrawn: the epoch, and numbers of the last iterations."""
        if self.silent:
            return
        head = tail = ""
        if record:
            head = f"epoch {record['epoch']}/{self._config.epochs}"
            tail = f"{learned(record, 'loss {:.4f}')}, {record['samples_per_s']:.0f} samples/s"
        if "staleness_mean" in record:
            tail += f", staleness {record['staleness_mean']:.2f}"
        if "train_loss" in record:
            tail += learned(record, ", accuracy {1:.2%}")
        if self._bar is not None:
            self._bar.set_description_str(head, refresh=False)
            self._bar.set_postfix_str(tail)
        told = {"total": self._total, "head": head, "tail": tail, "out": os.path.abspath(self._folder)}
        pulse.more["run"] = lambda: told

    def say(self, line: str) -> None:
        """One line (or several). Where they cannot be written the training goes on."""
        with guarded("standard output"):
            if self._bar is not None:
                self._bar.write(line)
            elif not self.silent:
                _print(line)

    def advance(self) -> None:
        """One more iteration has been queued."""
        if self._bar is not None:
            self._bar.update()

    def take_over(self, worker_rank: int) -> None:
        """Speak from here on, in the place of a worker that is lost."""
        self.silent = False
        self._open()
        self.warn(f"worker {worker_rank} goes on with evaluating and writing, in the place of a lost one")

    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._began

    def start(self, num_workers: int, batches_per_epoch: int, num_parameters: int, contexts: List[Any],
              resumed: Optional[Path]) -> None:
        """Say once what runs, with the arithmetic that decides about it, and the checkpoint it goes on from."""
        config = self._config
        self._write("start", {
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "config": config.to_dict(), "versions": versions(), "host": socket.gethostname(),
            "devices": [str(context) for context in contexts], "num_workers": num_workers,
            "batches_per_epoch": batches_per_epoch, "parameters": num_parameters, "iteration": self._iteration})
        if self._aside is not None:
            self.say(f"the metrics of an earlier run lie in {self._aside} now; it has left no checkpoint")
        self.say("\n".join(line for line in config.to_yaml().splitlines() if not line.endswith(UNUSED)))
        local = ", lr_local the same" if config.lr_local is None else f", lr_local {config.lr_local:g}"
        several = f"{len(contexts)} devices x " if len(contexts) > 1 else ""
        self.say(
            f"{num_workers} worker{'s' * (num_workers != 1)} x {several}batch {config.batch_size} = global batch "
            f"{num_workers * config.worker_batch_size}; {batches_per_epoch} iterations per epoch, {self._total} in all"
            f"; lr {config.lr:g}{local if config.steps_locally else ''}; {num_parameters} parameters; "
            f"on {', '.join(map(str, contexts))} of each worker")
        if resumed is not None:
            done = "; nothing is left to do" if self._iteration >= self._total else ""
            self.say(f"resumed from {resumed}{done}")

    def warn(self, line: str) -> None:
        """Something about the run that its user may not want."""
        self._write("warning", {"text": line})
        self.say(f"warning: {line}")

    def interval(self, record: Dict[str, Any]) -> None:
        """Numbers of the last iterations: into the bar, or as a line."""
        self._write("interval", record)
        self._show(record)
        if self._bar is None and not (environment.launched() and os.environ.get("ODSGD_LIVE")):
            self.say(f"iteration {record['iteration']}/{self._total}: {measured(record)}")

    def arrived(self, iteration: int, counts: Dict[int, int]) -> None:
        """Gradients by their staleness, since the last call."""
        if self._board is not None:
            self._board.add_counts(iteration, "staleness/gradients", counts)

    def epoch(self, record: Dict[str, Any]) -> None:
        self._write("epoch", {**record, "seconds_since_start": self.seconds()})
        tested = ""
        if "test_accuracy" in record:
            tested = f"; test: loss {record['test_loss']:.4f}, accuracy {record['test_accuracy']:.2%}"
        self.say(f"epoch {record['epoch']}/{self._config.epochs}: {measured(record)}{tested}")

    def has_epoch(self, number: int) -> bool:
        """Whether an epoch has been written down, by this run or by one that it goes on with."""
        records = [] if self.silent else still_valid(events_of(self._folder / METRICS))
        return any(record["event"] == "epoch" and record["epoch"] == number for record in records)

    def staleness(self, record: Dict[str, Any]) -> None:
        """What the servers of an asynchronous job have counted."""
        self._write("staleness", record)
        if self._file is not None:
            (self._folder / STALENESS).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        lost = f"; without workers {record['lost_workers']} at the end" if record["lost_workers"] else ""
        self.say(f"staleness: mean {record['staleness_mean']:.2f}, max {record['staleness_max']}; "
                 f"{record['updates_per_s']:.0f} updates/s; mean effective lr {record['lr_mean']:g}{lost}")

    def rounds(self, logs: Dict[str, Any]) -> None:
        """Which workers were in each round of the servers."""
        if self._file is not None:
            (self._folder / ROUNDS).write_text(json.dumps(logs) + "\n", encoding="utf-8")

    def end(self, iteration: int, tested: Dict[str, Any]) -> None:
        self._write("end", {"iteration": iteration, "seconds": self.seconds(), **tested})
        self.say(f"done after {iteration} iterations, {self.seconds():.1f} s; outputs lie in {self._config.out}")

    def close(self) -> None:
        """Leave terminal and file in order, also after a failure."""
        for part in (self._bar, self._file, self._board):
            if part is not None:
                part.close()

    def _write(self, event: str, fields: Dict[str, Any]) -> None:
        """A line of JSON, at once, so that a killed run leaves its measurements. JSON has null for what is not finite.
        """
        if self._file is not None:
            record = json.loads(json.dumps({"event": event, **fields}), parse_constant=lambda _: None)
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        if self._board is not None and event in ON_BOARD:
            self._board.add(fields["iteration"], {name: fields.get(key) for key, name in ON_BOARD[event].items()})


def _print(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  else Python tries again at its end, and exits with 120
        raise


def learned(record: Dict[str, Any], words: str) -> str:
    """Loss and accuracy of a record, where it has them."""
    if "train_loss" not in record:
        return "emulated compute"
    return words.format(record["train_loss"], record["train_accuracy"])


def measured(record: Dict[str, Any]) -> str:
    """Loss, accuracy, speed, learning rates, staleness and virtual time of a record, for a line."""
    line = (f"{learned(record, 'loss {:.4f}, accuracy {:.2%}')}, {record['samples_per_s']:.0f} samples/s, "
            f"{record['iteration_ms']:.2f} ms, lr {record['lr']:g}")
    if record.get("lr_local") is not None:
        line += f", lr_local {record['lr_local']:g}"
    if "staleness_mean" in record:
        line += f", staleness {record['staleness_mean']:.2f}, {record['updates_per_s']:.0f} updates/s"
    if "virtual_seconds" in record:
        line += f"; virtual: {record['virtual_seconds']:.4g} s, {record['virtual_iteration_ms']:.4g} ms per iteration"
    return line


def set_aside(folder: Path) -> Optional[Path]:
    """Move what an earlier run has measured to a new folder in this one; that folder, or None if there is nothing."""
    metrics = folder / METRICS
    if not metrics.exists() or not metrics.stat().st_size:
        return None
    places = (folder / f"earlier-{number}" for number in itertools.count(1))
    aside = next(place for place in places if not place.exists())
    aside.mkdir()
    for path in [metrics, *folder.glob(STALENESS), *folder.glob(ROUNDS), *folder.glob(EVENTS)]:
        path.rename(aside / path.name)
    return aside
