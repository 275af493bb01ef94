"""What the adviser knows beside times: measured accuracies, and the range in which its times were checked."""
import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

from odsgd.lab.advise.predictions import ITERATIONS
from odsgd.lab.bench.systems import OURS, System
from odsgd.virtual.description import PAYLOAD, LayerTimes, VirtualCluster

FILE = Path(__file__).with_name("measured.json")
"""scripts/maintain/measured.py writes it."""
_MEASURED = json.loads(FILE.read_text(encoding="utf-8"))

DIGITS: Dict[str, Sequence[float]] = _MEASURED["digits"]
"""Test accuracy in per cent on scikit-learn's digits with two workers, of seeds 0, 1 and 2."""

MNIST: Dict[str, Sequence[float]] = _MEASURED["mnist"]
"""Test accuracy in per cent on MNIST of a perceptron with 16 workers, of all seeds that ran, three or more. All systems
saw equally many examples, and their learning rates were chosen alike: docs/results/beyond.md, Figure 16, slow.
"""

CHECKED: Dict[str, Any] = _MEASURED["checked"]
"""Least and most of each property of the configurations measured for docs/how-to/advise.md and, without loss, for
docs/results/weights.md, and their stores."""

LINKS: Dict[str, Dict[str, Any]] = _MEASURED["links"]
"""By the rate of links in docs/results/weights.md: SSGD's iteration over its computing (`stretch`), and virtual seconds
to a test loss of 0.2, by store (`seconds`)."""

MOST = ITERATIONS[1]


def accuracy(system: System, known: Mapping[str, Sequence[float]]) -> str:
    """The lowest and the highest known accuracy of a system; a dash if none is known, with its options.

    What was measured with a codec has it both ways. Names leave out the warm-up.
    """
    method, options = OURS[system.name], dict(system.options)
    if options.get("codec_weights") == options.get("codec"):
        options.pop("codec_weights", None)
    usual = {"transport": method.transports[0],
             **{field.name: getattr(method.Options(), field.name) for field in dataclasses.fields(method.Options)
                if field.metadata["result"] and field.name != "warmup"}}
    told = "".join(f":{name}={options[name]}" for name in usual if options.get(name, usual[name]) != usual[name])
    seeds = sorted(known.get(system.name + told, ()))
    return f"{seeds[0]:.1f}–{seeds[-1]:.1f}" if seeds else "–"


def alike(stretch: float) -> str:
    """The rate in `LINKS` with the nearest stretch."""
    return min(LINKS, key=lambda rate: abs(math.log(LINKS[rate]["stretch"] / stretch)))


def beyond(cluster: VirtualCluster, floats: int, workers: int, systems: Sequence[System]) -> List[str]:
    """In what a cluster, a model and systems lie outside of what was checked."""
    links = (cluster.links, *cluster.hosts.values())
    goodputs, latency_ms = [link.goodput for link in links], 1000 * max(link.latency for link in links)
    ranges: List[Tuple[str, Sequence[float], Sequence[float], Callable[[float], str]]] = [
        (f"{workers} workers", [workers], CHECKED["workers"], str),
        (f"{_millions(floats)} parameters", [floats], CHECKED["floats"], _millions),
        (f"links of {_gbit(min(goodputs))} to {_gbit(max(goodputs))}", goodputs,
         [PAYLOAD * rate * 1e6 / 8 for rate in CHECKED["rate_mbit"]], _gbit)]
    found = [f"{what} (checked: {text(least)} to {text(most)})" for what, values, (least, most), text in ranges
             if not least <= min(values) <= max(values) <= most]
    if latency_ms > CHECKED["latency_ms"][1]:
        found.append(f"a latency of {latency_ms:.3g} ms (checked: to {CHECKED['latency_ms'][1]:g} ms)")
    if cluster.hosts:
        found.append("links that differ")
    if cluster.racks is not None:
        found.append("racks")
    random = cluster.compute.draws.kind in ("lognormal", "pareto") or cluster.compute.failures is not None
    if random or cluster.compute.draws.kind != "constant" or cluster.compute.speeds:
        found.append("passes that differ from worker to worker" + random * (
            ", drawn for few iterations: another `seed` in the description shows how much that matters"))
    if _rare(cluster.compute):
        found.append(f"waiting for pauses or failures that come less often than every {MOST} iterations, of which no "
                     "more are simulated: workers that wait for each other may be slower")
    codecs = {str(system.options.get("codec", "none")) for system in systems} - {"none"}
    found += [f"codec {codec}, which has no time in the profile" for codec in sorted(codecs - set(cluster.codecs))]
    others = sorted({system.name for system in systems} - set(CHECKED["stores"]))
    if others:
        found.append("the stores " + ", ".join(others))
    return found


def _rare(compute: LayerTimes) -> bool:
    """Whether a worker pauses or fails less often than in all iterations that are simulated."""
    pauses = compute.draws.kind == "pauses" and compute.draws.values[0] > MOST
    return pauses or (compute.failures is not None and compute.failures[0] > MOST * compute.iteration)


def _millions(number: float) -> str:
    return f"{number / 1e6:.3g} M"


def _gbit(goodput: float) -> str:
    return f"{8 * goodput / 1e9:.3g} Gbit/s"
