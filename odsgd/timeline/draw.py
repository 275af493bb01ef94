"""A figure like Figures 1, 7 and 8 of the OD-SGD paper, from real traces.

Per worker two rows: when its device computes, and when any of its buckets is being exchanged. Both carry the colour
and the number of their iteration, so that one sees beside which computation an exchange runs. An evaluation's exchanges
are grey.
"""
from pathlib import Path
from typing import Any, BinaryIO, Dict, List, Optional, Sequence, Tuple, Union

from kvstore.errors import ConfigError
from odsgd.timeline.summary import Shares, common, iterated, shares
from odsgd.timeline.timeline import Timeline, Track
from odsgd.tools import pyplot

COLOURS = ("#4477aa", "#ee7733", "#228833", "#aa3377")
"""In turn, one per iteration; apart for colour-blind readers, too."""
GREY = "#777777"
"""The colour of an exchange that belongs to no iteration."""

Iterations = Tuple[Optional[int], Optional[int]]
"""The first one, and the one before which a figure ends; None: the default."""

ITERATIONS = 4
"""Drawn by default: the last whole ones."""


def figure(timelines: List[Timeline], iterations: Sequence[Iterations], file: Union[Path, BinaryIO],
           **form: Any) -> None:
    """Draw `timelines` below each other, each with its iterations; `form`: of the file, for matplotlib."""
    plt = pyplot("drawing")
    rows = [2 * len(timeline.workers) for timeline in timelines]
    drawing, panels = plt.subplots(len(rows), 1, squeeze=False, figsize=(10, 0.9 * len(rows) + 0.42 * sum(rows)),
                                   gridspec_kw={"height_ratios": rows}, sharex=True)
    ranges = [_range(timeline, asked) for timeline, asked in zip(timelines, iterations)]
    extents = [_extent(timeline, *shown) for timeline, shown in zip(timelines, ranges)]
    longest_s = max(end_s - begin_s for begin_s, end_s in extents)
    for panel, timeline, shown, (zero_s, _) in zip(panels[:, 0], timelines, ranges, extents):
        _panel(panel, timeline, zero_s, longest_s)
        panel.set_title(_title(timeline, shares(timeline, *shown)), fontsize=10, loc="left")
    panels[-1, 0].set_xlabel("ms")
    drawing.legend(handles=_legend(), loc="upper center", ncol=3, frameon=False, fontsize=9)
    drawing.tight_layout(rect=(0, 0, 1, 1 - 0.32 / drawing.get_figheight()))
    drawing.savefig(file, **{"dpi": 150, **form})
    plt.close(drawing)


def _range(timeline: Timeline, iterations: Iterations) -> Tuple[int, int]:
    """First iteration, and the one before which the figure ends."""
    numbers = common(timeline)
    if not numbers:
        raise ConfigError(f"{timeline.name}: no compute in the trace; draw what `odsgd train --trace` recorded")
    stop = numbers[-1] if iterations[1] is None else iterations[1]
    return (max(numbers[0], stop - ITERATIONS) if iterations[0] is None else iterations[0]), stop


def _extent(timeline: Timeline, first: int, stop: int) -> Tuple[float, float]:
    """When the first worker began these iterations, and when the last worker had ended them."""
    begins_s, ends_s = zip(*(iterated(worker, first, stop)[0] for worker in timeline.workers))
    return min(begins_s), max(ends_s)


def _panel(panel: Any, timeline: Timeline, zero_s: float, longest_s: float) -> None:
    ticks: List[Tuple[float, str]] = []
    for number, worker in enumerate(timeline.workers):
        for below, (stage, label) in enumerate((("compute", "compute"), ("exchange", "communication"))):
            y = -2.4 * number - below
            ticks.append((y, f"{worker.name}: {label}"))
            _row(panel, worker, stage, y, zero_s, longest_s)
    panel.set_yticks([y for y, _ in ticks])
    panel.set_yticklabels([label for _, label in ticks], fontsize=9)
    panel.set_xlim(0, 1000 * longest_s)
    panel.set_ylim(ticks[-1][0] - 0.6, 0.6)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.tick_params(axis="y", length=0)


def _title(timeline: Timeline, found: List[Shares]) -> str:
    mean_ms = 1000 * sum(one.iteration_s for one in found) / len(found)
    exposed = 100 * sum(one.exposed for one in found) / len(found)
    return f"{timeline.name}: {mean_ms:.0f} ms per iteration, {exposed:.0f} % of it waiting for communication"


def _row(panel: Any, worker: Track, stage: str, y: float, zero_s: float, longest_s: float) -> None:
    """Every bar, and one number per iteration. Exchanges overlap, so they are drawn through each other."""
    extents: Dict[int, Tuple[float, float]] = {}
    bars = worker.of(stage)
    counted_by = "iteration" if any("iteration" in bar.args for bar in bars) else "round"  # of earlier versions
    for bar in bars:
        iteration = bar.args.get(counted_by)
        start_ms, end_ms = 1000 * (bar.start_s - zero_s), 1000 * (bar.end_s - zero_s)
        if end_ms <= 0 or start_ms >= 1000 * longest_s:
            continue
        colour = GREY if iteration is None else COLOURS[iteration % len(COLOURS)]
        panel.barh(y, end_ms - start_ms, left=start_ms, height=0.8, color=colour, linewidth=0,
                   alpha={"forward": 0.55, "backward": 1.0}.get(bar.name, 0.25))
        if iteration is not None:
            first_ms, last_ms = extents.get(iteration, (start_ms, end_ms))
            extents[iteration] = min(first_ms, start_ms), max(last_ms, end_ms)
    for iteration, (start_ms, end_ms) in extents.items():
        start_ms, end_ms = max(start_ms, 0.0), min(end_ms, 1000 * longest_s)
        if end_ms - start_ms > 15 * longest_s:  # 1.5 % of the width, what a number needs
            panel.text((start_ms + end_ms) / 2, y, str(iteration), ha="center", va="center", fontsize=8,
                       color="white" if stage == "compute" else "black")


def _legend() -> List[Any]:
    from matplotlib.patches import Patch
    return [Patch(color=COLOURS[0], alpha=0.55, label="forward"), Patch(color=COLOURS[0], label="backward"),
            Patch(color=COLOURS[0], alpha=0.25, label="exchange of a bucket (darker: several at once)")]
