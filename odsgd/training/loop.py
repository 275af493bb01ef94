"""One worker's training run: the loop, the ends of epochs, and checkpoints.

    for every iteration    forward and backward on every device → trainer.step → read a loss of some iterations ago
    for every epoch        sum loss and accuracy over the workers → evaluate the global weights → checkpoint

The loop waits for nothing it has just asked for; the algorithm's exchange runs beside the next batch. What bounds
the queue is `metrics.Meter`. All workers go through the same collective calls in the same order, since they have
the same number of batches; only worker 0 speaks, evaluates and writes metrics. Where an asynchronous job has lost it
(`--on-worker-loss continue`), the lowest rank that is left does so.

In an asynchronous job each worker trains at its own pace, with learning rates by its own iterations. Workers meet only
for checkpoints and at the end. Until then worker 0 evaluates a copy of the global weights beside its training
(evaluation.py), and records tell only of worker 0. On a virtual cluster workers meet at the end of every epoch.

docs/reference/run-folder.md says what is reported. With `emulate_compute` only times are: there is no loss, and there
are no weights worth a checkpoint.
"""
import contextlib
import itertools
import os
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from kvstore.engine._mxnet import mx
from kvstore.errors import EXIT_FAILURE, ConfigError, DivergedError, RoundTimeoutError
from kvstore.fronts.choice import connect
from kvstore.fronts.gluon.legacy import LegacyStore
from kvstore.job import agreement, ending, environment
from kvstore.job.aside import guarded
from kvstore.job.pulse import pulse
from kvstore.messages.seam import Transport
from kvstore.methods import fit
from kvstore.tracing import recorder
from odsgd.config.train import TrainConfig
from odsgd.timeline import timeline
from odsgd.training import devices, models, randomness
from odsgd.training.checkpoint import disk, manifests, mirror, resuming
from odsgd.training.checkpoint.checkpoint import CheckpointWriter
from odsgd.training.checkpoint.mirror import MirrorError
from odsgd.training.data import data
from odsgd.training.data.datasets import Arrays
from odsgd.training.evaluation import Evaluator, sum_over_workers
from odsgd.training.metrics import Measurements, StalenessReader
from odsgd.training.run_log import RunLog
from odsgd.training.schedule import EpochProgress, EpochShares, Schedule
from odsgd.training.stability import warnings_about
from odsgd.training.step.passes import passes_for
from odsgd.virtual import description


def run(config: TrainConfig) -> int:
    """Train as `config` says, alone or as one worker of a job; returns the exit code."""
    transport = _transport(config)
    try:
        Training(config, transport).run()
    except (ConfigError, DivergedError, MirrorError, RoundTimeoutError, OSError) as error:
        return give_up(config, error)
    return 0


def _transport(config: TrainConfig) -> Transport:
    """This worker's place in the job. Known before the store, whose options depend on the number of workers."""
    if config.kvstore == "local" and int(os.environ.get("DMLC_NUM_WORKER") or 1) > 1:
        raise ConfigError("kvstore `local` is for one process and this job has "
                          f"{os.environ['DMLC_NUM_WORKER']} workers; take --kvstore ssgd or odsgd, or no launcher")
    recorder.folder = config.trace or recorder.folder
    return connect(config.kvstore, config.transport, config.options.timeout_s)


def give_up(config: TrainConfig, error: Exception) -> int:
    """One line instead of a traceback. In a job, end at once: the way out of the interpreter waits for the others.

    Raises again an OSError that is not about a full disk.
    """
    why = disk.full(error, str(config.out)) if isinstance(error, OSError) else str(error)
    if why is None:
        raise error
    status = getattr(error, "exit_code", EXIT_FAILURE)
    if config.kvstore != "local" and config.cluster is None:
        ending.die(why, status)  # which names this process
    print(f"odsgd train: {why}", file=sys.stderr)
    return status


class Training:
    """All parts of one run, made from its configuration."""

    run_log: RunLog
    evaluator: Evaluator

    def __init__(self, config: TrainConfig, transport: Transport, arrays: Optional[Arrays] = None) -> None:
        self.config, self.folder = config, Path(str(config.out)) / "checkpoints"
        self.contexts = devices.contexts(config)
        self.data = data.load(config, transport.worker_rank, transport.num_workers, self.contexts, arrays)
        self.net = models.create(config)  # the same weights on every worker: the first gradients are computed on them
        options = config.options.in_iterations(self.data.batches_per_epoch)
        fit.check_on(transport, config.method, options)
        self.store = LegacyStore(config.method, options, transport)
        self.frozen = models.frozen(self.net, config)
        self.trainer = self._trainer()
        self.store.session.lr_given = config.lr
        self.passes = passes_for(config, self.net, self.trainer, self.data, self.store.rank)
        self.trainable = [one for one in self.net.collect_params().values() if one.grad_req != "null"]
        self.schedule = Schedule(config, self.data.batches_per_epoch, self.store.num_workers)
        self.measured = Measurements(config, self.schedule, self.store, self.trainer)
        local = getattr(config.options, "optimizer_local", None)
        self.draws = "sgld" in (config.optimizer, local) or randomness.draws(self.net)
        self.tested: Dict[str, float] = {}  # by the last evaluation
        self.before_s = 0.0  # what the first epoch has taken before the run was resumed
        self.staleness: Optional[StalenessReader] = None  # of an asynchronous job, from its first step on
        self.mirror = mirror.mirror_at(config.checkpoint_to)
        self.checkpoints = CheckpointWriter(self.folder, self.store, self.net, config.keep_checkpoints,
                                            lambda line: self.run_log.warn(line), self.mirror)

    def _trainer(self) -> Any:
        """The trainer of all parameters but the frozen ones, which the store never sees."""
        learning = {name: one for name, one in self.net.collect_params().items() if name not in self.frozen}
        optimizer = self.config.optimizer
        try:
            return mx.gluon.Trainer(learning, optimizer, self.config.optimizer_arguments(), kvstore=self.store)
        except TypeError as error:
            raise ConfigError(f"optimizer_params: optimizer `{optimizer}` does not take them: {error}") from None

    # --- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train from the first iteration, or from the checkpoint, to the last iteration."""
        with disk.held(self.folder.parent, self.store.rank), mirror.held(self.mirror, self.store.rank):
            self._run()

    def _run(self) -> None:
        manifest, warnings = self._resume()
        if self.frozen:
            agreement.check(self.store.session.transport, "the weights of frozen layers",
                            [models.digest(self.net, self.frozen)])
        self.measured.begin_interval()
        self.run_log = RunLog(self.config, self.store.rank != 0, self.store.iteration, self.schedule.total)
        self.evaluator = Evaluator(self.config, self.store, self.data.test, self.passes.test, self.run_log,
                                   self._take_over, self._take_up_epoch(manifest))
        resumed = self.folder / str(manifest["iteration"]) if manifest else None
        try:
            self.run_log.start(self.store.num_workers, self.schedule.batches_per_epoch,
                               sum(int(np.prod(parameter.shape)) for parameter in self.trainable),
                               self.contexts, resumed)
            for line in [*warnings, *self.schedule.warnings(), *warnings_about(self.config, self.store.num_workers),
                         *self.passes.warnings]:
                self.run_log.warn(line)
            self.tested = self.evaluator.tell_untold(self._begin_store)
            self.epoch_began = self.run_log.seconds() - self.before_s
            while self.store.iteration < self.schedule.total:
                self._train_epoch()
            self.checkpoints.close()
            if self.staleness is not None:
                self.run_log.staleness(self.staleness.result())
                if hasattr(self.store.options, "quorum"):
                    self.run_log.rounds(self.store.rounds())
            self._finish_trace()
            self.run_log.end(self.store.iteration, self.tested)
        finally:
            self.run_log.close()
        self.store.close()

    def _begin_store(self) -> None:
        """Begin as the first step would."""
        self.trainer._init_kvstore()
        self.trainer._init_params()
        self.store.begin()

    def _finish_trace(self) -> None:
        """Put the files of the job's processes on this host together. Collective."""
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
        """Train to the end of the epoch that the next iteration belongs to."""
        epoch, position = self.schedule.place(self.store.iteration)
        end = min(self.schedule.total, self.store.iteration + self.schedule.batches_per_epoch - position)
        self.measured.begin_epoch()
        with pulse.doing("training"):
            batches = (itertools.repeat(([], [])) if self.config.emulate_compute else
                       self.data.train(epoch, position, self.schedule.progress.offset(epoch)))
            for xs, ys in itertools.islice(batches, end - self.store.iteration):
                self._iterate(xs, ys)
                if self.evaluator.beside:
                    self._evaluate_beside()
                self.measured.clock.stop()
                self.checkpoints.advance(self.store.iteration)
                self.measured.clock.go_on()
                if self.store.iteration < end and self._checkpoint_due():
                    self._checkpoint()
            self._close_epoch(epoch)
        if not self.schedule.place(self.store.iteration)[1]:  # else --iterations cuts it short, and it may go on
            self.epoch_began = self.run_log.seconds()  # the time of the next epoch includes this checkpoint
        if self._checkpoint_due():
            self._checkpoint()

    def _iterate(self, xs: List[Any], ys: List[Any]) -> None:
        """Queue one iteration."""
        iteration = self.store.iteration
        lr, self.store.lr_local = self.schedule.rates(iteration)
        self.trainer.set_learning_rate(lr)
        if self.draws:
            randomness.seed_iteration(self.config.seed, iteration, self.store.rank)
        results = self.passes.train(xs, ys)
        try:
            self.trainer.step(self.config.worker_batch_size)
        except DivergedError as error:
            raise DivergedError(f"{error} ({self.schedule.settings(iteration)})") from None
        self.measured.meter.add(iteration, results, self.config.worker_batch_size)
        self.run_log.advance()
        if self.staleness is None and self.config.asynchronous and not self.run_log.silent:
            self._begin_staleness()
        if self.store.iteration % self.config.log_interval == 0:
            self._log_interval()

    def _evaluate_beside(self) -> None:
        """Go on with the evaluation beside the training. Each waits for the other on the devices anyway; we wait, too,
        so that it is known how long each takes.
        """
        self._wait_for_weights()
        with self.measured.apart():
            self.evaluator.advance()
            self._wait_for_weights()

    def _wait_for_weights(self) -> None:
        for parameter in self.trainable:
            for array in parameter.list_data():
                array.wait_to_read()

    def _begin_staleness(self) -> None:
        measured = self.measured
        clock_s = measured.clock.read if self.config.cluster is None else measured.virtual_s
        self.staleness = StalenessReader(self.store, clock_s)

    def _take_over(self) -> None:
        """Speak, evaluate and write from here on, if the workers that did so are lost."""
        if self.run_log.silent and self.store.leads:
            self.run_log.take_over(self.store.rank)
            if self.config.asynchronous:
                self._begin_staleness()

    def _log_interval(self) -> None:
        self._take_over()
        if self.measured.interval.sums.examples:  # else no result of so short an interval has been read yet
            live = {} if self.staleness is None else self.staleness.interval()
            self.run_log.interval({**self.measured.record(self.measured.interval), **live})
            if self.staleness is not None:
                self.run_log.arrived(self.store.iteration, self.staleness.arrived)
            self.measured.begin_interval()

    # --- the end of an epoch ------------------------------------------------------------------------------------------

    def _close_epoch(self, epoch: int) -> None:
        """Sum over the workers, evaluate, write down. An epoch that --iterations cuts short is closed like any other.

        The epoch is over, and the clock stops, when the slowest worker is through. In an asynchronous job a worker
        waits for nobody before the end of the last epoch, and a record's times are its own.
        """
        measured = self.measured
        measured.meter.drain()
        alone = self.config.asynchronous and self.config.cluster is None
        if alone and self.store.iteration < self.schedule.total:
            self._pass_epoch(epoch)
            return
        measured.clock.stop()
        self.evaluator.finish()
        measured.clock.go_on()
        with measured.apart() if alone else contextlib.nullcontext():
            measured.epoch.sums = sum_over_workers(self.store, measured.epoch.sums)
        measured.clock.stop()
        self._take_over()
        record = measured.record(measured.epoch)
        if self.schedule.evaluation_due(epoch, self.store.iteration):
            self.tested = self.evaluator.evaluate()
            record.update(self.tested)
        self.run_log.epoch({**record, "seconds": self.run_log.seconds() - self.epoch_began})

    def _pass_epoch(self, epoch: int) -> None:
        """The end of an epoch at which nobody waits. The worker that speaks evaluates beside the next one."""
        self.measured.clock.stop()
        self._take_over()
        self.evaluator.finish()
        if self.run_log.silent:
            return
        record = self._so_far()
        if self.schedule.evaluation_due(epoch, self.store.iteration):
            self.evaluator.begin_beside(record)
        else:
            self.run_log.epoch(record)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _checkpoint_due(self) -> bool:
        keeps = not (self.config.emulate_compute or environment.joined())
        return keeps and self.schedule.checkpoint_due(self.store.iteration)

    def _checkpoint(self) -> None:
        """Copy what is kept. Collective; weights of a run that has diverged are not worth it, so all losses are read
        first. The files are written while the training goes on, and count some iterations later.
        """
        self.measured.clock.stop()
        self.checkpoints.finish()
        self.measured.clock.go_on()
        self.measured.meter.drain()
        if self.config.cluster is not None:
            self.store.barrier()  # the time of a checkpoint is that at which all workers have come to it
        self.measured.clock.stop()
        epoch, position = self.schedule.place(self.store.iteration)
        facts = {"epoch": epoch, "position": position, "batches_per_epoch": self.schedule.batches_per_epoch,
                 "course": list(self.schedule.progress), "most_workers": self.schedule.most_workers,
                 "store": self.store.type, "config": self.config.to_dict(), "cluster": self._cluster(),
                 "virtual_seconds": None if self.config.cluster is None else self.measured.virtual_s(),
                 "untold": self.evaluator.untold, "epoch_so_far": self._so_far() if position else None}
        self.checkpoints.begin(facts)
        if self.config.cluster is not None:
            self.checkpoints.finish()  # later all would meet once more, which a run that resumes from here does not
        self.measured.clock.go_on()

    def _so_far(self) -> Dict[str, Any]:
        """The record of the epoch, by what this worker has done of it since it began or was resumed."""
        return {**self.measured.record(self.measured.epoch), "seconds": self.run_log.seconds() - self.epoch_began}

    def _take_up_epoch(self, manifest: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        """Go on with the epoch that was under way; returns the record of one that is over and not yet told.

        It counts as over if too few of its examples are left for all workers of now.
        """
        so_far = manifest.get("epoch_so_far")
        if so_far and self.schedule.place(self.store.iteration)[0] >= so_far["epoch"]:
            return dict(so_far)
        self.before_s = so_far["seconds"] if so_far else 0.0
        return manifest.get("untold")

    def _resume(self) -> Tuple[Dict[str, Any], List[str]]:
        """Take up the run that is there, if so asked; a job that the launcher has started again takes up its own.
        The checkpoint's manifest, or an empty one, and what to warn of. Collective.
        """
        if environment.joined():  # it has its iteration from the launcher, and its weights from the servers
            return {}, []
        again = environment.has_begun()
        if not self.config.resume and not again:
            if self.store.rank == 0:
                self._check_empty()
                resuming.tell_begun(self.store, self.folder, 0)
            return {}, []
        manifest, warnings = resuming.resume(self.folder, self.store, self.net, self._check, self.mirror,
                                             required=not again)
        if not manifest:
            return {}, warnings
        self.checkpoints.whole = manifest["iteration"]
        files = [os.path.realpath(os.path.expanduser(str(one or "")))
                 for one in (self.config.weights, (manifest["config"] or {}).get("weights"))]
        if self.config.weights is not None and files[0] != files[1]:
            warnings.append(f"the run goes on from its checkpoint, without --weights `{self.config.weights}`")
        self.schedule.progress = EpochProgress(*manifest.get("course") or ())
        if manifest["num_workers"] != self.store.num_workers:
            warnings.append(self._divide_anew(manifest))
        then, now = manifest.get("most_workers"), self.schedule.most_workers
        if self.config.lr_scaling != "none" and then not in (None, now):
            warnings.append(f"lr_scaling {self.config.lr_scaling} goes by MAX of -n MIN:MAX, which was {then} and is "
                            f"{now}: lr jumps; launch with -n MIN:{then} to go on as before")
        if self.config.cluster is not None:
            self.measured.virtual_before_s = manifest.get("virtual_seconds") or 0.0
        return manifest, warnings

    def _check_empty(self) -> None:
        """ConfigError if the folder, or the second place, has checkpoints of another run."""
        there = manifests.complete(self.folder)
        if there:
            raise ConfigError(f"`{self.folder.parent}` holds a run with checkpoints up to iteration {there[-1]}; go on "
                              "with it (--resume), take another --out, or remove it")
        if self.mirror is not None and self.mirror.holds(manifests.MANIFEST):
            raise ConfigError(f"`{self.config.checkpoint_to}` holds a run's checkpoints; go on with it (--resume), or "
                              "take another --checkpoint-to")

    def _check(self, manifest: Dict[str, Any]) -> None:
        """ConfigError unless a checkpoint fits this run. With ``-n MIN:MAX`` the number of workers may have changed."""
        workers = {"num_workers": self.store.num_workers, "batches_per_epoch": self.schedule.batches_per_epoch}
        others = environment.most_workers() is not None and manifest["num_workers"] != self.store.num_workers
        now = {**({} if others else workers), "cluster": self._cluster()}
        manifests.check_facts(manifest, now, self.config.mismatches(manifest["config"] or {}))
        manifests.check_model(manifest, self.net)

    def _cluster(self) -> Optional[str]:
        """Text that tells one virtual cluster from another; None for a real cluster."""
        if self.config.cluster is None:
            return None
        return f"virtual, settings {description.checksum(self.config.virtual_cluster):08x}"

    def _divide_anew(self, manifest: Dict[str, Any]) -> str:
        """Give the rest of the epoch to the workers of now, whose number has changed; a line that says so."""
        before, now = manifest["num_workers"], self.store.num_workers
        batch, examples = self.config.worker_batch_size, self.data.num_examples
        batches = self.schedule.batches_per_epoch
        self.schedule.progress = self.schedule.progress.divided_anew(
            self.store.iteration, examples, EpochShares(manifest["batches_per_epoch"], before * batch),
            EpochShares(batches, now * batch))
        epoch, position = self.schedule.place(self.store.iteration)
        left = (batches - position) * now * batch
        return (f"{now} workers go on where {before} were: {left} of the {examples} examples of epoch {epoch + 1} are "
                f"left and dealt anew; the global batch is {now * batch}, it was {before * batch}; what each worker "
                f"kept for itself begins anew; lr times {self.schedule.scaling:.4g} (lr_scaling "
                f"{self.config.lr_scaling})")
