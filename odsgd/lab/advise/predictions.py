"""The prediction for a system on a cluster: the simulation's times, and what follows from its programs.

Memory is counted in arrays of the model's size that a store adds, on a worker and a rule of its own for one float.
Besides what a method declares, a worker has per bucket

    servers    two buffers in turn; the gathered gradient where the method reads it after its exchange
    a ring     the gathered gradient, the sums in flight, two W where it exchanges, and U's state
    parts      the gathered gradient, the sum, two W, and U's state of its part

and the servers have W, what has been pushed, and U's state. U is SGD with momentum, whose state is one array. Codecs
add what they keep.
"""
import contextlib
import dataclasses
import math
import multiprocessing
from typing import Any, Callable, Dict, Hashable, Mapping, Sequence, Tuple

import numpy as np

from kvstore.messages.buckets import WIRE_DTYPE, Bucket, Parameter, Segment
from kvstore.messages.codecs import codec
from kvstore.methods.contract import Update
from kvstore.session.staleness import mean
from kvstore.state import declared
from odsgd.lab.bench.systems import AUTO, OURS, System
from odsgd.virtual import times
from odsgd.virtual.costs import NS, PassTimes
from odsgd.virtual.description import VirtualCluster
from odsgd.virtual.programs import Programs

WARM_UP = 4
"""Iterations that do not count; of asynchronous stores that exchange less often also as many exchanges: workers make
their first ones together, queue for the servers, and so drift apart.
"""
ITERATIONS, OF_ALL = (4, 10), 64
"""How many iterations of a worker count, at least and at most; and how many of all workers together in between."""
MUCH = 300
"""If all simulations together have more workers, it is worth while to start processes for them."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One system on one cluster.

    iteration_s : of a worker, mean
    staleness : tau -> pushes
    worker_nbytes, servers_nbytes : what it adds to the memory of a worker; what all servers have together
    loads : resource -> seconds per iteration that it is at work, where all workers go through equally many
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
        return max(self.loads, key=lambda what: self.loads[what])

    @property
    def bound_s(self) -> float:
        """No schedule is faster than this, on average.

        An asynchronous worker beside its server uses no link, and may go through more iterations than the others.
        """
        return min(self.loads[self.resource], self.iteration_s)

    @property
    def mean_staleness(self) -> float:
        return mean(dict(self.staleness))

    def staleness_of(self, part: float) -> int:
        """The least tau that this part of the pushes does not exceed."""
        taus, pushes = zip(*sorted(self.staleness.items()))
        return int(taus[np.searchsorted(np.cumsum(pushes), part * sum(pushes))])


class Oracle:
    """Predicts systems on one cluster and one model. What sends and waits alike is simulated once."""

    def __init__(self, cluster: VirtualCluster, parameters: Sequence[Parameter]) -> None:
        self.cluster, self.parameters = cluster, list(parameters)
        self.nbytes = WIRE_DTYPE.itemsize * sum(parameter.size for parameter in parameters)
        self._paces: Dict[Hashable, times.Pace] = {}

    def alone_s(self, workers: int) -> float:
        """Seconds of an iteration of one of them alone, the fastest, on average, with its pauses and failures."""
        compute = self.cluster.compute
        speed = max(compute.speeds.get(m, 1.0) for m in range(workers))
        alone = VirtualCluster(workers=1, compute=dataclasses.replace(compute, speeds={0: speed}))
        return PassTimes(alone, [], self.parameters).mean(of_slowest=True) / NS

    def prepare(self, systems: Sequence[System], workers: int, show_progress: Callable[[int, int, str], None]) -> None:
        """Simulate what these need, on all cores where that is much.

        `show_progress` is given how many are through, of how many, and what came of the last.
        """
        asked = [(self._question(_Job(system, workers, len(self.parameters))), system) for system in systems]
        questions = {key: arguments for (key, arguments), _ in asked if key not in self._paces}
        named = {key: system.label for (key, _), system in reversed(asked)}
        with contextlib.ExitStack() as stack:
            one_by_one: Any = map
            show_progress(0, len(questions), "")
            if workers * len(questions) > MUCH:
                one_by_one = stack.enter_context(multiprocessing.get_context("spawn").Pool()).imap
            for number, (key, pace) in enumerate(zip(questions, one_by_one(_simulated, questions.values())), start=1):
                self._paces[key] = pace
                show_progress(number, len(questions), f"; {named[key]}: {1000 * pace.iteration:.0f} ms")

    def predict(self, system: System, workers: int) -> Prediction:
        job = _Job(system, workers, len(self.parameters))
        key, arguments = self._question(job)
        if key not in self._paces:
            self._paces[key] = _simulated(arguments)
        pace = self._paces[key]
        bounds = [pace.loads["passes"]] if job.method.asynchronous else pace.loads.values()
        iteration = max(pace.iteration, *bounds)  # a short run may count less
        return Prediction(system, workers, iteration, pace.staleness or {job.delay(): 1},
                          self.nbytes * job.worker_arrays(), self.nbytes * job.server_arrays(), pace.loads)

    def _question(self, job: "_Job") -> Tuple[Hashable, Tuple[Any, ...]]:
        """A key, which is equal for systems that send and wait alike, and the arguments of `times.simulate`."""
        cluster = placed(self.cluster, job.system, job.workers)
        asked = tuple(tuple(job.programs.of(t)[0]) for t in job.iterations)
        own = (cluster.server.rules.get(job.system.name, cluster.server.update),
               cluster.worker.stores.get(job.system.name, 0.0))
        warm_up = WARM_UP * (1 + job.period) if job.method.asynchronous and job.period > 1 else WARM_UP
        least, most = ITERATIONS
        counted = max(min(max(-(-OF_ALL // job.workers), least), most), 2 * job.period)
        draws = cluster.compute.draws
        if draws.kind == "pauses" and draws.values[0] <= most:  # as many of each worker as on average
            counted = math.ceil(counted / draws.values[0]) * int(draws.values[0])
        return ((job.system.servers, job.workers, job.transport, asked, job.turns(), job.traffic, own,
                 job.given.get("n")),
                (cluster, job.system.name, self.parameters, job.given, warm_up + counted, warm_up, job.transport))


def placed(cluster: VirtualCluster, system: System, workers: int) -> VirtualCluster:
    """The cluster with this number of workers, and with the servers of a system.

    What the profile says of single hosts and workers stays where the cluster has them. A server that the profile does
    not name has the link of the first one.
    """
    beside = system.servers in (AUTO, None)
    servers = workers if system.servers == AUTO else system.extra_hosts() or 1
    speeds = {worker: speed for worker, speed in cluster.compute.speeds.items() if worker < workers}
    names = [f"worker{m}" for m in range(workers)] + ([] if beside else [f"server{s}" for s in range(servers)])
    first = cluster.hosts.get("server0")
    hosts = {name: cluster.hosts.get(name, first if name.startswith("server") else None) for name in names}
    return dataclasses.replace(cluster, workers=workers, servers=servers, placement="beside" if beside else "apart",
                               compute=dataclasses.replace(cluster.compute, speeds=speeds),
                               hosts={name: link for name, link in hosts.items() if link is not None})


def _simulated(arguments: Tuple[Any, ...]) -> times.Pace:
    return times.simulate(*arguments)


class _Job:
    """A system in the terms of the simulation, and what follows from its programs, which are for a bucket of one float.
    """

    def __init__(self, system: System, workers: int, parameters: int) -> None:
        self.system, self.workers, self.method = system, workers, OURS[system.name]
        self.transport = str(system.options.get("transport", self.method.transports[0]))
        self.given = {key: value for key, value in system.options.items() if key != "transport"}
        if "warmup" in self.given:
            self.given["warmup"] = 0  # what is told is what comes after it
        self.options = self.method.fitted(self.method.Options(**self.given).in_iterations(), parameters)
        self.programs = Programs(self.method, self.method.of_worker(self.options, 0), workers, [_FLOAT],
                                 self.transport != "server")
        self.period = max(self.method.intervals(self.options))  # iterations from one exchange to the next
        self.iterations = range(1, 2 * (WARM_UP + self.period))  # all that an exchange brings is asked for in these
        self.traffic = self.method(self.options, workers).traffic(whole=False)
        self._state = 0 if self.method.plain_sgd else 1  # arrays of U

    def turns(self) -> Hashable:
        """What decides when the buckets have their turns, beside the programs of the first fragment of worker 0."""
        own = [self.method.of_worker(self.options, rank) for rank in range(self.workers)]
        return self.method.fragments(self.options), tuple(self.method.intervals(options) for options in own)

    def delay(self) -> int:
        """How many exchanges after its own a synchronous method's gradient is part of the weights it computes on."""
        asked: Dict[int, int] = {}
        delays = [0]
        for t in self.iterations:
            for op in self.programs.of(t)[0]:
                if op.what in ("exchange", "sum"):
                    asked[op.number] = t
                elif op.what == "await" and op.number in asked:
                    delays.append(t - asked[op.number])
        return max(delays) // self.period

    def worker_arrays(self) -> float:
        """Arrays beside the weights and gradients of a worker's network."""
        if self.transport == "server":
            coded = codec(self.traffic.codec).residual + (self.traffic.codec_weights != "none")
            return self.programs.arrays() + 2 + (not self.method.worker.sends_gradient_in_place) + coded
        if self.transport == "sharded":
            return self.programs.arrays() + 4 + self._state / self.workers
        exchanges = any(op.update for op in self.programs.of(1)[0])
        return self.programs.arrays() + 1 + self.traffic.depth + 2 * exchanges + self._state

    def server_arrays(self) -> float:
        """Arrays of all servers together."""
        if self.transport != "server":
            return 0
        rule = self.method.rule(0, self.options, self.workers, Update())
        rule.start(np.zeros(1, np.float32))
        shown = (self.workers if self.method.asynchronous else 1) * (self.traffic.codec_weights != "none")
        return 2 + self._state + shown + sum(array.size for array in declared.arrays_of(rule).values())


_FLOAT = Bucket(0, 0, (Segment(Parameter(0, "w", (1,)), 0, 1, 0),))
