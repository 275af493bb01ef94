"""Loss, accuracy, speed and learning rates of one worker: of a few iterations, and of an epoch; and staleness."""
import collections
import contextlib
import dataclasses
import math
from typing import Any, Callable, Dict, Iterator, Tuple

from kvstore.errors import DivergedError
from kvstore.fronts.gluon.store import Store
from kvstore.job import environment
from kvstore.job.pulse import beyond
from kvstore.session.staleness import Staleness, mean
from odsgd.config.train import TrainConfig
from odsgd.training.metrics import Clock, Meter, Sums
from odsgd.training.schedule import Schedule


@dataclasses.dataclass
class Interval:
    """The iterations from one reading of the clocks on, and what they counted; `of_all` workers of a virtual cluster
    had done so many by then.
    """

    iteration: int
    own_s: float
    virtual_s: float
    of_all: int
    waited_s: float
    sums: Sums = dataclasses.field(default_factory=Sums)


class Measurements:
    """Counts the iterations of one worker: `interval` since the last line for the user, `epoch` in this epoch."""

    def __init__(self, config: TrainConfig, schedule: Schedule, store: Store, trainer: Any) -> None:
        self._config, self._schedule, self._store, self._trainer = config, schedule, store, trainer
        self.meter, self.clock = Meter(self._take), Clock()
        self._cluster_s: Callable[[], float] = getattr(store.session.transport, "seconds", lambda: 0.0)
        self._of_all: Callable[[], int] = getattr(store.session.transport, "iterations", lambda: 0)
        self.virtual_before_s = 0.0  # before the run was resumed
        self._apart_s = 0.0
        self.interval = self.epoch = self._from_here()

    def begin_interval(self) -> None:
        """Count a new interval from here on."""
        self.interval = self._after(self.interval)

    def begin_epoch(self) -> None:
        """Count a new epoch from here on; its clock runs."""
        self.clock.go_on()
        self.epoch = self._after(self.epoch)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, the clock of an asynchronous job goes on, but the time is none of this worker's iterations."""
        began_s = self.clock.read()
        yield
        self._apart_s += self.clock.read() - began_s

    def _own_s(self) -> float:
        """Seconds of this worker's iterations."""
        return self.clock.read() - self._apart_s

    def _from_here(self) -> Interval:
        return Interval(self._store.iteration, self._own_s(), self.virtual_s(), self._of_all(), self._store.waited_s)

    def _after(self, before: Interval) -> Interval:
        """A new interval. What a sample of waiting stands for beyond the time of the one `before` counts in this."""
        new = self._from_here()
        new.waited_s -= beyond(new.waited_s - before.waited_s, new.own_s - before.own_s)
        return new

    def virtual_s(self) -> float:
        """Seconds of the run so far on a virtual cluster, without evaluations and checkpoints; 0 on a real one."""
        return round(self.virtual_before_s + self._cluster_s(), 9)  # whole nanoseconds

    def _take(self, iteration: int, sums: Sums) -> None:
        """The numbers of an iteration have arrived."""
        if not math.isfinite(sums.loss) and self._config.options.on_nan in ("stop", "find"):
            lower = "lr or lr_local" if self._config.steps_locally else "lr"
            lengthen = "warmup or lr_warmup" if hasattr(self._config.options, "warmup") else "lr_warmup"
            raise DivergedError(
                f"iteration {iteration + 1}: the loss of this worker is {sums.mean_loss} "
                f"({self._schedule.settings(iteration)}). Lower {lower}, or lengthen {lengthen}; --on-nan continue "
                "goes on regardless")
        self.epoch.sums.add(sums)
        self.interval.sums.add(sums)

    def record(self, interval: Interval) -> Dict[str, Any]:
        """Numbers of an interval that ends here, as interval and epoch records have them."""
        done = self._store.iteration
        iterations, seconds = done - interval.iteration, self._own_s() - interval.own_s
        waited_s = min(self._store.waited_s - interval.waited_s, seconds)  # of a sample, so it may come to more
        present = self._store.num_workers - len(environment.absent_workers())
        lr, lr_local = self._schedule.rates(done - 1)
        follows = lr if self._config.steps_locally else None
        learned = {} if self._config.emulate_compute else interval.sums.named("train")
        return {"epoch": self._schedule.place(done - 1)[0] + 1, "iteration": done, **learned,
                "samples_per_s": iterations * self._config.worker_batch_size * present / seconds,
                "iteration_ms": 1000 * seconds / iterations,
                "lr": lr, "lr_local": follows if lr_local is None else lr_local, **self._loss_scale(),
                **(self._virtual(interval, iterations) if self._config.cluster is not None else
                   {"waiting_ms": 1000 * waited_s / iterations})}

    def _loss_scale(self) -> Dict[str, float]:
        """The scale, where there is one, and how many iterations it has left out so far."""
        scaler = self._trainer._amp_loss_scaler
        return {} if scaler is None else {"loss_scale": scaler.loss_scale, "left_out": self._store.session.left_out}

    def _virtual(self, interval: Interval, iterations: int) -> Dict[str, float]:
        """Time and speed on the virtual cluster's clock."""
        now = self.virtual_s()
        seconds = now - interval.virtual_s
        of_all = (self._of_all() - interval.of_all if self._config.asynchronous else
                  iterations * self._store.num_workers)
        samples = of_all * self._config.worker_batch_size
        return {"virtual_seconds": now, "virtual_iteration_ms": 1000 * seconds / iterations,
                "virtual_samples_per_s": samples / seconds if seconds else math.nan}


class StalenessReader:
    """Reads what the servers of an asynchronous job have counted, against the clock; made after the first step.

    Only worker 0 asks. An answer waits only for the servers, so the other workers are not held up. Seconds are worker
    0's of training, or virtual ones; they stand still during checkpoints, and evaluations in which nobody pushes. What
    the numbers mean: docs/explanation/staleness.md.
    """

    def __init__(self, store: Store, clock_s: Callable[[], float]) -> None:
        self._store, self._clock_s = store, clock_s
        self._first = self._last = self._read()
        self.arrived: Dict[int, int] = {}
        """Gradients by their staleness, between the last two calls of `interval`."""

    def interval(self) -> Dict[str, float]:
        """Mean staleness of the gradients that arrived since the last call, and updates of the weights per second."""
        before, self._last = self._last, self._read()
        self.arrived = collections.Counter(self._last[0].histogram) - collections.Counter(before[0].histogram)
        return {"staleness_mean": mean(self.arrived), "updates_per_s": _speed(before, self._last)}

    def result(self) -> Dict[str, Any]:
        """All that was counted, for a JSON file; after a resume of the whole run, but the speed of what came since.

        `lost_workers`: those without whom the job has gone on (`--on-worker-loss continue`); what they pushed counts.
        """
        reading = self._read()
        counted, _ = reading
        return {"store": self._store.type, "num_workers": self._store.num_workers,
                "staleness_mean": counted.mean, "staleness_max": counted.max,
                "pushes": counted.pushes, "updates_per_bucket": counted.updates_per_bucket,
                "updates_per_s": _speed(self._first, reading), "lr_mean": counted.lr_mean,
                "histogram": counted.histogram, "lost_workers": sorted(environment.absent_workers()),
                "workers": {rank: {"staleness_mean": mean(taus), "staleness_max": max(taus),
                                   "pushes": sum(taus.values()), "histogram": taus}
                            for rank, taus in counted.by_worker.items()}}

    def _read(self) -> Tuple[Staleness, float]:
        return self._store.statistics(), self._clock_s()


def _speed(before: Tuple[Staleness, float], now: Tuple[Staleness, float]) -> float:
    """Updates of a bucket per second; 0 if no time has passed."""
    seconds = now[1] - before[1]
    return (now[0].updates_per_bucket - before[0].updates_per_bucket) / seconds if seconds > 0 else 0.0
