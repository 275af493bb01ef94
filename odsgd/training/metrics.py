"""Loss, accuracy, speed and learning rates of one worker: of a few iterations, and of an epoch; and staleness.

Loss and accuracy are counted on the devices, and read a few iterations late, since reading a number waits for the
computation that makes it. The loop reads the loss of iteration t - IN_FLIGHT after it has queued iteration t: by then
it is there or about to be. The same read keeps MXNet's queue (and the batches in it) from growing without bound, and
finds a loss that is not finite IN_FLIGHT iterations after it arose.
"""
import collections
import contextlib
import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, Iterator, List, Optional, Tuple

from kvstore.errors import DivergedError
from kvstore.job import environment
from kvstore.job.pulse import beyond
from kvstore.session.staleness import Staleness, mean
from odsgd.config.train import TrainConfig
from odsgd.training.schedule import Schedule

if TYPE_CHECKING:  # it has MXNet, and a script of PyTorch's has these numbers, too
    from kvstore.fronts.gluon.store import Store

IN_FLIGHT = 4
"""Iterations that may be queued and not yet computed."""


@dataclasses.dataclass
class Sums:
    """Loss, right answers and examples, added up."""

    loss: float = 0.0
    hits: float = 0.0
    examples: float = 0.0

    def add(self, other: "Sums") -> None:
        self.loss += other.loss
        self.hits += other.hits
        self.examples += other.examples

    @property
    def mean_loss(self) -> float:
        """Per example; NaN if there was none."""
        return self.loss / self.examples if self.examples else math.nan

    @property
    def accuracy(self) -> float:
        """Share of right answers, 0 to 1; NaN if there was no example."""
        return self.hits / self.examples if self.examples else math.nan

    def named(self, kind: str) -> Dict[str, float]:
        """Both under their names in the metrics, of `train` or `test`."""
        return {f"{kind}_loss": self.mean_loss, f"{kind}_accuracy": self.accuracy}


class Meter:
    """Adds up what iterations counted, IN_FLIGHT iterations late.

    `on_read(iteration, sums)` is called for every iteration as its numbers arrive, in order.
    """

    def __init__(self, on_read: Callable[[int, Sums], None]) -> None:
        self._on_read = on_read
        self._queue: Deque[Tuple[int, List[Any], int]] = collections.deque()

    def add(self, iteration: int, tallies: List[Any], examples: int) -> None:
        """Iteration `iteration` has been queued and will give `tallies`; waits for an earlier one."""
        self._queue.append((iteration, tallies, examples))
        if len(self._queue) > IN_FLIGHT:
            self._read()

    def drain(self) -> None:
        """Wait for all that was added."""
        while self._queue:
            self._read()

    def _read(self) -> None:
        iteration, tallies, examples = self._queue.popleft()
        losses, hits = zip(*(tally.asnumpy().tolist() for tally in tallies))
        self._on_read(iteration, Sums(sum(losses), sum(hits), examples))


class Clock:
    """Seconds spent training: `go_on` starts it; evaluation and checkpoints stop it."""

    def __init__(self) -> None:
        self._passed_s = 0.0
        self._since: Optional[float] = None  # while it is stopped

    def read(self) -> float:
        return self._passed_s + (0.0 if self._since is None else time.perf_counter() - self._since)

    def stop(self) -> None:
        """Stop counting: what follows is not training."""
        self._passed_s, self._since = self.read(), None

    def go_on(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()


@dataclasses.dataclass
class Interval:
    """The clocks where an interval of iterations begins, and what these counted. `of_all`: how many iterations all
    workers of a virtual cluster together had done by then.
    """

    iteration: int
    own_s: float
    virtual_s: float
    of_all: int
    waited_s: float
    sums: Sums = dataclasses.field(default_factory=Sums)


class Measurements:
    """Counts the iterations of one worker: `interval` since the last line for the user, `epoch` in this epoch."""

    def __init__(self, config: TrainConfig, schedule: Schedule, store: "Store", trainer: Any) -> None:
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
        """Inside, the clock of an asynchronous job goes on, but its time counts for no iteration of this worker."""
        began_s = self.clock.read()
        yield
        self._apart_s += self.clock.read() - began_s

    def _from_here(self) -> Interval:
        return Interval(self._store.iteration, self.clock.read() - self._apart_s, self.virtual_s(), self._of_all(),
                        self._store.waited_s)

    def _after(self, before: Interval) -> Interval:
        """A new interval. Waiting is sampled: what exceeds the time of the interval `before` counts in this one."""
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
        now = self._from_here()
        done, iterations, seconds = now.iteration, now.iteration - interval.iteration, now.own_s - interval.own_s
        waited_s = min(now.waited_s - interval.waited_s, seconds)  # sampled, so it may come to more
        present = self._store.num_workers - len(environment.absent_workers())
        lr, lr_local = self._schedule.rates(done - 1)
        follows = lr if self._config.steps_locally else None
        learned = {} if self._config.emulate_compute else interval.sums.named("train")
        return {"epoch": self._schedule.place(done - 1)[0] + 1, "iteration": done, **learned,
                "samples_per_s": iterations * self._config.worker_batch_size * present / seconds,
                "iteration_ms": 1000 * seconds / iterations,
                "lr": lr, "lr_local": follows if lr_local is None else lr_local, **self._loss_scale(),
                **(self._virtual(interval, now) if self._config.cluster is not None else
                   {"waiting_ms": 1000 * waited_s / iterations})}

    def _loss_scale(self) -> Dict[str, float]:
        """The scale, where there is one, and how many iterations it has left out so far."""
        scaler = self._trainer._amp_loss_scaler
        return {} if scaler is None else {"loss_scale": scaler.loss_scale, "left_out": self._store.session.left_out}

    def _virtual(self, interval: Interval, now: Interval) -> Dict[str, float]:
        """Time and speed on the virtual cluster's clock."""
        iterations, seconds = now.iteration - interval.iteration, now.virtual_s - interval.virtual_s
        of_all = (now.of_all - interval.of_all if self._config.asynchronous else
                  iterations * self._store.num_workers)
        samples = of_all * self._config.worker_batch_size
        return {"virtual_seconds": now.virtual_s, "virtual_iteration_ms": 1000 * seconds / iterations,
                "virtual_samples_per_s": samples / seconds if seconds else math.nan}


class StalenessReader:
    """Reads what the servers of an asynchronous job have counted, against the clock; made after the first step.

    Only worker 0 asks. An answer waits only for the servers, so the other workers are not held up. Seconds are worker
    0's of training, or virtual ones; they stand still during checkpoints, and evaluations in which nobody pushes. What
    the numbers mean: docs/explanation/staleness.md.
    """

    def __init__(self, store: "Store", clock_s: Callable[[], float]) -> None:
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
        """All that was counted, for a JSON file: of the whole run, but the speed only of what came since a resume.

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
