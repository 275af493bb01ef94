#!/usr/bin/env python3
"""Write the tables of docs/results/timing-models.md anew: each equation of `timing` beside the virtual cluster, the
measured pages of docs/results/benchmarks, and Table 5 of the OD-SGD paper as configs/bench.yaml has it.
"""
import functools
import re
import statistics
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

from kvstore.messages.codecs import codec
from kvstore.messages.header import HEADER
from odsgd import tools
from odsgd.virtual.description import of
from odsgd.virtual.times import layers, simulate
from scripts.maintain import timing
from scripts.maintain.docs_tables import put

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results" / "timing-models.md"
BENCHMARKS = ROOT / "docs" / "results" / "benchmarks"
PRESETS = ROOT / "configs" / "bench.yaml"


def table(head: str, rows: Sequence[Sequence[Any]]) -> str:
    return tools.piped([head.split(" | "), *(list(map(str, row)) for row in rows)]) + "\n"


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 0.9995 else f"{1000 * seconds:.0f}"


def off(predicted: float, actual: float) -> str:
    return f"{round(100 * (predicted / actual - 1)):+d} %"


def seconds_and_error(predicted: float, actual: float) -> str:
    return f"{ms(predicted)} ({off(predicted, actual)})"


# --- (a) the virtual cluster ----------------------------------------------------------------------------------------

FLOATS = 250_000 - HEADER
"""A message of them is a megabyte."""
NOTHING = {"worker": {"message": 0, "gather": 0, "step": 0, "scatter": 0},
           "server": {"message": 0, "receive": 0, "update": 0}}


def virtual(store: str, T_cop: float, goodput: str, latency: float = 0.0, options: Optional[Dict[str, Any]] = None,
            workers: int = 4, buckets: int = 1) -> float:
    """Seconds per iteration where nothing but passes and the network takes time: a megabyte per bucket, one server."""
    cluster = of({**NOTHING, "workers": workers, "compute": {"iteration": f"{T_cop:.9f}s"},
                  "links": {"goodput": goodput, "latency": f"{latency:.9f}s", "message": 0}})
    sizes = {f"layer{number}": FLOATS for number in range(buckets)}
    return simulate(cluster, store, layers(sizes), {"bucket_nbytes": 4 * FLOATS, **(options or {})}, iterations=40,
                    warm_up=16).iteration


def virtual_delays() -> str:
    """OD-SGD's Eq. 2 and the delayed update's Eq. 1, for a network that fills and for one that only delays."""
    rows = []
    for network, goodput, latency in (("a full link", "640mbit", 0.0), ("a long way", "1000000gbit", 0.05)):
        T_com_ssgd = virtual("ssgd", 0.1, goodput, latency) - 0.1
        for ratio in (0.5, 1.0, 2.0, 4.0):
            T_cop = T_com_ssgd / ratio
            org, new = virtual("ssgd", T_cop, goodput, latency), virtual("odsgd", T_cop, goodput, latency)
            delayed = virtual("delayed", T_cop, goodput, latency)
            rows.append([network, f"{ratio:g}", ms(T_cop), ms(org), ms(new),
                         seconds_and_error(timing.T_new(T_cop, T_com_ssgd), new),
                         seconds_and_error(timing.limit(T_cop, T_com_ssgd), new),
                         f"{org / delayed:.3f}", f"{timing.R_WS(T_cop, T_com_ssgd):.3f}"])
    return table("network | T_com / T_cop | T_cop, ms | `ssgd`, ms | `odsgd`, ms | Eq. 2 | max(T_cop, T_com) | "
                 "`ssgd` / `delayed` | R_WS", rows)


def virtual_rings() -> str:
    """Pipe-SGD's Eq. 2 to 6."""
    rows, p, n = [], 4, 1e6
    for goodput, T_cop, alpha in (("80mbit", 0.3, 0.0), ("80mbit", 0.1, 0.0), ("80mbit", 0.1, 0.01)):
        beta = 8 / float(goodput[:-4]) / 1e6
        ring = timing.l_ring(p, alpha, n, beta, 0, 0)
        shown = f"{goodput}, {ms(alpha)} ms, {ms(T_cop)} ms"
        dsync, pipe = virtual("dsync", T_cop, goodput, alpha), virtual("pipesgd", T_cop, goodput, alpha)
        rows.append([shown, "Eq. 2", "`dsync`", ms(dsync),
                     seconds_and_error(timing.l_total_sync(1, 0, T_cop, ring), dsync)])
        rows.append([shown, "Eq. 4, 5", "`pipesgd`", ms(pipe), seconds_and_error(
            timing.l_total_pipe_s(1, 0, T_cop / 3, 2 * T_cop / 3, p, alpha, n, beta, 0, 0), pipe)])
        L = 8
        segments = virtual("pipesgd", T_cop, f"{8 * float(goodput[:-4]):g}mbit", alpha, buckets=L)
        rows.append([shown, f"Eq. 6, L = {L}", "`pipesgd`, 8 buckets", ms(segments), seconds_and_error(
            timing.l_total_pipe_p(1, 0, T_cop / 3, 2 * T_cop / 3 / L, p, alpha, n, beta, 0, 0, L), segments)])
    for K in (2, 3, 4):
        T_cop, alpha = 0.01, 0.05
        pipe = virtual("pipesgd", T_cop, "1000000gbit", alpha, {"K": K})
        l_comm = timing.l_ring(p, alpha, n, 0, 0, 0)
        rows.append([f"endless, {ms(alpha)} ms, {ms(T_cop)} ms", f"Eq. 3, K = {K}", "`pipesgd`", ms(pipe),
                     seconds_and_error(timing.l_total_pipe_unlimited(1, K, 0, T_cop, l_comm), pipe)])
    return table("goodput, latency, T_cop | equation | store | virtual, ms | predicted, ms", rows)


def virtual_others() -> str:
    """The closed forms of our own."""
    rows = []
    for workers, T_cop in ((2, 0.4), (4, 0.4), (4, 0.1), (16, 0.4)):
        push = 0.1
        for store, options, predicted in (
                ("asgd", {}, timing.T_async(workers, T_cop, 2 * push, push)),
                ("easgd", {"T": 4}, timing.T_elastic(workers, 4, T_cop, 2 * push, push)),
                ("sasgd", {"T": 4}, timing.T_interval(4, T_cop, timing.l_ring(workers, 0, 1e6, 1e-7, 0, 0)))):
            found = virtual(store, T_cop, "80mbit", 0, options, workers)
            rows.append([f"{workers}, {ms(T_cop)} ms", f"`{store}`{', T = 4' if options else ''}", ms(found),
                         seconds_and_error(predicted, found)])
    return table("workers, T_cop | store | virtual, ms | predicted, ms", rows)


# --- (b) measured ---------------------------------------------------------------------------------------------------

HEADING = re.compile(r"## (\S+) \(([\d.]+) M parameters in \d+ tensors\), (\d+) workers?, T_cop ([\d.]+) ms, links of "
                     r"(\S+) \(B = ([\d.]+) Mbit/s\)")


class Row(NamedTuple):
    """One system at one setting of a page of benchmarks. Seconds, bytes, bytes per second."""

    page: str
    model: str
    n: float
    workers: int
    T_cop: float
    rate: str
    goodput: float
    system: str
    iteration: float

    @property
    def setting(self) -> Tuple[Any, ...]:
        return self[:7]

    @property
    def place(self) -> str:
        page = f"[{self.page.split('_')[0]}](benchmarks/{self.page})"
        return f"{page}: {self.model}, {self.workers} workers, {self.rate}, {ms(self.T_cop)} ms"


def measured() -> List[Row]:
    """All rows of all pages whose jobs compute, on links of a known rate."""
    rows = []
    for page in sorted(BENCHMARKS.glob("*.md")):
        heading = None
        for line in page.read_text(encoding="utf-8").splitlines():
            if line.startswith("## "):
                heading = HEADING.fullmatch(line)
            elif heading and re.match(r"\| \S+ \| [\d.]+ \|", line) and float(heading[4]):
                system, iteration = (cell.strip() for cell in line.split("|")[1:3])
                model, millions, workers, T_cop_ms, rate, mbits = heading.groups()
                rows.append(Row(page.name, model, 4e6 * float(millions), int(workers), float(T_cop_ms) / 1000, rate,
                                float(mbits) * 1e6 / 8, system, float(iteration) / 1000))
    return rows


def pairs(rows: Sequence[Row], first: str, second: str) -> Iterator[Tuple[Row, Row, str]]:
    """Rows of two systems at the same setting; the systems are patterns, with a group for what must be the same."""
    for one in rows:
        match = re.fullmatch(first, one.system)
        for other in rows if match else ():
            found = re.fullmatch(second, other.system)
            if match and found and other.setting == one.setting and found[1] == match[1]:
                yield one, other, match[1]


def measured_delays() -> str:
    """OD-SGD's Eq. 2 on measured SSGD and OD-SGD."""
    rows, errors = [], []
    for ssgd, odsgd, servers in pairs(measured(), r"ssgd(@\d+|)", r"odsgd(?::optimizer_local=dcasgd_c)?(@\d+|)"):
        T_com = ssgd.iteration - ssgd.T_cop
        count = int(servers[1:]) if servers else 0
        T_wire = ssgd.workers * ssgd.n / ssgd.goodput / count if count else \
            2 * (ssgd.workers - 1) / ssgd.workers * ssgd.n / ssgd.goodput
        T_cop = odsgd.T_cop
        predicted = (timing.T_new(T_cop, T_com), timing.limit(T_cop, T_com), timing.limit(T_cop, T_wire))
        errors.append([abs(value / odsgd.iteration - 1) for value in predicted])
        rows.append([ssgd.place, count or "one each", ms(T_com), ms(T_wire), ms(odsgd.iteration),
                     *(seconds_and_error(value, odsgd.iteration) for value in predicted),
                     f"{ssgd.iteration / odsgd.iteration:.2f}"])
    middles = [f"{100 * statistics.median(column):.0f} % (at most {100 * max(column):.0f} %)"
               for column in zip(*errors)]
    rows.append([f"median of {len(errors)}", "", "", "", "", *middles, ""])
    return table("page: model, workers, links, T_cop | servers | T'_com = `ssgd` - T_cop, ms | T_wire, ms "
                 "| `odsgd`, ms | Eq. 2 | max(T_cop, T'_com) | max(T_cop, T_wire) | `ssgd` / `odsgd`", rows)


def measured_rings() -> str:
    """Pipe-SGD's Eq. 2 and 4."""
    rows = []
    for dsync, pipe, _ in pairs(measured(), r"dsync()", r"pipesgd(?::codec=\w+)?()"):
        code = pipe.system.partition("codec=")[2] or "none"
        l_comm, coded = (timing.l_ring(dsync.workers, 0, codec(name).nbytes(int(dsync.n / 4)), 1 / dsync.goodput, 0, 0)
                         for name in ("none", code))
        T_cop = dsync.T_cop
        rows.append([dsync.place, f"`{pipe.system}`", ms(coded), ms(dsync.iteration),
                     seconds_and_error(timing.l_total_sync(1, 0, T_cop, l_comm), dsync.iteration),
                     ms(pipe.iteration), seconds_and_error(timing.l_total_pipe(1, 0, T_cop, coded), pipe.iteration),
                     f"{timing.SE(0, T_cop, coded):.2f}", f"{T_cop / pipe.iteration:.2f}"])
    return table("page: model, workers, links, T_cop | system | l_comm, ms | `dsync`, ms | Eq. 2 | measured, ms "
                 "| Eq. 4, 5 | SE by Eq. 7 | measured", rows)


def measured_asgd() -> str:
    """The closed form of ASGD."""
    rows = []
    for asgd in (row for row in measured() if row.system == "asgd@1"):
        push = asgd.n / asgd.goodput
        rows.append([asgd.place, ms(push), ms(asgd.iteration), seconds_and_error(
            timing.T_async(asgd.workers, asgd.T_cop, 2 * push, push), asgd.iteration)])
    return table("page: model, workers, links, T_cop | a push, ms | `asgd`, ms | max(T_cop + T_com, M T_busy)", rows)


# --- (c) the papers' own numbers ------------------------------------------------------------------------------------

BATCH, RESNET18 = 128, 11.2e6  # ResNet18_v2's parameters
NETWORKS = {"200mbit": "Ethernet", "1gbit": "InfiniBand"}  # as the preset emulates them


@functools.lru_cache(maxsize=None)
def table_5(store: str) -> Dict[Tuple[str, int], float]:
    """Seconds per iteration in the OD-SGD paper, by network and number of workers."""
    values = yaml.safe_load(PRESETS.read_text(encoding="utf-8"))["table5"]["reference_values"]
    cells = [(key.split("/"), value) for key, value in values.items()]
    return {(NETWORKS[rate], int(workers)): BATCH * int(workers) / value for (rate, workers, _, system), value in cells
            if re.split("[:@]", system)[0] == store}


def predicted_by_two_networks(rho: float) -> Dict[Tuple[str, int], timing.Split]:
    """Passes and processors, and the network, of every row of Table 5: from the SSGD column and `rho`."""
    org = table_5("ssgd")
    return {(network, workers): split for workers in sorted({workers for _, workers in org})
            for network, split in zip(NETWORKS.values(), timing.two_networks(
                [org[name, workers] for name in NETWORKS.values()], rho))}


def rho_of_row(workers: int) -> float:
    """`rho` from the SSGD column and one number of the OD-SGD column: InfiniBand with so many workers."""
    org, new = table_5("ssgd"), table_5("odsgd")
    return timing.rho_of([org[name, workers] for name in NETWORKS.values()], new["InfiniBand", workers])


def worst(rho: float) -> float:
    """The largest error of predicted samples per second."""
    new, splits = table_5("odsgd"), predicted_by_two_networks(rho)
    return max(abs(new[row] / timing.T_new_of(split) - 1) for row, split in splits.items())


def samples(seconds: float, actual: float) -> str:
    return f"{BATCH / seconds:.1f} ({off(actual, seconds)})"


def paper_table_5() -> str:
    """OD-SGD's column of Table 5 by three models, of which each knows the SSGD column and OD-SGD's InfiniBand, 4."""
    org, new, splits = table_5("ssgd"), table_5("odsgd"), predicted_by_two_networks(rho_of_row(4))
    T_cop = new["InfiniBand", 4]
    rows = []
    for (network, workers), actual in new.items():
        split, T_com = splits[network, workers], org[network, workers] - T_cop
        rows.append([f"{network}, {workers}", f"{BATCH / org[network, workers]:.1f}", f"{BATCH / actual:.1f}",
                     samples(timing.T_new(T_cop, T_com), actual), samples(timing.limit(T_cop, T_com), actual),
                     samples(timing.T_new_of(split), actual), ms(split.T_net), ms(split.T_rest)])
    return table("network, workers | SSGD, samples/s | OD-SGD | Eq. 2 | max(T_cop, T_com) | max(T_net, T_rest) | "
                 "T_net, ms | T_rest, ms", rows)


def paper_fits() -> str:
    """The same model with its one number from elsewhere, and smaller models."""
    org, new = table_5("ssgd"), table_5("odsgd")
    grid = [number / 10000 for number in range(1, 5000)]
    best = min(grid, key=worst)
    good = [rho for rho in grid if worst(rho) <= 0.1]
    ratios = [org[row] / new[row] for row in org]
    gain = 2 * max(ratios) * min(ratios) / (max(ratios) + min(ratios))
    T_cop = min((number / 1000 for number in range(100, 1000)), key=lambda T: max(
        abs(new[row] / timing.limit(T, org[row] - T) - 1) for row in org))
    rows = [[f"max(T_net, T_rest), rho from OD-SGD's InfiniBand, {workers}", f"rho = {rho_of_row(workers):.3f}",
             f"{100 * worst(rho_of_row(workers)):.1f} %"] for workers in (4, 8, 12)]
    rows += [["the same, rho of the links' rates", f"rho = 10/56 = {10 / 56:.3f}", f"{100 * worst(10 / 56):.1f} %"],
             ["the same, the best rho", f"rho = {best:.3f}", f"{100 * worst(best):.1f} %"],
             ["the same, within 10 %", f"rho = {good[0]:.3f} to {good[-1]:.3f}", "10 %"],
             ["SSGD times a factor, the best", f"{gain:.3f}",
              f"{100 * max(abs(gain / ratio - 1) for ratio in ratios):.1f} %"],
             ["max(T_cop, T_org - T_cop), the best", f"T_cop = {ms(T_cop)} ms", "{:.1f} %".format(
                 100 * max(abs(new[row] / timing.limit(T_cop, org[row] - T_cop) - 1) for row in org))]]
    return table("model | its one number | largest error of the six", rows)


def paper_says() -> str:
    """What the fit says about the cluster: straight lines over the number of workers."""
    splits, nbytes = predicted_by_two_networks(rho_of_row(4)), 4 * RESNET18
    rows = []
    for what, values in (("T_rest", {workers: split.T_rest for (_, workers), split in splits.items()}),
                         *((f"T_net, {network}", {workers: split.T_net for (name, workers), split in splits.items()
                                                  if name == network}) for network in NETWORKS.values())):
        mean_M, mean_T = statistics.mean(values), statistics.mean(values.values())
        slope = sum((M - mean_M) * (T - mean_T) for M, T in values.items()) / sum((M - mean_M) ** 2 for M in values)
        rows.append([what, ms(mean_T - slope * mean_M), ms(slope), f"{nbytes / slope / 1e9:.1f}",
                     f"{2 * 8 * nbytes / slope / 1e9:.0f}"])
    return table("time | with no worker, ms | per worker, ms | the model in that time, GB/s | there and back, Gbit/s",
                 rows)


# --- the page -------------------------------------------------------------------------------------------------------

def tables() -> Dict[str, str]:
    """By the names they have on the page."""
    return {"virtual delays": virtual_delays(), "measured delays": measured_delays(), "Table 5": paper_table_5(),
            "fits": paper_fits(), "cluster": paper_says(), "virtual rings": virtual_rings(),
            "measured rings": measured_rings(), "virtual others": virtual_others(), "measured asgd": measured_asgd()}


def written(page: str) -> str:
    """The page with its tables as they should be."""
    for name, text in tables().items():
        page = put(page, f"<!-- {name} -->", text)
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
