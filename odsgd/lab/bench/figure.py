"""The medians as bars, with their spread and their limits: a picture per benchmark."""
from __future__ import annotations

import textwrap
from typing import Any, Dict, List, Sequence, Tuple

from kvstore.errors import ConfigError
from odsgd.lab.bench.results import Row

PANELS_PER_LINE = 3
TITLE_WIDTH = 50


def draw(rows: Sequence[Row], title: str, path: str) -> None:
    """A panel per model, rate and T_cop; in it a group of bars per number of workers."""
    pyplot = _pyplot()
    panels: Dict[Tuple[str, str, str], List[Row]] = {}
    for row in rows:
        panels.setdefault((row.case.model, row.case.rate, row.case.compute.rpartition("=")[2]), []).append(row)
    columns = min(PANELS_PER_LINE, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(lines, columns, squeeze=False, figsize=(1.5 + 4.5 * columns, 1 + 3.5 * lines))
    systems = list(dict.fromkeys(row.system for row in rows))
    for axis, ((model, rate, compute), of_panel) in zip(axes.flat, panels.items()):
        _panel(axis, of_panel, systems)
        axis.set_title(f"{model}, {rate}, T_cop {compute}", fontsize=10)
    for axis in list(axes.flat)[len(panels):]:
        axis.set_visible(False)
    handles: Dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    figure.suptitle(textwrap.fill(title, TITLE_WIDTH * columns))
    per_line = min(2 * columns, 5)
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncol=per_line, fontsize=8)
    figure.tight_layout(rect=(0, 0.02 + 0.05 * -(-len(handles) // per_line) / lines, 1, 0.98))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def check() -> None:
    """ConfigError unless pictures can be drawn."""
    _pyplot()


def _panel(axis: Any, rows: Sequence[Row], systems: Sequence[str]) -> None:
    groups = sorted({row.case.workers for row in rows})
    width = 0.8 / len(systems)
    for number, system in enumerate(systems):
        mine = [row for row in rows if row.system == system]
        places = [groups.index(row.case.workers) + (number + 0.5) * width - 0.4 for row in mine]
        medians = [row.iteration_ms for row in mine]
        spread = [[median - min(row.iterations_ms) for median, row in zip(medians, mine)],
                  [max(row.iterations_ms) - median for median, row in zip(medians, mine)]]
        axis.bar(places, medians, width, yerr=spread, label=system, color=f"C{number % 10}", capsize=2,
                 error_kw={"elinewidth": 0.8})
        limits = [row.limit_ms for row in mine]
        axis.hlines(limits, [place - width / 2 for place in places], [place + width / 2 for place in places],
                    colors="black", linewidth=1.5, label="limit" if any(limits) else None)
    axis.set_xticks(range(len(groups)))
    axis.set_xticklabels([f"{workers} worker{'s' * (workers != 1)}" for workers in groups])
    axis.set_ylabel("iteration, ms")
    axis.set_ylim(bottom=0)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--png needs matplotlib: pip install 'odsgd[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot
