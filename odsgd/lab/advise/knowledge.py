"""The range in which the adviser's times were checked."""
from __future__ import annotations

from typing import List, Sequence

from odsgd.lab.bench.systems import System
from odsgd.virtual.description import PAYLOAD, VirtualCluster

WORKERS, FLOATS, RATES_MBIT = (2, 6), (50_848, 17_102_358), (347, 9581)
STORES = {"ssgd", "odsgd", "pipesgd", "asgd", "easgd"}
"""Least and most of the configurations measured for docs/how-to/advise.md, and the stores that ran on them."""


def beyond(cluster: VirtualCluster, floats: int, workers: int, systems: Sequence[System]) -> List[str]:
    """In what a cluster, a model and systems lie outside of what was checked."""
    goodputs = [link.goodput for link in (cluster.links, *cluster.hosts.values())]
    found = []
    if not WORKERS[0] <= workers <= WORKERS[1]:
        found.append(f"{workers} workers (checked: {WORKERS[0]} to {WORKERS[1]})")
    if not FLOATS[0] <= floats <= FLOATS[1]:
        found.append(f"{_millions(floats)} parameters (checked: {_millions(FLOATS[0])} to {_millions(FLOATS[1])})")
    checked = [PAYLOAD * rate * 1e6 / 8 for rate in RATES_MBIT]
    if not checked[0] <= min(goodputs) <= max(goodputs) <= checked[1]:
        found.append(f"links of {_gbit(min(goodputs))} to {_gbit(max(goodputs))} (checked: {_gbit(checked[0])} to "
                     f"{_gbit(checked[1])})")
    if cluster.hosts:
        found.append("links that differ")
    if cluster.racks is not None:
        found.append("racks")
    if cluster.compute.draws.kind != "constant" or cluster.compute.speeds:
        found.append("passes that differ from worker to worker")
    codecs = {str(system.options.get("codec", "none")) for system in systems} - {"none"}
    found += [f"codec {codec}, which has no time in the profile" for codec in sorted(codecs - set(cluster.codecs))]
    others = sorted({system.name for system in systems} - STORES)
    if others:
        found.append("the stores " + ", ".join(others))
    return found


def _millions(number: float) -> str:
    return f"{number / 1e6:.3g} M"


def _gbit(goodput: float) -> str:
    return f"{8 * goodput / 1e9:.3g} Gbit/s"
