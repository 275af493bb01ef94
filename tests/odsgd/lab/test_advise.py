"""The adviser: what it looks at, what it expects, and what it says, on clusters that can be worked out by hand."""
from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from pathlib import Path
from typing import Any, Dict, List, Sequence

import pytest

from kvstore.errors import ConfigError
from kvstore.messages.buckets import Parameter
from odsgd.lab.advise import cli, knowledge, report
from odsgd.lab.advise.candidates import candidates
from odsgd.lab.advise.config import AdviseConfig
from odsgd.lab.advise.predictions import Oracle, placed
from odsgd.lab.bench import models
from odsgd.lab.bench.systems import parse
from odsgd.virtual.description import Quantity, VirtualCluster, of
from scripts.maintain import measured

PROFILE = """
compute: {iteration: 100ms}
links: {goodput: 800mbit, latency: 0, message: 0}
worker: {message: 0, gather: 0, step: 0, scatter: 0}
server: {message: 0, receive: 0, update: 0}
"""
MBYTE_MS = 10  # a megabyte at 800 Mbit/s


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(PROFILE, encoding="utf-8")
    return str(path)


def config(profile: str, *flags: str) -> AdviseConfig:
    return AdviseConfig.from_flags([profile, *flags])


def oracle(**cluster: Any) -> Oracle:
    """Of a model of 4 MB in 16 layers, which the 16 buckets of a server are then."""
    free: Dict[str, Any] = {"worker": {"message": 0, "gather": 0, "step": 0, "scatter": 0},
                            "server": {"message": 0, "receive": 0, "update": 0},
                            "links": {"goodput": "800mbit", "latency": 0, "message": 0}}
    return Oracle(of({**free, **cluster}), [Parameter(number, f"layer{number}", (62_500,)) for number in range(16)])


# --- what is looked at ------------------------------------------------------------------------------------------------

def labels(profile: str, *flags: str, workers: int = 4) -> List[str]:
    return [system.label for system in candidates(config(profile, *flags), workers, ("none", "quantize"))]


def test_every_store_comes_with_every_number_of_servers_that_there_are_workers_for(profile: str) -> None:
    assert labels(profile, "--stores", "ssgd", "--servers", "1,2,8,auto", workers=4) == [
        "ssgd@1", "ssgd@2", "ssgd@auto", *(f"ssgd:codec=quantize:codec_weights=quantize@{n}" for n in (1, 2, "auto")),
        "ssgd:transport=sharded"]


def test_intervals_and_codecs_are_those_that_a_store_has_on_its_transport(profile: str) -> None:
    flags = ["--intervals", "1,10", "--servers", "1"]
    assert labels(profile, "--stores", "easgd,sasgd", *flags) == [
        "easgd:T=1@1", "easgd:T=10@1", "sasgd:T=1", "sasgd:T=10"]
    assert labels(profile, "--stores", "pipesgd", *flags) == ["pipesgd", "pipesgd:codec=quantize"]
    assert labels(profile, "--stores", "sparseloco", *flags) == ["sparseloco@1"]
    assert "odsgd:codec=quantize:codec_weights=quantize@1" in labels(profile, *flags)


def test_systems_may_be_named_one_by_one(profile: str) -> None:
    assert labels(profile, "--systems", "odsgd@3,pipesgd") == ["odsgd@3", "pipesgd"]


def test_what_a_profile_says_of_single_hosts_stays_where_they_are_there() -> None:
    cluster = of({"workers": 4, "hosts": {"worker3": {"goodput": "1mbit"}, "server0": {"goodput": "10gbit"}},
                  "compute": {"speeds": {3: 0.5, 1: 2.0}}})
    two = placed(cluster, parse("ssgd@2"), 2)
    assert (two.workers, two.servers, two.compute.speeds) == (2, 2, {1: 2.0})
    assert {name: link.goodput for name, link in two.hosts.items()} == {"server0": 1.25e9, "server1": 1.25e9}
    assert placed(cluster, parse("ssgd"), 4).placement == "beside"


def test_a_rate_leaves_the_rest_of_what_a_profile_says_of_single_hosts() -> None:
    cluster = of({"hosts": {"worker1": {"goodput": "1mbit", "latency": "40ms"}, "server0": {"goodput": "10gbit"}}})
    rated = cli.linked(cluster, 125e6)
    assert rated.hosts == {"worker1": dataclasses.replace(rated.links, latency=Quantity(0.04))}
    assert rated.links == dataclasses.replace(cluster.links, goodput=Quantity(0.954 * 125e6))


# --- what is expected -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("system, bound_ms, resource", [
    ("odsgd@1", 4 * 4 * MBYTE_MS, "server's link"),      # four workers' 4 MB
    ("odsgd@2", 100, "passes"),                          # 80 ms
    ("odsgd@4", 100, "passes"),
    ("odsgd@auto", 2 * 3 / 4 * 4 * MBYTE_MS, None),      # 60 ms of links, 100 of passes
    ("easgd:T=4@1", 100, "passes"),
])
def test_the_bound_is_that_of_the_busiest_resource(system: str, bound_ms: float, resource: str) -> None:
    found = oracle(compute={"iteration": "100ms"}).predict(parse(system), 4)
    assert 1000 * found.bound_s == pytest.approx(max(bound_ms, 100), rel=0.01)
    assert resource is None or found.resource == resource
    assert found.iteration_s >= found.bound_s


def test_od_sgd_reaches_the_bound_and_ssgd_does_not() -> None:
    one = oracle(compute={"iteration": "100ms"})
    odsgd, ssgd = one.predict(parse("odsgd@1"), 4), one.predict(parse("ssgd@1"), 4)
    assert odsgd.iteration_s == pytest.approx(odsgd.bound_s, rel=0.05) and ssgd.iteration_s > 1.2 * ssgd.bound_s


@pytest.mark.parametrize("warmup", ["500", "2epochs"])
def test_a_system_is_told_as_it_is_after_its_warm_up(warmup: str) -> None:
    one = oracle(compute={"iteration": "100ms"})
    warm, plain = one.predict(parse(f"odsgd:warmup={warmup}@1"), 4), one.predict(parse("odsgd@1"), 4)
    assert (warm.iteration_s, warm.staleness) == (plain.iteration_s, plain.staleness)


@pytest.mark.parametrize("systems", [
    ("decoupled:H=8:fragments=1@1", "decoupled:H=8:fragments=4@1"), ("diloco:H=20:delay=5@1", "diloco:H=20:delay=15@1"),
    ("async_diloco:H=8@1", "async_diloco:H=8:dylu=1,0.25,0.25,0.25@1")])
def test_a_system_has_its_own_time_whichever_is_asked_first(systems: Sequence[str]) -> None:
    slow, asked = {"iteration": "10ms"}, [parse(system) for system in systems]
    times = [oracle(compute=slow).predict(system, 4).iteration_s for system in asked]
    known = oracle(compute=slow)
    assert [known.predict(system, 4).iteration_s for system in asked] == times and times[0] != times[1]


def test_systems_that_send_and_wait_alike_are_simulated_once() -> None:
    known = oracle()
    for system in ("asgd@1", "dcasgd_c@1", "dcasgd_c:lamda=2@1"):
        known.predict(parse(system), 4)
    assert len(known._paces) == 1


def test_an_asynchronous_worker_beside_its_server_waits_for_no_link_of_the_others() -> None:
    """One bucket of 2.5 ms: three workers share a link to it, and the fourth goes on after each of its passes."""
    known = oracle(compute={"iteration": "1ms"})
    found = Oracle(known.cluster, known.parameters[:1]).predict(parse("asgd"), 4)
    assert 1000 * found.iteration_s == pytest.approx(4 / (1 / 1 + 3 / 7.5), rel=0.1)
    assert found.bound_s <= found.iteration_s < 0.5 * found.loads["server's link"]


def test_workers_that_seldom_exchange_and_wait_for_nobody_are_told_of_when_they_have_drifted_apart() -> None:
    """Eight workers keep a link busy for 320 ms of 400: together they queue for it, apart hardly anyone does."""
    known = oracle(compute={"iteration": "100ms"})
    assert 1000 * known.predict(parse("easgd:T=4@1"), 8).iteration_s == pytest.approx(100, rel=0.02)
    assert known.predict(parse("async_diloco:H=12@1"), 8).mean_staleness == 7


def test_pauses_come_as_often_as_they_do_in_a_long_run() -> None:
    """Each of two workers pauses once in nine iterations, and the other one waits."""
    found, plain = (oracle(compute={"iteration": "100ms", "draws": draws}).predict(parse("ssgd@1"), 2)
                    for draws in ("pauses:9:900ms", "constant"))
    assert found.iteration_s - plain.iteration_s == pytest.approx(2 * 0.9 / 9, rel=0.01)


@pytest.mark.parametrize("system, mean, largest", [("ssgd@1", 0, 0), ("dsync", 0, 0), ("odsgd@1", 1, 1),
                                                   ("delayed:transport=ring", 1, 1), ("pipesgd:K=3", 2, 2),
                                                   ("asgd@1", 3, 3), ("softsync:n=1@1", 1, 1)])
def test_staleness_is_in_updates(system: str, mean: float, largest: int) -> None:
    """Four workers alike push in turns; of 1-softsync four pushes are an update."""
    found = oracle().predict(parse(system), 4)
    assert found.mean_staleness == pytest.approx(mean, abs=0.3)
    assert largest <= found.staleness_of(0.99) <= (2 * largest if found.system.name == "asgd" else largest)


@pytest.mark.parametrize("system, worker, servers", [
    ("ssgd@1", 2, 3),                           # two buffers; W, the sum, momentum
    ("odsgd@1", 3, 3),                          # and w_bak
    ("dcasgd_c@1", 2, 3 + 4),                   # a backup for each worker
    ("easgd:T=4@1", 2 + 1 + 3, 2),              # and the gathered gradient, x, v, ahead; no momentum
    ("pipesgd", 1 + 2 + 1 + 1, 0),              # the gathered gradient, two sums, W, momentum
    ("ssgd:transport=sharded", 4 + 1 / 4, 0),
])
def test_memory_is_counted_in_arrays_of_the_models_size(system: str, worker: float, servers: float) -> None:
    known = oracle()
    found = known.predict(parse(system), 4)
    assert (found.worker_nbytes, found.servers_nbytes) == (worker * known.nbytes, servers * known.nbytes)


# --- what is said -----------------------------------------------------------------------------------------------------

def advice(profile: str, *flags: str, workers: int = 4) -> report.Advice:
    asked = config(profile, "--model", "1M", *flags)
    return cli.advise(asked, cli.of_profile(asked), workers)


def test_a_profile_of_a_network_tells_how_long_its_passes_take(tmp_path: Path) -> None:
    measured = tmp_path / "measured.yaml"
    layers = "layers: {conv0_weight: [20ms, 40ms], dense0_weight: [10ms, 30ms]}"
    measured.write_text(PROFILE.replace("iteration: 100ms", layers), encoding="utf-8")
    compute = cli.of_profile(config(str(measured), "--model", "1M")).cluster.compute
    assert (compute.iteration, compute.forward) == pytest.approx((0.1, 0.3)) and not compute.layers
    assert advice(str(measured), "--stores", "odsgd", "--servers", "1").compute_s == pytest.approx(0.1)


@pytest.mark.parametrize("compute, alone_s", [
    ("draws: 'pauses:10:1s'", 0.2), ("draws: 'pauses:600:6s'", 0.11), ("failures: '60s:6s'", 0.11)])
def test_one_worker_alone_pauses_and_fails_too(tmp_path: Path, compute: str, alone_s: float) -> None:
    """No number of workers that wait for nobody is more than as many times as fast."""
    uneven = tmp_path / "uneven.yaml"
    uneven.write_text(PROFILE.replace("iteration: 100ms", f"iteration: 100ms, {compute}"), encoding="utf-8")
    said = advice(str(uneven), "--stores", "asgd", "--servers", "auto", "--rate", "10gbit")
    assert said.compute_s == pytest.approx(alone_s)
    assert 3.5 < float(re.findall(r"([\d.]+) times one worker alone", report.sentences(said)[0])[0]) <= 4


EXAMPLE, = re.findall(r"^    # cluster\.yaml: 30 workers(?s:.*?)\n\n",
                      (measured.ROOT / "docs/how-to/virtual.md").read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("cluster, workers, alone_s", [
    (EXAMPLE, 4, 0.1), ("{workers: 4, hosts: {worker2: {goodput: 100mbit}}}", 4, 0.1),
    ("{workers: 4, servers: 2, placement: beside}", 4, 0.1), ("{workers: 4, compute: {speeds: {0: 0.5}}}", 4, 0.1),
    ("{workers: 4, compute: {speeds: {0: 0.5, 1: 0.8}}}", 2, 0.125)])
def test_one_worker_alone_is_the_fastest_whatever_is_said_of_the_others(tmp_path: Path, cluster: str, workers: int,
                                                                        alone_s: float) -> None:
    described = tmp_path / "described.yaml"
    described.write_text(textwrap.dedent(cluster), encoding="utf-8")
    said = advice(str(described), "--model", "50k", "--systems", "ssgd@1", workers=workers)
    assert said.compute_s == pytest.approx(alone_s)


def gains(said: report.Advice) -> Dict[str, float]:
    return dict(said.changes)


def test_a_second_server_gains_where_the_first_ones_link_is_the_bound_and_a_fourth_nothing(profile: str) -> None:
    """160 ms with one server, 80 with two, and the passes take 100."""
    said = advice(profile, "--stores", "odsgd", "--servers", "1,2,4", "--now", "odsgd@1")
    assert gains(said)["taking 2 servers"] == pytest.approx(0.6, abs=0.05)
    assert gains(said)["half the time of the passes"] == pytest.approx(0, abs=0.01)
    then = advice(profile, "--stores", "odsgd", "--servers", "1,2,4", "--now", "odsgd@2")
    assert gains(then)["taking 4 servers"] < 0.03 < gains(then)["half the time of the passes"]
    assert all(f"taking {text}" in report.text(then, 0, 0) for text in ("4 servers gains nothing", "1 server loses"))


def test_the_fastest_comes_first_and_the_table_is_as_long_as_asked_for(profile: str) -> None:
    said = advice(profile, "--stores", "ssgd,odsgd,dsync", "--servers", "1,auto")
    times = [prediction.iteration_s for prediction in said.predictions]
    assert times[0] <= 1.01 * min(times) and times[2:] == sorted(times[2:]) and said.now is said.predictions[0]
    sentences = report.sentences(said)
    lines = report.text(said, batch_size=32, lines=2).splitlines()
    assert lines[1:1 + len(sentences)] == sentences
    head, alone, first, second, more = lines[1 + len(sentences):][:5]
    assert head.split()[:7] == ["system", "iteration,", "ms", "samples/s", "of", "all", "workers"]
    assert alone.split()[:5] == ["one", "worker", "alone", "100", "320"]
    assert first.split()[0] == said.predictions[0].system.label and "the fastest of each store" in more
    assert first.split("@")[0] != second.split("@")[0]
    assert f"--lines 0 shows {len(said.predictions) - 2} more" in more


def test_it_is_said_whether_more_than_one_worker_is_worth_it_and_what_od_sgd_gains(profile: str) -> None:
    slow = advice(profile, "--stores", "ssgd,odsgd", "--servers", "auto", "--rate", "100Mbit/s")
    assert report.sentences(slow)[0].startswith("Not worth it as it is: 4 workers are slower than one alone")
    assert "send fewer bytes (odsgd:transport=ring:codec=float16: " in report.sentences(slow)[2]
    fast = advice(profile, "--stores", "ssgd,odsgd", "--servers", "auto", "--rate", "10gbit", "--compute", "100ms")
    assert "times one worker alone" in report.sentences(fast)[0] and " ms less, " in report.sentences(fast)[1]


def test_of_all_stores_those_that_exchange_less_often_are_told_of_apart(profile: str) -> None:
    """They train differently, so their speed alone does not make them the answer."""
    said = advice(profile, "--model", "50k", "--servers", "auto", "--rate", "3mbit", workers=2)
    first, _, change, which = report.sentences(said)
    assert " of the stores that exchange in every iteration, " in first
    assert re.search(r"exchange less often \(eager.*, every 100 iterations: 2\.00 times", change)
    ssgd = min(one.iteration_s for one in said.predictions if one.system.name == "ssgd")
    assert f"SSGD takes {10 * ssgd:.3g} times as long as it computes" in which
    assert "(docs/results/weights.md, 100mbit), the same test loss came after decoupled " in which
    assert next(one for one in said.predictions if one.system.name == "eager").mean_staleness == 1


def test_nothing_is_said_to_gain_that_gains_nothing(profile: str) -> None:
    """Passes take 100 ms, and the exchange 0.1; then passes take 1 ms, and the way there and back 40, of any bytes."""
    first, change = report.sentences(advice(profile, "--model", "50k", "--systems", "asgd,diloco", "--rate", "100gbit"))
    assert " of the stores that exchange in every iteration, " in first and "exchange less often" not in change
    Path(profile).write_text(PROFILE.replace("latency: 0", "latency: 20ms"), encoding="utf-8")
    said = advice(profile, "--model", "50k", "--systems", "ssgd@1", "--rate", "10gbit", "--compute", "1ms")
    assert report.sentences(said)[0].startswith("Not worth it") and said.coded is None


def test_what_od_sgd_loses_is_no_gain(profile: str) -> None:
    Path(profile).write_text(PROFILE.replace("step: 0", "step: 50ms"), encoding="utf-8")
    said = report.sentences(advice(profile, "--stores", "ssgd,odsgd", "--servers", "1", "--rate", "10gbit"))[1]
    assert re.search(r": \d+ ms more, \d+ %\.", said), said


def test_what_ties_with_the_fastest_is_ordered_by_staleness_and_then_by_memory(profile: str) -> None:
    """All hide 4 MB behind passes of 100 ms with a server for each worker; `easgd` is as fast, and staler."""
    said = advice(profile, "--systems", "easgd:T=4@4,odsgd@4,delayed@4,ssgd@4", "--rate", "5gbit")
    assert [found.system.label for found in said.predictions] == ["delayed@4", "odsgd@4", "easgd:T=4@4", "ssgd@4"]


def test_a_rate_is_that_of_the_links_of_which_headers_take_their_part(profile: str) -> None:
    slow, fast = (advice(profile, "--systems", "odsgd@1", "--rate", rate).predictions[0].iteration_s
                  for rate in ("100mbit", "200mbit"))
    assert slow == pytest.approx(2 * fast, rel=0.03) and slow == pytest.approx(16 / (12.5 * 0.954), rel=0.05)


@pytest.mark.parametrize("workers, flags, beyond", [
    (4, ["--rate", "1gbit"], []), (32, ["--rate", "1gbit"], ["32 workers"]), (4, ["--rate", "100gbit"], ["links of"])])
def test_what_lies_outside_of_what_was_checked_is_said(profile: str, workers: int, flags: List[str],
                                                       beyond: List[str]) -> None:
    said = advice(profile, "--systems", "pipesgd", *flags, workers=workers)
    assert [any(part in what for what in said.beyond) for part in beyond] == [True] * len(said.beyond)
    assert ("Not checked" in report.text(said, 0, 0)) == bool(beyond)


def test_links_that_differ_and_racks_were_not_checked() -> None:
    described: List[VirtualCluster] = [of({"hosts": {"worker0": {"goodput": "500mbit"}}}), of({"racks": {"hosts": 2}}),
                                       of({"compute": {"draws": "lognormal:0.1"}}), of({"links": {"latency": "80ms"}})]
    assert [knowledge.beyond(cluster, 10 ** 6, 2, [parse("odsgd")]) for cluster in described] == [
        ["links that differ"], ["racks"],
        ["passes that differ from worker to worker, drawn for few iterations: another `seed` in the description shows "
         "how much that matters"],
        ["a latency of 80 ms (checked: to 50 ms)"]]
    coded = [parse("pipesgd:codec=quantize"), parse("delayed")]
    assert knowledge.beyond(of({}), 10 ** 6, 2, coded) == [
        "codec quantize, which has no time in the profile", "the stores delayed"]
    assert knowledge.beyond(of({"codecs": {"quantize": "1ms"}}), 10 ** 6, 2, coded[:1]) == []


@pytest.mark.parametrize("compute, rare", [
    ({"draws": "pauses:600:5s"}, True), ({"draws": "pauses:8:5s"}, False), ({"failures": "60s:5s"}, True),
    ({"failures": "0.5s:5s"}, False), ({}, False)])
def test_pauses_and_failures_that_the_simulation_is_too_short_for_are_said(compute: Dict[str, Any], rare: bool) -> None:
    found = knowledge.beyond(of({"compute": {"iteration": "100ms", **compute}}), 10 ** 6, 2, [parse("odsgd")])
    assert any("pauses or failures" in what for what in found) == rare


@pytest.mark.parametrize("compute, drawn", [
    ({"draws": "pareto:2"}, True), ({"failures": "0.5s:5s"}, True), ({"draws": "pauses:8:5s"}, False),
    ({"speeds": {1: 0.5}}, False)])
def test_that_few_iterations_are_drawn_is_said(compute: Dict[str, Any], drawn: bool) -> None:
    differ, = knowledge.beyond(of({"compute": compute}), 10 ** 6, 2, [parse("odsgd")])
    assert differ.startswith("passes that differ from worker to worker") and (", drawn for few" in differ) == drawn


def test_codecs_are_looked_at_where_the_profile_has_their_times(profile: str) -> None:
    Path(profile).write_text(PROFILE + "codecs: {truncate: 0.1ms, 2bit: 0.1ms}", encoding="utf-8")
    said = advice(profile, "--stores", "pipesgd", "--rate", "200mbit")
    assert [found.system.label for found in said.predictions] == ["pipesgd:codec=truncate", "pipesgd"]
    assert gains(said)["codec `none`"] == pytest.approx(-0.5, abs=0.1)


def test_codecs_at_both_ends_are_a_change_of_their_own(profile: str) -> None:
    """A server decodes and encodes 4 MB for each of four workers; links and passes take less."""
    Path(profile).write_text(PROFILE + "codecs: {quantize: 20ms}", encoding="utf-8")
    said = advice(profile, "--systems", "ssgd:codec=quantize:codec_weights=quantize@1,ssgd@1", "--rate", "200mbit",
                  "--compute", "20ms", "--now", "ssgd:codec=quantize:codec_weights=quantize@1")
    assert gains(said)["half the work of the codecs at both ends"] > 0.4
    assert abs(gains(said)["half the work of a worker's host"]) < 0.01
    assert "half the work of the codecs at both ends gains " in report.text(said, 0, 0)


def test_accuracy_is_told_where_it_was_measured_and_nowhere_else() -> None:
    known = {text: knowledge.accuracy(parse(text), knowledge.DIGITS) for text in (
        "ssgd@4", "pipesgd:codec=quantize", "easgd:T=4", "easgd:T=10", "odsgd:transport=sharded",
        "odsgd:codec=quantize:codec_weights=quantize@1", "diloco", "diloco:H=10", "diloco:H=20",
        "odsgd:optimizer_local=sgd:warmup=500:bucket_nbytes=90000", "odsgd:optimizer_local=adam", "pipesgd:K=4",
        "dcasgd_a:lamda=50", "odsgd:codec_weights=quantize")}
    assert [text for text, told in known.items() if told == "–"] == [
        "easgd:T=10", "odsgd:transport=sharded", "diloco:H=20", "odsgd:optimizer_local=adam", "pipesgd:K=4",
        "dcasgd_a:lamda=50", "odsgd:codec_weights=quantize"]
    many = [knowledge.accuracy(parse(text), knowledge.MNIST) for text in ("easgd:T=5@2", "easgd:T=4")]
    assert many[0] != "–" == many[1]


def test_accuracies_on_digits_are_those_that_the_files_say_which_tell_how_they_were_measured() -> None:
    for file, seeds_of in measured.DIGITS.items():
        said, digits = (measured.ROOT / file).read_text(encoding="utf-8"), 1 if file.endswith(".yaml") else 2
        written = {label: ", ".join(f"{seed:.{digits}f}" for seed in seeds) for label, seeds in seeds_of.items()}
        assert [label for label, seeds in written.items() if seeds not in said] == []


def test_measurements_are_those_of_the_results() -> None:
    """To write them anew: scripts/maintain/measured.py."""
    assert knowledge.FILE.read_text(encoding="utf-8") == measured.text()
    assert len(knowledge.MNIST) == 14 and knowledge.MNIST["pipesgd:codec=truncate"] == [93.34, 93.07, 92.99]


# --- the command ------------------------------------------------------------------------------------------------------

def test_the_command_prints_a_table_and_writes_everything(profile: str, tmp_path: Path,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "advice.json"
    flags = ["--model", "50k", "--workers", "2,4", "--systems", "ssgd@1,odsgd@1,odsgd", "--batch-size", "8"]
    assert cli.main([profile, *flags, "--json", str(written)]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("2 workers: 0 of ")  # at once, also where there is no terminal
    blocks = said.out.split("\n\n")
    assert [block.splitlines()[0] for block in blocks] == ["2 workers", "4 workers"]
    found = json.loads(written.read_text(encoding="utf-8"))
    assert [(each["workers"], len(each["predictions"])) for each in found["advice"]] == [(2, 3), (4, 3)]
    first = found["advice"][0]["predictions"][0]
    assert first["samples_per_s"] == pytest.approx(8 * first["gradients_per_s"])
    assert first["bound_ms"] == pytest.approx(max(first["loads_ms"].values()))


def test_a_file_may_say_how_long_a_worker_computes(tmp_path: Path) -> None:
    (tmp_path / "asked.yaml").write_text("compute: 400ms\nmodel: cnn\n", encoding="utf-8")
    assert AdviseConfig.from_flags(["--config", str(tmp_path / "asked.yaml")]).compute == 0.4


@pytest.mark.parametrize("flags, complaint", [
    ([], "no profile"), (["nowhere.yaml", "--model", "cnn"], "nowhere.yaml"), (["PROFILE"], "--model 25.6M"),
    (["PROFILE", "--model", "cnn", "--stores", "odsdg"], "did you mean `odsgd`"),
    (["PROFILE", "--model", "cnn", "--systems", "torch/ddp"], "is no store of odsgd"),
    (["PROFILE", "--model", "cnn", "--now", "ddp"], "did you mean `torch/ddp`"),
    (["PROFILE", "--model", "resnet50"], "did you mean `resnet50_v1`"),
    (["PROFILE", "--model", "cnn", "--servers", "0"], "numbers of servers"),
    (["PROFILE", "--model", "cnn", "--rate", "fast"], "expected a rate"),
    (["PROFILE", "--model", "cnn", "--systems", "ssgd", "--compute", "0"], "say how long the passes take"),
    (["PROFILE", "--model", "cnn", "--systems", "ssgd", "--json", "/"], "cannot write `/`: Is a directory"),
    (["PROFILE", "--model", "cnn", "--workers", "1", "--stores", "ssgd", "--servers", "4"], "")])
def test_what_cannot_work_is_one_line(profile: str, flags: List[str], complaint: str) -> None:
    if not complaint:
        assert cli.main([profile, *flags[1:]]) == 0  # sharded is left
        return
    with pytest.raises(ConfigError) as error:
        cli.main([profile if flag == "PROFILE" else flag for flag in flags])
    assert complaint in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("flags", [["--workers", "2,131073"], ["--now", "ssgd@131073"], ["--systems", "ssgd@131073"]])
def test_more_than_can_be_computed_is_refused_before_anything_is(profile: str, flags: List[str]) -> None:
    with pytest.raises(ConfigError, match="131073 are more than can be computed, expected at most 131072"):
        config(profile, *flags)


@pytest.mark.parametrize("text", ["50k", "0.3M", "7.5M", "25M"])
def test_a_number_of_parameters_is_a_model_of_that_size(text: str) -> None:
    wanted = float(text[:-1]) * {"k": 1e3, "M": 1e6}[text[-1]]
    assert models.size(models.check(text)) == pytest.approx(wanted, rel=0.005)


def test_a_number_of_parameters_needs_no_unit() -> None:
    assert models.shapes(models.check("17226")) == models.shapes("17.226k")
