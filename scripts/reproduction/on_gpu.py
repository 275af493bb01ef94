"""Cells of the papers on one GPU, where they can be run at full length: `python -m scripts.reproduction.on_gpu --help`.

All workers of a synchronous job are in one process, and take each iteration side by side. What a worker and the server
do is the method's own file (`Method.worker`, `Method.rule`), here on PyTorch's tensors; the optimizers are in `sgd`,
`momentum_sgd` and `compensated_*` below. Batches, rates and networks are those of ``odsgd train`` and of
``scripts/train_torch.py``, virtual times those of `odsgd.virtual`. tests/test_on_gpu.py compares it with a store.

An iteration is recorded as a CUDA graph, and played from then on: every second one is the same work on the same memory,
until OD-SGD's warm-up is over, and from then on. Several runs share the GPU, each with streams of its own.
"""
from __future__ import annotations

import argparse
import collections
import fnmatch
import functools
import gc
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import nn

from kvstore import methods
from kvstore.errors import ConfigError, ProtocolError
from kvstore.messages.buckets import Bucket, Parameter, Segment
from kvstore.messages.header import SYNC_MODULUS, Header
from kvstore.messages.seam import GlobalWeights, Pending
from kvstore.methods import fit
from kvstore.methods.contract import Step, Update
from kvstore.methods.dcasgd import compensated_a, compensated_c
from odsgd import __version__
from odsgd.config.train import TrainConfig
from odsgd.tools import cpu
from odsgd.training.data.data import PAD, Shards, in_memory, random_bits
from odsgd.training.schedule import lr_at, lr_local_at
from odsgd.virtual import description, times
from odsgd.virtual.costs import NS
from scripts.examples.networks import make
from scripts.reproduction import results
from scripts.reproduction.cli import chosen
from scripts.reproduction.declarations import Trial, named
from scripts.reproduction.results import Result
from scripts.reproduction.run import NOT_KEPT, configuration, source

TEST_BATCH = 1000
AHEAD = 8
"""Iterations of a run that are queued on the GPU at a time."""
SAID_S, STILL_S = 60.0, 120.0
"""Between two lines of how far the runs are; without an iteration of any of them, until that is an error."""


# --- the optimizers: out <- w after a step along g --------------------------------------------------------------------

def sgd(out: Any, w: Any, g: Any, state: Any, lr: Any, wd: float, **_: Any) -> None:
    out.copy_(w - lr * (g + wd * w))


def momentum_sgd(out: Any, w: Any, g: Any, state: Any, lr: Any, wd: float, momentum: float, **_: Any) -> None:
    v, = state
    v.copy_(momentum * v - lr * (g + wd * w))
    out.copy_(w + v)


def compensating_c(out: Any, w: Any, g: Any, state: Any, lr: Any, wd: float, lamda: float, **_: Any) -> None:
    w_read, = state
    out.copy_(w - lr * (compensated_c(g, w - w_read, lamda) + wd * w))
    w_read.copy_(out)


def compensating_a(out: Any, w: Any, g: Any, state: Any, lr: Any, wd: float, lamda: float, m: float, epsilon: float,
                   **_: Any) -> None:
    w_read, mean_square = state
    out.copy_(w - lr * (compensated_a(g, w - w_read, mean_square, lamda, m, epsilon, torch.sqrt) + wd * w))
    w_read.copy_(out)


BEGINS: Dict[Any, Sequence[Callable[[Any], Any]]] = {
    sgd: (), momentum_sgd: (torch.zeros_like,), compensating_c: (torch.clone,),
    compensating_a: (torch.clone, torch.zeros_like)}
"""What the state of each is made of, from the weights that it begins at."""

FORMULAS: Dict[str, Any] = {"sgd": sgd, "dcasgd_c": compensating_c, "dcasgd_a": compensating_a}


class Applied(Update):
    """One of them, on the weights of a whole model; on a GPU it is one kernel."""

    def __init__(self, name: str, momentum: float, **settings: Any) -> None:
        if name not in FORMULAS or (momentum and name != "sgd"):
            raise ConfigError(f"optimizer `{name}` with momentum {momentum:g} is not there on a GPU; there are "
                              f"{', '.join(FORMULAS)}, of which sgd takes momentum")
        self._formula: Any = momentum_sgd if momentum else FORMULAS[name]
        self._settings = {"momentum": momentum, **{key: value for key, value in settings.items() if value is not None}}
        self.state: List[Any] = []

    def start(self, w: Any) -> None:
        self.state = [begin(w.as_subclass(torch.Tensor)) for begin in BEGINS[self._formula]]

    def __call__(self, w: Any, grad: Any, lr: Any, gradient_weight: float = 1.0, out: Any = None) -> Any:
        step = compiled(self._formula) if w.is_cuda else self._formula
        out = w if out is None else out
        grad = grad if gradient_weight == 1 else gradient_weight * grad
        step(*(one.as_subclass(torch.Tensor) for one in (out, w)), grad, self.state, lr, **self._settings)
        return out


@functools.lru_cache(maxsize=None)
def compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False)


# --- the job ----------------------------------------------------------------------------------------------------------

class Flat(torch.Tensor):
    """All weights of a model, with the calls that the methods' files make of arrays."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def copy(self) -> Flat:
        return self.clone().as_subclass(Flat)


class Server(GlobalWeights):
    """A server beside its workers. Its answers lie in two places in turn, and are there when all have pushed."""

    def __init__(self, rule: Any, w: Flat, grads: Any) -> None:
        self.rule, self.w, self.answers, self._grads, self._pushed = rule, w, [w.copy(), w.copy()], grads, 0
        self.turn = 0

    def exchange(self, bucket: Bucket, grad: Any, lr: Any) -> Pending:
        self._pushed += 1
        workers = len(self._grads)
        if self._pushed == workers:
            self._pushed = 0
            header = Header(workers * (self.rule.version % SYNC_MODULUS), lr, workers * (workers - 1) // 2)
            self.rule.receive(header, self._grads.sum(0), self.w)
            self.answers[self.turn].copy_(self.w)
        return Pending(self.answers[self.turn])


class Replica:
    """The network of a worker: its parameters, and its statistics of BatchNorm, each in one flat tensor.

    Weights of convolutions are there with their channels last, as the GPU wants them.
    """

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        torch.manual_seed(config.seed)
        self.network = make(config.model, config.input_shape, config.classes, config.thumbnail)
        self.network.to(device, memory_format=torch.channels_last)
        self.parameters = [one for one in self.network.parameters() if one.requires_grad]
        self.flat = torch.cat([_flattened(one.detach()) for one in self.parameters])
        for one, part in zip(self.parameters, self.flat.split([one.numel() for one in self.parameters])):
            one.data = _shaped(part, one.shape)
        norms = [one for one in self.network.modules() if isinstance(one, nn.BatchNorm2d)]
        norms.sort(key=lambda one: -one.num_features)  # none begins where kernels cannot read four floats
        found = [(one, name) for one in norms for name in ("running_mean", "running_var")]
        self.statistics = torch.cat([torch.zeros(0, device=device), *(one._buffers[name] for one, name in found)])
        for (one, name), part in zip(found, self.statistics.split([len(one._buffers[name]) for one, name in found])):
            one._buffers[name] = part
        for one in norms:
            one.num_batches_tracked = None  # a kernel each, for nothing
            one.forward = functools.partial(_normalized, one)

    def gradient(self, images: Any, labels: Any, out: Any) -> Any:
        """Put the gradient of the mean loss into `out`; loss and right answers, summed."""
        output = self.network(images)
        loss = nn.functional.cross_entropy(output, labels)
        torch.cat([_flattened(one) for one in torch.autograd.grad(loss, self.parameters)], out=out)
        return _counted(loss.detach(), output.detach(), labels)

    def tested(self, images: Any, labels: Any) -> Any:
        with torch.no_grad():
            output = self.network(images)
            return _counted(nn.functional.cross_entropy(output, labels), output, labels)


def _normalized(norm: nn.BatchNorm2d, x: Any) -> Any:
    """By PyTorch's own kernels: blocks of cuDNN's wait for each other, and those of other streams may keep them out."""
    with torch.backends.cudnn.flags(enabled=False):
        return nn.BatchNorm2d.forward(norm, x)


def _counted(loss: Any, output: Any, labels: Any) -> Any:
    return torch.stack([loss * len(labels), (output.argmax(1) == labels).sum()])


def _flattened(tensor: Any) -> Any:
    return (tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor).reshape(-1)


def _shaped(flat: Any, shape: Sequence[int]) -> Any:
    if len(shape) != 4:
        return flat.view(shape)
    outs, ins, height, width = shape
    return flat.view(outs, height, width, ins).permute(0, 3, 1, 2)


class Images:
    """A data set on the device, normalised, with its channels last; with a border, where images are to be shifted."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        arrays = in_memory(config)
        assert arrays is not None
        self.augment, self.device = config.augment, device
        self.mean, self.std = (torch.tensor(one, device=device) for one in (arrays.mean, arrays.std))
        images = arrays.train.images
        self.height, self.width = images.shape[2:]
        if self.augment:
            images = np.pad(images, ((0, 0), (0, 0), (PAD, PAD), (PAD, PAD)))
        self.train, self.labels = self._placed(images), torch.tensor(arrays.train.labels, device=device).long()
        self.test, self.test_labels = (self._placed(arrays.test.images),
                                       torch.tensor(arrays.test.labels, device=device).long())

    def _placed(self, images: np.ndarray) -> Any:
        pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 2, 3, 1))).to(self.device)
        return (pixels.float() - self.mean) / self.std

    def plan(self, shards: Shards, epoch: int) -> Any:
        """Iteration, worker, example: number, and with augmentation rows, columns and whether it is mirrored."""
        count = shards.batches_per_epoch * shards.num_workers * shards.worker_batch_size
        examples = shards.order(epoch)[:count]
        columns = [examples]
        if self.augment:
            bits, span = random_bits(shards.seed, epoch, examples), np.uint64(2 * PAD + 1)
            columns += [(bits >> np.uint64(8)) % span, (bits >> np.uint64(32)) % span, bits & np.uint64(1)]
        shape = (len(columns), shards.batches_per_epoch, shards.num_workers, shards.worker_batch_size)
        planned = np.stack([one.astype(np.int64) for one in columns]).reshape(shape).transpose(1, 2, 0, 3)
        tensor = torch.from_numpy(np.ascontiguousarray(planned))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def batch(self, planned: Any) -> Tuple[Any, Any]:
        """What `planned` says of one worker's batch."""
        examples, labels = planned[0], self.labels[planned[0]]
        if not self.augment:
            return self.train[examples].permute(0, 3, 1, 2), labels
        down, right, mirror = planned[1:].unsqueeze(-1)
        rows, along = (torch.arange(one, device=self.device) for one in (self.height, self.width))
        columns = right + torch.where(mirror > 0, self.width - 1 - along, along)
        images = self.train[examples[:, None, None], (down + rows)[:, :, None], columns[:, None, :]]
        return images.permute(0, 3, 1, 2), labels


class Run:
    """A trial from its first iteration to its result, an iteration at a time."""

    def __init__(self, trial: Trial, config: TrainConfig, images: Images) -> None:
        self.trial, self.config, self.images, device = trial, config, images, images.device
        method = methods.find(config.kvstore)
        workers = trial.asked["cluster"]["workers"]
        if method.asynchronous or method.takes != "gradients" or len(config.input_shape) != 3:
            raise ConfigError(f"{trial}: its workers take no iteration side by side; run it by scripts/reproduce")
        self.shards = Shards(len(images.labels), workers, config.batch_size, config.seed)
        self.each = self.shards.batches_per_epoch
        self.total = min(config.epochs * self.each, config.iterations or sys.maxsize)
        options: Any = config.options.in_iterations(self.each)
        self.warm = options.warmup.iterations() if "warmup" in method.option_names() else self.total
        self.replicas = [Replica(config, device) for _ in range(workers)]
        self.shown = Replica(config, device)
        self.shown.network.eval()
        self.w = self.shown.flat.clone().as_subclass(Flat)
        self.grads = torch.zeros(workers, len(self.w), device=device)
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
        self.seconds, self.starts, self._since = 0.0, 0, 0.0
        self._streams = [torch.cuda.Stream(device) for _ in range(workers + 1)] if self.w.is_cuda else []
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
        if len(self._queued) >= AHEAD and not self._queued[0].query():
            return False
        if self._queued and len(self._queued) >= AHEAD:
            self._queued.popleft()
        if not self._since:
            self._since, self.starts = time.perf_counter(), self.starts + 1
            if self._streams:
                torch.cuda.synchronize()  # what it begins with was made on another stream
        with torch.cuda.stream(self._streams[-1] if self._streams else None):
            self._iterate()
            if self._streams:
                self._queued.append(torch.cuda.current_stream().record_event())
        if self.over:
            self.pause()
        return True

    @property
    def over(self) -> bool:
        return self.t == self.total

    def pause(self) -> None:
        """Nothing is queued any more, and its clock stands still."""
        if self._streams:
            self._streams[-1].synchronize()
        self.seconds += time.perf_counter() - self._since
        self._since = 0.0

    def _iterate(self) -> None:
        epoch, index = divmod(self.t, self.each)
        if index == 0 or not self._graphs:
            self.lr.fill_(lr_at(self.config, self.t, self.each))
            local = lr_local_at(self.config, self.t, self.each)
            self.lr_local.fill_(lr_at(self.config, self.t, self.each) if local is None else local)
            self._plan = self.images.plan(self.shards, epoch)
        self.planned.copy_(self._plan[index])
        self.t += 1
        # The first iteration, and the one where the local steps begin, are not like those that follow.
        alone = self.t == self.warm + 1 or not self._graphs.get("begun")
        kind = "" if alone else f"{self.t <= self.warm} {self.t % 2}"
        self.server.turn = self.t % 2
        self._play(kind, lambda: self._together(Step(self.t, self.lr, self.lr_local)))
        self._hold()
        self._graphs["begun"] = True
        if index == self.each - 1 or self.over:
            self._play("test" if self._graphs.get("tested") else "", self._test)
            self._graphs["tested"] = True
            self.table[epoch].copy_(torch.cat([self.tally.sum(0), self.tests]))
            self.tally.zero_()

    def _play(self, kind: str, work: Callable[[], None]) -> None:
        """Do `work`, from its second time on as a graph; '': as it is."""
        if not self._streams or not kind:
            return work()
        if kind not in self._graphs:
            graph = self._graphs[kind] = torch.cuda.CUDAGraph()
            gc.disable()  # it may free what belongs to another graph
            graph.capture_begin(self._pool, "thread_local")
            work()
            graph.capture_end()
            gc.enable()
        self._graphs[kind].replay()

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
        for stream in self._streams[:-1]:
            torch.cuda.current_stream().wait_stream(stream)
        for m, worker in enumerate(self.workers):
            self.weights[m] = worker.iterate(self.grads[m], step)

    def _beside(self, m: int) -> Any:
        """On a stream of worker m's own, after what is queued."""
        if self._streams:
            self._streams[m].wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._streams[m] if self._streams else None)

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
        torch.save({"t": self.t, "seconds": self.seconds, "starts": self.starts,
                    "tensors": [one.as_subclass(torch.Tensor) for one in self._tensors()]}, folder / self._file)

    def load(self, folder: Path) -> None:
        if not (folder / self._file).exists():
            return
        saved = torch.load(folder / self._file, map_location=self.images.device)
        self.t, self.seconds, self.starts = saved["t"], saved["seconds"], saved["starts"]
        if self.t > self.warm:
            for worker in self.workers:
                if worker.local_optimizer:
                    worker.local_optimizer.start(self.w)
        for mine, its in zip(self._tensors(), saved["tensors"]):
            mine.copy_(its)
        self._hold()

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
        config = {key: value for key, value in self.config.to_dict().items()
                  if key not in NOT_KEPT and value is not None}
        return Result(cell=trial.cell.name, seed=trial.seed, paper=trial.item.paper, item=trial.item.name,
                      scale=trial.scale.name, asked=trial.asked, config=config, versions=versions, machine=machine,
                      parameters=len(self.w), starts=self.starts, seconds=round(self.seconds, 1),
                      rows=results.thinned(rows), staleness=None)


def _finite(value: float) -> Optional[float]:
    return float(f"{value:.7g}") if np.isfinite(value) else None


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


# --- the command ------------------------------------------------------------------------------------------------------

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
    asked = _parser().parse_args(argv)
    end = time.monotonic() + asked.seconds
    torch.backends.cudnn.benchmark = True
    trials = chosen(named(asked.items), asked.scale, "*", asked.seeds)
    names = {f"{trial.cell.name}:{trial.seed}": trial for trial in trials}
    wanted = dict.fromkeys(name for glob in asked.cells for name in fnmatch.filter(names, glob))
    Several(asked, [names[name] for name in wanted if names[name].result(asked.results) is None]).go_on(end)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.reproduction.on_gpu", description=__doc__,
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
