"""``odsgd advise``."""
import dataclasses
import math
import sys
import time
from pathlib import Path
from typing import List, Optional, Sequence

from kvstore.errors import ConfigError
from kvstore.messages.codecs import WITHOUT_RESIDUAL
from odsgd.config.files import read_cluster
from odsgd.lab.advise import report
from odsgd.lab.advise.candidates import NOTHING, candidates, changes, coded_alike
from odsgd.lab.advise.config import AdviseConfig
from odsgd.lab.advise.knowledge import beyond
from odsgd.lab.advise.predictions import Oracle, Prediction
from odsgd.lab.advise.report import Advice
from odsgd.lab.bench import models
from odsgd.tools import say, writable
from odsgd.virtual.description import PAYLOAD, Quantity, VirtualCluster, of

TIE = 0.01
"""Systems within this part of the fastest time tie: the least stale comes first, then the one that needs least memory.
"""

SAY_EVERY_S = 5.0
"""Between two lines of progress, where there is no terminal."""


def main(argv: Sequence[str]) -> int:
    config = AdviseConfig.from_flags(argv)
    oracle = of_profile(config)
    writable(config.json)
    advices = [advise(config, oracle, workers) for workers in config.workers or (oracle.cluster.workers,)]
    print("\n\n".join(report.text(advice, config.batch_size, config.lines) for advice in advices))
    if config.json:
        Path(config.json).write_text(report.as_json(advices, config), encoding="utf-8")
    return 0


def of_profile(config: AdviseConfig) -> Oracle:
    """The cluster and the model that are asked for; the passes' time is in `compute.iteration` alone."""
    cluster = read_cluster(config.profile) if config.profile else of({})
    compute = cluster.compute
    if config.compute is not None:
        compute = dataclasses.replace(compute, iteration=config.compute, layers={})
    elif compute.layers:  # of a network by its own names, and here tensors have none
        forward, backward = map(sum, zip(*compute.layers.values()))
        compute = dataclasses.replace(compute, iteration=Quantity(forward + backward),
                                      forward=forward / ((forward + backward) or 1), layers={})
    cluster = dataclasses.replace(cluster, compute=compute)
    if config.model is None:
        raise ConfigError("how many parameters does the model have? Say --model 25.6M, or name a model")
    return Oracle(linked(cluster, config.rate) if config.rate else cluster, models.parameters(config.model))


def linked(cluster: VirtualCluster, rate: float) -> VirtualCluster:
    """The cluster with all links of one rate, in bytes per second; hosts that differ otherwise still do."""
    goodput = Quantity(PAYLOAD * rate)
    links = dataclasses.replace(cluster.links, goodput=goodput)
    rated = {name: dataclasses.replace(link, goodput=goodput) for name, link in cluster.hosts.items()}
    others = {name: link for name, link in rated.items() if link != links}
    return dataclasses.replace(cluster, links=links, hosts=others)


def ranked(config: AdviseConfig, oracle: Oracle, workers: int) -> List[Prediction]:
    """All candidates, the fastest first; candidates that tie with it are ordered by what they cost."""
    timed = [codec for codec in oracle.cluster.codecs if codec in WITHOUT_RESIDUAL and codec != "none"]
    systems = candidates(config, workers, config.codecs or ("none", *timed))

    said_at = -math.inf

    def show_progress(done: int, of: int, found: str) -> None:
        nonlocal said_at
        if of and (sys.stderr.isatty() or time.monotonic() - said_at >= SAY_EVERY_S):
            said_at = time.monotonic()
            say(f"{workers} workers: {done} of {of} simulations{found}")

    oracle.prepare(systems, workers, show_progress)
    say("")
    found = sorted((oracle.predict(system, workers) for system in systems), key=lambda one: one.iteration_s)
    tied = sum(one.iteration_s <= found[0].iteration_s * (1 + TIE) for one in found)
    found[:tied] = sorted(found[:tied], key=lambda one: (one.mean_staleness, one.worker_nbytes + one.servers_nbytes))
    return found


def advise(config: AdviseConfig, oracle: Oracle, workers: int) -> Advice:
    if not oracle.cluster.compute.iteration:
        raise ConfigError("an iteration that computes nothing has nothing to gain; say how long the passes take, "
                          "e.g. --compute 400ms")
    predictions = ranked(config, oracle, workers)
    if not predictions:
        raise ConfigError("no system is left; give more of stores, servers, codecs and intervals")
    often = [one for one in predictions if one.system.intervals(one.workers) == (1, 1)] or predictions
    now = oracle.predict(config.now, workers) if config.now else often[0]
    say(f"{workers} workers: what a change would gain")
    advice = Advice(workers, predictions, often[0], _coded(oracle, often), now, changes(oracle, now, predictions),
                    beyond(oracle.cluster, oracle.nbytes // 4, workers, [one.system for one in predictions]),
                    oracle.alone_s(workers))
    say("")
    return advice


def _coded(oracle: Oracle, often: Sequence[Prediction]) -> Optional[Prediction]:
    """`Advice.coded`."""
    first = often[0]
    slow = 1 < first.workers <= first.iteration_s / oracle.alone_s(first.workers)
    codable = filter(None, (coded_alike(one.system) for one in often))
    system = next(codable, None) if slow and "float16" not in oracle.cluster.codecs else None  # else it is ranked
    coded = oracle.predict(system, first.workers) if system else None
    return coded if coded and coded.rate > first.rate * (1 + NOTHING) else None
