"""From readings to findings: of each system at each setting the median of its jobs, and how near the limit it comes."""
import statistics
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from kvstore.messages.codecs import codec
from odsgd.lab.bench.config import BenchConfig
from odsgd.lab.bench.run import Measured, Reading, Setting, nbytes
from odsgd.lab.bench.systems import AUTO, System


class Finding(NamedTuple):
    """One system at one setting; a line of the table."""

    setting: Setting
    system: str
    compute_ms: float
    iterations_ms: List[float]  # of each job, the mean iteration
    limit_ms: float  # 0: no limit says anything (loopback, and nothing computed)
    speedup: Optional[float]  # iterations per second over the baseline's
    worker_cpu_ms: float
    server_cpu_ms: Optional[float]
    worker_memory_mb: float
    server_memory_mb: Optional[float]
    reference: Optional[float]

    @property
    def iteration_ms(self) -> float:
        return statistics.median(self.iterations_ms)

    @property
    def share(self) -> Optional[float]:
        """Limit / iteration: 1 is as fast as can be."""
        return self.limit_ms / self.iteration_ms if self.limit_ms else None


def findings(config: BenchConfig, measured: Measured) -> List[Finding]:
    """The findings in the order of the configuration: rates, models, workers, computing times, systems."""
    found: Dict[Tuple[Setting, str], List[Reading]] = {}
    for reading in measured.readings:
        found.setdefault((reading.setting, reading.system), []).append(reading)
    ordered = [(Setting(rate, model, workers, str(compute)), system) for rate in config.rates for model in config.models
               for workers in config.workers for compute in config.computes(model) for system in config.systems]
    return [_finding(config, measured.goodput(setting.rate), system, found[setting, system.label],
                     found.get((setting, config.baseline or "")))
            for setting, system in ordered if (setting, system.label) in found]


def _finding(config: BenchConfig, goodput: float, system: System, readings: Sequence[Reading],
             baseline: Optional[Sequence[Reading]]) -> Finding:
    setting, compute_ms = readings[0].setting, readings[0].compute_ms
    iterations_ms = [reading.iteration_ms for reading in readings]
    on_wire = wire_nbytes(system, setting.workers, nbytes(setting.model))
    speedup = None
    if baseline:
        speedup = statistics.median(reading.iteration_ms for reading in baseline) / statistics.median(iterations_ms)
    return Finding(
        setting, system.label, compute_ms, iterations_ms, bound_ms(compute_ms, on_wire, goodput), speedup,
        statistics.median(reading.worker_cpu_ms for reading in readings),
        _over(statistics.median, [reading.server_cpu_ms for reading in readings]),
        max(reading.worker_memory_mb for reading in readings),
        _over(max, [reading.server_memory_mb for reading in readings]),
        config.reference_values.get(f"{setting.rate}/{setting.workers}/{setting.model}/{system.label}"))


def _over(what: Callable[[List[float]], float], values: Sequence[Optional[float]]) -> Optional[float]:
    """`what` of the values of a system's servers; None if it has no servers."""
    there = [value for value in values if value is not None]
    return what(there) if there else None


def wire_nbytes(system: System, workers: int, nbytes: int) -> float:
    """Bytes over the busiest link in one direction per iteration, of `nbytes` of parameters.

    docs/how-to/benchmark.md has them for each pattern of traffic. A method that communicates every T iterations needs a
    T-th on average.
    """
    there, back = (codec(name).nbytes(nbytes // 4) / interval
                   for name, interval in zip(system.codecs(workers), system.intervals(workers)))
    if system.servers is None or system.servers == AUTO:
        return (workers - 1) / workers * (there + back)
    return max(workers / int(system.servers), 1) * max(there, back)


def bound_ms(compute_ms: float, nbytes: float, goodput: float) -> float:
    """max(T_cop, T_wire), which no schedule beats; `goodput`: bytes per second, infinite where links are not shaped."""
    return max(compute_ms, 1000 * nbytes / goodput)
