"""The jobs of a benchmark, one after the other: for each rate a cluster, and on it every system in turn, repeatedly.

Each job is launched by a process on the cluster's launching machine: ``python -m odsgd.lab.bench.run SPEC.json``.
"""
import contextlib
import dataclasses
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from kvstore.errors import ConfigError
from odsgd.lab import processes
from odsgd.lab.bench import models
from odsgd.lab.bench.config import NO_CLUSTER, BenchConfig, ComputingTime
from odsgd.lab.bench.systems import FOREIGN, STOCK, System
from odsgd.lab.cluster import Cluster
from odsgd.launch import command, supervisor
from odsgd.report.runs import events_of

LEAST_ITERATIONS, MOST_ITERATIONS = 8, 200
LOOPBACK_GUESS = 5e8
"""Bytes per second, only to guess how many iterations fill a measurement."""


class Setting(NamedTuple):
    """Under these conditions several systems are measured; one block of the table."""

    rate: str
    model: str
    workers: int
    compute: str


class Reading(NamedTuple):
    """One job's measurement of its system at one setting."""

    setting: Setting
    system: str
    compute_ms: float
    iteration_ms: float  # the mean, as a training run takes: a median would hide iterations that are long in turn
    times_ms: List[List[float]]  # of every worker, of every iteration
    worker_cpu_ms: float
    worker_memory_mb: float
    server_cpu_ms: Optional[float]
    server_memory_mb: Optional[float]


class Measured(NamedTuple):
    readings: List[Reading]
    goodputs: Dict[str, List[float]]  # per rate, bytes per second over the links each way, before and after the jobs
    failures: List[str]

    def goodput(self, rate: str) -> float:
        """B, in bytes per second; infinite where links are not shaped."""
        return statistics.median(self.goodputs[rate])


Usage = Dict[str, float]


class JobFailed(Exception):
    """One job has not come to its end; the others go on."""


def measure(config: BenchConfig, say: Callable[[str], None]) -> Measured:
    measured = Measured([], {}, [])
    systems = _available(config, say)
    # The memory of a process says something of a model only if it has had no other.
    together = [[model] for model in config.models] if "memory" in config.columns else [config.models]
    jobs = [(repetition, workers, system, group) for repetition in range(config.repeat) for workers in config.workers
            for group in together for system in systems]
    for rate in config.rates:
        hosts = max(config.workers) + max(system.extra_hosts() for system in systems)
        with contextlib.nullcontext() if rate == NO_CLUSTER else Cluster.up(hosts, rate) as cluster:
            measured.goodputs[rate] = _goodputs(cluster)
            goodput = measured.goodput(rate)
            for number, (repetition, workers, system, group) in enumerate(jobs, start=1):
                say(f"{rate}: job {number} of {len(jobs)}: {system.label}, {workers} workers, {', '.join(group)}")
                try:
                    measured.readings.extend(job(config, cluster, rate, goodput, workers, system, group))
                except JobFailed as failure:
                    measured.failures.append(f"{system.label}, {workers} workers, {rate}, repetition "
                                             f"{repetition + 1}: {failure}")
            measured.goodputs[rate].extend(_goodputs(cluster))
    return measured


def _available(config: BenchConfig, say: Callable[[str], None]) -> Sequence[System]:
    """The systems whose Python is known, or which need no other one."""
    missing = {system.name for system in config.systems if system.name in FOREIGN and not config.python(system.name)}
    systems = [system for system in config.systems if system.name not in missing]
    for name in sorted(missing):
        flag = f"--{name.split('/')[0]}-python PATH"
        if not systems:
            raise ConfigError(f"{name} needs a Python that has it: {flag}")
        say(f"{name} is left out: say where a Python that has it is, {flag}\n")
    return systems


def _goodputs(cluster: Optional[Cluster]) -> List[float]:
    """Bytes per second over the links each way, twice; infinite on loopback, and where one host is alone."""
    if cluster is None or len(cluster.hosts) == 1:
        return [math.inf]
    return [way for _ in range(2) for way in cluster.goodput()]


def job(config: BenchConfig, cluster: Optional[Cluster], rate: str, goodput: float, workers: int, system: System,
        group: Sequence[str]) -> List[Reading]:
    """Measure some models in one job of a system; without a cluster on this machine's loopback."""
    push, fetch = system.intervals(workers)
    period = push * fetch // math.gcd(push, fetch)
    stints = {(model, compute): Stint.of(config, model, compute, workers, goodput, period)
              for model in group for compute in config.computes(model)}
    with tempfile.TemporaryDirectory(prefix="odsgd-bench-") as folder:
        flags = ["-n", str(workers), "-s", system.servers or "0", *(["-H", cluster.hostfile] if cluster else []),
                 "--startup-timeout", "0", "--store", "none", "--env", "OMP_NUM_THREADS:1",
                 "--env", f"ODSGD_BENCH_FOLDER:{folder}"]
        flags += ["--wire", system.wire] if system.servers else []
        for variable, value in STOCK.get(system.name, {}).items():
            flags += ["--env", f"{variable}:{value}"]
        spec = Path(folder, "spec.json")
        spec.write_text(json.dumps({
            "folder": folder, "system": {"name": system.name, "options": system.options, "stock": system.stock},
            "dtype": config.dtype, "models": [{"shapes": models.shapes(model), "stints": [
                stint._asdict() for (of, _), stint in stints.items() if of == model]} for model in group],
            "flags": [*flags, *system.worker_command(config.python(system.name)), str(spec)],
            "server_command": system.server_command}), encoding="utf-8")
        _await(cluster, [sys.executable, "-m", "odsgd.lab.bench.run", str(spec)], config.timeout_s)
        found = [json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(workers)]
        servers = [events_of(Path(folder, f"server-{rank}")) for rank in range(system.num_servers(workers))]
    return [Reading(Setting(rate, model, workers, str(compute)), system.label, stint.compute_ms,
                    *_merged(by_worker, servers))
            for ((model, compute), stint), by_worker in zip(stints.items(), zip(*found))]


def _await(cluster: Optional[Cluster], words: Sequence[str], timeout_s: float) -> None:
    try:
        done = cluster.run(words, timeout=timeout_s) if cluster else processes.completed(
            subprocess.Popen(words, **processes.READ_TO_THE_END), timeout_s)
    except subprocess.TimeoutExpired as overdue:
        said = overdue.stderr if isinstance(overdue.stderr, str) else ""
        raise JobFailed(f"not finished within {timeout_s:g} s (`timeout_s`){_last_lines(said)}") from None
    if done.returncode:
        raise JobFailed(f"exit code {done.returncode}{_last_lines(done.stderr.strip() or done.stdout)}")


def _last_lines(said: str) -> str:
    return "".join("\n    " + line for line in said.strip().splitlines()[-12:])


def _merged(by_worker: Sequence[Dict[str, Any]], servers: Sequence[List[Usage]]) -> Tuple[Any, ...]:
    """Means over workers and over servers, for the time when all workers had begun and none had ended.

    Without that, workers that do not wait for each other would have the links to themselves at the end.
    """
    moments = [worker["moments_s"] for worker in by_worker]
    began_s, ended_s = max(mine[0] for mine in moments), min(mine[-1] for mine in moments)
    counts = [iterations(mine, began_s, ended_s) for mine in moments]
    if min(counts) < 1:
        raise JobFailed("one worker ended about when another began to be measured; raise `seconds`")
    count = statistics.mean(counts)
    times_ms = [[round(1000 * (end - start), 3) for start, end in zip(mine, mine[1:])] for mine in moments]
    of_workers = [used(worker["usage"], began_s, ended_s) for worker in by_worker]
    of_servers = [used(log, began_s, ended_s) for log in servers]
    return (round(1000 * (ended_s - began_s) / count, 3), times_ms, *_per_iteration(of_workers, count),
            *_per_iteration(of_servers, count))


def iterations(moments_s: Sequence[float], began_s: float, ended_s: float) -> float:
    """How many iterations, which began and ended at these moments, fit between two others.

    >>> iterations([0.0, 2.0, 4.0], 1.0, 4.0)
    1.5
    """
    import numpy as np
    before, after = np.interp([began_s, ended_s], moments_s, range(len(moments_s)))
    return float(after - before)


def used(log: Sequence[Usage], began_s: float, ended_s: float) -> Usage:
    """The usage of a process from one moment to another: CPU seconds, and the largest memory.

    >>> log = [{"at_s": 0, "cpu_s": 0, "memory_mb": 8}, {"at_s": 2, "cpu_s": 1, "memory_mb": 9}]
    >>> used(log, 1, 2)
    {'cpu_s': 0.5, 'memory_mb': 9.0}
    """
    import numpy as np
    at_s, cpu_s, memory_mb = ([line[what] for line in log] for what in ("at_s", "cpu_s", "memory_mb"))
    began_cpu_s, ended_cpu_s = np.interp([began_s, ended_s], at_s, cpu_s)
    return {"cpu_s": float(ended_cpu_s - began_cpu_s), "memory_mb": float(np.interp(ended_s, at_s, memory_mb))}


def _per_iteration(usages: Sequence[Usage], count: float) -> Tuple[Optional[float], Optional[float]]:
    """CPU milliseconds in each of `count` iterations and memory, means over processes; None, None without any."""
    if not usages:
        return None, None
    return (round(1000 * statistics.mean(usage["cpu_s"] for usage in usages) / count, 3),
            round(statistics.mean(usage["memory_mb"] for usage in usages), 1))


class Stint(NamedTuple):
    """How long a job measures one model with one computing time, as its workers are told."""

    compute_ms: float
    iterations: int
    warm_up: int

    @classmethod
    def of(cls, config: BenchConfig, model: str, compute: ComputingTime, workers: int, goodput: float,
           period: int) -> "Stint":
        """`period`: iterations after which pushes and fetches recur; whole ones are measured, after a whole one."""
        wire_ms = 1000 * workers * nbytes(model) / (goodput if math.isfinite(goodput) else LOOPBACK_GUESS)
        compute_ms = compute.milliseconds(wire_ms)
        iterations = round(1000 * config.seconds / (compute_ms + wire_ms))
        iterations = min(max(iterations, LEAST_ITERATIONS), MOST_ITERATIONS)
        return cls(compute_ms, *(-(-count // period) * period for count in (iterations, config.warm_up)))


def nbytes(model: str) -> int:
    """N, of single precision."""
    return 4 * models.size(model)


def main(file: str) -> int:
    """Launch one job with the flags that stand there, and with servers that note their usage; the exit code."""
    asked = json.loads(Path(file).read_text(encoding="utf-8"))
    parsed = command.parse(asked["flags"])
    return supervisor.run(dataclasses.replace(parsed, server_command=tuple(asked["server_command"])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
