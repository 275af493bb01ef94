"""``odsgd cluster up|run|down``."""
import argparse
import functools
import shutil
import signal
import sys
from typing import List, Optional, Sequence

from kvstore.errors import ConfigError
from odsgd.config.flags import Parser
from odsgd.lab.cluster import links
from odsgd.lab.cluster.cluster import Cluster, check_machine, clusters
from odsgd.launch.early import ending_signals, handled_by
from odsgd.tools import chosen

DEFAULT_NAME = "default"
SI_KERNEL = 0x80
"""The `si_code` of a signal that the terminal has sent to all of its foreground processes."""

USAGE = """usage: odsgd cluster up --hosts N [--name NAME] [--rate RATE]
                        [--host-rate HOST=RATE ...] [--own-tmp]
       odsgd cluster run [--name NAME] COMMAND ...
       odsgd cluster run --hosts N [--rate RATE]
                         [--host-rate HOST=RATE ...] COMMAND ...
       odsgd cluster up|run --like FILE ...
       odsgd cluster down [--name NAME | --all]

Emulate a cluster on this machine (Linux, root): its hosts are network
namespaces, and its links are as slow as you say. `run` runs a command on the
launching machine of a cluster; with --hosts it brings a cluster up for the
command only. In the command, `@hosts` becomes the path of the hosts file.

--like     the hosts and links are those of FILE, which describes a virtual
           cluster (docs/how-to/virtual.md): the hosts of its workers, then
           those of its servers
--own-tmp  each host has an empty /tmp of its own

Example: OD-SGD on four hosts with links of 1 Gbit/s, and a server beside each
worker:
  odsgd cluster run --hosts 4 --rate 1gbit \\
    odsgd launch -n 4 -s auto -H @hosts odsgd train --kvstore odsgd
"""


def main(argv: Sequence[str]) -> int:
    """Bring a cluster up, run a command on one, or take one down; the exit code is 0, or the command's."""
    action = chosen(argv, USAGE, {"up": up, "run": run, "down": down})
    with handled_by(lambda number, frame: sys.exit(128 + number)):  # a cluster for one command goes down
        return action(list(argv[1:]))


def up(argv: List[str]) -> int:
    """Bring a cluster up that stays."""
    options = _parser(DEFAULT_NAME, shape=True).parse_args(argv)
    if options.hosts is None and options.like is None:
        raise ConfigError("--hosts N is needed: how many hosts")
    cluster = _up(options)
    cluster.stay()
    count = len(cluster.hosts)
    last = f" to host{count - 1}" if count > 1 else ""
    print(f"cluster `{cluster.name}` is up: host0{last}, hosts file {cluster.hostfile}")
    return 0


def run(argv: List[str]) -> int:
    """Run a command on a cluster that is up, or bring one up for it."""
    parser = _parser(None, shape=True)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run on the launching machine")
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise ConfigError("no command: say what to run, e.g. `odsgd cluster run -- odsgd launch -n 2 -H @hosts …`")
    if not shutil.which(command[0]):
        raise ConfigError(f"no such program: {command[0]}")
    if options.hosts is None and options.like is None:
        if options.rate or options.host_rate or options.own_tmp:
            raise ConfigError("--rate, --host-rate and --own-tmp shape a new cluster: give --hosts as well, or leave "
                              "them out")
        return _attend(Cluster.find(options.name or DEFAULT_NAME), command)
    with _up(options) as cluster:
        return _attend(cluster, command)


def down(argv: List[str]) -> int:
    """Take a cluster down, or every cluster."""
    parser = _parser(DEFAULT_NAME)
    parser.add_argument("--all", action="store_true", help="take every cluster down")
    options = parser.parse_args(argv)
    check_machine()
    known = clusters()
    if not options.all and options.name not in known:
        Cluster.find(options.name)  # complains
    for name in known if options.all else [options.name]:
        Cluster(name).down()
        print(f"cluster `{name}` is down")
    return 0


def _up(options: argparse.Namespace) -> Cluster:
    if options.like is None:
        rates = links.parse_host_rates(options.host_rate)
        return Cluster.up(options.hosts, options.rate, rates, options.name, options.own_tmp)
    if options.hosts or options.rate or options.host_rate:
        raise ConfigError("--like has hosts and rates of its own: leave --hosts, --rate and --host-rate out")
    rates = links.described(options.like)
    return Cluster.up(len(rates), None, rates, options.name, options.own_tmp)


def _attend(cluster: Cluster, command: Sequence[str]) -> int:
    """Run the command in the foreground; signals are for it, and this process stays as long as it does."""
    signals = ending_signals()
    ours = [*signals, signal.SIGCHLD]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ours)
    try:
        process = cluster.popen(command, preexec_fn=functools.partial(
            signal.pthread_sigmask, signal.SIG_SETMASK, before))
        while process.poll() is None:
            told = signal.sigtimedwait(ours, 0.5)
            if told and told.si_signo in signals and told.si_code != SI_KERNEL:
                process.send_signal(told.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _parser(name: Optional[str], shape: bool = False) -> Parser:
    parser = Parser(" (see odsgd cluster --help)", prog="odsgd cluster", usage=USAGE[7:].rstrip())
    parser.add_argument("--name", default=name, help="name of the cluster (default: default)")
    if shape:
        parser.add_argument("--hosts", type=int, metavar="N", help="number of hosts")
        parser.add_argument("--rate", help="rate of every link, e.g. 1gbit (default: no limit)")
        parser.add_argument("--like", metavar="FILE", help="description of a virtual cluster to emulate")
        parser.add_argument("--own-tmp", action="store_true", help="give each host an empty /tmp of its own")
        parser.add_argument("--host-rate", metavar="HOST=RATE", action="append", default=[], help="of one host's link")
    return parser
