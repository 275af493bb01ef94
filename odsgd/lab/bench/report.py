"""What a benchmark says: a table on the terminal, the same as Markdown with the whole configuration, and JSON."""
from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from odsgd.lab.bench import models
from odsgd.lab.bench.config import NO_CLUSTER, BenchConfig
from odsgd.lab.bench.results import Case, Row, goodput, is_finite
from odsgd.lab.bench.run import Measured

HOW_MEASURED = """\
Iteration: milliseconds from one iteration's end to the next, the mean over a job's iterations and workers (after the
warm-up of all, while none has ended); the table has the median over the jobs, and the lowest and the highest. Limit:
max(T_cop, T_wire), where T_wire is the time the busiest link needs for one direction of the system's traffic pattern at
the measured goodput B (`odsgd/bench/limits.py`); share: limit / iteration. The emulated accelerator computes without
using a core, and the gradients appear over T_cop, last layer first, as they have elements. T_cop 0: the exchange
alone."""


class Column:
    """One column: its heading, and the text of its cell."""

    def __init__(self, heading: str, cell: Callable[[Row], str]) -> None:
        self.heading, self.cell = heading, cell


def columns(config: BenchConfig) -> List[Column]:
    """The columns that this configuration asks for."""
    found = [
        Column("system", lambda row: row.system),
        Column("iteration, ms", lambda row: _ms(row.iteration_ms)),
        Column("lowest – highest", lambda row: f"{_ms(min(row.iterations_ms))} – {_ms(max(row.iterations_ms))}"),
        Column("limit, ms", lambda row: _ms(row.limit_ms) if row.limit_ms else "–"),
        Column("share", lambda row: "–" if row.share is None else f"{row.share:.2f}")]
    if config.batch_size:
        found.append(Column("samples/s", lambda row: f"{1000 * config.batch_size / row.iteration_ms:.1f}"))
    if config.baseline:
        found.append(Column(f"faster than {config.baseline}",
                            lambda row: "–" if row.speedup is None else f"{100 * (row.speedup - 1):+.0f} %"))
    if "size" in config.columns:
        found.append(Column("ms per M parameters",
                            lambda row: f"{row.iteration_ms / _millions(row.case.model):.2f}"))
    if "cpu" in config.columns:
        found.append(Column("CPU of a worker, ms", lambda row: _ms(row.worker_cpu_ms)))
        found.append(Column("of a server, ms", lambda row: _optional(row.server_cpu_ms, _ms)))
    if "memory" in config.columns:
        found.append(Column("memory of a worker, MB", lambda row: f"{row.worker_memory_mb:.0f}"))
        found.append(Column("of a server, MB", lambda row: _optional(row.server_memory_mb, "{:.0f}".format)))
    if config.reference_values:
        found.append(Column(config.reference, lambda row: _optional(row.reference, "{:g}".format)))
    return found


def table(config: BenchConfig, rows: Sequence[Row], measured: Measured) -> str:
    """Aligned text, a block per case."""
    blocks = []
    for case, of_case in _by_case(rows):
        blocks.append(headline(case, of_case, measured) + "\n" + _aligned(columns(config), of_case))
    return "\n\n".join(blocks + _failures(measured))


def headline(case: Case, rows: Sequence[Row], measured: Measured) -> str:
    """What the systems of a block were measured at."""
    tensors = models.shapes(case.model)
    return (f"{case.model} ({_millions(case.model):.2f} M parameters in {len(tensors)} tensors), {case.workers} "
            f"worker{'s' * (case.workers != 1)}, T_cop {_ms(rows[0].compute_ms)} ms, {links(case.rate, measured)}")


def links(rate: str, measured: Measured) -> str:
    """A rate in words, with what was measured on it."""
    if rate == NO_CLUSTER:
        return "loopback"
    found = goodput(measured, rate)
    return f"links of {rate}" + (f" (B = {8 * found / 1e6:.0f} Mbit/s)" if is_finite(found) else "")


def markdown(config: BenchConfig, rows: Sequence[Row], measured: Measured, machine: Dict[str, str],
             command: Sequence[str]) -> str:
    """A page: the tables, and all that one needs to make them again."""
    parts = [f"# {config.title}", f"<!-- Written by `odsgd bench`: {shlex.join(command)} -->"]
    parts += [config.note.strip()] if config.note.strip() else []
    for case, of_case in _by_case(rows):
        parts += [f"## {headline(case, of_case, measured)}", _piped(columns(config), of_case)]
    parts += ["## How it was measured", HOW_MEASURED, _pairs({**machine, "command": f"`{shlex.join(command)}`"})]
    parts += [_pairs(configuration(config)), *_failures(measured)]
    return "\n\n".join(parts) + "\n"


def as_json(config: BenchConfig, rows: Sequence[Row], measured: Measured, machine: Dict[str, str]) -> Dict[str, Any]:
    """Everything, also each iteration of each job."""
    return {"machine": machine, "configuration": configuration(config), "failures": measured.failures,
            "goodput_bytes_per_s": {rate: values for rate, values in measured.goodput.items() if rate != NO_CLUSTER},
            "rows": [{**row._asdict(), "case": row.case._asdict(), "iteration_ms": row.iteration_ms} for row in rows],
            "runs": [run._asdict() for run in measured.runs]}


def configuration(config: BenchConfig) -> Dict[str, str]:
    """What was asked for, apart from the files to write."""
    skipped = ("title", "note", "reference", "reference_values", "markdown", "json", "png", "torch_python", "columns")
    return {field.name: _words(getattr(config, field.name)) for field in dataclasses.fields(config)
            if field.name not in skipped}


def machine(config: BenchConfig, loads: Tuple[float, float]) -> Dict[str, str]:
    """Where it was measured; `loads`: of the machine, before and after."""
    import numpy

    import odsgd
    from kvstore.engine._mxnet import mx
    versions = (f"Python {platform.python_version()}, MXNet {mx.__version__}, NumPy {numpy.__version__}, odsgd "
                f"{odsgd.__version__} at commit {_output(['git', 'describe', '--always', '--dirty'])}")
    if config.torch_python:
        versions += f", PyTorch {_output([config.torch_python, '-c', 'import torch; print(torch.__version__)'])}"
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2 ** 30
    return {"date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()) + " UTC",
            "machine": f"{os.cpu_count()} cores ({_cpu()}), {memory_gb:.0f} GiB",
            "load before and after": "{:.1f}, {:.1f}".format(*loads),
            "system": f"Linux {platform.release()}", "versions": versions,
            "links": "emulated by `odsgd cluster`: all hosts on this machine" if set(config.rates) != {NO_CLUSTER}
            else "loopback", "threads": "OMP_NUM_THREADS=1"}


def write(path: Optional[str], text: str) -> None:
    """To a file, if one was asked for."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")


def dumps(content: Dict[str, Any]) -> str:
    """As JSON, with a line per value that matters and not per iteration."""
    return json.dumps(content, indent=1, default=str)


def _by_case(rows: Sequence[Row]) -> List[Tuple[Case, List[Row]]]:
    found: Dict[Case, List[Row]] = {}
    for row in rows:
        found.setdefault(row.case, []).append(row)
    return list(found.items())


def _cells(columns: Sequence[Column], rows: Sequence[Row]) -> List[List[str]]:
    return [[column.heading for column in columns], *([column.cell(row) for column in columns] for row in rows)]


def _aligned(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    lines = _cells(columns, rows)
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  " + "  ".join([first.ljust(widths[0])] + [cell.rjust(width) for cell, width in
                                                                  zip(cells, widths[1:])]) for first, *cells in lines)


def _piped(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    head, *body = ["| " + " | ".join(cells) + " |" for cells in _cells(columns, rows)]
    return "\n".join([head, "|---|" + "---:|" * (len(columns) - 1), *body])


def _pairs(pairs: Dict[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in pairs.items())])


def _failures(measured: Measured) -> List[str]:
    if not measured.failures:
        return []
    return [f"{len(measured.failures)} jobs failed and are missing above:\n" + "\n".join(
        f"- {failure}" for failure in measured.failures)]


def _ms(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _optional(value: Optional[float], text: Callable[[float], str]) -> str:
    return "–" if value is None else text(value)


def _millions(model: str) -> float:
    return sum(map(models.size, models.shapes(model))) / 1e6


def _words(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_words, value))
    if value is None:
        return "–"
    return str(getattr(value, "label", value))


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, universal_newlines=True,
                              timeout=60, cwd=os.path.dirname(sys.modules["odsgd"].__file__ or "."))
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
