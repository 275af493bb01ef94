"""The pictures of a report. Each takes the axes to draw on and the runs, which keep their colour in all of them."""
import dataclasses
import io
import itertools
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

from odsgd.report.breakdown import PARTS, Breakdown
from odsgd.report.runs import Records, number, samples_per_s
from odsgd.timeline.draw import figure
from odsgd.timeline.timeline import Timeline
from odsgd.tools import pyplot

COLOURS = ("#4477aa", "#ee7733", "#228833", "#aa3377", "#66ccee", "#ccbb44")
PARTS_COLOURS = dict(zip(PARTS, ("#4477aa", "#88bbdd", "#ee7733", "#dddddd", "#6699c4", "#f4b183")))
WIDTH, HEIGHT = 9.0, 3.4  # inches


def picture(draw: Callable[[Sequence[Any], Any], None], of: Any, panels: int = 1, height: float = HEIGHT) -> bytes:
    """A file with what is drawn of the runs; the same bytes for the same drawing."""
    plt = pyplot("a report with pictures")
    with plt.rc_context({"svg.hashsalt": "odsgd", "font.size": 9, "axes.spines.top": False,
                         "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 8}):
        figure, axes = plt.subplots(1, panels, figsize=(WIDTH, height), squeeze=False)
        draw(axes[0], of)
        figure.tight_layout()
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
        plt.close(figure)
    return file.getvalue()


def timelines(drawn: Sequence[Tuple[Timeline, range]]) -> bytes:
    """A file with the first worker of each timeline, in these iterations."""
    file = io.BytesIO()
    figure([dataclasses.replace(timeline, tracks=timeline.workers[:1]) for timeline, _ in drawn],
           [(its.start, its.stop) for _, its in drawn], file, format="svg")
    return file.getvalue()


def accuracy(axes: Sequence[Any], runs: Sequence[Records]) -> None:
    """Test accuracy by epoch, and by time."""
    for colour, run in zip(itertools.cycle(COLOURS), runs):
        points = [(epoch["epoch"], seconds, 100 * number(epoch["test_accuracy"]))
                  for epoch, seconds in zip(run.epochs, run.seconds()) if epoch.get("test_accuracy") is not None]
        if points:
            epochs, seconds_s, accuracies = zip(*points)
            for panel, xs in zip(axes, (epochs, seconds_s)):
                panel.plot(xs, accuracies, label=run.name, color=colour, marker=".", markersize=4, linewidth=1.3)
    seconds_of = "seconds of the virtual cluster" if all(run.virtual for run in runs) else \
        "seconds, with evaluations and the checkpoints before"
    for panel, label in zip(axes, ("epoch", seconds_of)):
        panel.set(xlabel=label, ylabel="test accuracy, %")
        panel.grid(alpha=0.25)
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend()


def throughput(axes: Sequence[Any], runs: Sequence[Records]) -> None:
    """Samples per second, interval by interval."""
    for colour, run in zip(itertools.cycle(COLOURS), runs):
        of = [one for one in run.intervals or run.epochs if "iteration" in one]
        axes[0].plot([one["iteration"] for one in of], [samples_per_s(one) for one in of],
                     label=run.name, color=colour, linewidth=1)
    axes[0].set(xlabel="iteration", ylabel="samples per second", ylim=(0, None))
    axes[0].grid(alpha=0.25)
    axes[0].legend()


def staleness(axes: Sequence[Any], runs: Sequence[Records]) -> None:
    """Staleness of asynchronous runs: the mean of each interval, and the share of the gradients with each staleness."""
    for colour, run in zip(itertools.cycle(COLOURS), runs):
        live = [one for one in run.intervals if "staleness_mean" in one]
        axes[0].plot([one["iteration"] for one in live], [number(one["staleness_mean"]) for one in live],
                     color=colour, linewidth=1, label=run.name if live else None)
        if run.staleness is not None:
            _histogram(axes[1], run.staleness.get("histogram", {}), colour, run.name)
    axes[0].set(xlabel="iteration", ylabel="mean staleness", ylim=(0, None))
    axes[0].grid(alpha=0.25)
    axes[1].set(xlabel="staleness", ylabel="share of the gradients")
    if axes[1].containers:  # else no run has come to its end
        axes[1].legend()


def _histogram(panel: Any, counts: Mapping[str, int], colour: str, name: str) -> None:
    pushes: Dict[int, int] = {int(tau): count for tau, count in counts.items()}
    total = sum(pushes.values()) or 1
    taus: List[int] = list(range(max(pushes, default=0) + 1))
    panel.bar(taus, [pushes.get(tau, 0) / total for tau in taus], width=0.9, alpha=0.6, color=colour, label=name)


def breakdowns(axes: Sequence[Any], found: Sequence[Tuple[str, Breakdown]]) -> None:
    """A bar for each run: its mean iteration in parts."""
    places = range(len(found), 0, -1)
    left = [0.0] * len(found)
    for part in parts_of(found):
        lengths = [breakdown.get(part, 0.0) for _, breakdown in found]
        axes[0].barh(places, lengths, left=left, height=0.6, color=PARTS_COLOURS[part], label=part)
        left = [begin + length for begin, length in zip(left, lengths)]
    axes[0].set_yticks(list(places))
    axes[0].set_yticklabels([name for name, _ in found])
    axes[0].set_xlabel("milliseconds per iteration")
    axes[0].legend(ncol=len(PARTS), loc="lower left", bbox_to_anchor=(0, 1))


def parts_of(found: Sequence[Tuple[str, Breakdown]]) -> List[str]:
    """The parts that at least one of the runs has."""
    return [part for part in PARTS if any(part in breakdown for _, breakdown in found)]
