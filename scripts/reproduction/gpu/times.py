"""Virtual times of a trial, by a process of its own: one that began as `-m` is not found again by another."""
from __future__ import annotations

from typing import Any, Dict, List

from kvstore import methods
from kvstore.methods import fit
from odsgd.config.train import TrainConfig
from odsgd.virtual import description, times
from odsgd.virtual.costs import NS
from scripts.examples.networks import make


def virtual_seconds(asked: Dict[str, Any], config: TrainConfig, each: int) -> List[float]:
    """When each epoch, of `each` iterations, is over on the trial's cluster, where all workers meet."""
    method = methods.find(config.kvstore)
    cluster = description.of(asked["cluster"])
    network = make(config.model, config.input_shape, config.classes, config.thumbnail)
    sizes = [one.numel() for one in network.parameters() if one.requires_grad]
    job = times.simulation(cluster, method, fit.options_of(method, config.options.in_iterations(each).plain()),
                           times.layers({f"{number:04}": size for number, size in enumerate(sizes)}))
    over = []
    for epoch in range(config.epochs):
        for m in range(cluster.workers):
            for t in range(epoch * each + 1, (epoch + 1) * each + 1):
                job.begin(m, t)
            job.rest(m)
        over.append(job.met() / NS)
    return over
