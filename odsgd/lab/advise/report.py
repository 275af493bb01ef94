"""Advice as text, and as JSON."""
from __future__ import annotations

import json
import textwrap
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

from kvstore.methods import fit
from odsgd.lab.advise.changes import Change
from odsgd.lab.advise.config import AdviseConfig
from odsgd.lab.advise.predictions import Prediction
from odsgd.lab.bench.systems import OURS
from odsgd.tools import aligned

LARGE = 0.99
"""The share of the pushes whose staleness a column has."""


class Advice(NamedTuple):
    """What is said of one number of workers.

    predictions : the fastest first
    now : the one that `changes` are told of
    beyond : in what the cluster lies outside of what was checked
    compute_s : how long the passes of an iteration take
    """

    workers: int
    predictions: List[Prediction]
    now: Prediction
    changes: List[Change]
    beyond: List[str]
    compute_s: float


Column = Tuple[str, Callable[[Prediction], str]]


def columns(batch_size: int) -> List[Column]:
    """Headings, and the text of their cells."""
    speed = (f"{'samples' if batch_size else 'gradients'}/s of all workers",
             lambda it: f"{it.rate * (batch_size or 1):.4g}")
    return [("system", lambda it: it.system.label), ("iteration, ms", lambda it: _ms(it.iteration_s)), speed,
            ("bound, ms", lambda it: _ms(it.bound_s)), ("by", lambda it: it.resource),
            ("staleness", lambda it: f"{it.mean_staleness:.1f}"), ("99 %", lambda it: str(it.staleness_of(LARGE))),
            ("worker, MB", lambda it: f"{it.worker_nbytes / 1e6:.4g}"),
            ("servers, MB", lambda it: f"{it.servers_nbytes / 1e6:.4g}" if it.servers_nbytes else "–")]


def text(advice: Advice, batch_size: int, lines: int) -> str:
    """A table and what to change first."""
    shown = advice.predictions[:lines or None]
    left = len(advice.predictions) - len(shown)
    cells = [[heading for heading, _ in columns(batch_size)],
             *([cell(prediction) for _, cell in columns(batch_size)] for prediction in shown)]
    alone = [(batch_size or 1) / advice.compute_s, 1000 * advice.compute_s]
    cells.insert(1, ["one worker alone", f"{alone[1]:.4g}", f"{alone[0]:.4g}", *[""] * (len(cells[0]) - 3)])
    said = [f"{advice.workers} worker{'s' * (advice.workers != 1)}", *sentences(advice),
            textwrap.indent(aligned(cells), "  ")]
    said += [f"  … and {left} slower ones (--lines 0 shows all)"] if left else []
    said += [f"What would change {advice.now.system.label}:", *(f"  {change}" for change in advice.changes)]
    return "\n".join([*said, *(f"Not checked: {what}." for what in advice.beyond)])


def sentences(advice: Advice) -> List[str]:
    """What limits it, what OD-SGD gains, and whether more than one worker is worth it."""
    def times_alone(found: Prediction) -> float:
        return advice.workers * advice.compute_s / found.iteration_s

    often = [found for found in advice.predictions if _interval(found) == (1, 1)]
    first, rarer = (often or advice.predictions)[0], advice.predictions[0]
    times = times_alone(first)
    which = "of the stores that exchange in every iteration " if rarer is not first else ""
    lines = [f"{first.system.label} is the fastest {which}".rstrip() + f", {times:.2f} times one worker alone. "
             f"Its limit: {first.resource}."]
    if advice.workers > 1 and times <= 1:
        lines = [f"Not worth it: {advice.workers} workers are slower than one alone, at best {times:.2f} times as fast "
                 f"({first.system.label}). Its limit: {first.resource}. Send fewer bytes (--codecs float16), or "
                 "exchange less often (--intervals 10)."]
    if rarer is not first:
        lines.append(f"With an exchange every {max(_interval(rarer))} iterations {rarer.system.label} is "
                     f"{times_alone(rarer):.2f} times one worker alone. Test its accuracy: it trains otherwise.")
    best = {name: min((one for one in advice.predictions if one.system.name == name), default=None,
                      key=lambda one: one.iteration_s) for name in ("ssgd", "odsgd")}
    ssgd, odsgd = best["ssgd"], best["odsgd"]
    if ssgd is not None and odsgd is not None:
        gain_s = ssgd.iteration_s - odsgd.iteration_s
        lines.append(f"OD-SGD takes {_ms(odsgd.iteration_s)} ms for SSGD's {_ms(ssgd.iteration_s)}: "
                     f"{100 * gain_s / ssgd.iteration_s:.0f} % less. Its gradients are a step late: "
                     "train a control with ssgd to see what that costs.")
    return [*lines, *([f"To change first: {advice.changes[0]}."] if advice.changes and advice.changes[0].gain > 0.01
                      else [])]


def _interval(found: Prediction) -> Tuple[int, int]:
    """Iterations between two pushes, and between two fetches."""
    method = OURS[found.system.name]
    given = {key: value for key, value in found.system.options.items() if key != "transport"}
    return method.intervals(fit.options_of(method, given))


def as_json(advices: Sequence[Advice], config: AdviseConfig) -> str:
    """All of it."""
    return json.dumps({"profile": config.profile, "model": config.model, "batch_size": config.batch_size, "advice": [
        {"workers": advice.workers, "now": advice.now.system.label, "beyond": advice.beyond,
         "changes": [change._asdict() for change in advice.changes],
         "predictions": [_row(prediction, config.batch_size) for prediction in advice.predictions]}
        for advice in advices]}, indent=1)


def _row(prediction: Prediction, batch_size: int) -> Dict[str, Any]:
    return {"system": prediction.system.label, "iteration_ms": 1000 * prediction.iteration_s,
            "samples_per_s": prediction.rate * batch_size if batch_size else None, "gradients_per_s": prediction.rate,
            "bound_ms": 1000 * prediction.bound_s, "bound_by": prediction.resource,
            "loads_ms": {what: 1000 * seconds for what, seconds in prediction.loads.items()},
            "staleness_mean": prediction.mean_staleness, "staleness_99": prediction.staleness_of(LARGE),
            "worker_mb": prediction.worker_nbytes / 1e6, "servers_mb": prediction.servers_nbytes / 1e6}


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 0.1 else f"{1000 * seconds:.0f}"
