"""The medians as bars, with their spread and their limits: a picture per benchmark."""
from __future__ import annotations

import textwrap
from typing import Any, Dict, List, Sequence, Tuple

from odsgd.lab.bench.results import Finding
from odsgd.tools import pyplot

PANELS_PER_LINE = 3
TITLE_WIDTH = 50
COLOURS = [f"C{number}" for number in range(10)] + ["gold", "navy", "lime", "black", "silver", "teal", "salmon", "plum"]


def draw(findings: Sequence[Finding], title: str, path: str) -> None:
    """A panel per model, rate and T_cop; in it a group of bars per number of workers."""
    plt = pyplot("--png")
    panels: Dict[Tuple[str, str, str], List[Finding]] = {}
    for finding in findings:
        setting = finding.setting
        panels.setdefault((setting.model, setting.rate, setting.compute.rpartition("=")[2]), []).append(finding)
    columns = min(PANELS_PER_LINE, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, squeeze=False, figsize=(1.5 + 4.5 * columns, 1 + 3.5 * lines))
    systems = list(dict.fromkeys(finding.system for finding in findings))
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
    plt.close(figure)


def _panel(axis: Any, findings: Sequence[Finding], systems: Sequence[str]) -> None:
    groups = sorted({finding.setting.workers for finding in findings})
    width = 0.8 / len(systems)
    for number, system in enumerate(systems):
        mine = [finding for finding in findings if finding.system == system]
        places = [groups.index(finding.setting.workers) + (number + 0.5) * width - 0.4 for finding in mine]
        medians = [finding.iteration_ms for finding in mine]
        spread = [[finding.iteration_ms - min(finding.iterations_ms) for finding in mine],
                  [max(finding.iterations_ms) - finding.iteration_ms for finding in mine]]
        axis.bar(places, medians, width, yerr=spread, label=system, color=COLOURS[number % len(COLOURS)],
                 capsize=2, error_kw={"elinewidth": 0.8})
        limits = [finding.limit_ms for finding in mine]
        axis.hlines(limits, [place - width / 2 for place in places], [place + width / 2 for place in places],
                    colors="black", linewidth=1.5, label="limit" if any(limits) else None)
    axis.set_xticks(range(len(groups)))
    axis.set_xticklabels([f"{workers} worker{'s' * (workers != 1)}" for workers in groups])
    axis.set_ylabel("iteration, ms")
    axis.set_ylim(bottom=0)

