"""Times on a virtual cluster that can be worked out by hand."""
import dataclasses
from typing import Any, Dict, List, Optional, Sequence, Type

import numpy as np
import pytest
import yaml

from kvstore import methods
from kvstore.errors import ConfigError
from kvstore.messages.buckets import Parameter
from kvstore.messages.header import Header
from kvstore.methods.contract import Method, Step
from kvstore.methods.sasgd import SparseAggregation
from kvstore.methods.sync import SSGD, SyncRule
from odsgd.virtual import times
from odsgd.virtual.costs import NS
from odsgd.virtual.description import Draws, VirtualCluster, checksum, of
from odsgd.virtual.simulation import Simulation

FREE: Dict[str, Any] = {"worker": {"message": 0, "gather": 0, "step": 0, "scatter": 0},
                        "server": {"message": 0, "receive": 0, "update": 0}}
FLOATS = 250_000 - 4  # a message is a megabyte, with its header
MBYTE = "8mbit"  # a second for each


def described(**cluster: Any) -> VirtualCluster:
    """All that is not given costs nothing, but for links: a message needs a second."""
    return of({**FREE, "links": {"goodput": MBYTE, "latency": 0, "message": 0}, **cluster})


def job(store: str, layers: int = 1, options: Any = None, **cluster: Any) -> Simulation:
    """Of equal layers, a bucket each."""
    method = methods.find(store)
    parameters = [Parameter(number, f"layer{number}", (FLOATS,)) for number in range(layers)]
    checked = method.Options(**{"bucket_nbytes": 4 * FLOATS, **(options or {})}).in_iterations()
    return times.simulation(described(**cluster), method, checked, parameters)


def per_iteration(store: str, iterations: int = 12, **settings: Any) -> float:
    return times.iteration_s(job(store, **settings), iterations, warm_up=4)


def simulated(store: str, options: Any = None, sizes: Any = None, transport: Optional[str] = None,
              **cluster: Any) -> times.Pace:
    """The same by `times.simulate`."""
    return times.simulate(described(**cluster), store, times.layers(sizes or {"layer": FLOATS}),
                          {"bucket_nbytes": 4 * FLOATS, **(options or {})}, transport=transport)


COMPUTE_3S = {"iteration": "3s"}


class Fetching(SparseAggregation):
    """Asks servers where there are none."""

    def iterate(self, grad: Any, step: Step) -> Any:
        self.weights_holder.fetch(self.bucket, grad)  # type: ignore[attr-defined]
        return super().iterate(grad, step)


def test_a_ring_has_nobody_to_fetch_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods.find("sasgd"), "worker", Fetching)
    with pytest.raises(ConfigError, match="a worker of this method calls `fetch`, which only servers have"):
        simulated("sasgd", workers=2, compute=COMPUTE_3S)


def test_one_message_takes_both_its_links_and_the_answer_takes_them_back() -> None:
    """T_cop 3, then 1 s there (both links at once) and 1 s back."""
    assert per_iteration("ssgd", workers=1, compute=COMPUTE_3S) == pytest.approx(5)


def test_a_servers_link_is_shared_by_all_workers() -> None:
    """Four pushes queue for it, four answers for its other direction: the last is back after 4 + 4."""
    assert per_iteration("ssgd", workers=4, compute=COMPUTE_3S) == pytest.approx(3 + 4 + 4)


def test_od_sgd_hides_the_exchange_behind_the_passes_or_the_other_way_round() -> None:
    warm: Dict[str, Any] = {"options": {"warmup": 0}}
    assert per_iteration("odsgd", workers=1, compute=COMPUTE_3S, **warm) == pytest.approx(3)
    assert per_iteration("odsgd", workers=4, compute={"iteration": "1s"}, **warm) == pytest.approx(8, rel=0.02)


def test_costs_of_processors_latency_and_messages_are_paid_where_they_arise() -> None:
    """T_cop 3, gather 0.1, message 0.01, transfer 1 + 0.02, latency 0.3, server 0.001 + 0.2 + 0.4, and back."""
    costs: Dict[str, Any] = {"worker": {"message": "10ms", "gather": "100.0016ms", "step": 0, "scatter": "50.0008ms"},
                             "server": {"message": "1ms", "receive": "200.0032ms", "update": "400.0064ms"},
                             "links": {"goodput": MBYTE, "latency": "300ms", "message": "20ms"}}
    there, server, back = 0.1 + 0.01 + 1.02 + 0.3, 0.601, 1.02 + 0.3 + 0.01 + 0.05
    assert per_iteration("ssgd", workers=1, compute=COMPUTE_3S, **costs) == pytest.approx(3 + there + server + back)


def test_a_workers_processor_takes_one_array_after_the_other() -> None:
    """Gradients of two buckets appear together: two seconds to gather them, and then two to scatter the weights."""
    compute = {"layers": {"layer0": [0, 0], "layer1": [0, "3s"]}}
    worker = {"message": 0, "gather": "1s", "step": 0, "scatter": "1s"}
    both = per_iteration("ssgd", workers=1, layers=2, placement="beside", compute=compute, worker=worker)
    assert both == pytest.approx(3 + 2 + 2, rel=1e-4)


def test_an_answer_that_is_not_there_yet_holds_up_no_gradient() -> None:
    """Of two layers on a ring of two: a sum takes 4 s. The last layer's ends 1 s after the other gradient came."""
    pace = simulated("odsgd", sizes={"layer0": FLOATS, "layer1": FLOATS}, transport="ring", workers=2,
                     links={"goodput": "2mbit", "latency": 0, "message": 0},
                     compute={"layers": {"layer0": [0, "3s"], "layer1": [0, "6s"]}},
                     worker={"message": "1us", "gather": 0, "step": "1us", "scatter": "1us"})
    assert pace.iteration == pytest.approx(9, rel=1e-3)


def test_the_optimizer_of_a_ring_takes_its_time_on_the_workers() -> None:
    worker = {"message": 0, "gather": 0, "step": "1s", "scatter": 0}
    assert per_iteration("dsync", workers=1, compute=COMPUTE_3S, worker=worker) == pytest.approx(4, rel=1e-4)


def test_the_cost_of_an_update_is_its_rules() -> None:
    server = {"message": 0, "receive": 0, "update": "1s", "rules": {"dcasgd_c": "2.0s"}}
    paces = [per_iteration(store, workers=1, compute=COMPUTE_3S, server=server) for store in ("asgd", "dcasgd_c")]
    assert paces == pytest.approx([6, 7], rel=1e-4)


def test_a_store_whose_worker_computes_more_takes_longer_and_the_others_do_not() -> None:
    worker = {"message": 0, "gather": 0, "step": 0, "scatter": 0, "stores": {"asgd": "1.0s"}}
    found = [per_iteration(store, workers=1, compute=COMPUTE_3S, worker=worker) for store in ("asgd", "dcasgd_c")]
    assert found == pytest.approx([6, 5], rel=1e-4)


def test_overlap_comes_out_of_the_order_of_the_gradients() -> None:
    """Two layers: 1 s forward, then 1 s backward each. The last layer's message goes while the first one computes."""
    assert per_iteration("ssgd", workers=1, layers=2, compute={"iteration": "3s"}) == pytest.approx(5)


def test_a_lane_that_waits_does_not_hold_up_the_others() -> None:
    """The last layer's server is ten times slower than the first one's; the first layer's message is not behind it."""
    hosts = {"server0": {"goodput": "0.8mbit"}}
    both = per_iteration("ssgd", workers=1, layers=2, servers=2, compute=COMPUTE_3S, hosts=hosts)
    assert both == pytest.approx(2 + 10 + 10 - 0.5), "the first layer's forward pass of 0.5 s runs meanwhile"


def test_servers_beside_workers_share_their_links_but_not_with_themselves() -> None:
    """One worker and its own server: no message takes any time."""
    assert per_iteration("ssgd", workers=1, compute=COMPUTE_3S, placement="beside") == pytest.approx(3)
    assert per_iteration("ssgd", workers=2, compute=COMPUTE_3S, placement="beside") == pytest.approx(5)


@pytest.mark.parametrize("servers, expected", [(1, 4), (2, 4 / 0.8)])
def test_links_are_slower_where_several_workers_and_servers_send_across_each_other(servers: int, expected: float
                                                                                   ) -> None:
    """Two workers and two buckets: one after the other on one server; on two there and back for both workers."""
    found = per_iteration("odsgd", workers=2, layers=2, servers=servers, compute={"iteration": 0},
                          links={"goodput": MBYTE, "latency": 0, "message": 0, "crossing": 0.2},
                          options={"warmup": 0})
    assert found == pytest.approx(expected, rel=0.05)


def test_racks_share_an_uplink() -> None:
    """Two workers in one rack, two servers in the other: what each link could carry at once goes one after another."""
    settings: Dict[str, Any] = {"workers": 2, "servers": 2, "layers": 2, "compute": {"iteration": 0}}
    free = per_iteration("ssgd", **settings)
    racks = per_iteration("ssgd", racks={"hosts": 2, "goodput": MBYTE}, **settings)
    assert free == pytest.approx(5) and racks == pytest.approx(6), "four there, then two back"


def test_answers_of_a_round_share_an_uplink_too() -> None:
    """A server with a fast link, alone in its rack: four pushes and four answers go through the rack's uplink."""
    found = per_iteration("ssgd", workers=4, compute={"iteration": "1s"}, racks={"hosts": 4, "goodput": MBYTE},
                          hosts={"server0": {"goodput": "800gbit"}})
    assert found == pytest.approx(1 + 4 + 4, rel=1e-3), "nobody goes on before the last answer"


def test_a_ring_sends_every_part_of_a_bucket_on_to_all() -> None:
    """2 (p - 1) hops of a p-th of a megabyte each, p = 4."""
    assert per_iteration("dsync", workers=4, compute=COMPUTE_3S) == pytest.approx(3 + 1.5, rel=1e-3)
    assert per_iteration("pipesgd", workers=4, compute=COMPUTE_3S) == pytest.approx(3, rel=1e-3)
    half = per_iteration("pipesgd", workers=4, compute={"iteration": 0}, options={"codec": "truncate"})
    assert half == pytest.approx(0.75, rel=1e-3)


@pytest.mark.parametrize("hosts, expected", [(2, 12), (4, 1.5)])
def test_a_ring_through_several_racks_is_no_faster_than_their_uplinks(hosts: int, expected: float) -> None:
    racks = {"hosts": hosts, "goodput": "1mbit"}
    assert per_iteration("dsync", workers=4, compute={"iteration": 0}, racks=racks) == pytest.approx(expected, rel=1e-3)


def test_workers_that_own_parts_send_as_a_ring_does_and_update_a_part_each() -> None:
    """3 s of passes, 1.5 s of the ring, and U of a quarter of a megabyte."""
    worker = {"message": 0, "gather": 0, "step": "2.0s", "scatter": 0}
    found = simulated("ssgd", transport="sharded", workers=4, compute=COMPUTE_3S, worker=worker)
    assert found.iteration == pytest.approx(3 + 1.5 + 0.5, rel=1e-3)


def test_a_codec_on_servers_shortens_both_ways_and_takes_its_time_four_times_and_once_more() -> None:
    """A quarter of a second each way, or a whole one back; 0.1 s each to encode and decode, and for the server's own
    copy of what it sent.
    """
    for codec_weights, back in (("quantize", 0.25), ("none", 1)):
        found = simulated("ssgd", {"codec": "quantize", "codec_weights": codec_weights}, workers=1, compute=COMPUTE_3S,
                          codecs={"quantize": "100.0016ms"})
        assert found.iteration == pytest.approx(3 + 0.25 + back + 5 * 0.1, rel=1e-3)


@pytest.mark.parametrize("back", ["none", "quantize"])
def test_where_there_is_a_codec_a_fetch_sends_nothing_and_brings_whole_floats(back: str) -> None:
    fetches = {"push_every": 1000, "fetch_every": 1, "codec": "quantize", "codec_weights": back}
    found = simulated("downpour", fetches, workers=1, compute=COMPUTE_3S)
    assert found.iteration == pytest.approx(4, rel=1e-3)
    assert found.loads["server's link"] == pytest.approx(1, rel=2e-3)


@pytest.mark.parametrize("store, placement, expected", [
    ("ssgd", "apart", (2 * (0.2 + 0.01 * 2) + 0.3 * 4 + 0.5 + 2 * 0.3) / 2),   # two workers' pushes and answers
    ("ssgd", "beside", (2 * (0.2 + 0.01 * 2) + 0.3 * 2 + 0.5 + 2 * 0.3) / 2),  # one of which goes nowhere
    ("dsync", "apart", (2 * (0.2 + 0.1 + 0.01 * 2) + 0.3 * 2 + 2 * 2 * (0.01 + 0.025)) / 2),  # 2 hops of half of it
])
def test_cores_that_all_share_have_the_work_of_all_to_do(store: str, placement: str, expected: float) -> None:
    """Gather, scatter and a step 0.1 s each, a message 10 ms; to send a megabyte 0.3 s; on the server 0.3 and 0.5."""
    simulation = job(store, workers=2, placement=placement, cores=2, links={"goodput": MBYTE, "processor": "300ms"},
                     worker={"message": "10ms", **dict.fromkeys(("gather", "step", "scatter"), "100.0016ms")},
                     server={"message": 0, "receive": "300.0048ms", "update": "500.008ms"})
    assert times.loads(simulation, range(1, 2))["shared cores"] == pytest.approx(expected, rel=1e-4)


def test_where_cores_are_shared_processors_take_as_much_longer_as_they_are_busy() -> None:
    """3 s of passes, 2 of links, f of gathering; 1.5 s of one core's: f = 1 / (1 - 1.5 / (5 + f)), so f = 1.31."""
    worker = {"message": 0, "gather": "1s", "step": 0, "scatter": 0}
    passes = {"iteration": "3s", "processor": "500ms"}
    settings: Dict[str, Any] = {"workers": 1, "compute": passes, "worker": worker}
    assert simulated("ssgd", **settings).iteration == pytest.approx(6, rel=1e-3)
    assert simulated("ssgd", cores=1, **settings).iteration == pytest.approx(6.31, rel=0.015)


def test_a_method_that_exchanges_every_T_iterations_sends_so_often() -> None:
    assert per_iteration("sasgd", 13, workers=4, compute=COMPUTE_3S, options={"T": 3}) == pytest.approx(3.5, rel=1e-3)


def test_an_exchange_with_a_delay_runs_beside_the_steps_until_it_is_applied() -> None:
    """It takes 2 s, once in four steps of 3 s; in two fragments twice 1 s, of which the second layer's runs beside the
    passes of the first."""
    halves = {"layer0": FLOATS // 2, "layer1": FLOATS // 2}
    for more, expected in (({}, 3.5), ({"delay": 1}, 3), ({"fragments": 2}, 3.25), ({"fragments": 2, "delay": 1}, 3)):
        found = simulated("diloco", {"H": 4, **more}, halves, workers=1, compute=COMPUTE_3S)
        assert found.iteration == pytest.approx(expected, rel=1e-3), more


def run_through(simulation: Simulation, iterations: Sequence[int]) -> int:
    """These iterations of every worker; when all have met."""
    for m in range(simulation.num_workers):
        for t in iterations:
            simulation.begin(m, t)
        simulation.rest(m)
    return simulation.met()


@pytest.mark.parametrize("store", ["asgd", "ssgd"])
def test_programs_of_iterations_that_are_over_are_forgotten_though_nobody_meets(store: str) -> None:
    simulation, kept = job(store, workers=2), []  # type: Simulation, List[int]
    simulation.over = lambda m: kept.append(len(simulation.programs[m]._made))
    run_through(simulation, range(1, 31))
    assert max(kept) <= 3


def test_an_asynchronous_worker_waits_for_nobody() -> None:
    """A worker at half speed takes twice as long, and the other does not notice."""
    simulation = job("asgd", workers=2, compute={"iteration": "30s", "speeds": {1: 0.5}})
    over: List[float] = []
    simulation.over = lambda m: over.append(simulation.ready(m) / NS) if m == 0 else None
    for m, iterations in enumerate((10, 5)):
        for t in range(1, iterations + 1):
            simulation.begin(m, t)
        simulation.rest(m)
    simulation.met()
    assert over[-1] == pytest.approx(10 * 32, rel=0.01)


def test_the_order_at_a_servers_rule_is_that_of_the_times() -> None:
    simulation = job("asgd", workers=3, compute={"iteration": "10s", "speeds": {0: 0.5, 2: 2.0}})
    run_through(simulation, range(1, 5))
    order, = simulation.order.values()
    assert list(order)[:6] == [2, 1, 2, 2, 0, 1]  # their pushes are there after 6, 11, 13, 20, 21 and 23 s


@pytest.mark.parametrize("dylu, sent", [(None, [0, 1, 0, 1, 2, 2]), ([1.0, 1.0, 0.25], [0, 1, 2, 0, 1, *6 * [2], 2])])
def test_a_slow_worker_that_takes_fewer_steps_sends_when_the_others_do(dylu: Any, sent: List[int]) -> None:
    """8 steps, H is 4, and for the slow worker 1."""
    compute = {"iteration": "10s", "speeds": {2: 0.25}}
    simulation = job("async_diloco", workers=3, compute=compute, options={"H": 4, "dylu": dylu})
    run_through(simulation, range(1, 9))
    order, = simulation.order.values()
    assert list(order) == sent


def test_time_does_not_go_on_while_a_worker_may_begin_something_earlier() -> None:
    simulation = job("asgd", workers=2, compute=COMPUTE_3S)
    simulation.begin(0, 1)
    assert not simulation.advance() and not any(simulation.order.values())
    simulation.begin(1, 1)
    assert simulation.advance() and [list(order) for order in simulation.order.values()] == [[0]]


@pytest.mark.parametrize("placement, receive", [("apart", "1ms"), ("apart", "2.0s"), ("beside", "1ms")])
def test_the_pace_of_a_round_follows_from_the_description(placement: str, receive: str) -> None:
    """Where the link is slower, and where the server's thread is."""
    settings: Dict[str, Any] = {"workers": 4, "placement": placement, "compute": {"iteration": 0},
                                "server": {"message": 0, "receive": receive, "update": "1.0s"}}
    paced = 4 * (FLOATS + 4) * described(**settings).round_pace()
    assert per_iteration("ssgd", **settings) == pytest.approx(paced, rel=1e-3)


class LooksAtAll(SyncRule):
    """A rule that does not say that it looks at each element alone."""

    def receive(self, header: Header, total: np.ndarray, w: np.ndarray) -> None:
        super().receive(header, total, w)


class OfItsOwn(SSGD):
    rule = LooksAtAll


def test_buckets_are_larger_on_fast_links_unless_bits_depend_on_them() -> None:
    def buckets(method: Type[Method], goodput: str) -> int:
        described = of({"workers": 2, "links": {"goodput": goodput}, "server": {"receive": 0, "update": 0}})
        layers = [Parameter(number, f"layer{number}", (100_000,)) for number in range(40)]
        return len(times.simulation(described, method, method.Options(), layers).buckets)

    assert buckets(SSGD, "954mbit") > 4 * buckets(SSGD, "100gbit")
    assert buckets(OfItsOwn, "100gbit") == buckets(OfItsOwn, "954mbit") == buckets(SSGD, "954mbit")


def test_loads_say_which_resource_an_iteration_waits_for() -> None:
    """Four workers, a message of a second, 3 s of passes; the server takes 0.1 s for a push and 0.5 s for an update."""
    costs: Dict[str, Any] = {"workers": 4, "compute": COMPUTE_3S,
                             "server": {"message": "100ms", "receive": 0, "update": "500.008ms"},
                             "worker": {"message": "10ms", "gather": 0, "step": "200.0032ms", "scatter": 0}}
    links = {"worker's link": 1, "server's link": 4}
    assert simulated("odsgd", **costs).loads == pytest.approx(
        {"passes": 3, "worker's processor": 0.2, "server's thread": 0.4 + 0.5, **links}, rel=1e-6)
    every_third = simulated("easgd", {"T": 3}, **costs).loads
    assert every_third == pytest.approx(
        {"passes": 3, "worker's processor": 0.02 / 3, "server's thread": 4 * 0.6 / 3, "worker's link": 1 / 3,
         "server's link": 4 / 3}, rel=1e-6)
    assert simulated("dsync", **costs).loads["ring"] == pytest.approx(2 * 3 / 4, rel=1e-3)
    assert simulated("ssgd", placement="beside", **costs).loads["server's link"] == pytest.approx(3)
    assert simulated("ssgd", racks={"hosts": 4, "goodput": MBYTE}, **costs).loads["uplink"] == pytest.approx(4)


def test_loads_are_of_every_worker_where_some_exchange_more_often() -> None:
    """One worker exchanges in each iteration, three others in every eighth one, whichever it is."""
    first, last = (simulated("async_diloco", {"H": 8, "dylu": dylu}, workers=4, compute=COMPUTE_3S, cores=2,
                             links={"goodput": MBYTE, "processor": "100ms"}).loads
                   for dylu in ([0.125, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.125]))
    assert first == last == pytest.approx(
        {"passes": 3, "server's link": 1 + 3 / 8, "worker's link": 1, "shared cores": 0.1 * (1 + 3 / 8)}, rel=1e-3)


def test_the_passes_of_unlike_workers_are_those_of_the_slowest_or_of_them_all() -> None:
    unlike: Dict[str, Any] = {"workers": 2, "compute": {"iteration": "6s", "speeds": {1: 0.5}}}
    assert simulated("ssgd", **unlike).loads["passes"] == pytest.approx(12)
    asynchronous = simulated("asgd", **unlike)
    assert asynchronous.loads["passes"] == pytest.approx(2 / (1 / 6 + 1 / 12))
    assert asynchronous.iteration == pytest.approx(2 / (1 / 8 + 1 / 14), rel=0.03), "2 s for each exchange"


def test_staleness_counts_what_others_have_updated_meanwhile() -> None:
    """By hand; and equal workers that take turns see each of the others once."""
    assert times.staleness([[0, 1, 1, 0, 1, 0]], (1, 1), 1, 0) == {0: 2, 1: 2, 2: 1}, "until worker 1 is through"
    assert times.staleness([[0, 1, 1, 0, 1, 0]], (1, 1), 2, 0) == {0: 3, 1: 2}
    assert times.staleness([[0, 1, 0, 1, 0, 1, 0, 1]], (2, 1), 1, 0) == {0: 2, 1: 1}, "fetch, push, fetch, push"
    assert times.staleness([[0] * 8], (1, 4), 1, 0) == {0: 2, 1: 2, 2: 2, 3: 2}, "its own since it has fetched"
    assert simulated("asgd", workers=4, compute={"iteration": "30s"}).staleness.keys() == {3}
    softsync = simulated("softsync", {"n": 2}, workers=4, compute={"iteration": "30s"}).staleness
    assert sum(tau * count for tau, count in softsync.items()) == 1.5 * sum(softsync.values())
    assert simulated("ssgd", workers=4).staleness == {}


def test_staleness_of_rounds_is_what_their_servers_count() -> None:
    """By hand: pushes and fetches by turns, two workers, all of whom end a round; then a quorum of two of three."""
    assert times.staleness_of_rounds([[0, 0, 1, 1, 0, 1, 0, 1]], 4, 1, 2, 0) == {0: 2, 1: 2}
    assert times.staleness_of_rounds([[0, 1, 0, 2, 1, 2, 0, 0, 1, 2]], 4, 2, 3, 0) == {0: 3, 1: 1}
    assert times.staleness_of_rounds([[0, 1, 0, 1, 0, 1, 0, 1]], 4, 1, 2, 4) == {0: 2}, "the first do not count"
    even = simulated("decoupled", {"H": 4, "fragments": 1}, workers=2, compute={"iteration": "30s"})
    assert even.staleness.keys() == {0}, "both are in every round"


def test_a_simulation_of_something_that_there_is_not_says_so() -> None:
    with pytest.raises(ConfigError, match=r"unknown option of store odsgd `warmpu`; did you mean `warmup`"):
        simulated("odsgd", {"warmpu": 3})
    with pytest.raises(ConfigError, match="unknown store"):
        simulated("odgsd")


@pytest.mark.parametrize("store, workers", [("ssgd", 1), ("asgd", 1), ("asgd", 2)])
def test_what_takes_no_time_has_no_pace(store: str, workers: int) -> None:
    """Of two asynchronous workers the one beside the server would go on for ever before the other's first answer."""
    with pytest.raises(ConfigError, match="nothing that a worker does takes any time"):
        simulated(store, workers=workers, placement="beside", compute={"iteration": 0})


def test_a_pause_does_not_change_what_follows() -> None:
    """All times after a meeting are those of a job that begins there."""
    settings: Dict[str, Any] = {"workers": 3, "compute": {"iteration": "1s", "draws": "lognormal:0.3"}}
    whole, later = job("asgd", **settings), job("asgd", **settings)

    def go_on(simulation: Simulation, first: int) -> int:
        began = simulation.ready(0)
        return run_through(simulation, range(first, first + 4)) - began

    assert go_on(whole, 1) != go_on(whole, 5) == go_on(later, 5)
    (all_of_them,), (part,) = whole.order.values(), later.order.values()
    assert list(all_of_them)[12:] == list(part)


def test_draws_keep_the_mean_and_follow_the_seed() -> None:
    constant, *drawn = [per_iteration("asgd", 60, workers=1, compute={"iteration": "1s", "draws": draws}, seed=seed)
                        for draws, seed in (("constant", 0), ("lognormal:0.2", 0), ("lognormal:0.2", 1),
                                            ("pareto:5", 0))]
    assert len({*drawn}) == 3 and drawn == pytest.approx([constant] * 3, rel=0.06)
    assert per_iteration("asgd", 14, workers=1, compute={"iteration": "1s", "draws": "pauses:5:10s"}) \
        == pytest.approx(constant + 2, rel=0.01)


def test_a_worker_that_fails_is_away_as_long_and_as_often_as_it_is_said() -> None:
    fails = {"iteration": "1s", "failures": "10s:20s"}
    constant, failing, other = (per_iteration("asgd", 600, workers=1, compute=compute, seed=seed) for compute, seed in
                                (({"iteration": "1s"}, 0), (fails, 0), (fails, 1)))
    assert failing != other and (failing, other) == pytest.approx((constant + 2, constant + 2), rel=0.25)
    away = [job("asgd", workers=3, compute=fails).passes.away(m, t) for m in range(3) for t in range(1, 200)]
    assert 0.05 < sum(one > 0 for one in away) / len(away) < 0.15
    assert simulated("asgd", workers=1, compute=fails).loads["passes"] == pytest.approx(3)


@pytest.mark.parametrize("iteration, failures, away", [("10s", "1s:1s", 10), ("100s", "1us:1us", 1)])
def test_a_worker_may_fail_more_than_once_in_a_long_iteration(iteration: str, failures: str, away: float) -> None:
    passes = job("asgd", workers=1, compute={"iteration": iteration, "failures": failures}).passes
    assert sum(passes.away(0, t) for t in range(1, 401)) / 400 / NS == pytest.approx(away, rel=0.1)


def test_measured_times_of_layers_are_taken_as_they_are() -> None:
    layers = {"layer0": ["1s", "2s"], "layer1": ["3s", "4s"]}
    assert per_iteration("ssgd", workers=1, layers=2, compute={"layers": layers}) == pytest.approx(10 + 2)
    with pytest.raises(ConfigError, match=r"unknown parameter in compute\.layers `layer7`"):
        job("ssgd", compute={"layers": {"layer7": ["1s", "2s"]}})


def test_a_description_says_what_each_host_is_like() -> None:
    values = yaml.safe_load("workers: 3\nservers: 2\nlinks: {goodput: 100mbit, latency: 1ms}\n"
                            "hosts: {server1: {goodput: 1gbit}}\n"
                            "compute: {iteration: 0.2s, draws: lognormal:0.1, speeds: {2: 0.5}}\n")
    cluster = of(values, workers=4)
    assert cluster.workers == 4 and cluster.compute.draws == Draws("lognormal", (0.1,))
    assert [cluster.link(host).goodput for host in range(6)] == [100e6 / 8] * 5 + [1e9 / 8]
    assert cluster.link(5).latency == pytest.approx(1e-3), "what a host does not say is as all links are"
    assert dataclasses.replace(cluster) == cluster


def test_a_checksum_tells_clusters_apart_and_outlives_settings_that_come_later() -> None:
    @dataclasses.dataclass(frozen=True)
    class Later(VirtualCluster):
        tides: int = 0

    cluster = of({"workers": 3, "compute": {"draws": "lognormal:0.1", "speeds": {2: 0.5}},
                  "hosts": {"server0": {"goodput": "1gbit"}}, "racks": {}})
    later = Later(**vars(cluster))
    others = [VirtualCluster(), dataclasses.replace(later, tides=1), dataclasses.replace(cluster, racks=None),
              dataclasses.replace(cluster, seed=1), dataclasses.replace(cluster, hosts={})]
    assert checksum(later) == checksum(cluster) and len({*map(checksum, [cluster, *others])}) == 6


def test_an_empty_part_of_a_description_is_the_default() -> None:
    assert of(yaml.safe_load("compute:\nlinks:\nracks:\nworker:\nserver:\nhosts:\nworkers: 3")) == of({"workers": 3})


def test_servers_beside_workers_have_no_host_of_their_own() -> None:
    assert of({"workers": 3, "servers": 2, "placement": "beside"}).host_names() == ("worker0", "worker1", "worker2")
    assert VirtualCluster().host_names() == ("worker0", "worker1", "server0")


@pytest.mark.parametrize("text, complaint", [
    ("links: {goodput: -1mbit}", "links.goodput: expected a rate above 0 with its unit"),
    ("links: {goodput: 0}", "links.goodput: expected a rate above 0"),
    ("compute: {iteration: 100}", "compute.iteration: expected a time of 0 or more with its unit"),
    ("compute: {iteratoin: 1ms}", "unknown key of compute `iteratoin`; did you mean `iteration`"),
    ("compute: {draws: 'pareto:1'}", "compute.draws: expected constant, lognormal:SIGMA"),
    ("compute: {draws: 'pauses:0:1ms'}", "compute.draws: expected constant"),
    ("compute: {failures: 60s}", "compute.failures: expected two times with their units, as 60s:5s"),
    ("compute: {failures: '0s:5s'}", "compute.failures: expected two times"),
    ("compute: {speeds: {9: 2}}", "compute.speeds: there is no worker 9; they are 0 to 1"),
    ("compute: 3", "compute: expected keys with values, got `3`"),
    ("hosts: {server7: {}}", "unknown host `server7`; did you mean `server0`"),
    ("hosts: {server0: {goodput: fast}}", "hosts.server0.goodput: expected a rate"),
    ("{servers: 3, placement: beside}", "servers: 3 servers have no place beside 2 workers"),
    ("workers: 10000000", "workers: 10000000 are more than can be computed"),
    ("racks: {hosts: 0}", "racks.hosts: expected a whole number"),
    ("servers: 2000000000\nhosts: {server0: {}}", "servers: 2000000000 are more than can be computed"),
])
def test_bad_input_is_one_line(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        of(yaml.safe_load(text))
    assert str(raised.value).startswith(complaint) and "\n" not in str(raised.value)
