"""What is known beside the times: accuracies that were measured, and the range in which the times were checked."""
from __future__ import annotations

from typing import Dict, List, Mapping, Sequence, Tuple

from odsgd.lab.bench.systems import OURS, System
from odsgd.virtual.description import VirtualCluster

Seeds = Tuple[str, str, str]

ACCURACY: Dict[str, Dict[str, Seeds]] = {
    "docs/reference/algorithms.md": {
        "ssgd": ("97.78", "97.78", "97.22"), "ssgd:codec=float16": ("98.06", "97.78", "97.22"),
        "ssgd:codec=truncate": ("98.06", "97.78", "97.22"), "ssgd:codec=quantize": ("97.78", "98.06", "97.22"),
        "ssgd:codec=2bit": ("95.00", "96.94", "96.94"),
        "odsgd": ("98.33", "97.22", "97.78"), "odsgd:codec=float16": ("98.33", "96.94", "97.78"),
        "odsgd:codec=truncate": ("98.33", "96.94", "97.78"), "odsgd:codec=quantize": ("98.33", "96.67", "97.78"),
        "odsgd:codec=2bit": ("95.83", "96.11", "96.67")},
    "configs/digits_ring.yaml": {
        "odsgd:transport=ring": ("98.1", "97.2", "96.9"), "delayed:transport=ring": ("97.8", "97.5", "97.2"),
        "dsync": ("98.1", "96.9", "96.9"), "pipesgd": ("98.1", "97.5", "96.9"),
        "pipesgd:codec=truncate": ("98.1", "97.5", "97.2"), "pipesgd:codec=quantize": ("98.1", "97.5", "96.9"),
        "sasgd": ("98.1", "96.9", "96.9"), "sasgd:T=4": ("97.8", "97.2", "97.2")},
    "configs/digits_async.yaml": {
        "asgd": ("98.1", "97.5", "96.9"), "dcasgd_c": ("97.8", "97.5", "96.9"), "dcasgd_a": ("97.5", "97.2", "96.7"),
        "softsync": ("97.8", "97.2", "96.1"), "downpour": ("97.5", "97.2", "96.7"), "easgd": ("97.5", "96.1", "95.8"),
        "eamsgd": ("98.3", "97.8", "97.8")}}
"""Test accuracy in per cent on scikit-learn's digits with two workers, of seeds 0, 1 and 2, by the file that says how
it was measured."""

MNIST: Dict[str, Seeds] = {
    "ssgd": ("94.13", "94.35", "94.39"), "dsync": ("94.07", "94.34", "94.41"), "odsgd": ("94.26", "93.94", "94.38"),
    "delayed": ("92.88", "93.76", "93.65"), "pipesgd": ("93.27", "93.11", "93.04"),
    "pipesgd:codec=truncate": ("93.34", "93.07", "92.99"), "asgd": ("94.43", "94.63", "94.40"),
    "dcasgd_c": ("94.46", "94.63", "94.41"), "dcasgd_a": ("94.39", "94.70", "94.34"),
    "softsync": ("93.73", "94.00", "93.58"), "downpour:T=5": ("90.59", "90.11", "88.87"),
    "easgd:T=5": ("93.17", "92.85", "93.14"), "eamsgd:T=5": ("93.85", "93.73", "93.69"),
    "sasgd:T=5": ("93.84", "93.63", "94.10")}
"""Test accuracy in per cent on MNIST of a perceptron with 16 workers, of seeds 0, 1 and 2, after as many examples and
with rates chosen alike: docs/results/beyond.md, Figure 16, slow."""

_DIGITS = {label: seeds for measured in ACCURACY.values() for label, seeds in measured.items()}


def accuracy_of_two(system: System) -> str:
    """What is known of the accuracy of a system with two workers, lowest and highest; a dash where nothing is."""
    return _told(system, _DIGITS)


def accuracy_of_many(system: System) -> str:
    """The same with 16 workers."""
    return _told(system, MNIST)


def _told(system: System, known: Mapping[str, Seeds]) -> str:
    method, options = OURS[system.name], dict(system.options)
    usual = {"transport": method.transports[0], "codec": "none", "T": getattr(method.Options(), "T", None)}
    told = "".join(f":{name}={options[name]}" for name in usual if options.get(name, usual[name]) != usual[name])
    seeds = sorted(map(float, known.get(system.name + told, ())))
    return f"{seeds[0]:.1f}–{seeds[-1]:.1f}" if seeds else "–"


CHECKED_WORKERS, CHECKED_FLOATS, CHECKED_GOODPUT = (2, 6), (0.05e6, 17.1e6), (0.33e9 / 8, 9.6e9 / 8)
CHECKED_STORES = ("ssgd", "odsgd", "asgd", "pipesgd", "easgd")
"""Of the configurations measured for docs/how-to/advise.md, lowest and highest; goodput in bytes per second."""


def beyond(cluster: VirtualCluster, floats: int, workers: int, systems: Sequence[System]) -> List[str]:
    """In what a cluster, a model and systems lie outside of what was checked."""
    goodputs = [link.goodput for link in (cluster.links, *cluster.hosts.values())]
    found = []
    if not CHECKED_WORKERS[0] <= workers <= CHECKED_WORKERS[1]:
        found.append(f"{workers} workers (checked: {CHECKED_WORKERS[0]} to {CHECKED_WORKERS[1]})")
    if not CHECKED_FLOATS[0] <= floats <= CHECKED_FLOATS[1]:
        found.append(f"{floats / 1e6:.3g} M parameters (checked: {CHECKED_FLOATS[0] / 1e6:g} M to "
                     f"{CHECKED_FLOATS[1] / 1e6:g} M)")
    if not all(CHECKED_GOODPUT[0] <= goodput <= CHECKED_GOODPUT[1] for goodput in goodputs):
        found.append(f"links of {_gbit(min(goodputs))} to {_gbit(max(goodputs))} (checked: "
                     f"{_gbit(CHECKED_GOODPUT[0])} to {_gbit(CHECKED_GOODPUT[1])})")
    if cluster.hosts:
        found.append("links that differ")
    if cluster.racks is not None:
        found.append("racks")
    if cluster.compute.draws.kind != "constant" or cluster.compute.speeds:
        found.append("passes that differ from worker to worker")
    codecs = {str(system.options.get("codec", "none")) for system in systems} - {"none"}
    found += [f"codec {codec}, of which the profile has no time" for codec in sorted(codecs - set(cluster.codecs))]
    others = sorted({system.name for system in systems} - set(CHECKED_STORES))
    if others:
        found.append("the stores " + ", ".join(others))
    return found


def _gbit(goodput: float) -> str:
    return f"{8 * goodput / 1e9:.3g} Gbit/s"
