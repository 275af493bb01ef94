"""From runs to rows: for each system and case the median over the jobs, its spread, and how near the limit it comes."""
from __future__ import annotations

import math
import statistics
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from odsgd.lab.bench import limits
from odsgd.lab.bench.config import BenchConfig
from odsgd.lab.bench.run import Measured, Run, nbytes


class Case(NamedTuple):
    """What several systems were measured at; one block of the table."""

    rate: str
    model: str
    workers: int
    compute: str


class Row(NamedTuple):
    """One system at one case."""

    case: Case
    system: str
    compute_ms: float
    iterations_ms: List[float]
    """Of each job, the mean iteration."""
    limit_ms: float
    """0: there is none that says anything (loopback, and nothing computed)."""
    speedup: Optional[float]
    """Iterations per second over the baseline's."""
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
        """Of the limit: 1 is as fast as can be."""
        return self.limit_ms / self.iteration_ms if self.limit_ms else None


def goodput(measured: Measured, rate: str) -> float:
    """B, in bytes per second."""
    return statistics.median(measured.goodput[rate])


def rows(config: BenchConfig, measured: Measured) -> List[Row]:
    """In the order of the configuration: rates, models, workers, computing times, systems."""
    found: Dict[Tuple[Case, str], List[Run]] = {}
    for run in measured.runs:
        found.setdefault((Case(run.rate, run.model, run.workers, run.compute), run.system), []).append(run)
    ordered = [(Case(rate, model, workers, str(compute)), system) for rate in config.rates for model in config.models
               for workers in config.workers for compute in config.computes(model) for system in config.systems]
    return [_row(config, measured, case, system, found[case, system.label], found.get((case, config.baseline or "")))
            for case, system in ordered if (case, system.label) in found]


def _row(config: BenchConfig, measured: Measured, case: Case, system: Any, runs: Sequence[Run],
         baseline: Optional[Sequence[Run]]) -> Row:
    iterations_ms = [run.iteration_ms for run in runs]
    wire_nbytes = limits.wire_nbytes(system, case.workers, nbytes(case.model))
    reference = config.reference_values.get("/".join((case.rate, str(case.workers), case.model, system.label)))
    return Row(
        case, system.label, runs[0].compute_ms, iterations_ms,
        limits.bound_ms(runs[0].compute_ms, wire_nbytes, goodput(measured, case.rate)),
        _median(baseline, lambda run: run.iteration_ms) / statistics.median(iterations_ms) if baseline else None,
        _median(runs, lambda run: run.worker_cpu_ms),
        _median(runs, lambda run: run.server_cpu_ms) if runs[0].server_cpu_ms is not None else None,
        max(run.worker_memory_mb for run in runs),
        max(run.server_memory_mb or 0.0 for run in runs) if runs[0].server_memory_mb is not None else None,
        reference if reference is None else float(reference))


def _median(runs: Sequence[Run], what: Callable[[Run], Any]) -> float:
    return float(statistics.median(what(run) for run in runs))


def is_finite(value: float) -> bool:
    """Whether links were shaped."""
    return math.isfinite(value)
