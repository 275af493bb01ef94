"""One worker's training run: the loop, evaluation, checkpoints, and what is written down.

    for every iteration    forward and backward on every device → trainer.step → read a loss of some iterations ago
    for every epoch        sum loss and accuracy over the workers → evaluate the global weights → checkpoint

The loop waits for nothing it has just asked for; the algorithm's exchange runs beside the next batch. What bounds
the queue is `metrics.Meter`. All workers go through the same collective calls in the same order, since they have
the same number of batches; only worker 0 speaks, evaluates and writes metrics.

In an asynchronous job the workers train each at its own pace, with learning rates by their own iterations, and meet
at the end of an epoch (to sum, and for the evaluation of weights that nobody changes meanwhile) and for checkpoints.

Reported per epoch and per interval: loss and accuracy of the weights trained on (interval: worker 0's batches alone),
samples_per_s of all workers together, without evaluation and checkpoints (an asynchronous job's intervals take the
others to be as fast as worker 0). Asynchronous jobs report their staleness, too (staleness.py).

With `emulate_compute` an emulated accelerator takes the place of forward and backward, and only time is reported: the
gradients of the first batch are sent again and again, so that there is no loss, and no weights worth a checkpoint.
"""
from __future__ import annotations

import itertools
import math
import os
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

import numpy as np

from kvstore.engine._mxnet import mx
from kvstore.errors import EXIT_FAILURE, EXIT_USAGE, ConfigError
from kvstore.factory import connect, make
from kvstore.job import control
from kvstore.tracing import recorder
from kvstore.wire.interfaces import Transport
from odsgd.config.kinds import Compute
from odsgd.config.train import TrainConfig
from odsgd.lab import tracing
from odsgd.training import checkpoint, data, devices, models, randomness
from odsgd.training.emulate import Emulated
from odsgd.training.journal import Journal, versions
from odsgd.training.metrics import Clock, Meter, Sums, Tally, Window
from odsgd.training.schedule import lr_at, lr_local_at
from odsgd.training.stability import warnings_about
from odsgd.training.staleness import Gauge


class DivergedError(RuntimeError):
    """The loss is infinite or not a number."""


def run(config: TrainConfig) -> int:
    """Train as `config` says, alone or as one worker of a job; returns the exit code."""
    transport = _transport(config)
    try:
        Training(config, transport).run()
    except (ConfigError, DivergedError) as error:
        return _give_up(config, error)
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
        control.die(str(error), status)  # which says who we are
    print(f"odsgd train: {error}", file=sys.stderr)
    return status


class Training:
    """All parts of one run, made from its configuration."""

    def __init__(self, config: TrainConfig, transport: Transport) -> None:
        self.config, self.out = config, Path(str(config.out))
        self.data = data.load(config, transport.worker_rank, transport.num_workers)
        self.net = models.create(config)  # the same weights on every worker: the first gradients are computed on them
        self.store = make(config.kvstore, config.options.in_iterations(self.data.batches_per_epoch), transport)
        self.trainer = mx.gluon.Trainer(self.net.collect_params(), config.optimizer, config.optimizer_arguments(),
                                        kvstore=self.store)
        self.loss, self.tally = mx.gluon.loss.SoftmaxCrossEntropyLoss(), Tally()
        for block in (self.loss, self.tally):
            block.hybridize(config.hybridize)
        self.batches_per_epoch = self.data.batches_per_epoch
        self.total = min(config.epochs * self.batches_per_epoch, config.iterations or sys.maxsize)
        self.draws = randomness.draws(self.net)
        self.meter, self.clock = Meter(self._take), Clock()
        self.clock.stop()
        self.interval = self.epoch = Window(0, 0.0)
        self.tested: Optional[Sums] = None
        self.emulated: Optional[Emulated] = None
        self.gauge: Optional[Gauge] = None  # worker 0's, of an asynchronous job, from its first step on

    # --- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """From the first iteration, or the checkpoint, to the last."""
        resumed = self._resume() if self.config.resume else self._begin_afresh()
        self.interval = self._window()
        self.journal = Journal(self.config, self.store.rank, self.store.iteration, self.total, resumed)
        try:
            self.journal.start(self.store.num_workers, self.batches_per_epoch, count_parameters(self.net),
                               devices.contexts(self.config))
            for line in warnings_about(self.config, self.store.num_workers):
                self.journal.warn(line)
            if self.config.emulate_compute is not None:
                self._emulate(self.config.emulate_compute)
            elif recorder.on is not None:
                self._passes = self._traced(recorder.on)  # type: ignore[method-assign]
            while self.store.iteration < self.total:
                self._train_epoch()
            if self.gauge is not None:
                self.journal.staleness(self.gauge.result())
            self._finish_trace()
            self.journal.end(self.store.iteration, self._test_fields())
        finally:
            self.journal.close()
        self.store.close()

    def _finish_trace(self) -> None:
        """Put the files of the job's processes together, as far as they lie on this host. Collective."""
        if recorder.on is None:
            return
        self.store.wait()
        mx.nd.waitall()  # the last bars end when their arrays are looked at
        recorder.on.flush()
        self.store.barrier()
        if self.store.rank == 0:
            self.journal.note(tracing.finish(Path(str(recorder.folder))))

    def _train_epoch(self) -> None:
        """What is left of the epoch that the next iteration belongs to."""
        began = self.journal.seconds()
        epoch, position = divmod(self.store.iteration, self.batches_per_epoch)
        end = min(self.total, (epoch + 1) * self.batches_per_epoch)
        self.clock.go_on()
        self.epoch = self._window()
        for xs, ys in itertools.islice(self._batches(epoch, position), end - self.store.iteration):
            self._iterate(xs, ys)
            if self.store.iteration < end and self._checkpoint_due():
                self._checkpoint()
        self._close_epoch(epoch, began)
        if self._checkpoint_due():
            self._checkpoint()

    def _iterate(self, xs: List[Any], ys: List[Any]) -> None:
        """Queue one iteration."""
        iteration = self.store.iteration
        lr, lr_local = self._rates(iteration)
        self.trainer.set_learning_rate(lr)
        self.store.lr_local = lr_local
        if self.draws:
            randomness.seed_iteration(self.config.seed, iteration, self.store.rank)
        tallies = self._compute(xs, ys) if self.emulated is None else self._pretend()
        self.trainer.step(self.config.worker_batch_size)
        self.meter.add(iteration, tallies, self.config.worker_batch_size)
        self.journal.iteration()
        if self.gauge is None and self.config.asynchronous and self.store.rank == 0:
            self.gauge = Gauge(self.store, self.clock)
        if self.store.iteration % self.config.log_interval == 0:
            self._log_interval()

    def _compute(self, xs: List[Any], ys: List[Any]) -> List[Any]:
        """Queue forward and backward on every device; what they count."""
        outputs, losses = self._passes(xs, ys)
        return [self.tally(loss, output, y) for loss, output, y in zip(losses, outputs, ys)]

    def _passes(self, xs: List[Any], ys: List[Any]) -> Tuple[List[Any], List[Any]]:
        """Queue both; outputs and losses."""
        with mx.autograd.record():
            outputs = [self.net(x) for x in xs]
            losses = [self.loss(output, y) for output, y in zip(outputs, ys)]
        mx.autograd.backward(losses)
        return outputs, losses

    def _traced(self, on: recorder.Recorder) -> Any:
        """`_passes`, with bars of both on the timeline: from the first layer's weights, which are read first, to its
        gradient, which is written last.
        """
        passes = self._passes
        first = next(parameter for parameter in self.net.collect_params().values() if parameter.grad_req != "null")

        def traced(xs: List[Any], ys: List[Any]) -> Tuple[List[Any], List[Any]]:
            bars = on.compute(first.list_data())
            outputs, losses = passes(xs, ys)
            bars.passes(losses, first.list_grad())
            return outputs, losses
        return traced

    def _emulate(self, compute: Compute) -> None:
        """From here on an emulated accelerator computes. What the gradients hold, of the first batch, they keep."""
        self._compute(*next(iter(self.data.train(0))))
        self.emulated = Emulated(self.net.collect_params().values(), compute.seconds, compute.spread,
                                 seed=[self.config.seed, self.store.rank])
        self.journal.warn(f"forward and backward are emulated, {compute} per iteration: speeds count, and nothing is "
                          "learned, evaluated or kept")

    def _pretend(self) -> List[Any]:
        """Queue an iteration of the emulated accelerator, which counts nothing."""
        assert self.emulated is not None
        return [mx.nd.tile(through, 2) for through in self.emulated.iteration()]

    def _batches(self, epoch: int, position: int) -> Iterator[Any]:
        """What is left of an epoch; an emulated accelerator needs no data."""
        if self.emulated is not None:
            return iter([([], [])] * (self.batches_per_epoch - position))
        return self.data.train(epoch, position)

    def _rates(self, iteration: int) -> Tuple[float, Optional[float]]:
        """lr and lr_local of an iteration; lr_local None: it follows lr."""
        return (lr_at(self.config, iteration, self.batches_per_epoch),
                lr_local_at(self.config, iteration, self.batches_per_epoch))

    # --- counting -----------------------------------------------------------------------------------------------------

    def _window(self) -> Window:
        """Count from here on."""
        return Window(self.store.iteration, self.clock.read())

    def _take(self, iteration: int, sums: Sums) -> None:
        """The numbers of an iteration have arrived."""
        if not math.isfinite(sums.loss) and self.config.on_nan == "stop":
            raise DivergedError(self._diverged(iteration, sums.mean_loss))
        self.epoch.sums.add(sums)
        self.interval.sums.add(sums)

    def _diverged(self, iteration: int, loss: float) -> str:
        lr, lr_local = self._rates(iteration)
        settings = {"lr": lr, "lr_local": lr_local, **self.config.tuned_with()}
        given = ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)
        return (f"iteration {iteration}: the loss of this worker is {loss} ({given}). Lower lr or lr_local, or "
                "lengthen warmup or lr_warmup; --on-nan continue goes on regardless")

    def _log_interval(self) -> None:
        if self.interval.sums.examples:  # else the interval is so short that nothing of it has been read yet
            live = {} if self.gauge is None else self.gauge.interval()
            self.journal.interval({**self._record(self.interval), **live})
            self.interval = self._window()

    @property
    def _present(self) -> int:
        """Workers that have not been lost."""
        return self.store.num_workers - len(control.lost_workers())

    def _record(self, window: Window) -> Dict[str, Any]:
        """Numbers of a window that ends here, as interval and epoch records have them."""
        iterations, seconds = self.store.iteration - window.iteration, self.clock.read() - window.clock_s
        lr, lr_local = self._rates(self.store.iteration - 1)
        follows = lr if self.config.method.steps_locally(self.config.options) else None
        learned = {"train_loss": window.sums.mean_loss, "train_accuracy": window.sums.accuracy}
        return {"epoch": (self.store.iteration - 1) // self.batches_per_epoch + 1, "iteration": self.store.iteration,
                **(learned if self.emulated is None else {}),
                "samples_per_s": iterations * self.config.worker_batch_size * self._present / seconds,
                "iteration_ms": 1000 * seconds / iterations,
                "lr": lr, "lr_local": follows if lr_local is None else lr_local}

    def _close_epoch(self, epoch: int, began: float) -> None:
        """Reduce, evaluate, write down. An epoch that --iterations cuts short is closed like any other.

        It is over, and the clock stops, when the slowest worker is through.
        """
        self.meter.drain()
        self.epoch.sums = self._over_workers(self.epoch.sums)
        self.clock.stop()
        record = self._record(self.epoch)
        if self._evaluation_due(epoch):
            self.tested = self._evaluate()
            record.update(self._test_fields())
        self.journal.epoch({**record, "seconds": self.journal.seconds() - began})

    def _over_workers(self, sums: Sums) -> Sums:
        return Sums(*map(float, self.store.allreduce(np.array([sums.loss, sums.hits, sums.examples], np.float32))))

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def _evaluation_due(self, epoch: int) -> bool:
        """Every so many epochs, and at the end."""
        every = self.config.eval_every
        return bool(every) and ((epoch + 1) % every == 0 or self.store.iteration == self.total)

    def _evaluate(self) -> Sums:
        """The global weights on the test set. Collective; worker 0 computes, the others go on to their next exchange
        and wait there for it, as long as `timeout_s` allows.

        In an asynchronous job no exchange makes them wait. They do it here, or else worker 0 would come back with
        weights that the others have long left behind, and its staleness would be that of an evaluation.
        """
        sums = Sums()
        meter = Meter(lambda _, part: sums.add(part))
        with self.store.global_weights():
            if self.store.rank == 0:
                for number, (xs, ys) in enumerate(self.data.test()):
                    outputs = [self.net(x) for x in xs]
                    tallies = [self.tally(self.loss(output, y), output, y) for output, y in zip(outputs, ys)]
                    meter.add(number, tallies, sum(len(y) for y in ys))
                meter.drain()
        if self.config.asynchronous:
            self.store.barrier()
        return sums

    def _test_fields(self) -> Dict[str, Any]:
        if self.tested is None:
            return {}
        return {"test_loss": self.tested.mean_loss, "test_accuracy": self.tested.accuracy}

    # --- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def _checkpoints(self) -> Path:
        return self.out / "checkpoints"

    def _checkpoint_due(self) -> bool:
        if self.emulated is not None:
            return False
        every = self.config.checkpoint_every.iterations(self.batches_per_epoch)
        return self.store.iteration == self.total or bool(every and self.store.iteration % every == 0)

    def _checkpoint(self) -> None:
        """Collective. Weights of a run that has diverged are not worth keeping, so all losses are read first."""
        self.meter.drain()
        self.clock.stop()
        epoch, position = divmod(self.store.iteration, self.batches_per_epoch)
        facts = {"epoch": epoch, "position": position, "batches_per_epoch": self.batches_per_epoch,
                 "store": self.store.type, "config": self.config.to_dict(), "versions": versions()}
        checkpoint.save(self._checkpoints, self.store, self.net, facts, self.config.keep_checkpoints)
        self.clock.go_on()

    def _begin_afresh(self) -> Optional[Path]:
        """A new run must not mix with one that is there."""
        there = checkpoint.complete(self._checkpoints) if self.store.rank == 0 else []
        if there:
            raise ConfigError(f"`{self.out}` holds a run with checkpoints up to iteration {there[-1]}; go on with it "
                              "(--resume), take another --out, or remove it")
        return None

    def _resume(self) -> Path:
        """Take up the newest complete checkpoint of worker 0. Collective."""
        manifest = self._newest() if self.store.rank == 0 else None
        manifest = checkpoint.share_manifest(self.store, manifest)
        folder = self._checkpoints / str(manifest["iteration"])
        checkpoint.restore(folder, manifest, self.store, self.net)
        return folder

    def _newest(self) -> Dict[str, Any]:
        there = checkpoint.complete(self._checkpoints)
        if not there:
            raise ConfigError(f"no complete checkpoint in `{self._checkpoints}`; check --out, or leave --resume out to "
                              "begin a new run")
        manifest = checkpoint.read_manifest(self._checkpoints / str(there[-1]))
        now = {"num_workers": self.store.num_workers, "batches_per_epoch": self.batches_per_epoch}
        checkpoint.check_facts(manifest, now, self.config.mismatches(manifest["config"]))
        checkpoint.check_model(manifest, self.net)
        return manifest


def count_parameters(net: Any) -> int:
    """Numbers that are trained."""
    return sum(int(np.prod(parameter.shape)) for parameter in net.collect_params().values()
               if parameter.grad_req != "null")
