"""One page on several runs: HTML, with its pictures inside."""
import base64
import dataclasses
import io
import itertools
from html import escape
from typing import Any, Callable, Dict, List, Sequence, Tuple

from odsgd.report.breakdown import PARTS, Breakdown, breakdown_of, stretches, timeline_of
from odsgd.report.runs import Records, cells, compared, number, outcome, samples_per_s
from odsgd.timeline.draw import figure
from odsgd.tools import pyplot

COLOURS = ("#4477aa", "#ee7733", "#228833", "#aa3377", "#66ccee", "#ccbb44")
PARTS_COLOURS = dict(zip(PARTS, ("#4477aa", "#88bbdd", "#ee7733", "#dddddd", "#6699c4", "#f4b183")))
WIDTH, HEIGHT = 9.0, 3.4  # inches

SHOWN = 3
"""Iterations of a timeline."""

TIME = ("An exchange is hidden while the device computes, and exposed while the device waits for it. Runs with a "
        "timeline (odsgd train --trace DIR) have it in four parts, the mean over workers and iterations without those "
        "in which epochs end. The others have what worker 0 waited for, and the rest, of the median epoch.")

HTML = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 62em; margin: 2em auto; padding: 0 1em }}
h1 {{ font-size: 1.6em }}
h2 {{ font-size: 1.2em; margin-top: 2em }}
img {{ display: block; width: 100%; height: auto }}
.wide {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: .25em .8em; border-bottom: 1px solid #ddd; text-align: right }}
th:first-child, td:first-child {{ text-align: left }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def html(runs: Sequence[Records]) -> str:
    """The page as one file that needs no other."""
    if len({run.virtual for run in runs}) > 1:
        runs = [run._replace(name=run.name + " (virtual)" * run.virtual) for run in runs]
    outcomes = list(map(outcome, runs))
    sections = [
        _section("Results", "Test accuracy is measured on the weights that all workers share, after the last epoch. "
                 "Samples per second count all workers together in the median epoch, without evaluations and "
                 "checkpoints; of an asynchronous run they are worker 0's, times the workers. Seconds are with "
                 "evaluations and checkpoints, but for the last checkpoint. Of a virtual cluster both are in its time, "
                 "without either." + "".join(f" {line}" for line in compared(outcomes)), cells(outcomes)),
        _accuracy(runs), _timelines(runs),
        _section("Throughput", "Of all workers together, without evaluations and checkpoints; of an asynchronous run "
                 "worker 0's, times the workers; of a virtual cluster by its own time.",
                 picture=_picture(_draw_throughput, runs)),
        _time(runs), _staleness(runs),
        _section("How it was run", "Options and versions stand in each run's config.yaml and metrics.jsonl.",
                 _settings(runs))]
    title = f"Report of runs: {', '.join(run.name for run in runs)}"
    return HTML.format(title=escape(title), body="\n".join(filter(None, sections)))


def _section(title: str, text: str, table: Sequence[Sequence[str]] = (), picture: bytes = b"") -> str:
    """A part of the page; `picture` is an SVG."""
    lines = [f"<h2>{escape(title)}</h2>", f"<p>{escape(text)}</p>"]
    if picture:
        content = base64.b64encode(picture).decode()
        lines.append(f'<img alt="{escape(title)}" src="data:image/svg+xml;base64,{content}">')
    if table:
        head, *body = table
        rows = ["".join(f"<th>{escape(cell)}</th>" for cell in head),
                *("".join(f"<td>{escape(cell)}</td>" for cell in line) for line in body)]
        lines += ['<div class="wide"><table>', *(f"<tr>{row}</tr>" for row in rows), "</table></div>"]
    return "\n".join(lines)


def _picture(draw: Callable[[Sequence[Any], Any], None], of: Any, panels: int = 1, height: float = HEIGHT) -> bytes:
    """An SVG with the panels in which `draw` draws what it is given; the same bytes each time."""
    plt = pyplot("a report with pictures")
    with plt.rc_context({"svg.hashsalt": "odsgd", "font.size": 9, "axes.spines.top": False,
                         "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 8}):
        drawing, axes = plt.subplots(1, panels, figsize=(WIDTH, height), squeeze=False)
        draw(axes[0], of)
        drawing.tight_layout()
        file = io.BytesIO()
        drawing.savefig(file, format="svg", metadata={"Date": None})
        plt.close(drawing)
    return file.getvalue()


def _accuracy(runs: Sequence[Records]) -> str:
    if not any(epoch.get("test_accuracy") is not None for run in runs for epoch in run.epochs):
        return ""
    return _section("Accuracy", "By epoch, which shows what an algorithm learns of the same data, and by time, which "
                    "shows what that is worth.", picture=_picture(_draw_accuracy, runs, 2))


def _draw_accuracy(axes: Sequence[Any], runs: Sequence[Records]) -> None:
    """Test accuracy by epoch, and by time."""
    for colour, run in zip(itertools.cycle(COLOURS), runs):
        points = [(epoch["epoch"], seconds, 100 * number(epoch["test_accuracy"]))
                  for epoch, seconds in zip(run.epochs, run.seconds()) if epoch.get("test_accuracy") is not None]
        if points:
            epochs, seconds_s, accuracies = zip(*points)
            for panel, xs in zip(axes, (epochs, seconds_s)):
                panel.plot(xs, accuracies, label=run.name, color=colour, marker=".", markersize=4, linewidth=1.3)
    seconds_of = "seconds of the virtual cluster" if all(run.virtual for run in runs) else \
        "seconds, with evaluations and checkpoints unless virtual" if any(run.virtual for run in runs) else \
        "seconds, with evaluations and the checkpoints before"
    for panel, label in zip(axes, ("epoch", seconds_of)):
        panel.set(xlabel=label, ylabel="test accuracy, %")
        panel.grid(alpha=0.25)
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend()


def _timelines(runs: Sequence[Records]) -> str:
    drawn = [(timeline, found[-1][-SHOWN:]) for run, timeline in ((run, timeline_of(run)) for run in runs)
             if timeline is not None for found in [stretches(timeline, run)] if found]
    if not drawn:
        return ""
    file = io.BytesIO()
    figure([dataclasses.replace(timeline, tracks=timeline.workers[:1]) for timeline, _ in drawn],
           [(shown.start, shown.stop) for _, shown in drawn], file, format="svg")
    return _section("What a worker does when", "Worker 0 in the last whole iterations of an epoch: above what its "
                    "device computes, below what is under way over the network.", picture=file.getvalue())


def _draw_throughput(axes: Sequence[Any], runs: Sequence[Records]) -> None:
    """Samples per second, interval by interval."""
    for colour, run in zip(itertools.cycle(COLOURS), runs):
        of = [one for one in run.intervals or run.epochs if "iteration" in one]
        axes[0].plot([one["iteration"] for one in of], [samples_per_s(one) for one in of],
                     label=run.name, color=colour, linewidth=1)
    axes[0].set(xlabel="iteration", ylabel="samples per second", ylim=(0, None))
    axes[0].grid(alpha=0.25)
    axes[0].legend()


def _time(runs: Sequence[Records]) -> str:
    title = "Where an iteration's time goes"
    found = [(run.name, one) for run in runs for one in [breakdown_of(run)] if one is not None]
    if not found:
        return _section(title, "These runs have neither timelines (odsgd train --trace DIR) nor samples of it.")
    parts = _parts_of(found)
    lines = [["run", "ms per iteration", *parts]]
    lines += [[name, f"{sum(one.values()):.2f}", *(f"{one[part]:.2f}" if part in one else "-" for part in parts)]
              for name, one in found]
    return _section(title, TIME, lines, _picture(_draw_breakdowns, found, height=1.3 + 0.4 * len(found)))


def _parts_of(found: Sequence[Tuple[str, Breakdown]]) -> List[str]:
    """The parts that at least one of the runs has."""
    return [part for part in PARTS if any(part in breakdown for _, breakdown in found)]


def _draw_breakdowns(axes: Sequence[Any], found: Sequence[Tuple[str, Breakdown]]) -> None:
    """A bar for each run: its mean iteration in parts."""
    places = range(len(found), 0, -1)
    left = [0.0] * len(found)
    for part in _parts_of(found):
        lengths = [breakdown.get(part, 0.0) for _, breakdown in found]
        axes[0].barh(places, lengths, left=left, height=0.6, color=PARTS_COLOURS[part], label=part)
        left = [begin + length for begin, length in zip(left, lengths)]
    axes[0].set_yticks(list(places))
    axes[0].set_yticklabels([name for name, _ in found])
    axes[0].set_xlabel("milliseconds per iteration")
    axes[0].legend(ncol=len(PARTS), loc="lower left", bbox_to_anchor=(0, 1))


def _staleness(runs: Sequence[Records]) -> str:
    if not any(run.staleness or any("staleness_mean" in one for one in run.intervals) for run in runs):
        return ""
    return _section("Staleness", "How many updates the weights had seen between the reading of the weights that a "
                    "gradient was computed on and its own update, as the servers of asynchronous runs count it.",
                    picture=_picture(_draw_staleness, runs, 2))


def _draw_staleness(axes: Sequence[Any], runs: Sequence[Records]) -> None:
    """Staleness of asynchronous runs: the mean of each interval, and the share of the gradients with each staleness."""
    for colour, run in zip(itertools.cycle(COLOURS), runs):
        live = [one for one in run.intervals if "staleness_mean" in one]
        axes[0].plot([one["iteration"] for one in live], [number(one["staleness_mean"]) for one in live],
                     color=colour, linewidth=1, label=run.name if live else None)
        if run.staleness is not None:
            pushes: Dict[int, int] = {int(tau): count for tau, count in run.staleness.get("histogram", {}).items()}
            taus, total = range(max(pushes, default=0) + 1), sum(pushes.values()) or 1
            axes[1].bar(taus, [pushes.get(tau, 0) / total for tau in taus], width=0.9, alpha=0.6, color=colour,
                        label=run.name)
    axes[0].set(xlabel="iteration", ylabel="mean staleness", ylim=(0, None))
    axes[0].grid(alpha=0.25)
    axes[1].set(xlabel="staleness", ylabel="share of the gradients")
    if axes[1].containers:  # else no run has come to its end
        axes[1].legend()


def _settings(runs: Sequence[Records]) -> List[List[str]]:
    lines = [["run", "store", "workers", "model", "data", "batch", "lr", "iterations", "host", "began", "odsgd"]]
    for run in runs:
        start, config = run.start, run.start.get("config") or {}
        known = [config.get("kvstore"), start.get("num_workers"), config.get("model"), config.get("dataset"),
                 config.get("batch_size"), config.get("lr"), run.epochs[-1].get("iteration"), start.get("host"),
                 start.get("time"), (start.get("versions") or {}).get("odsgd")]
        lines.append([run.name, *("-" if value is None else str(value) for value in known)])
    return lines
