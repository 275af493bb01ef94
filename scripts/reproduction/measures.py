"""Numbers of one finished run, by name; and of several runs, their mean with a confidence interval."""
from __future__ import annotations

import math
import statistics
from typing import Callable, Dict, NamedTuple, Optional, Sequence, Tuple

from odsgd.virtual.description import TIME
from scripts.reproduction.results import Result

CONFIDENCE = 0.95

FEW = 5 / 160
"""Share of the epochs, the last, that `accuracy5` is averaged over: one at least."""


class Measure(NamedTuple):
    """How it is called and written, and what it is in a result; NaN where the run has no such number."""

    label: str
    form: str
    of: Callable[[Result], float]

    def text(self, value: float) -> str:
        return "-" if math.isnan(value) else format(value, self.form)


def _last(column: str) -> Callable[[Result], float]:
    return lambda result: 100 * result.column(column)[-1]


def diverged(result: Result) -> bool:
    """Whether its loss was not finite in the end."""
    return math.isnan(result.column("train_loss")[-1])


def _vibration(result: Result) -> float:
    """Between an epoch's test accuracy and the next one's, over the second half; NaN if epochs of it were left out."""
    tests = dict(zip(result.column("epoch"), result.column("test_accuracy")))
    steps = [100 * (tests.get(epoch + 1, math.nan) - tests.get(epoch, math.nan))
             for epoch in range(int(max(tests)) // 2 + 1, int(max(tests)))]
    return statistics.pstdev(steps) if steps and math.isfinite(sum(steps)) else math.nan


def _smoothed(result: Result) -> float:
    last = max(1, round(FEW * result.config["epochs"]))
    return 100 * statistics.fmean(result.column("test_accuracy")[-last:])


def _early(result: Result) -> float:
    epochs = result.column("epoch")
    return 100 * statistics.fmean(accuracy for epoch, accuracy in zip(epochs, result.column("test_accuracy"))
                                  if epoch <= math.ceil(epochs[-1] / 2))


def _halfway(result: Result) -> float:
    """The training accuracy of the last epoch that was kept of the first half."""
    half = [accuracy for epoch, accuracy in zip(result.column("epoch"), result.column("train_accuracy"))
            if epoch <= max(1, result.config["epochs"] / 2)]
    return 100 * half[-1]


def _staleness(key: str) -> Callable[[Result], float]:
    return lambda result: float(result.staleness[key]) if result.staleness else math.nan


def _beyond(result: Result) -> float:
    """Of all pushes, in percent, those whose staleness is above 2n; NaN of what has no n."""
    if not result.staleness or "n" not in result.config:
        return math.nan
    bound, histogram = 2 * result.config["n"], result.staleness["histogram"]
    return 100 * sum(pushes for tau, pushes in histogram.items() if int(tau) > bound) / sum(histogram.values())


def _speed(batch_size: Optional[int]) -> Callable[[Result], float]:
    """Samples of one worker in a virtual second, with mini-batches of its own size or of another in the same time."""
    def of(result: Result) -> float:
        iterations, seconds = result.column("iteration")[-1], result.column("virtual_seconds")[-1]
        return float((batch_size or result.config["batch_size"]) * iterations / seconds)
    return of


def _speed_later(result: Result) -> float:
    """The same with mini-batches of 128 after the first epoch, in which the warm-up is; NaN of a single one."""
    iterations, seconds = (values[-1] - values[0] for values in map(result.column, ("iteration", "virtual_seconds")))
    return 128 * iterations / seconds if seconds else math.nan


def _reached(accuracy: float) -> Callable[[Result], float]:
    """Virtual seconds until the test accuracy is reached, on a line between two epochs; NaN where it never is, and
    where the first test passes it: that would be the time of an epoch, and no learning.
    """
    def of(result: Result) -> float:
        points = list(zip(result.column("virtual_seconds"), result.column("test_accuracy")))
        for (before_s, before), (seconds, now) in zip(points, points[1:]):
            if before >= accuracy:
                break
            if before < accuracy <= now:
                return before_s + (seconds - before_s) * (accuracy - before) / (now - before)
        return math.nan
    return of


def _iteration_ms(result: Result) -> float:
    return 1000 * result.column("virtual_seconds")[-1] / result.column("iteration")[-1]


def _exposed_ms(result: Result) -> float:
    """Of an iteration, that in which a worker does not compute; NaN unless the cell says how long it does."""
    computing = result.asked["cluster"].get("compute", {}).get("iteration")
    return _iteration_ms(result) - 1000 * TIME.convert(computing) if computing else math.nan


MEASURES: Dict[str, Measure] = {
    "accuracy": Measure("test accuracy, %", ".2f", _last("test_accuracy")),
    "accuracy5": Measure("test accuracy at the end, %", ".2f", _smoothed),
    "learned": Measure("test accuracy of runs that did not diverge, %", ".2f",
                       lambda result: math.nan if diverged(result) else _last("test_accuracy")(result)),
    "vibration": Measure("deviation of the change of the test accuracy from epoch to epoch, second half, points",
                         ".2f", _vibration),
    "early_accuracy": Measure("test accuracy, mean of the first half of the epochs, %", ".2f", _early),
    "error": Measure("test error, %", ".2f", lambda result: 100 - _last("test_accuracy")(result)),
    "train_accuracy": Measure("training accuracy, %", ".2f", _last("train_accuracy")),
    "half_train_accuracy": Measure("training accuracy after half of the epochs, %", ".2f", _halfway),
    "train_error": Measure("training error, %", ".2f", lambda result: 100 - _last("train_accuracy")(result)),
    "staleness": Measure("mean staleness", ".2f", _staleness("mean")),
    "staleness_max": Measure("largest staleness", ".0f", _staleness("max")),
    "beyond": Measure("pushes with a staleness above 2n, %", ".4f", _beyond),
    "speed": Measure("samples/s of a worker", ".1f", _speed(None)),
    "speed128": Measure("samples/s of a worker", ".1f", _speed(128)),
    "later128": Measure("samples/s of a worker after the first epoch", ".1f", _speed_later),
    "throughput": Measure("samples/s of all workers", ".0f",
                          lambda result: result.asked["cluster"].get("workers", 1) * _speed(None)(result)),
    "iteration": Measure("ms per iteration", ".1f", _iteration_ms),
    "exposed": Measure("ms per iteration not spent computing", ".2f", _exposed_ms),
    "waiting": Measure("share of the time not spent computing, %", ".1f",
                       lambda result: 100 * _exposed_ms(result) / _iteration_ms(result)),
    **{f"seconds{mark}": Measure(f"virtual seconds to a test accuracy of {mark} %", ".2f", _reached(mark / 100))
       for mark in (90, 93, 98)},
    "hours": Measure("hours", ".3f", lambda result: result.column("virtual_seconds")[-1] / 3600),
}


TIMES = {"staleness", "staleness_max", "beyond", "speed", "speed128", "later128", "throughput", "iteration", "exposed",
         "waiting", "hours"} | {name for name in MEASURES if name.startswith("seconds")}
"""Measures that a simulator of the network makes; the others are of learning."""


class Estimate(NamedTuple):
    """A mean over seeds, with its confidence interval: infinite for a single one."""

    mean: float
    low: float
    high: float
    seeds: int


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Mean and interval by Student's t.

    >>> "{:.3f}, {:.3f} to {:.3f}".format(*estimate([1.0, 2.0, 3.0]))
    '2.000, -0.484 to 4.484'
    >>> estimate([7.0])
    Estimate(mean=7.0, low=-inf, high=inf, seeds=1)
    """
    from scipy.special import stdtrit
    mean, n = statistics.fmean(values), len(values)
    if n < 2 or any(map(math.isnan, values)):
        return Estimate(mean, -math.inf, math.inf, n)
    half = float(stdtrit(n - 1, 0.5 + confidence / 2)) * statistics.stdev(values) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def spread(values: Sequence[float]) -> Tuple[float, float]:
    """Mean and standard deviation, which is NaN for a single value."""
    return statistics.fmean(values), (statistics.stdev(values) if len(values) > 1 and not any(map(math.isnan, values))
                                      else math.nan)
