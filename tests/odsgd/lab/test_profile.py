"""`odsgd profile`: what it writes can be read, and what it says of a network, links and servers follows from times."""
from __future__ import annotations

import itertools
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

import pytest
import yaml

from kvstore import methods
from kvstore.transports.in_process import Stage
from odsgd.cli import main
from odsgd.config.files import read_cluster
from odsgd.config.train import TrainConfig
from odsgd.lab.profile import cli, passes, processor, wire
from odsgd.lab.profile.processor import Price, price
from odsgd.virtual import description

QUICK = ("import sys, tests.lean; from odsgd.cli import main; from odsgd.lab.profile import processor, wire; "
         "processor.SIZES, processor.SPREAD_NBYTES, processor.REPEAT = (2 ** 12, 2 ** 14, 2 ** 16), 1e6, 2; "
         "processor.LITTLE = 0.0; "
         "wire.SIZES, wire.REPEAT, wire.SECONDS = (2 ** 12, 2 ** 14, 2 ** 16), 8, 0.3; "
         "sys.exit(main(['profile', *sys.argv[1:]]))")
"""`odsgd profile` with smaller arrays and fewer rounds: the same work, and numbers that are less sure, so that none is
left out as too little."""


def profiled(tmp_path: Path, *flags: str) -> Dict[str, Any]:
    """What a process of its own measures: its arrays of up to a gigabyte are not this one's."""
    path = tmp_path / "cluster.yaml"
    subprocess.run([sys.executable, "-c", QUICK, "--dataset", "digits", "--write", str(path), *flags],
                   check=True, timeout=300)
    read_cluster(str(path))
    values: Dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return values


def test_a_profile_of_one_worker_has_every_layer_and_every_rule(tmp_path: Path,
                                                                capfd: pytest.CaptureFixture[str]) -> None:
    found = profiled(tmp_path, "--model", "mlp", "--kvstore", "odsgd", "--batch-size", "8")
    assert len(found["compute"]["layers"]) == 6
    assert {"gather", "step", "scatter", "stores"} == set(found["worker"])
    assert {"easgd", "eamsgd"} <= set(found["worker"]["stores"]), "x, v and x + delta v are the worker's own"
    assert {"ssgd", "asgd"} < set(found["server"]["rules"])
    assert "links" not in found, "there was no job"
    assert "measuring mlp, forward and backward\n" in capfd.readouterr().err


def test_an_emulated_accelerators_times_are_its_own(tmp_path: Path) -> None:
    found = profiled(tmp_path, "--kvstore", "odsgd", "--emulate-compute", "200ms,lognormal:0.1")
    assert found["compute"] == {"iteration": "200000us", "draws": "lognormal:0.1"}


def test_the_layers_of_a_network_take_as_long_as_its_iterations_together() -> None:
    network = passes.Network(TrainConfig.from_flags(["--dataset", "digits", "--kvstore", "ssgd", "--batch-size", "8"]))
    assert all(forward >= 0 and backward >= 0 for forward, backward in network.shares(3))
    assert len(network.shares(3)) == len(network.layers) and len(network.times(4)) == 4


def test_the_next_iteration_is_queued_before_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it begins on an idle device, and its first layer seems to take what data and Python do."""
    queued, followed = itertools.count(), []  # type: Any, List[bool]

    class Timed:
        def __init__(self) -> None:
            self.number = next(queued)

        def wait(self, timeout_s: float) -> float:
            followed.append(self.number + 1 < len(made))
            return float(self.number)

    made: List[Timed] = []
    network = object.__new__(passes.Network)

    def queue(looked_at: bool) -> Any:
        made.append(Timed())
        return [made[-1]], [made[-1]]

    monkeypatch.setattr(network, "_queue", queue, raising=False)
    assert network.shares(3) == [(1.0, 0.0)]
    assert all(followed)


def test_an_exchange_that_takes_longer_than_a_second_counts_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "REPEAT", 2)
    monkeypatch.setattr(wire, "time", types.SimpleNamespace(perf_counter=itertools.count(0, 3).__next__,
                                                            process_time=itertools.count(0, 2).__next__))
    transport: Any = Stage(1).worker(0)
    assert wire._exchange(transport, 1, 16) == (3, 2)


def test_a_line_through_times_counts_small_buckets_as_much_as_large_ones() -> None:
    sizes = [2 ** 12, 2 ** 16, 2 ** 18]
    assert price(sizes, [1e-4 + 2e-3 * 4 * size / 1e6 for size in sizes]) == pytest.approx(Price(1e-4, 2e-3))


def test_a_line_that_would_fall_goes_through_nothing() -> None:
    assert price([250_000, 500_000], [0.002, 0.001]).call == 0
    assert price([250_000, 500_000], [0.001, 0.003]).call == 0


def test_links_and_messages_are_what_an_exchange_has_beyond_what_is_known() -> None:
    """100 Mbyte/s: 10 ms per megabyte each way. Alone 2 x 10 + 0.2 + 0.3 copied + 0.5 received + 1 updated; 3 ms per
    call, of which the server's thread has 0.4 and the worker 2 x 0.1."""
    found = wire.Exchanges(alone=Price(3e-3, 22e-3), together=Price(0.4e-3, 10e-3), worker=Price(0.2e-3, 0.7e-3))
    known = wire.described(found, 1e8, [Price(0, 0.2e-3), Price(0, 0.3e-3)], Price(0, 1e-3))
    assert known["links"] == pytest.approx({"goodput": 1e8, "latency": 1.2e-3, "message": 0.0, "processor": 0.2e-3})
    assert known["worker"] == pytest.approx({"message": 0.1e-3})
    assert known["server"] == pytest.approx({"message": 0.4e-3, "receive": 0.5e-3})


def test_what_was_measured_has_units() -> None:
    text = cli.text({"workers": 2, "links": {"goodput": 1.25e8, "latency": 5e-5}, "server": {"update": 2e-4},
                     "compute": {"layers": {"slow": [0.9999999, 25.0]}}}, ["--kvstore", "asgd"])
    assert text.startswith("# Measured by: odsgd profile --kvstore asgd\nworkers: 2\n")
    cluster = description.of(yaml.safe_load(text))
    assert cluster.compute.layers["slow"] == (1.0, 25.0)
    assert (cluster.links.goodput, cluster.links.latency, cluster.server.update) == pytest.approx((1.25e8, 5e-5, 2e-4))


@pytest.mark.parametrize("flags", ["odsgd --warmup 1epoch", "softsync --n 18", "decoupled --quorum 2 --replay x"])
def test_options_of_a_job_do_not_keep_one_worker_from_measuring(monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    monkeypatch.setattr(processor, "SIZES", (256, 512))
    monkeypatch.setattr(processor, "SPREAD_NBYTES", 1e4)
    config = TrainConfig.from_flags(["--dataset", "digits", "--kvstore", *flags.split()])
    assert set(processor.of_worker(config)) == {"gather", "step", "scatter"}
    assert config.kvstore in processor.of_server(config)


@pytest.mark.parametrize("store, turns", [("decoupled", 3 / 24), ("diloco", 1 / 100), ("easgd", 1), ("odsgd", 1)])
def test_a_stores_own_lines_count_as_often_as_they_run(monkeypatch: pytest.MonkeyPatch, store: str, turns: float
                                                       ) -> None:
    """Of a round of `decoupled` it sends, asks what came of it, and applies that."""
    def each_one(operations: Sequence[Callable[[], Any]]) -> float:
        for operation in operations:
            operation()
        return 1.0

    monkeypatch.setattr(processor, "_timed", each_one)
    assert processor._lines(methods.find(store), 256) == turns


@pytest.mark.parametrize("flags, message", [
    (["--write", "/no/such/x.yaml"], "--write /no/such/x.yaml: expected a file in a folder that is there"),
    (["--kvstore", "odsgd", "--cluster", "virtual"],
     "cluster: there is nothing to measure on a cluster in virtual time; leave it out"),
    (["--modle", "mlp"], "unknown option `--modle`"),
])
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], flags: List[str], message: str) -> None:
    assert main(["profile", *flags]) == 64
    error = capsys.readouterr().err
    assert error.startswith(f"odsgd profile: {message}") and error.count("\n") == 1
