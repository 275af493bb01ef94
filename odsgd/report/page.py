"""One page on several runs: HTML, with its pictures inside."""
import base64
from html import escape
from typing import List, Sequence

from odsgd.report import pictures
from odsgd.report.breakdown import breakdown_of, stretches, timeline_of
from odsgd.report.runs import Records, cells, compared, outcome

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
                 picture=pictures.picture(pictures.throughput, runs)),
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


def _accuracy(runs: Sequence[Records]) -> str:
    if not any(epoch.get("test_accuracy") is not None for run in runs for epoch in run.epochs):
        return ""
    return _section("Accuracy", "By epoch, which shows what an algorithm learns of the same data, and by time, which "
                    "shows what that is worth.", picture=pictures.picture(pictures.accuracy, runs, 2))


def _timelines(runs: Sequence[Records]) -> str:
    drawn = [(timeline, its[-1][-SHOWN:]) for run, timeline in ((run, timeline_of(run)) for run in runs)
             if timeline is not None for its in [stretches(timeline, run)] if its]
    if not drawn:
        return ""
    return _section("What a worker does when", "Worker 0 in the last whole iterations of an epoch: above what its "
                    "device computes, below what is under way over the network.", picture=pictures.timelines(drawn))


def _time(runs: Sequence[Records]) -> str:
    title = "Where an iteration's time goes"
    found = [(run.name, one) for run in runs for one in [breakdown_of(run)] if one is not None]
    if not found:
        return _section(title, "These runs have neither timelines (odsgd train --trace DIR) nor samples of it.")
    parts = pictures.parts_of(found)
    lines = [["run", "ms per iteration", *parts]]
    lines += [[name, f"{sum(one.values()):.2f}", *(f"{one[part]:.2f}" if part in one else "-" for part in parts)]
              for name, one in found]
    return _section(title, TIME, lines, pictures.picture(pictures.breakdowns, found, height=1.3 + 0.4 * len(found)))


def _staleness(runs: Sequence[Records]) -> str:
    if not any(run.staleness or any("staleness_mean" in one for one in run.intervals) for run in runs):
        return ""
    return _section("Staleness", "How many updates the weights had seen between the reading of the weights that a "
                    "gradient was computed on and its own update, as the servers of asynchronous runs count it.",
                    picture=pictures.picture(pictures.staleness, runs, 2))


def _settings(runs: Sequence[Records]) -> List[List[str]]:
    lines = [["run", "store", "workers", "model", "data", "batch", "lr", "iterations", "host", "began", "odsgd"]]
    for run in runs:
        start, config = run.start, run.start.get("config") or {}
        known = [config.get("kvstore"), start.get("num_workers"), config.get("model"), config.get("dataset"),
                 config.get("batch_size"), config.get("lr"), run.epochs[-1].get("iteration"), start.get("host"),
                 start.get("time"), (start.get("versions") or {}).get("odsgd")]
        lines.append([run.name, *("-" if value is None else str(value) for value in known)])
    return lines
