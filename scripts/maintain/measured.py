#!/usr/bin/env python3
"""Write the measurements that `odsgd advise` knows (odsgd/lab/advise/measured.json) anew, from docs/results/data.

    digits    test accuracies with two workers, as they stand below
    mnist     test accuracies with 16 workers: Figure 16, slow, of docs/results/beyond.md
    checked   least and most of the configurations of docs/how-to/advise.md (check_advice.py) and of
              docs/results/weights.md (utilisation.py, without loss), and their stores
    links     of each link of docs/results/weights.md (links.py): SSGD's iteration over its computing, and virtual
              seconds to a test loss of 0.2, by store
"""
import csv
import json
import math
import sys
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from odsgd.lab.advise.knowledge import FILE
from odsgd.lab.bench import models
from odsgd.lab.bench.systems import OURS, parse
from odsgd.lab.cluster.links import parse_rate
from scripts.maintain import check_advice, utilisation
from scripts.maintain import links as map_of_links
from scripts.maintain.docs_tables import by_line
from scripts.reproduction.declarations import BEYOND, paper_called
from scripts.reproduction.pages import load

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
COMPUTE_S, LOSS = 0.01, 0.2  # of docs/results/weights.md

DIGITS: Dict[str, Dict[str, Sequence[float]]] = {
    "docs/reference/algorithms.md": {
        "ssgd": (97.78, 97.78, 97.22), "ssgd:codec=float16": (98.06, 97.78, 97.22),
        "ssgd:codec=truncate": (98.06, 97.78, 97.22), "ssgd:codec=quantize": (97.78, 98.06, 97.22),
        "ssgd:codec=2bit": (95.00, 96.94, 96.94),
        "odsgd": (98.33, 97.22, 97.78), "odsgd:codec=float16": (98.33, 96.94, 97.78),
        "odsgd:codec=truncate": (98.33, 96.94, 97.78), "odsgd:codec=quantize": (98.33, 96.67, 97.78),
        "odsgd:codec=2bit": (95.83, 96.11, 96.67)},
    "configs/digits_ring.yaml": {
        "odsgd:transport=ring": (98.1, 97.2, 96.9), "delayed:transport=ring": (97.8, 97.5, 97.2),
        "dsync": (98.1, 96.9, 96.9), "pipesgd": (98.1, 97.5, 96.9),
        "pipesgd:codec=truncate": (98.1, 97.5, 97.2), "pipesgd:codec=quantize": (98.1, 97.5, 96.9),
        "sasgd": (98.1, 96.9, 96.9), "sasgd:T=4": (97.8, 97.2, 97.2),
        "diloco": (97.2, 96.4, 97.2), "diloco:H=10": (98.1, 97.5, 96.7), "eager": (96.1, 96.4, 94.7),
        "eager:H=10": (98.3, 97.5, 96.4)},
    "configs/digits_async.yaml": {
        "asgd": (98.1, 97.5, 96.9), "dcasgd_c": (97.8, 97.5, 96.9), "dcasgd_a": (97.5, 97.2, 96.7),
        "softsync": (97.8, 97.2, 96.1), "downpour": (97.5, 97.2, 96.7), "easgd": (97.5, 96.1, 95.8),
        "eamsgd": (98.3, 97.8, 97.8)}}
"""Test accuracy in per cent on scikit-learn's digits with two workers, of seeds 0, 1 and 2, by the file that says how
it was measured."""


def accuracies() -> Dict[str, List[float]]:
    """System as the adviser names it -> test accuracy in per cent after the last epoch, for each seed."""
    cells = load(paper_called(BEYOND), RESULTS)["figure-16-slow", "small"].values()
    named = {system(next(iter(seeds.values())).asked["options"]): seeds for seeds in cells}
    return {name: [round(100 * seeds[seed].column("test_accuracy")[-1], 2) for seed in sorted(seeds)]
            for name, seeds in sorted(named.items()) if name}


def system(options: Mapping[str, Any]) -> str:
    """The name of a run's system; empty if the run has options of its method that the adviser never varies."""
    own = {key: value for key, value in options.items()
           if key in OURS[options["kvstore"]].option_names() and key not in ("on_nan", "warmup")}
    named = "".join(f":{key}={value}" for key, value in own.items())
    return options["kvstore"] + named if own.keys() <= {"codec", "T"} else ""


def checked() -> Dict[str, List[Any]]:
    """The range of each property of the configurations, and the stores that ran on them."""
    results = list(json.loads(check_advice.FILE.read_text(encoding="utf-8"))["configurations"].values())
    drawn = [result["configuration"] for result in results]
    values = {"workers": [of["workers"] for of in drawn],
              "floats": [models.size(of["model"]) for of in drawn],
              "rate_mbit": [int(of["rate"][:-len("mbit")]) for of in drawn], "latency_ms": [0.0]}
    labels = {label for result in results for label in result["measured_ms"]}
    for run in map(json.loads, utilisation.OUT.read_text(encoding="utf-8").splitlines()):
        if not run["loss"]:
            labels.add(run["system"])
            values["rate_mbit"].append(parse_rate(run["rate"], "") // 10 ** 6)
            values["latency_ms"].append(run["rtt_ms"] / 2)
    stores = {parse(label).name for label in labels}
    return {**{what: [min(of), max(of)] for what, of in values.items()}, "stores": sorted(stores)}


def links() -> Dict[str, Dict[str, Any]]:
    """By the links' rate; of a store that was run in two ways the one that was faster."""
    found: Dict[str, Dict[str, Any]] = {rate: {"seconds": {}} for rate in map_of_links.LINKS}
    with map_of_links.OUT.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if (row["workers"], row["momentum"], row["seed"]) != ("4", "0", "0"):
            continue
        of_rate, store = found[row["link"]], map_of_links.METHODS[row["method"]].split()[0]
        if store == "ssgd":
            iterations = float(row["bytes"]) / map_of_links.bytes_of("SSGD", 1)
            of_rate["stretch"] = round(float(row["virtual_s"]) / iterations / COMPUTE_S, 2)
        if float(row["test_loss"]) <= LOSS:
            seconds = min(float(row["virtual_s"]), of_rate["seconds"].get(store, math.inf))
            of_rate["seconds"][store] = round(seconds, 2)
    return {rate: {"stretch": one["stretch"], "seconds": dict(sorted(one["seconds"].items(), key=lambda item: item[1]))}
            for rate, one in found.items()}


def text() -> str:
    """The content of the file, a line for each entry."""
    digits = {label: seeds for of_file in DIGITS.values() for label, seeds in of_file.items()}
    return by_line({"digits": digits, "mnist": accuracies(), "checked": checked(), "links": links()})


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
