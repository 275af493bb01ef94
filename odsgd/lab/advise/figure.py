"""Throughput over the number of workers: for each store the best of its systems."""
from __future__ import annotations

from typing import Dict, List, Sequence

from odsgd.lab.advise.predictions import Prediction
from odsgd.tools import pyplot

MARKERS = "os^vDP*X<>hd"


def draw(ranked: Sequence[Sequence[Prediction]], batch_size: int, title: str, path: str) -> None:
    """A line per store. `ranked`: for each number of workers the predictions, the fastest first."""
    plt = pyplot("--png")
    figure, axis = plt.subplots(figsize=(8, 5.5))
    best: Dict[str, List[Prediction]] = {}
    for predictions in ranked:
        for prediction in predictions:
            line = best.setdefault(prediction.system.name, [])
            if not line or line[-1].workers != prediction.workers:
                line.append(prediction)
    for number, (store, line) in enumerate(sorted(best.items(), key=lambda item: -item[1][-1].rate)):
        axis.plot([it.workers for it in line], [it.rate * (batch_size or 1) for it in line],
                  marker=MARKERS[number % len(MARKERS)], markersize=5, label=f"{store} ({line[-1].system.label})")
    workers = [predictions[0].workers for predictions in ranked]
    alone = [it.workers / it.loads["passes"] * (batch_size or 1) for it, *_ in ranked if "passes" in it.loads]
    if len(alone) == len(workers):
        axis.plot(workers, alone, color="black", linestyle=":", label="passes alone")
    axis.set_xlabel("workers")
    axis.set_ylabel(f"{'samples' if batch_size else 'gradients'} per second of all workers, predicted")
    axis.set_xticks(workers)
    axis.set_ylim(bottom=0)
    axis.set_title(title, fontsize=10)
    axis.legend(fontsize=7, title=f"best of each store (at {workers[-1]} workers)", title_fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
