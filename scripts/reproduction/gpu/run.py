"""A trial, an iteration at a time."""
from __future__ import annotations

import collections
import contextlib
import gc
import math
import time
from pathlib import Path
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional, Sequence

import torch

from kvstore import methods
from kvstore.errors import ConfigError, shown
from kvstore.messages.buckets import Bucket, Parameter, Segment
from kvstore.messages.seam import Pending
from kvstore.methods.contract import Step, Update
from kvstore.methods.delayed import DelayedWorker
from kvstore.methods.sync import Synchronous
from odsgd.config.train import TrainConfig
from odsgd.training.data.data import Shards
from odsgd.training.schedule import Schedule
from scripts.examples.networks import NETWORKS
from scripts.reproduction.declarations import Trial
from scripts.reproduction.gpu.images import Images
from scripts.reproduction.gpu.replica import Replica
from scripts.reproduction.gpu.tensors import Applied, Flat, Server
from scripts.reproduction.results import Result
from scripts.reproduction.run import from_sources, kept, rounded

TEST_BATCH = 1000
AHEAD = 8
"""Iterations of a run that are queued on the GPU at a time."""


class Run:
    """A trial from its first iteration to its result, an iteration at a time."""

    def __init__(self, trial: Trial, config: TrainConfig, images: Images, streams: Sequence[Any] = ()) -> None:
        """`streams`: of a GPU, its own as long as it runs; the first ones are the workers', who share them."""
        self.trial, self.config, self.images, device = trial, config, images, images.device
        method = methods.find(config.kvstore)
        workers = trial.asked["cluster"]["workers"]
        _check(trial, config)
        self.shards = shards(config, trial, images)
        self.each = self.shards.batches_per_epoch
        self.schedule = Schedule(config, self.each, workers)
        self.total = self.schedule.total
        options: Any = config.options.in_iterations(self.each)
        self.warm = options.warmup.iterations() if "warmup" in method.option_names() else self.total
        self.replicas = [Replica(config, device) for _ in range(workers)]
        self.shown = Replica(config, device)
        self.shown.network.eval()
        self.w = self.shown.flat.clone().as_subclass(Flat)
        aligned = -(-len(self.w) // 64) * 64  # so that kernels read four floats at once of each worker's, too
        self.grads = torch.zeros(workers, aligned, device=device)[:, :len(self.w)]
        self.update = Applied(config.optimizer, config.momentum, wd=config.wd)
        self.update.start(self.w)
        bucket = Bucket(0, 0, (Segment(Parameter(0, "all", (len(self.w),)), 0, len(self.w), 0),))
        made = method(options, workers)
        self.server = Server(method.rule(0, made.options, workers, self.update), self.w, self.grads)
        self.workers: List[Any] = [method.worker(
            options=made.options, num_workers=workers, bucket=bucket, weights_holder=self.server,
            last_exchange=Pending(self.server.answers[0]), wd=config.wd, lr_given=config.lr,
            local_optimizer=self._local(options), update=None, begun=0, w_local=self.w) for _ in range(workers)]
        self.weights = [self.server.answers[0]] * workers
        self.t = 0
        self.lr, self.lr_local = torch.zeros((), device=device), torch.zeros((), device=device)
        self.planned = torch.zeros_like(images.plan(self.shards, 0)[0])
        self.tally = torch.zeros(workers, 2, device=device)
        self.tests = torch.zeros(2, device=device)
        self.table = torch.zeros(config.epochs, 4, device=device)
        self.seconds, self._since = 0.0, 0.0
        self.sources: List[str] = []
        """Commit and tree of each of its starts."""
        self._plan: Any = None  # of the epoch
        self._rates = (-1.0, -1.0)
        self.streams = streams
        self._graphs: Dict[str, Any] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.w.is_cuda else None  # no two graphs of a run play at a time
        self._queued: Deque[Any] = collections.deque()

    def _local(self, options: Any) -> Optional[Update]:
        found = methods.find(self.config.kvstore).local_optimizer(options)
        if found is None:
            return None
        name, settings = found
        wd = self.config.wd if settings["wd"] is None else settings["wd"]
        return Applied(name, **{**settings, "wd": wd})

    # --- an iteration -------------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Queue an iteration, unless enough of them are queued; whether it did."""
        if self.t == self.total:
            return False
        if len(self._queued) >= AHEAD:
            if not self._queued[0].query():
                return False
            self._queued.popleft()
        if not self._since:
            self._since = time.perf_counter()
            if self.streams:
                self.streams[-1].wait_stream(torch.cuda.default_stream())  # which has made what it begins with
        with torch.cuda.stream(self.streams[-1]) if self.streams else contextlib.nullcontext():
            self._iterate()
            if self.streams:
                self._queued.append(torch.cuda.current_stream().record_event())
        if self.over:
            self.pause()
        return True

    @property
    def over(self) -> bool:
        return self.t == self.total

    def pause(self) -> None:
        """Nothing is queued any more, and its clock stands still."""
        if self.streams:
            self.streams[-1].synchronize()
        if self._since:
            self.seconds += time.perf_counter() - self._since
            self._since = 0.0

    def _iterate(self) -> None:
        epoch, index = self.schedule.place(self.t)
        first = self._plan is None
        if index == 0 or first:
            self._plan = self.images.plan(self.shards, epoch)
        self._set_rates()
        self.planned.copy_(self._plan[index])
        self.t += 1
        self.server.turn = self.t % 2
        # The first iteration, and the one where the local steps begin, are not like those that follow.
        kind = "" if first or self.t == self.warm + 1 else f"{self.t <= self.warm} {self.t % 2}"
        self._play(kind, lambda: self._together(Step(self.t, self.lr, self.lr_local)))
        self._hold()
        if index == self.each - 1 or self.over:
            self._play("test", self._test)
            self.table[epoch].copy_(torch.cat([self.tally.sum(0), self.tests]))
            self.tally.zero_()

    def _set_rates(self) -> None:
        lr, lr_local = self.schedule.rates(self.t)
        rates = lr, lr if lr_local is None else lr_local
        if rates != self._rates:
            self._rates = rates
            self.lr.fill_(rates[0])
            self.lr_local.fill_(rates[1])

    def _play(self, kind: str, work: Callable[[], None]) -> None:
        """Do `work`, from its second time on as a graph; of kind '': never."""
        if not self.streams or not kind or kind not in self._graphs:
            self._graphs[kind] = None  # what compilers and libraries make ready cannot be recorded
            return work()
        if self._graphs[kind] is None:
            self._graphs[kind] = self._recorded(work)
        self._graphs[kind].replay()

    def _recorded(self, work: Callable[[], None]) -> Any:
        """A graph of `work`, with memory of its own for what cuBLAS keeps for each stream."""
        graph = torch.cuda.CUDAGraph()
        gc.disable()  # it may free what belongs to another graph
        try:
            torch._C._cuda_clearCublasWorkspaces()
            graph.capture_begin(self._pool, "thread_local")
            work()
            graph.capture_end()
            torch._C._cuda_clearCublasWorkspaces()
        finally:
            gc.enable()
        return graph

    def _hold(self) -> None:
        """What the methods' files would hold now, where they have not run, but were played."""
        now = self.server.answers[self.t % 2]
        for m, worker in enumerate(self.workers):
            worker.last_exchange = Pending(now)
            if self.t > self.warm:
                self.weights[m] = worker.w_bak if worker.local_optimizer else self.server.answers[(self.t - 1) % 2]
            else:
                self.weights[m] = now

    def _together(self, step: Step) -> None:
        for m in range(len(self.workers)):
            with self._beside(m):
                replica = self.replicas[m]
                replica.flat.copy_(self.weights[m])
                self.tally[m] += replica.gradient(*self.images.batch(self.planned[m]), out=self.grads[m])
        for stream in self.streams[:min(len(self.workers), len(self.streams) - 1)]:
            torch.cuda.current_stream().wait_stream(stream)
        for m, worker in enumerate(self.workers):  # `_hold` says what comes of it
            worker.iterate(self.grads[m], step)

    def _beside(self, m: int) -> Any:
        """On a stream beside, after what is queued."""
        if not self.streams:
            return contextlib.nullcontext()
        stream = self.streams[m % (len(self.streams) - 1)]
        if m < len(self.streams) - 1:
            stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def _test(self) -> None:
        """The global weights, with the mean of the workers' statistics, on the test set."""
        self.shown.flat.copy_(self.w)
        self.shown.statistics.copy_(torch.stack([one.statistics for one in self.replicas]).mean(0))
        parts = zip(self.images.test.permute(0, 3, 1, 2).split(TEST_BATCH), self.images.test_labels.split(TEST_BATCH))
        self.tests.copy_(sum(self.shown.tested(*part) for part in parts))

    # --- to go on, and the result -------------------------------------------------------------------------------------

    def _tensors(self) -> Iterator[Any]:
        """All that the next iteration depends on, and what was counted."""
        yield from (self.w, *self.server.answers, *self.update.state, self.tally, self.table,
                    *(one.statistics for one in self.replicas))
        if self.t > self.warm:
            for worker in self.workers:
                yield from (*([worker.w_bak] if worker.local_optimizer else []),
                            *(worker.local_optimizer.state if worker.local_optimizer else []))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f"{self._file}.draft"
        torch.save({"t": self.t, "seconds": self.seconds, "sources": self.sources,
                    "tensors": [one.as_subclass(torch.Tensor) for one in self._tensors()]}, draft)
        draft.replace(folder / self._file)

    def load(self, folder: Path) -> None:
        """Go on from what `save` has kept of the same trial, if it has."""
        if not (folder / self._file).exists():
            return
        saved = torch.load(folder / self._file, map_location=self.images.device)
        self.t, self.seconds, self.sources = saved["t"], saved["seconds"], saved["sources"]
        if self.t > self.warm:
            for worker in self.workers:
                if worker.local_optimizer:
                    worker.local_optimizer.start(self.w)
        for mine, its in zip(self._tensors(), saved["tensors"]):
            mine.copy_(its)
        self._hold()

    def forget(self, folder: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            (folder / self._file).unlink()

    @property
    def _file(self) -> str:
        return self.trial.folder.replace("/", "_") + ".pt"

    def result(self, virtual_s: Sequence[float], versions: Dict[str, str], machine: Dict[str, Any]) -> Result:
        batch, tests = self.config.batch_size * len(self.workers), len(self.images.test)
        rows = []
        for epoch, (loss, hits, test_loss, test_hits) in enumerate(self.table.tolist()):
            done = min(self.each, self.total - epoch * self.each)
            if done > 0:
                rows.append([epoch + 1, epoch * self.each + done, *map(_finite, (
                    loss / (done * batch), hits / (done * batch), test_loss / tests, test_hits / tests,
                    virtual_s[epoch]))])
        trial = self.trial
        return Result(cell=trial.cell.name, seed=trial.seed, paper=trial.item.paper, item=trial.item.name,
                      scale=trial.scale.name, asked=trial.asked, config=kept(self.config.to_dict()),
                      versions={**versions, **from_sources(self.sources)}, machine=machine,
                      parameters=len(self.w), starts=len(self.sources), seconds=round(self.seconds, 1),
                      rows=rows, staleness=None)


def shards(config: TrainConfig, trial: Trial, images: Images) -> Shards:
    return Shards(len(images.labels), trial.asked["cluster"]["workers"], config.batch_size, config.seed)


def _finite(value: float) -> Optional[float]:
    return float(rounded(value)) if math.isfinite(value) else None


def _check(trial: Trial, config: TrainConfig) -> None:
    """ConfigError for what only a store's job does."""
    if methods.find(config.kvstore).worker not in (Synchronous, DelayedWorker) or config.model not in NETWORKS:
        raise ConfigError(f"{trial}: here run ssgd, odsgd and delayed, with {', '.join(NETWORKS)}; run it by "
                          "scripts/reproduce")
    asked, plain = config.to_dict(), TrainConfig(kvstore=config.kvstore).to_dict()
    for name in ("optimizer_params", "dtype", "num_gpus", "num_cpus", "weights", "trainable", "codec", "codec_weights",
                 "reduction"):
        if asked[name] != plain[name]:
            raise ConfigError(f"{trial}: {name} is {shown(asked[name])}, which a GPU's runs have not; run it by "
                              "scripts/reproduce")
