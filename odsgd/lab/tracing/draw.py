"""A figure like Figures 1, 7 and 8 of the OD-SGD paper, from real traces.

Per worker two rows: what its device computes, and when any of its buckets is being exchanged. Both carry the colour
and the number of their iteration, so that one sees beside which computation an exchange runs.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from kvstore.errors import ConfigError
from odsgd.lab.tracing.files import Job, Process
from odsgd.lab.tracing.summary import Shares, begins_of, bounds, shares

COLOURS = ("#4477aa", "#ee7733", "#228833", "#aa3377")
"""In turn, one per iteration; apart for colour-blind readers, too."""

ITERATIONS = 4
"""Drawn by default: the last whole ones."""


def figure(jobs: List[Job], iterations: Tuple[Optional[int], Optional[int]], path: Path) -> None:
    """Draw `jobs` below each other."""
    plt = _pyplot()
    rows = [2 * len(job.workers) for job in jobs]
    drawing, panels = plt.subplots(len(jobs), 1, squeeze=False, figsize=(10, 0.9 * len(jobs) + 0.42 * sum(rows)),
                                   gridspec_kw={"height_ratios": rows}, sharex=True)
    ranges = [_range(job, iterations) for job in jobs]
    longest_s = max(_longest_s(job, *its) for job, its in zip(jobs, ranges))
    for panel, job, its in zip(panels[:, 0], jobs, ranges):
        _panel(panel, job, its, longest_s)
    panels[-1, 0].set_xlabel("ms")
    drawing.legend(handles=_legend(plt), loc="upper center", ncol=3, frameon=False, fontsize=9)
    drawing.tight_layout(rect=(0, 0, 1, 1 - 0.32 / drawing.get_figheight()))
    drawing.savefig(path, dpi=150)
    plt.close(drawing)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("drawing needs matplotlib: pip install 'odsgd[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot
    return matplotlib.pyplot


def _range(job: Job, iterations: Tuple[Optional[int], Optional[int]]) -> Tuple[int, int]:
    """First iteration, and the one before which the figure ends."""
    numbers = sorted(begins_of(job.workers[0])) if job.workers else []
    if not numbers:
        raise ConfigError(f"{job.name}: no compute in the trace; draw what `odsgd train --trace` recorded")
    stop = numbers[-1] if iterations[1] is None else iterations[1]
    return (max(numbers[0], stop - ITERATIONS) if iterations[0] is None else iterations[0]), stop


def _longest_s(job: Job, first: int, stop: int) -> float:
    spans = [bounds(worker, first, stop)[:2] for worker in job.workers]
    return max(end_s for _, end_s in spans) - min(begin_s for begin_s, _ in spans)


def _panel(panel: Any, job: Job, iterations: Tuple[int, int], longest_s: float) -> None:
    zero_s = min(bounds(worker, *iterations)[0] for worker in job.workers)
    ticks: List[Tuple[float, str]] = []
    for number, worker in enumerate(job.workers):
        top = -2.4 * number
        for row, (lane, what) in enumerate((("compute", "compute"), ("exchange", "communication"))):
            ticks.append((top - row, f"{worker.name}: {what}"))
            _row(panel, worker, lane, top - row, zero_s, longest_s)
    panel.set_yticks([y for y, _ in ticks])
    panel.set_yticklabels([label for _, label in ticks], fontsize=9)
    panel.set_xlim(0, 1000 * longest_s)
    panel.set_ylim(ticks[-1][0] - 0.6, 0.6)
    panel.set_title(_title(job, shares(job, *iterations)), fontsize=10, loc="left")
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.tick_params(axis="y", length=0)


def _title(job: Job, rows: List[Shares]) -> str:
    mean_ms = 1000 * sum(row.iteration_s for row in rows) / len(rows)
    exposed = 100 * sum(row.exposed for row in rows) / len(rows)
    return f"{job.name}: {mean_ms:.0f} ms per iteration, {exposed:.0f} % of it waiting for communication"


def _row(panel: Any, worker: Process, lane: str, y: float, zero_s: float, longest_s: float) -> None:
    """Every bar, and one number per iteration. Exchanges overlap, so they are drawn through each other."""
    extents: Dict[int, Tuple[float, float]] = {}
    for span in worker.lane(lane):
        iteration = span.args["iteration" if lane == "compute" else "round"]
        start_ms, end_ms = 1000 * (span.start_s - zero_s), 1000 * (span.end_s - zero_s)
        if end_ms <= 0 or start_ms >= 1000 * longest_s:
            continue
        colour = COLOURS[iteration % len(COLOURS)]
        panel.barh(y, end_ms - start_ms, left=start_ms, height=0.8, color=colour, linewidth=0,
                   alpha={"forward": 0.55, "backward": 1.0}.get(span.name, 0.25))
        begin_ms, _ = extents.setdefault(iteration, (start_ms, end_ms))
        extents[iteration] = min(begin_ms, start_ms), max(extents[iteration][1], end_ms)
    for iteration, (start_ms, end_ms) in extents.items():
        start_ms, end_ms = max(start_ms, 0.0), min(end_ms, 1000 * longest_s)
        if end_ms - start_ms > 15 * longest_s:  # 1.5 % of the width, what a number needs
            panel.text((start_ms + end_ms) / 2, y, str(iteration), ha="center", va="center", fontsize=8,
                       color="white" if lane == "compute" else "black")


def _legend(plt: Any) -> List[Any]:
    from matplotlib.patches import Patch
    return [Patch(color=COLOURS[0], alpha=0.55, label="forward"), Patch(color=COLOURS[0], label="backward"),
            Patch(color=COLOURS[0], alpha=0.25, label="exchange of a bucket (darker: several at once)")]
