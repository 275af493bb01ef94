"""The report of a benchmark: a table on the terminal, the same as Markdown with all options, and JSON."""
import dataclasses
import importlib
import itertools
import json
import math
import os
import platform
import shlex
import shutil
import textwrap
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from kvstore._version import commit
from kvstore.job import environment
from odsgd.lab.bench import models
from odsgd.lab.bench.config import NO_CLUSTER, BenchConfig
from odsgd.lab.bench.results import Finding
from odsgd.lab.bench.run import Measured, Setting, nbytes
from odsgd.tools import aligned, cpu, output, piped

HOW_MEASURED = """\
Iteration: milliseconds from one iteration's end to the next, the mean over a job's iterations and workers (after the
warm-up of all, while none has ended); the table has the median over the jobs, and the lowest and the highest. Limit:
max(T_cop, T_wire), where T_wire is the time the busiest link needs for one direction of the system's traffic pattern at
the measured goodput B (`odsgd/lab/bench/results.py`); share: limit / iteration. The emulated accelerator computes
without using a core, and the gradients appear over T_cop, last layer first, as they have elements. T_cop 0: the
exchange alone."""

CHANGED = "*Measured with changes to the source that no commit has: nobody can measure exactly this again.*"
_HOROVOD = "import horovod, mxnet, numpy; print(horovod.__version__, 'on MXNet', mxnet.__version__)"

Column = Tuple[str, Callable[[Finding], str]]
"""The heading of a column, and the text of its cells."""


def columns(config: BenchConfig) -> List[Column]:
    """The columns that this configuration asks for."""
    found: List[Column] = [
        ("system", lambda it: it.system),
        ("iteration, ms", lambda it: _ms(it.iteration_ms)),
        ("lowest – highest", lambda it: f"{_ms(min(it.iterations_ms))} – {_ms(max(it.iterations_ms))}"),
        ("limit, ms", lambda it: _ms(it.limit_ms) if it.limit_ms else "–"),
        ("share", lambda it: _optional(it.share, "{:.2f}".format))]
    if config.batch_size:
        found.append(("samples/s of all workers",
                      lambda it: f"{1000 * config.batch_size * it.setting.workers / it.iteration_ms:.1f}"))
    if config.baseline:
        found.append((f"faster than {config.baseline}",
                      lambda it: _optional(it.speedup, lambda speedup: f"{100 * (speedup - 1):+.0f} %")))
    if "size" in config.columns:
        found.append(("ms per M parameters", lambda it: f"{it.iteration_ms / _millions(it.setting.model):.2f}"))
    if "cpu" in config.columns:
        found += [("CPU of a worker, ms", lambda it: _ms(it.worker_cpu_ms)),
                  ("of a server, ms", lambda it: _optional(it.server_cpu_ms, _ms))]
    if "memory" in config.columns:
        found += [("memory of a worker, MB", lambda it: f"{it.worker_memory_mb:.0f}"),
                  ("of a server, MB", lambda it: _optional(it.server_memory_mb, "{:.0f}".format)),
                  ("worker / model", lambda it: _multiples(it, it.worker_memory_mb)),
                  ("server / model", lambda it: _multiples(it, it.server_memory_mb))]
    if config.reference_values:
        found.append((config.reference, lambda it: _optional(it.reference, "{:g}".format)))
    return found


def table(config: BenchConfig, findings: Sequence[Finding], measured: Measured) -> str:
    """Aligned text, a block per setting."""
    blocks = [headline(setting, block, measured) + "\n" + textwrap.indent(aligned(_cells(config, block)), "  ")
              for setting, block in _blocks(findings)]
    return "\n\n".join(blocks + _failures(measured))


def headline(setting: Setting, block: Sequence[Finding], measured: Measured) -> str:
    """The setting of a block in words."""
    return (f"{setting.model} ({_millions(setting.model):.2f} M parameters in {len(models.shapes(setting.model))} "
            f"tensors), {setting.workers} worker{'s' * (setting.workers != 1)}, T_cop {_ms(block[0].compute_ms)} ms, "
            f"{links(setting.rate, measured)}")


def links(rate: str, measured: Measured) -> str:
    """A rate in words, with the goodput measured on it."""
    if rate == NO_CLUSTER:
        return "loopback"
    goodput = measured.goodput(rate)
    return f"links of {rate}" + (f" (B = {8 * goodput / 1e6:.0f} Mbit/s)" if math.isfinite(goodput) else "")


def markdown(config: BenchConfig, findings: Sequence[Finding], measured: Measured, machine: Dict[str, str],
             command: Sequence[str]) -> str:
    """A page: the tables, and all that one needs to make them again."""
    parts = [f"# {config.title}", f"<!-- Written by `odsgd bench`: {shlex.join(command)} -->"]
    parts += [CHANGED] if "-dirty" in machine.get("versions", "") else []
    parts += [config.note.strip()] if config.note.strip() else []
    for setting, block in _blocks(findings):
        parts += [f"## {headline(setting, block, measured)}", piped(_cells(config, block))]
    parts += ["## How it was measured", HOW_MEASURED, _pairs({**machine, "command": f"`{shlex.join(command)}`"})]
    parts += [_pairs(configuration(config)), *_failures(measured)]
    return "\n\n".join(parts) + "\n"


def as_json(config: BenchConfig, findings: Sequence[Finding], measured: Measured, machine: Dict[str, str]) -> str:
    """Everything, also each iteration of each job. A row: a system at a setting, which is its case; a run: a job's."""
    rows = [{"case": finding.setting._asdict(), **finding._asdict(), "iteration_ms": finding.iteration_ms}
            for finding in findings]
    runs = [{**reading.setting._asdict(), **reading._asdict()} for reading in measured.readings]
    for record in (*rows, *runs):
        del record["setting"]
    goodputs = {rate: values for rate, values in measured.goodputs.items() if rate != NO_CLUSTER}
    return json.dumps({"machine": machine, "configuration": configuration(config), "failures": measured.failures,
                       "goodput_bytes_per_s": goodputs, "rows": rows, "runs": runs}, indent=1, default=str)


def configuration(config: BenchConfig) -> Dict[str, str]:
    """The options in words, apart from the files to write."""
    skipped = ("title", "note", "reference", "reference_values", "markdown", "json", "torch_python",
               "horovod_python", "columns")
    return {field.name: _words(getattr(config, field.name)) for field in dataclasses.fields(config)
            if field.name not in skipped}


def machine(config: BenchConfig, loads: Tuple[float, float]) -> Dict[str, str]:
    """The machine and the software; `loads`: the machine's load before and after."""
    from odsgd.training.checkpoint.manifests import versions
    if environment.has_mxnet():
        importlib.import_module("mxnet")  # in its workers it was; `versions` tells of what is imported here
    software = "Python {python}, MXNet {mxnet}, NumPy {numpy}, odsgd {odsgd}".format(**{"mxnet": "none", **versions()})
    software += f" at commit {commit() or 'unknown'}"
    if config.torch_python and shutil.which(config.torch_python):
        software += f", PyTorch {output([config.torch_python, '-I', '-c', 'import torch; print(torch.__version__)'])}"
    if config.horovod_python and shutil.which(config.horovod_python):
        software += f", Horovod {output([config.horovod_python, '-I', '-c', _HOROVOD])}"
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2 ** 30
    return {"date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()) + " UTC",
            "machine": f"{os.cpu_count()} cores ({cpu()}), {memory_gb:.0f} GiB",
            "load before and after": "{:.1f}, {:.1f}".format(*loads),
            "system": f"Linux {platform.release()}", "versions": software,
            "links": "emulated by `odsgd cluster`: all hosts on this machine" if set(config.rates) != {NO_CLUSTER}
            else "loopback", "threads": "OMP_NUM_THREADS=1"}


def _blocks(findings: Sequence[Finding]) -> List[Tuple[Setting, List[Finding]]]:
    return [(setting, list(block)) for setting, block in itertools.groupby(findings, lambda it: it.setting)]


def _cells(config: BenchConfig, block: Sequence[Finding]) -> List[List[str]]:
    asked = columns(config)
    return [[heading for heading, _ in asked], *([cell(finding) for _, cell in asked] for finding in block)]


def _pairs(pairs: Dict[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in pairs.items())])


def _failures(measured: Measured) -> List[str]:
    if not measured.failures:
        return []
    return [f"{len(measured.failures)} jobs failed and are missing above:\n" + "\n".join(
        f"- {failure}" for failure in measured.failures)]


def _ms(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _multiples(finding: Finding, memory_mb: Optional[float]) -> str:
    return _optional(memory_mb, lambda it: f"{it * 2 ** 20 / nbytes(finding.setting.model):.1f}")


def _optional(value: Optional[float], text: Callable[[float], str]) -> str:
    return "–" if value is None else text(value)


def _millions(model: str) -> float:
    return models.size(model) / 1e6


def _words(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_words, value))
    return "–" if value is None else str(value)
