"""What is known beside the times: accuracies that were measured, and the range in which the times were checked."""
from __future__ import annotations

from typing import Dict, List, Sequence

from kvstore.transports.virtual.description import VirtualCluster
from odsgd.lab.bench.systems import OURS, System

ACCURACY: Dict[str, str] = {
    "ssgd": "97.2–97.8", "ssgd:codec=float16": "97.2–98.1", "ssgd:codec=truncate": "97.2–98.1",
    "ssgd:codec=quantize": "97.2–98.1", "ssgd:codec=2bit": "95.0–96.9",
    "odsgd": "97.2–98.3", "odsgd:codec=float16": "96.9–98.3", "odsgd:codec=truncate": "96.9–98.3",
    "odsgd:codec=quantize": "96.7–98.3", "odsgd:codec=2bit": "95.8–96.7", "odsgd:transport=ring": "96.9–98.1",
    "delayed:transport=ring": "97.2–97.8", "dsync": "96.9–98.1", "pipesgd": "96.9–98.1",
    "pipesgd:codec=truncate": "97.2–98.1", "pipesgd:codec=quantize": "96.9–98.1",
    "sasgd": "96.9–98.1", "sasgd:T=4": "97.2–97.8", "asgd": "96.9–98.1", "dcasgd_c": "96.9–97.8",
    "dcasgd_a": "96.7–97.5", "softsync": "96.1–97.8", "downpour": "96.7–97.5", "easgd": "95.8–97.5",
    "eamsgd": "97.8–98.3"}
"""Test accuracy in per cent on scikit-learn's digits, lowest and highest of three seeds, with two workers: what
configs/digits_*.yaml and docs/reference/algorithms.md have. Nothing larger has been measured."""


def accuracy(system: System) -> str:
    """What is known of the accuracy of a system; a dash where nothing is."""
    method, options = OURS[system.name], dict(system.options)
    usual = {"transport": method.transports[0], "codec": "none", "T": getattr(method.Options(), "T", None)}
    told = "".join(f":{name}={options[name]}" for name in usual if options.get(name, usual[name]) != usual[name])
    return ACCURACY.get(system.name + told, "–")


CHECKED_WORKERS, CHECKED_FLOATS, CHECKED_GOODPUT = (2, 6), (0.05e6, 17.1e6), (0.33e9 / 8, 9.6e9 / 8)
CHECKED_STORES = ("ssgd", "odsgd", "asgd", "pipesgd", "easgd")
"""Of the configurations that were measured for docs/advise.md, lowest and highest; goodput in bytes per second."""


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
