"""What is to be expected of a system on a cluster: the simulation's times, and what follows from its programs."""
from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Dict, Hashable, Mapping, Sequence

from kvstore.buckets import WIRE_DTYPE, Bucket, Parameter, Segment
from kvstore.staleness import mean
from kvstore.transports.virtual import times
from kvstore.transports.virtual.description import VirtualCluster
from kvstore.transports.virtual.programs import Programs
from odsgd.lab.advise import memory
from odsgd.lab.advise.candidates import placed
from odsgd.lab.bench.systems import OURS, System

ITERATIONS, WARM_UP = 14, 4


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One system on one cluster.

    iteration_s : of a worker, mean
    staleness : tau -> pushes
    worker_nbytes, servers_nbytes : what it adds to the memory of a worker; what all servers have together
    loads : resource -> seconds per iteration that it is at work
    """

    system: System
    workers: int
    iteration_s: float
    staleness: Mapping[int, int]
    worker_nbytes: float
    servers_nbytes: float
    loads: Mapping[str, float]

    @property
    def rate(self) -> float:
        """Gradients per second, of all workers."""
        return self.workers / self.iteration_s

    @property
    def resource(self) -> str:
        """What is busiest."""
        return max(self.loads, key=lambda what: self.loads[what])

    @property
    def bound_s(self) -> float:
        """No schedule is faster than this, on average."""
        return self.loads[self.resource]

    @property
    def mean_staleness(self) -> float:
        return mean(dict(self.staleness))

    def staleness_of(self, part: float) -> int:
        """The least tau that so large a part of the pushes does not exceed."""
        sums = itertools.accumulate(count for _, count in sorted(self.staleness.items()))
        return next(tau for tau, known in zip(sorted(self.staleness), sums)
                    if known >= part * sum(self.staleness.values()))


class Oracle:
    """Predicts systems on one cluster and one model. What sends and waits alike is simulated once."""

    def __init__(self, cluster: VirtualCluster, parameters: Sequence[Parameter]) -> None:
        self.cluster, self.parameters = cluster, list(parameters)
        self.nbytes = WIRE_DTYPE.itemsize * sum(parameter.size for parameter in parameters)
        self._paces: Dict[Hashable, times.Pace] = {}

    def predict(self, system: System, workers: int) -> Prediction:
        """What is to be expected of a system."""
        method, transport = OURS[system.name], str(system.options.get("transport", OURS[system.name].transports[0]))
        given = {key: value for key, value in system.options.items() if key != "transport"}
        options = method.Options(**given).in_iterations()
        programs = Programs(method, options, workers, [_FLOAT], method(options, workers).local_optimizer() is not None,
                            transport != "server")
        pace = self._pace(placed(self.cluster, system, workers), system, options, given, transport, programs)
        servers = memory.of_servers(method, options, workers) if transport == "server" else 0
        iteration = max(pace.iteration, *pace.loads.values())  # what is counted of a short run may be less
        return Prediction(system, workers, iteration, pace.staleness or {_delay(programs): 1},
                          self.nbytes * memory.of_worker(method, options, workers, transport, programs),
                          self.nbytes * servers, pace.loads)

    def _pace(self, cluster: VirtualCluster, system: System, options: Any, given: Mapping[str, Any], transport: str,
              programs: Programs) -> times.Pace:
        method = OURS[system.name]
        period = max(method.intervals(options))
        asked = tuple(tuple(programs.of(t)[0]) for t in range(1, WARM_UP + period + 1))
        key = (system.servers, cluster.workers, transport, asked, method(options, cluster.workers).traffic(whole=False),
               cluster.server.rules.get(system.name, cluster.server.update), given.get("n"))
        if key not in self._paces:
            self._paces[key] = times.simulate(cluster, system.name, self.parameters, given,
                                              WARM_UP + max(ITERATIONS - WARM_UP, 2 * period), WARM_UP,
                                              transport)
        return self._paces[key]


def _delay(programs: Programs) -> int:
    """How many iterations after it was sent a synchronous method's gradient is part of the weights it computes on."""
    asked: Dict[int, int] = {}
    delays = [0]
    for t in range(1, 2 * WARM_UP):
        for op in programs.of(t)[0]:
            if op.what in ("exchange", "sum"):
                asked[op.number] = t
            elif op.what == "await" and op.number in asked:
                delays.append(t - asked[op.number])
    return max(delays)


_FLOAT = Bucket(0, 0, (Segment(Parameter(0, "w", (1,)), 0, 1, 0),))
