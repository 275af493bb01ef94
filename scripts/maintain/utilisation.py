#!/usr/bin/env python3
"""Utilisation of workers by bandwidth, round-trip time and loss: real processes, real TCP, and the virtual cluster.

    scripts/maintain/utilisation.py            as root: writes docs/results/utilisation.jsonl, goes on from what is
                                               there; utilisation.svg, and the page's table
    scripts/maintain/utilisation.py --table    the table and the figure alone

Two workers and a server on the hosts of an emulated cluster; the computing is emulated. Utilisation: the time that an
iteration computes, over the time that it takes. A host holds what comes to it for half of the round-trip time, and
loses some: netfilter queues its packets to a process of this file (iptables; not every kernel has netem).
"""
import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import math
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, median
from typing import Any, Deque, Dict, Iterator, List, NamedTuple, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
OUT = ROOT / "docs" / "results" / "utilisation.jsonl"
PROFILE = ROOT / "docs" / "results" / "benchmarks" / "virtual_2core_202611.yaml"
WORKERS, MODEL, COMPUTE_MS, H = 2, "100k", 50.0, 20
SYSTEMS = ("ssgd@1", "odsgd@1", f"diloco:H={H}@1", f"eager:H={H}@1", f"decoupled:H={H}@1")
RATES, RTTS_MS, LOSSES = ("10mbit", "100mbit", "1gbit"), (1.0, 20.0, 100.0), (0.0, 0.001, 0.01)
BASE = "100mbit"
REPEAT = 2
NFQUEUE, ACCEPT, DROP = 3, 1, 0


class Way(NamedTuple):
    """What a link is like."""

    rate: str
    rtt_ms: float
    loss: float
    restarts: bool = True  # whether TCP begins slowly again once it was idle, as Linux does unless told otherwise


DILOCO = SYSTEMS[2]
WAYS = [*(Way(rate, rtt_ms, 0.0) for rtt_ms in RTTS_MS for rate in RATES),
        *(Way(BASE, rtt_ms, loss) for rtt_ms in RTTS_MS[1:] for loss in LOSSES[1:])]
KEEPING = [Way(rate, RTTS_MS[-1], 0.0, False) for rate in RATES[1:]]
"""Why `diloco` is slower than predicted there."""
JOBS = [*itertools.product(WAYS, SYSTEMS), *((way, DILOCO) for way in KEEPING)]


def way_of(run: Dict[str, Any]) -> Way:
    return Way(*(run[name] for name in Way._fields))


def hold(delay_s: float, loss: float, restarts: float) -> None:
    """On a host: hold each packet of queue 0 for some time, in their order, and lose some."""
    Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text(f"{restarts:.0f}", encoding="ascii")
    queue = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)
    queue.setsockopt(socket.SOL_SOCKET, 33, 1 << 24)  # SO_RCVBUFFORCE
    whole = 0 if loss else 4  # NFQA_CFG_F_GSO; without it the kernel cuts what TCP has joined, and frames are lost
    attributes = [(1, struct.pack("!BxH", 1, 0)), (2, struct.pack("!IB", 0, 1)), (3, struct.pack("!I", 1 << 20)),
                  (4, struct.pack("!I", 4)), (5, struct.pack("!I", whole))]
    queue.send(_message(2, attributes, 1 | 4))  # bind, and ask whether that went well
    if struct.unpack_from("i", queue.recv(4096), 16)[0]:
        sys.exit("no queue of netfilter")
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    subprocess.run(["iptables", "-A", "INPUT", "-i", "eth0", "-j", "NFQUEUE", "--queue-num", "0"], check=True)
    print("ready", flush=True)
    queue.setblocking(False)
    held: Deque[Tuple[float, int]] = collections.deque()
    drawn = random.Random(0)
    while True:
        select.select([queue], [], [], max(held[0][0] - time.monotonic(), 0) if held else None)
        with contextlib.suppress(BlockingIOError):
            while True:
                number, = struct.unpack_from("!I", queue.recv(4096), 24)
                if loss and drawn.random() < loss:
                    queue.send(_verdict(1, DROP, number))
                else:
                    held.append((time.monotonic() + delay_s, number))
        now, last = time.monotonic(), None
        while held and held[0][0] <= now:
            last = held.popleft()[1]
        if last is not None:
            queue.send(_verdict(3, ACCEPT, last))  # and all before it


def _verdict(kind: int, verdict: int, number: int) -> bytes:
    return _message(kind, [(2, struct.pack("!II", verdict, number))], 1)


def _message(kind: int, attributes: List[Tuple[int, bytes]], flags: int) -> bytes:
    """Of nfnetlink, to queue 0."""
    body = struct.pack("!BBH", 0, 0, 0)
    for name, value in attributes:
        body += struct.pack("HH", 4 + len(value), name) + value.ljust(-len(value) // 4 * -4, b"\0")
    return struct.pack("IHHII", 16 + len(body), NFQUEUE << 8 | kind, flags, 0, 0) + body


@contextlib.contextmanager
def cluster(way: Way) -> Iterator[Any]:
    from odsgd.lab import processes
    from odsgd.lab.cluster import Cluster
    with Cluster.up(WORKERS + 1, way.rate) as up:
        for host in range(WORKERS + 1):
            held = up.popen([sys.executable, str(Path(__file__).resolve()), "--hold", str(way.rtt_ms / 2000),
                             str(way.loss), str(int(way.restarts))], host=host, **processes.READ_BY_LINE)
            if processes.next_line(held.stdout, time.monotonic() + 30) != "ready\n":
                raise SystemExit(f"host {host} cannot hold its packets")
        yield up


def measure(way: Way, systems: List[str]) -> Iterator[Dict[str, Any]]:
    """Milliseconds of an iteration, of each system; with what the links carry."""
    from odsgd.lab.bench import run
    from odsgd.lab.bench.config import BenchConfig
    with cluster(way) as up:
        goodput = 8e-6 * min(up.goodput(4.0))
        for system in systems:
            iterations, warm_up = (3 * H, H + 1) if "H=" in system else (16, 4)
            wire_ms = 1000 * WORKERS * run.nbytes(MODEL) / run.LOOPBACK_GUESS
            config = BenchConfig.from_flags([
                "--systems", system, "--models", MODEL, "--compute", f"{COMPUTE_MS:g}ms", "--warm-up", str(warm_up),
                "--seconds", str(iterations * (COMPUTE_MS + wire_ms) / 1000)])
            reading, = run.job(config, up, way.rate, math.inf, WORKERS, config.systems[0], [MODEL])
            yield {**way._asdict(), "system": system, "iteration_ms": reading.iteration_ms,
                   "goodput_mbit": round(goodput, 2), "iterations": len(reading.times_ms[0]),
                   "load": round(os.getloadavg()[0], 2)}


def predict(way: Way, system: str, goodput_mbit: float) -> float:
    """The virtual cluster's milliseconds of an iteration, on links of this goodput."""
    from odsgd.config.files import read_cluster
    from odsgd.virtual import times
    from odsgd.virtual.description import Quantity
    from scripts.maintain import validate_virtual as rows
    job = rows.job(rows.Measured("", MODEL, WORKERS, COMPUTE_MS, way.rate, goodput_mbit, system, 0.0),
                   read_cluster(str(PROFILE)))
    cluster = dataclasses.replace(
        job.cluster, links=dataclasses.replace(job.cluster.links, latency=Quantity(way.rtt_ms / 2000)))
    return 1000 * times.simulate(cluster, job.system.name, job.parameters, job.system.options, 3 * H, H).iteration


Cell = Tuple[float, float, float]
"""Utilisation: measured; predicted for the link as it is described; and for what TCP was measured to carry."""


def cells(runs: List[Dict[str, Any]]) -> Dict[Tuple[Way, str], Cell]:
    """The means of all runs."""
    from odsgd.lab.cluster.links import parse_rate
    from odsgd.virtual.description import PAYLOAD
    found: Dict[Tuple[Way, str], Cell] = {}
    for way, system in JOBS:
        mine = [run for run in runs if (way_of(run), run["system"]) == (way, system)]
        if mine:
            goodputs = PAYLOAD * parse_rate(way.rate, "") / 1e6, mean(run["goodput_mbit"] for run in mine)
            found[way, system] = (mean(COMPUTE_MS / run["iteration_ms"] for run in mine),
                                  *(COMPUTE_MS / predict(way, system, goodput) for goodput in goodputs))
    return found


def draw(found: Dict[Tuple[Way, str], Cell]) -> None:
    from odsgd import tools
    pyplot = tools.pyplot("the page")
    pyplot.rcParams.update({"svg.hashsalt": "odsgd", "svg.fonttype": "none", "font.size": 8})
    figure, panels = pyplot.subplots(1, 5, figsize=(13, 3.2), sharey=True, layout="constrained")
    sweeps = [*([Way(rate, rtt_ms, 0.0) for rate in RATES] for rtt_ms in RTTS_MS),
              *([Way(BASE, rtt_ms, loss) for loss in LOSSES] for rtt_ms in RTTS_MS[1:])]
    for panel, ways in zip(panels, sweeps):
        for number, system in enumerate(SYSTEMS):
            style: Dict[str, Any] = {"color": f"C{number}", "linewidth": 1}
            there = [(at, found[way, system]) for at, way in enumerate(ways) if (way, system) in found]
            panel.plot([at for at, _ in there], [cell[0] for _, cell in there], marker="os^vD"[number], markersize=4,
                       label=system[:-2], **style)
            panel.plot([at for at, _ in there], [cell[1] for _, cell in there], linestyle=":", **style)
        rates = ways[0].rate != ways[1].rate
        panel.set(title=f"{'no loss' if rates else BASE}, {ways[0].rtt_ms:g} ms", ylim=(0, 1.05),
                  xticks=range(len(ways)), xticklabels=[way.rate if rates else f"{100 * way.loss:g} %" for way in ways],
                  xlabel="links" if rates else "packets lost")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("utilisation (dotted: predicted)")
    panels[0].legend(fontsize=7)
    figure.savefig(OUT.with_suffix(".svg"), metadata={"Date": None, "Creator": None})


def table(found: Dict[Tuple[Way, str], Cell]) -> str:
    from odsgd.tools import piped
    lines = [["link", *(f"`{system[:-2]}`" for system in SYSTEMS)]]
    for way in (*WAYS, *KEEPING):
        words = [way.rate, f"{way.rtt_ms:g} ms", f"{100 * way.loss:g} % lost" * (way.loss > 0),
                 "TCP keeps its window" * (not way.restarts)]
        texts = ["" if (way, system) not in found else _text(*found[way, system], way.loss > 0) for system in SYSTEMS]
        lines.append([", ".join(filter(None, words)), *texts])
    return piped(lines, right="")


def _text(measured: float, described: float, carried: float, lossy: bool) -> str:
    return f"{measured:.2f} ({described:.2f}{f', {carried:.2f}' * lossy})"


def verdict(found: Dict[Tuple[Way, str], Cell]) -> str:
    """Without loss: how far the predictions are off, and what following them costs."""
    ways, missed = [way for way in WAYS if not way.loss], []
    errors = sorted(abs(cell[1] / cell[0] - 1) for (way, _), cell in found.items() if way in ways)
    for way in ways:
        measured, predicted = ({system: found[way, system][which] for system in SYSTEMS} for which in (0, 1))
        missed.append(max(measured.values()) - measured[max(SYSTEMS, key=lambda system: predicted[system])])
    return (f"without loss: median error {errors[len(errors) // 2]:.1%}, nine of ten within "
            f"{errors[9 * len(errors) // 10]:.0%}, the largest {errors[-1]:.0%}; what is predicted as the fastest is "
            f"at most {max(missed):.2f} behind the one that is")


def spread(runs: List[Dict[str, Any]]) -> str:
    """How far two runs of a cell are apart."""
    times: Dict[Tuple[Way, str], List[float]] = collections.defaultdict(list)
    for run in runs:
        times[way_of(run), run["system"]].append(run["iteration_ms"])
    apart = sorted(max(one) / min(one) - 1 for one in times.values() if len(one) > 1)
    return f"{len(apart)} of {len(times)} cells ran twice, {median(apart):.1%} apart (median), {apart[-1]:.1%} at most"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--hold", nargs=3, type=float, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.hold:
        hold(*asked.hold)
    runs = [json.loads(line) for line in OUT.read_text(encoding="utf-8").splitlines()] if OUT.exists() else []
    for repetition, way in itertools.product(range(REPEAT), () if asked.table else (*WAYS, *KEEPING)):
        done = collections.Counter(run["system"] for run in runs if way_of(run) == way)
        missing = [system for its, system in JOBS if its == way and done[system] <= repetition]
        for run in measure(way, missing) if missing else ():
            print(run, flush=True)
            runs.append(run)
            with OUT.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")
    found = cells(runs)
    print(table(found), verdict(found) + "\n" + spread(runs), sep="\n\n")
    draw(found)


if __name__ == "__main__":
    main()
