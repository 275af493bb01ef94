"""A job on a virtual cluster with times only: no arrays, no gradients, thousands of workers."""
import gc
from dataclasses import dataclass
from typing import List, Optional, Sequence, Type

from kvstore.algorithms.method import Method, Options
from kvstore.buckets import Keys, Parameter, by_layer
from kvstore.errors import ConfigError
from kvstore.transports.rounds import on_ring
from kvstore.transports.virtual import layout
from kvstore.transports.virtual.description import VirtualCluster
from kvstore.transports.virtual.programs import Programs
from kvstore.transports.virtual.simulation import NS, Simulation


def simulation(cluster: VirtualCluster, method: Type[Method], options: Options, parameters: Sequence[Parameter],
               ring: Optional[bool] = None) -> Simulation:
    """The job before its first iteration. `ring`: whether it has no servers; None: the method's first choice."""
    made = method(options, cluster.workers)
    kind = ("ring" if ring else "server") if ring is not None else method.transports[0]
    if kind not in method.transports:
        raise ConfigError(f"store {method.name} does not run on transport `{kind}`")
    layers, traffic = by_layer(parameters), made.traffic(whole=False)
    buckets = (on_ring(layers, traffic, Keys(1), cluster.workers) if kind == "ring" else
               layout.on_servers(layers, traffic, Keys(cluster.servers), cluster))
    programs = Programs(method, options, cluster.workers, buckets, made.local_optimizer() is not None, kind == "ring",
                        None if kind == "ring" else layout.window(layers, traffic))
    return Simulation(cluster, method, programs, buckets, layers, traffic.codec)


@dataclass(frozen=True)
class Pace:
    """How long iterations took, in seconds: `iteration`, the mean of those that count, and when each of worker 0's was
    over."""

    iteration: float
    over: List[float]


def pace(simulation: Simulation, iterations: int, warm_up: int = 0) -> Pace:
    """Let every worker go through so many iterations; the first `warm_up` do not count."""
    over: List[float] = []
    simulation.over = lambda m: over.append(simulation.ready(m) / NS) if m == 0 else None
    gc.disable()  # which would look at millions of events again and again, and none of them is in a circle
    for m in range(simulation.num_workers):
        for t in range(1, iterations + 1):
            simulation.begin(m, t)
        simulation.rest(m)
    simulation.met()
    gc.enable()
    began = over[warm_up - 1] if warm_up else 0.0
    return Pace((over[-1] - began) / (iterations - warm_up), over)
