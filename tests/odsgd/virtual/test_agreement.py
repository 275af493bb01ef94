"""Two ways through the same job, on small clusters drawn at random: the same nanoseconds and orders."""
from random import Random
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvstore import methods
from kvstore.messages.buckets import Parameter
from odsgd.virtual import times
from odsgd.virtual.description import of
from odsgd.virtual.simulation import Simulation

ITERATIONS = 7
STORES: List[Tuple[str, Dict[str, Any]]] = [
    ("ssgd", {}), ("odsgd", {"warmup": 0}), ("odsgd", {"warmup": 2}), ("delayed", {}), ("dsync", {}), ("pipesgd", {}),
    ("pipesgd", {"K": 3}), ("sasgd", {"T": 2}), ("asgd", {}), ("dcasgd_a", {}), ("softsync", {}), ("easgd", {"T": 3}),
    ("downpour", {"push_every": 2, "fetch_every": 3}), ("eamsgd", {"T": 1}), ("acco", {}),
    ("downpour", {"push_every": 2, "fetch_every": 3, "codec": "quantize", "codec_weights": "truncate"}),
    ("diloco", {"H": 3}), ("diloco", {"H": 3, "delay": 2}), ("eager", {"H": 2}), ("async_diloco", {"H": 2}),
    ("async_diloco", {"H": 4, "dylu": [0.5, 1.0, 0.25, 0.75, 0.5]}),
    ("sparseloco", {"H": 2}), ("decoupled", {"H": 3})]


class Job(NamedTuple):
    """A store with its options, floats of each layer, and a virtual cluster as a table."""

    store: str
    options: Dict[str, Any]
    layers: Sequence[int]
    cluster: Dict[str, Any]


def drawn(random: Random) -> Job:
    """Times are few and round, so that many events fall on one nanosecond."""
    store, options = random.choice(STORES)
    workers, beside = random.randint(1, 5), random.random() < 0.3
    servers = random.randint(1, min(workers, 4) if beside else 4)
    layers = [random.choice([1, 1000, 100_000, 249_996, 500_000]) for _ in range(random.randint(1, 5))]
    hosts = [f"worker{m}" for m in range(workers)] + [f"server{s}" for s in range(0 if beside else servers)]
    compute: Dict[str, Any] = {"iteration": random.choice([0, "5ms", "100ms", "1s", "2s"]),
                               "forward": random.choice([0.0, 0.5, 1.0]),
                               "draws": random.choice(["constant", "lognormal:0.3", "pareto:3", "pauses:3:1s"])}
    if random.random() < 0.3:
        compute["speeds"] = {random.randrange(workers): random.choice([0.3, 0.5, 2.0])}
    if random.random() < 0.3:
        compute["layers"] = {f"layer{n}": [random.choice([0, "0.5s"]), random.choice([0, "2s"])]
                             for n in range(len(layers))}
    cluster = {
        "workers": workers, "servers": servers, "placement": "beside" if beside else "apart", "compute": compute,
        "links": _link(random), "hosts": {host: _link(random) for host in hosts if random.random() < 0.15},
        "worker": {"message": random.choice([0, "40us", "40ms"]), "gather": random.choice([0, "0.3ms", "1s"]),
                   "step": random.choice([0, "0.4ms", "1s"]), "scatter": random.choice([0, "0.3ms", "0.5s"])},
        "server": {"message": random.choice([0, "40us"]), "receive": random.choice([0, "0.3s"]),
                   "update": random.choice([0, "0.5ms", "0.5s"])}}
    if random.random() < 0.25:
        cluster["racks"] = {"hosts": random.randint(1, 3), "goodput": random.choice(["8mbit", "10mbit", "1gbit"])}
    return Job(store, {**options, "bucket_nbytes": random.choice([400_000, 999_984, 4_000_000])}, layers, cluster)


def _link(random: Random) -> Dict[str, Any]:
    return {"goodput": random.choice(["3mbit", "8mbit", "10mbit", "100mbit", "1gbit"]),
            "latency": random.choice([0, 0, "50us", "90ms"]), "message": random.choice([0, "20us", "10ms"])}


TWO_SERVERS = Job("odsgd", {"warmup": 0, "bucket_nbytes": 999_984}, [500_000], {
    "workers": 2, "servers": 2, "racks": {"hosts": 2, "goodput": "1gbit"}, "compute": {"forward": 0.5},
    "links": {"goodput": "8mbit", "latency": 0, "message": 0},
    "worker": {"message": 0, "gather": 0, "step": 0, "scatter": 0},
    "server": {"message": 0, "receive": 0, "update": "500ms"}})
"""Without latency, two servers' answers come to the uplink of their rack at one time."""


@given(st.randoms(use_true_random=False).map(drawn))
@example(TWO_SERVERS)
@settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_a_job_takes_as_long_step_by_step_as_in_one_go(job: Job) -> None:
    """When every iteration ends, when all have met, and the order at every rule; over two meetings."""
    assert ends(in_one_go, job) == ends(step_by_step, job)


def ends(go: Callable[[Simulation, range], None], job: Job) -> Tuple[List[Tuple[int, int]], List[List[int]], List[int]]:
    method = methods.find(job.store)
    parameters = [Parameter(number, f"layer{number}", (size,)) for number, size in enumerate(job.layers)]
    simulation = times.simulation(of(job.cluster), method, method.Options(**job.options).in_iterations(), parameters)
    over: List[Tuple[int, int]] = []
    simulation.over = lambda m: over.append((m, simulation.ready(m)))
    met = []
    for first in (1, 1 + ITERATIONS):
        go(simulation, range(first, first + ITERATIONS))
        met.append(simulation.met())
    return sorted(over), [list(order) for order in simulation.order.values()], met


def in_one_go(simulation: Simulation, iterations: range) -> None:
    """As a job without gradients: all is told before anything happens."""
    for m in range(simulation.num_workers):
        for t in iterations:
            simulation.begin(m, t)
        simulation.rest(m)


def step_by_step(simulation: Simulation, iterations: range) -> None:
    """As a training: a worker begins an iteration once the one before is over; time stands still at each question."""
    left = [list(reversed(iterations)) for _ in range(simulation.num_workers)]
    workers, tell = list(range(simulation.num_workers)), simulation.over

    def over(m: int) -> None:
        tell(m)
        workers.append(m)

    simulation.over = over
    while workers or simulation.advance():
        for m in workers:
            if left[m]:
                simulation.begin(m, left[m].pop())
            else:
                simulation.rest(m)
        workers.clear()
    simulation.over = tell
