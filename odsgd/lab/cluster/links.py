"""Rates of links, and the queueing discipline that makes a link so slow."""
from typing import Dict, List, Mapping, Optional, Sequence

from kvstore.errors import ConfigError
from odsgd.config.files import read_cluster
from odsgd.virtual.description import PAYLOAD, RATE

LEAST, MOST = 10**6, 100 * 10**9
MOST_HOSTS = 250

FAST = 10**9
LARGE_NBYTES, SMALL_NBYTES = 65536, 32768
"""The largest packet that the kernel hands to a link, for hardware to cut into frames: its own choice, and ours for
links slower than FAST, which it would hold up too long. Smaller packets cost more of the cores."""
BURST_OVER_NBYTES, BURST_S = 7_000, 1e-4
"""An idle link takes so much at once, whichever is more: a packet with its headers, or the bytes of a timer's lateness;
with less the rate is not reached."""
QUEUE_NBYTES, QUEUE_S = 500_000, 0.032
"""The buffer of a switch's port, whichever is more. In a smaller one the packets of several senders to one
receiver get lost, and TCP waits 200 ms before it sends the last of them again; a larger one delays the way back."""


def parse_rate(text: str, option: str) -> int:
    """Bits per second.

    >>> parse_rate("1gbit", "--rate"), parse_rate("2.5mbit", "--rate")
    (1000000000, 2500000)
    """
    try:
        rate = round(8 * RATE.convert(text))
    except ValueError:
        rate = 0
    if not LEAST <= rate <= MOST:
        raise ConfigError(f"{option} {text}: expected a rate from 1mbit to 100gbit, e.g. `1gbit` or `100mbit`")
    return rate


def link_rates(hosts: int, rate: Optional[str], rates: Mapping[int, str]) -> List[Optional[int]]:
    """The rate of each host's link in bits per second; None: not shaped."""
    if not 1 <= hosts <= MOST_HOSTS:
        raise ConfigError(f"--hosts {hosts}: expected 1 to {MOST_HOSTS}")
    links = [None if rate is None else parse_rate(rate, "--rate")] * hosts
    for index, slower in rates.items():
        if not 0 <= index < hosts:
            raise ConfigError(f"--host-rate {index}={slower}: there is no host {index}; with --hosts {hosts} they are "
                              f"0 to {hosts - 1}")
        links[index] = parse_rate(slower, f"--host-rate of host {index}:")
    return links


def parse_host_rates(values: Sequence[str]) -> Dict[int, str]:
    """`["2=100mbit"]` as {2: "100mbit"}."""
    rates: Dict[int, str] = {}
    for value in values:
        index, equals, rate = value.partition("=")
        if not equals or not index.isdigit():
            raise ConfigError(f"--host-rate {value}: expected HOST=RATE, e.g. `2=100mbit` (hosts count from 0)")
        rates[int(index)] = rate
    return rates


def described(path: str) -> Dict[int, str]:
    """The rates of the hosts that the description of a virtual cluster has, in the order of their numbers."""
    cluster = read_cluster(path)
    if cluster.racks is not None:
        raise ConfigError(f"`{path}`: racks: an emulated cluster has one switch; leave them out")
    hosts = range(min(len(cluster.host_names()), MOST_HOSTS + 1))
    rates = {host: f"{8 * cluster.link(host).goodput / PAYLOAD / 1e6:.6g}mbit" for host in hosts}
    for name, rate in zip(cluster.host_names(), rates.values()):
        parse_rate(rate, f"`{path}`: link of {name}:")  # complains
    return rates


def segment(rate: Optional[int]) -> int:
    """Bytes of the largest packet on a link of `rate` bits per second; None: not shaped."""
    return LARGE_NBYTES if rate is None or rate >= FAST else SMALL_NBYTES


def discipline(rate: int) -> str:
    """The words for `tc qdisc add dev DEVICE root` of a link of `rate` bits per second."""
    burst = max(segment(rate) + BURST_OVER_NBYTES, round(rate / 8 * BURST_S))
    queue = max(QUEUE_NBYTES, round(rate / 8 * QUEUE_S))
    return f"tbf rate {rate}bit burst {burst}b limit {queue}b"
