"""One worker's training run: the loop, evaluation, checkpoints, and what is written down.

    for every iteration    forward and backward on every device → trainer.step → read a loss of some iterations ago
    for every epoch        sum loss and accuracy over the workers → evaluate the global weights → checkpoint

The loop waits for nothing it has just asked for; the algorithm's exchange runs beside the next batch. What bounds
the queue is `metrics.Meter`. All workers go through the same collective calls in the same order, since they have
the same number of batches; only worker 0 speaks, evaluates and writes metrics. Where an asynchronous job has lost it
(`--on-worker-loss continue`), the lowest rank that is left does so.

In an asynchronous job the workers train each at its own pace, with learning rates by their own iterations. They meet
for checkpoints and at the end alone; before that, worker 0 evaluates a copy of the global weights beside its training
(evaluation.py), and records are of it alone. On a virtual cluster they meet at the end of every epoch.

docs/reference/run-folder.md says what is reported. With `emulate_compute` that is time alone: there is no loss, and
there are no weights worth a checkpoint.
"""
from __future__ import annotations

import dataclasses
import itertools
import math
import os
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from kvstore.engine._mxnet import mx
from kvstore.errors import EXIT_FAILURE, EXIT_USAGE, ConfigError, DivergedError, KVStoreError, RoundTimeoutError
from kvstore.fronts.choice import connect, fitting
from kvstore.fronts.gluon.legacy import LegacyStore
from kvstore.job import agreement, ending, environment
from kvstore.job.aside import guarded
from kvstore.job.pulse import pulse
from kvstore.messages.seam import Transport
from kvstore.tracing import recorder
from odsgd import timeline
from odsgd.config.train import TrainConfig
from odsgd.training import devices, evaluation, going_on, randomness
from odsgd.training.checkpoint import disk, resuming
from odsgd.training.checkpoint.mirror import MirrorError, mirror_at
from odsgd.training.checkpoint.writer import CheckpointWriter
from odsgd.training.data import data
from odsgd.training.data.datasets import Arrays
from odsgd.training.epochs import EpochProgress, EpochShares
from odsgd.training.metrics import Clock, Interval, Meter, Sums, VirtualClock
from odsgd.training.models import models
from odsgd.training.run_log import RunLog, versions
from odsgd.training.schedule import lr_at, lr_local_at
from odsgd.training.stability import warnings_about
from odsgd.training.staleness import StalenessReader
from odsgd.training.step.passes import passes_for


def run(config: TrainConfig) -> int:
    """Train as `config` says, alone or as one worker of a job; returns the exit code."""
    transport = _transport(config)
    try:
        Training(config, transport).run()
    except (ConfigError, DivergedError, MirrorError, RoundTimeoutError) as error:
        return _give_up(config, error)
    except OSError as error:
        why = disk.full(error, str(config.out))
        if why is None:
            raise
        return _give_up(config, KVStoreError(why))
    return 0


def _transport(config: TrainConfig) -> Transport:
    """This worker's place in the job. Known before the store, whose options depend on the number of workers."""
    if config.kvstore == "local" and int(os.environ.get("DMLC_NUM_WORKER") or 1) > 1:
        raise ConfigError("kvstore `local` is for one process and this job has "
                          f"{os.environ['DMLC_NUM_WORKER']} workers; take --kvstore ssgd or odsgd, or no launcher")
    recorder.folder = config.trace or recorder.folder
    return connect(config.kvstore, config.transport, config.options.timeout_s)


def _give_up(config: TrainConfig, error: Exception) -> int:
    """One line instead of a traceback. In a job, end at once: the way out of the interpreter waits for the others."""
    status = EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE
    if config.kvstore != "local":
        ending.die(str(error), status)  # which names this process
    print(f"odsgd train: {error}", file=sys.stderr)
    return status


class Training:
    """All parts of one run, made from its configuration."""

    def __init__(self, config: TrainConfig, transport: Transport, arrays: Optional[Arrays] = None) -> None:
        self.config, self.folder = config, Path(str(config.out)) / "checkpoints"
        self.data = data.load(config, transport.worker_rank, transport.num_workers, arrays)
        self.net = models.create(config)  # the same weights on every worker: the first gradients are computed on them
        options = config.options.in_iterations(self.data.batches_per_epoch)
        self.store = LegacyStore(fitting(config.kvstore, options, transport), options, transport)
        self.frozen = models.frozen(self.net, config)
        self.trainer = self._trainer()
        self.store.session.lr_given = config.lr
        self.passes = passes_for(config, self.net, self.trainer, self.data, self.store.rank)
        self.batches_per_epoch = self.data.batches_per_epoch
        self.trainable = [one for one in self.net.collect_params().values() if one.grad_req != "null"]
        self.progress, self.scaling = EpochProgress(), self._scaling()
        self.draws = randomness.draws(self.net)
        self.meter, self.clock, self.virtual = Meter(self._take), Clock(), VirtualClock(transport)
        self.clock.stop()
        self.interval = self.epoch = Interval(0, 0.0, None)
        self.tested: Dict[str, float] = {}  # by the last evaluation
        self.staleness: Optional[StalenessReader] = None  # of an asynchronous job, from its first step on
        self.beside: Optional[evaluation.Beside] = None
        self.untold: Optional[Dict[str, Any]] = None  # the record of an epoch whose evaluation goes on
        self.mirror = mirror_at(config.checkpoint_to)
        self.checkpoints = CheckpointWriter(self.folder, self.store, self.net, config.keep_checkpoints,
                                            lambda line: self.run_log.warn(line), self.mirror, self.frozen)
        self.warnings: List[str] = []  # of the time before there was a run log

    def _trainer(self) -> Any:
        """Of what is not frozen; a store never sees the rest."""
        learning = {name: one for name, one in self.net.collect_params().items() if name not in self.frozen}
        optimizer = self.config.optimizer
        try:
            return mx.gluon.Trainer(learning, optimizer, self.config.optimizer_arguments(), kvstore=self.store)
        except TypeError as error:
            raise ConfigError(f"optimizer_params: optimizer `{optimizer}` does not take them: {error}") from None

    # --- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """From the first iteration, or the checkpoint, to the last."""
        with disk.held(self.folder.parent, self.store.rank):
            self._run()

    def _run(self) -> None:
        resumed = self._resume()
        self.total = min(self.config.epochs * self.batches_per_epoch - self.progress.ahead,
                         self.config.iterations or sys.maxsize)
        if self.frozen:
            agreement.check(self.store.session.transport, "the weights of frozen layers",
                            [models.digest(self.net, self.frozen)])
        self.interval = self._interval_from_here()
        self.run_log = RunLog(self.config, self.store.rank != 0, self.store.iteration, self.total)
        try:
            self.run_log.start(self.store.num_workers, self.batches_per_epoch,
                               sum(int(np.prod(parameter.shape)) for parameter in self.trainable),
                               devices.contexts(self.config), resumed)
            for line in [*self.warnings, *warnings_about(self.config, self.store.num_workers), *self.passes.warnings]:
                self.run_log.warn(line)
            self._tell_untold()
            while self.store.iteration < self.total:
                self._train_epoch()
            if self.staleness is not None:
                self.run_log.staleness(self.staleness.result())
            self._finish_trace()
            self.run_log.end(self.store.iteration, self.tested)
        finally:
            self.run_log.close()
        self.store.close()

    def _finish_trace(self) -> None:
        """Put the files of the job's processes together, as far as they lie on this host. Collective."""
        if recorder.on is None:
            return
        self.store.wait()
        mx.nd.waitall()  # the last bars end when their arrays are looked at
        recorder.on.flush()
        self.store.barrier()
        if self.store.leads:
            with guarded("the timeline"):
                self.run_log.say(timeline.finish(Path(str(recorder.folder))))

    def _train_epoch(self) -> None:
        """What is left of the epoch that the next iteration belongs to."""
        began = self.run_log.seconds()
        epoch, position = self._place()
        end = min(self.total, self.store.iteration + self.batches_per_epoch - position)
        self.clock.go_on()
        self.epoch = self._interval_from_here()
        with pulse.doing("training"):
            batches = self.passes.batches(self.data, epoch, position, self.progress.offset(epoch))
            for xs, ys in itertools.islice(batches, end - self.store.iteration):
                self._iterate(xs, ys)
                if self.beside is not None and not self.beside.advance():
                    self.beside = None
                self.checkpoints.advance(self.store.iteration)
                if self.store.iteration < end and self._checkpoint_due():
                    self._checkpoint()
            self._close_epoch(epoch, began)
        if self._checkpoint_due():
            self._checkpoint()
        if self.store.iteration == self.total:
            self.checkpoints.close()

    def _iterate(self, xs: List[Any], ys: List[Any]) -> None:
        """Queue one iteration."""
        iteration = self.store.iteration
        lr, lr_local = self._rates(iteration)
        self.trainer.set_learning_rate(lr)
        self.store.lr_local = lr_local
        if self.draws:
            randomness.seed_iteration(self.config.seed, iteration, self.store.rank)
        results = self.passes.train(xs, ys)
        try:
            self.trainer.step(self.config.worker_batch_size)
        except DivergedError as error:
            raise DivergedError(f"{error} ({self._settings(iteration)})") from None
        self.meter.add(iteration, results, self.config.worker_batch_size)
        self.run_log.advance()
        if self.staleness is None and self.config.asynchronous and not self.run_log.silent:
            self._begin_staleness()
        if self.store.iteration % self.config.log_interval == 0:
            self._log_interval()

    def _place(self) -> Tuple[int, int]:
        """Epoch, and batch in it, of the next iteration."""
        return divmod(self.store.iteration + self.progress.ahead, self.batches_per_epoch)

    def _rates(self, iteration: int) -> Tuple[float, Optional[float]]:
        """lr and lr_local of an iteration; lr_local None: it follows lr."""
        counted = iteration + self.progress.ahead
        return (lr_at(self.config, counted, self.batches_per_epoch) * self.scaling,
                lr_local_at(self.config, counted, self.batches_per_epoch))

    def _scaling(self) -> float:
        """The factor of lr while workers are missing."""
        part = self.store.num_workers / (environment.most_workers() or self.store.num_workers)
        return {"none": 1.0, "linear": part, "sqrt": math.sqrt(part)}[self.config.lr_scaling]

    def _begin_staleness(self) -> None:
        self.staleness = StalenessReader(self.store, self.clock if self.config.cluster is None else self.virtual)

    def _take_over(self) -> None:
        """Speak, evaluate and write from here on, if the workers that did so are lost."""
        if self.run_log.silent and self.store.leads:
            self.run_log.take_over(self.store.rank)
            if self.config.asynchronous:
                self._begin_staleness()

    # --- counting -----------------------------------------------------------------------------------------------------

    def _interval_from_here(self) -> Interval:
        """Count from here on."""
        return Interval(self.store.iteration, self.clock.read(), self.virtual.read(), self.store.waited_s)

    def _take(self, iteration: int, sums: Sums) -> None:
        """The numbers of an iteration have arrived."""
        if not math.isfinite(sums.loss) and self.config.options.on_nan == "stop":
            raise DivergedError(self._diverged(iteration, sums.mean_loss))
        self.epoch.sums.add(sums)
        self.interval.sums.add(sums)

    def _diverged(self, iteration: int, loss: float) -> str:
        return (f"iteration {iteration}: the loss of this worker is {loss} ({self._settings(iteration)}). Lower lr or "
                "lr_local, or lengthen warmup or lr_warmup; --on-nan continue goes on regardless")

    def _settings(self, iteration: int) -> str:
        """What a run that diverges is mended with."""
        lr, lr_local = self._rates(iteration)
        settings = {"lr": lr, "lr_local": lr_local, **self.config.tuned_with()}
        return ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)

    def _log_interval(self) -> None:
        self._take_over()
        if self.interval.sums.examples:  # else the interval is so short that nothing of it has been read yet
            live = {} if self.staleness is None else self.staleness.interval()
            self.run_log.interval({**self._record(self.interval), **live})
            if self.staleness is not None:
                self.run_log.arrived(self.store.iteration, self.staleness.arrived)
            self.interval = self._interval_from_here()

    def _record(self, interval: Interval) -> Dict[str, Any]:
        """Numbers of an interval that ends here, as interval and epoch records have them."""
        iterations, seconds = self.store.iteration - interval.iteration, self.clock.read() - interval.clock_s
        present = self.store.num_workers - len(environment.lost_workers())
        lr, lr_local = self._rates(self.store.iteration - 1)
        follows = lr if self.config.steps_locally else None
        learned = {"train_loss": interval.sums.mean_loss, "train_accuracy": interval.sums.accuracy}
        done = self.store.iteration + self.progress.ahead
        return {"epoch": (done - 1) // self.batches_per_epoch + 1, "iteration": self.store.iteration,
                **(learned if self.passes.learns else {}),
                "samples_per_s": iterations * self.config.worker_batch_size * present / seconds,
                "iteration_ms": 1000 * seconds / iterations,
                "lr": lr, "lr_local": follows if lr_local is None else lr_local, **self._scale(),
                **(self._virtual_record(interval, iterations) if self.config.cluster is not None else
                   {"waiting_ms": 1000 * (self.store.waited_s - interval.waited_s) / iterations})}

    def _scale(self) -> Dict[str, float]:
        """Of the losses, and the iterations it has left out so far, where it has one."""
        scaler = self.trainer._amp_loss_scaler
        return {} if scaler is None else {"loss_scale": scaler.loss_scale, "left_out": self.store.session.left_out}

    def _virtual_record(self, interval: Interval, iterations: int) -> Dict[str, float]:
        """The same numbers in virtual time, where there is one."""
        now = self.virtual.read()
        if now is None or interval.virtual_s is None:
            return {}
        seconds, samples = now - interval.virtual_s, iterations * self.config.worker_batch_size * self.store.num_workers
        return {"virtual_seconds": now, "virtual_iteration_ms": 1000 * seconds / iterations,
                "virtual_samples_per_s": samples / seconds if seconds else math.nan}

    def _close_epoch(self, epoch: int, began: float) -> None:
        """Reduce, evaluate, write down. An epoch that --iterations cuts short is closed like any other.

        It is over, and the clock stops, when the slowest worker is through. In an asynchronous job a worker waits for
        nobody before the last epoch: its record is of itself.
        """
        self.meter.drain()
        if self.config.asynchronous and self.config.cluster is None and self.store.iteration < self.total:
            self._pass_epoch(epoch, began)
            return
        self.clock.stop()
        self._finish_evaluation()
        self.clock.go_on()
        mine = np.array(dataclasses.astuple(self.epoch.sums), np.float32)
        self.epoch.sums = Sums(*map(float, self.store.allreduce(mine)))
        self.clock.stop()
        self._take_over()
        record = self._record(self.epoch)
        if self._evaluation_due(epoch):
            with pulse.doing("evaluation"):
                self.tested = self._evaluate()
            record.update(self.tested)
        self.run_log.epoch({**record, "seconds": self.run_log.seconds() - began}, self.config.epochs)

    def _pass_epoch(self, epoch: int, began: float) -> None:
        """The end of an epoch at which nobody waits. The worker that speaks evaluates beside the next one."""
        self.clock.stop()
        self._take_over()
        self._finish_evaluation()
        if self.run_log.silent:
            return
        record = {**self._record(self.epoch), "seconds": self.run_log.seconds() - began}
        if not self._evaluation_due(epoch):
            self.run_log.epoch(record, self.config.epochs)
            return
        self.untold = record
        self.beside = evaluation.Beside(self.store, self.data.test(), self.passes.test, self._tell)

    def _tell(self, tested: Dict[str, float]) -> None:
        """The evaluation beside has ended."""
        assert self.untold is not None
        record, self.untold = {**self.untold, **tested}, None
        self.run_log.epoch(record, self.config.epochs)

    def _tell_untold(self) -> None:
        """Evaluate the checkpoint's weights for the epoch whose evaluation went on when it was saved, unless that came
        to its end. Collective.
        """
        if self.untold is None:
            return
        if resuming.from_worker_0(self.store, self.run_log.has_epoch(self.untold["epoch"])):
            self.untold = None
            return
        self.trainer._init_kvstore()
        self.trainer._init_params()
        self.store.begin()  # else the first step would
        with pulse.doing("evaluation"):
            self._tell(self._evaluate())

    def _finish_evaluation(self) -> None:
        """Of the epoch before, if it is still going on."""
        if self.beside is not None:
            with pulse.doing("evaluation"):
                self.beside.finish()
            self.beside = None

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def _evaluation_due(self, epoch: int) -> bool:
        """Every so many epochs, and at the end."""
        every = self.config.eval_every
        return bool(every) and ((epoch + 1) % every == 0 or self.store.iteration == self.total)

    def _evaluate(self) -> Dict[str, float]:
        """The global weights on the test set. Collective; worker 0 computes, the others go on to their next exchange
        and wait there for it, as long as `timeout_s` allows.

        In an asynchronous job no exchange makes them wait. They do it here, or else worker 0 would come back with
        weights that the others have long left behind, and its staleness would be that of an evaluation. If it is lost
        at that, its successor evaluates.
        """
        while True:
            self._take_over()
            with self.store.global_weights():
                sums = Sums() if self.run_log.silent else self._test()
            told = sums
            if self.config.asynchronous:
                told = Sums(*map(float, self.store.allreduce(np.array(dataclasses.astuple(sums), np.float32))))
            if told.examples or not self.config.asynchronous:
                sums = told if self.run_log.silent else sums
                return evaluation.as_metrics(sums)

    def _test(self) -> Sums:
        return evaluation.test(self.data.test(), self.passes.test)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _checkpoint_due(self) -> bool:
        if not self.passes.learns:
            return False
        span = self.config.checkpoint_every
        every, done = span.iterations(self.batches_per_epoch), self.store.iteration
        counted = done + (self.progress.ahead if span.unit == "epochs" else 0)
        return done == self.total or bool(every and counted % every == 0)

    def _checkpoint(self) -> None:
        """Copy what is kept. Collective; weights of a run that has diverged are not worth it, so all losses are read
        first. The files are written while the training goes on, and count some iterations later.
        """
        self.checkpoints.finish()
        self.meter.drain()
        if self.config.cluster is not None:
            self.store.barrier()  # the time of a checkpoint is that at which all workers have come to it
        self.clock.stop()
        epoch, position = self._place()
        facts = {"epoch": epoch, "position": position, "batches_per_epoch": self.batches_per_epoch,
                 "course": list(self.progress),
                 "store": self.store.type, "config": self.config.to_dict(), "versions": versions(),
                 "cluster": going_on.cluster(self.config), "virtual_seconds": self.virtual.read(),
                 "untold": self.untold}
        self.checkpoints.begin(facts)
        if self.config.cluster is not None:
            self.checkpoints.finish()  # later all would meet once more, which a run that resumes from here does not
        self.clock.go_on()

    def _resume(self) -> Optional[Path]:
        """Take up the run that is there, if there is one to go on with; the folder of its checkpoint. Collective."""
        manifest, self.warnings = going_on.resume(self.config, self.store, self.net, self.folder, self.mirror,
                                                  self.frozen, self.batches_per_epoch)
        if manifest is None:
            return None
        self.progress, self.untold = EpochProgress(*manifest.get("course") or ()), manifest.get("untold")
        if manifest["num_workers"] != self.store.num_workers:
            self._divide_anew(manifest)
        if self.config.cluster is not None:
            self.virtual.go_on_from(manifest.get("virtual_seconds"))
        return self.folder / str(manifest["iteration"])

    def _divide_anew(self, manifest: Dict[str, Any]) -> None:
        """What is left of the epoch goes to the workers that there are now, which are others than those of before."""
        before, now = manifest["num_workers"], self.store.num_workers
        batch, examples = self.config.worker_batch_size, self.data.num_examples
        self.progress = self.progress.divided_anew(self.store.iteration, examples,
                                                   EpochShares(manifest["batches_per_epoch"], before * batch),
                                                   EpochShares(self.batches_per_epoch, now * batch))
        epoch, position = self._place()
        left = (self.batches_per_epoch - position) * now * batch
        self.warnings.append(
            f"{now} workers go on where {before} were: {left} of the {examples} examples of epoch {epoch + 1} are left "
            f"and dealt anew; the global batch is {now * batch}, it was {before * batch}; what each worker kept for "
            f"itself begins anew; lr times {self.scaling:.4g} (lr_scaling {self.config.lr_scaling})")
