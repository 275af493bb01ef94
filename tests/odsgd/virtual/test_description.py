"""A description that makes no sense is told in one line, with the key."""
import dataclasses

import pytest
import yaml

from kvstore.errors import ConfigError
from odsgd.virtual.description import Draws, VirtualCluster, checksum, of


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
