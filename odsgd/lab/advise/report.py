"""Advice as text, and as JSON."""
import json
import textwrap
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from odsgd.lab.advise.candidates import NOTHING, Change
from odsgd.lab.advise.config import AdviseConfig
from odsgd.lab.advise.knowledge import DIGITS, LINKS, MNIST, accuracy, alike
from odsgd.lab.advise.predictions import Prediction
from odsgd.tools import aligned

IDLE = 0.8
"""If the busiest resource is at work for no more of an iteration, it is not what limits the job."""
LARGE = 0.99
"""The share of the pushes whose staleness a column has."""


class Advice(NamedTuple):
    """What is said of one number of workers.

    predictions : the fastest first
    first : the fastest one that exchanges in every iteration, if there is one
    coded : the first that can have the codec float16, with it, where several workers are slower than one without, the
        profile has no times of that codec, and it is faster
    now : the one that `changes` are told of
    beyond : in what the cluster lies outside of what was checked
    compute_s : how long an iteration of one worker alone takes, with its pauses and failures
    """

    workers: int
    predictions: List[Prediction]
    first: Prediction
    coded: Optional[Prediction]
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
            ("servers, MB", lambda it: f"{it.servers_nbytes / 1e6:.4g}" if it.servers_nbytes else "–"),
            ("digits, %", lambda it: accuracy(it.system, DIGITS)),
            ("MNIST, %", lambda it: accuracy(it.system, MNIST))]


def text(advice: Advice, batch_size: int, lines: int) -> str:
    """A table and what to change first."""
    shown = _shown(advice.predictions, lines)
    left = len(advice.predictions) - len(shown)
    cells = [[heading for heading, _ in columns(batch_size)],
             *([cell(prediction) for _, cell in columns(batch_size)] for prediction in shown)]
    alone = [(batch_size or 1) / advice.compute_s, 1000 * advice.compute_s]
    cells.insert(1, ["one worker alone", f"{alone[1]:.4g}", f"{alone[0]:.4g}", *[""] * (len(cells[0]) - 3)])
    said = [f"{advice.workers} worker{'s' * (advice.workers != 1)}", *sentences(advice),
            textwrap.indent(aligned(cells), "  ")]
    said += [f"  … the fastest of each store (--lines 0 shows {left} more)"] if left else []
    said += [f"What would change {advice.now.system.label}:", *(f"  {change}" for change in advice.changes)]
    return "\n".join([*said, *(f"Not checked: {what}." for what in advice.beyond)])


def _shown(predictions: List[Prediction], lines: int) -> List[Prediction]:
    """All, or where these are too many lines the fastest of each store."""
    if not lines or len(predictions) <= lines:
        return predictions
    fastest = {one.system.name: one for one in reversed(predictions)}
    return [one for one in predictions if one is fastest[one.system.name]][:lines]


def sentences(advice: Advice) -> List[str]:
    """What limits it, what OD-SGD gains at what risk, what to change first, and what is known of methods' learning."""
    first, worth = advice.first, _times_alone(advice, advice.first) > 1 or advice.workers == 1
    among = " of the stores that exchange in every iteration" if first is not advice.predictions[0] else ""
    times = f"{_times_alone(advice, first):.2f} times"
    busy = first.bound_s / first.iteration_s
    limit = f"What limits it: {NAMED.get(first.resource, f'the {first.resource}')}." if busy > IDLE else \
        f"What limits it: waiting for answers; no part is at work for more than {100 * busy:.0f} % of the time."
    lines = [f"{first.system.label} is the fastest{among}, {times} one worker alone. {limit}" if worth else
             f"Not worth it as it is: {advice.workers} workers are slower than one alone, at best {times} as fast "
             f"({first.system.label}). {limit}"]
    ssgd, odsgd = (min((one for one in advice.predictions if one.system.name == name), default=None,
                       key=lambda one: one.iteration_s) for name in ("ssgd", "odsgd"))
    if ssgd is not None and odsgd is not None:
        gain_s = ssgd.iteration_s - odsgd.iteration_s
        lines.append(f"OD-SGD takes {_ms(odsgd.iteration_s)} ms an iteration and SSGD {_ms(ssgd.iteration_s)}: "
                     f"{_ms(abs(gain_s))} ms {'less' if gain_s >= 0 else 'more'}, "
                     f"{100 * abs(gain_s) / ssgd.iteration_s:.0f} %. The risk: its gradients are a step late; train a "
                     "control with ssgd to see what that costs.")
    ways = _ways(advice, worth)
    return [*lines, *([f"Change first: {'; or '.join(ways)}."] if ways else []),
            *([_which(ssgd.iteration_s / advice.compute_s)] if ssgd is not None and advice.workers > 1 else [])]


def _which(stretch: float) -> str:
    """Which methods learned soonest on links about as slow; `stretch`: SSGD's iteration over its computing."""
    rate = alike(stretch)
    seconds = ", ".join(f"{store} {after:g} s" for store, after in LINKS[rate]["seconds"].items())
    return (f"Which method: SSGD takes {stretch:.3g} times as long as it computes; where it took "
            f"{LINKS[rate]['stretch']:.3g} times (docs/results/weights.md, {rate}), the same test loss came after "
            f"{seconds}.")


NAMED = {"passes": "the computing", "ring": "the links"}
"""Words for resources that need others in a sentence."""


def _ways(advice: Advice, worth: bool) -> List[str]:
    """What to change first."""
    ways = []
    if advice.coded is not None:
        ways.append(f"send fewer bytes ({advice.coded.system.label}: "
                    f"{_times_alone(advice, advice.coded):.2f} times one worker alone, if encoding took no time)")
    elif worth and advice.changes and advice.changes[0].gain > NOTHING:
        ways.append(f"{advice.changes[0]}")
    rarer = advice.predictions[0]
    if rarer.rate > advice.first.rate * (1 + NOTHING):
        every = max(rarer.system.intervals(rarer.workers))
        ways.append(f"exchange less often ({rarer.system.label}, every {every} iterations: "
                    f"{_times_alone(advice, rarer):.2f} times one worker alone; it trains otherwise)")
    return ways


def _times_alone(advice: Advice, found: Prediction) -> float:
    return advice.workers * advice.compute_s / found.iteration_s


def as_json(advices: Sequence[Advice], config: AdviseConfig) -> str:
    """The advice as JSON, with every prediction."""
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
            "worker_mb": prediction.worker_nbytes / 1e6, "servers_mb": prediction.servers_nbytes / 1e6,
            "digits_accuracy": accuracy(prediction.system, DIGITS),
            "mnist_accuracy": accuracy(prediction.system, MNIST)}


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 0.1 else f"{1000 * seconds:.0f}"
