#!/usr/bin/env python3
"""What an asynchronous rule costs the server: from a push's arrival to its answer, beside stock MXNet in the same run.

    scripts/maintain/bench_rules.py [--pushes N] [--repeat N] [--rule-workers M] [--floats N] [--json FILE]

Real processes on this machine: one server, one worker, one bucket per rule, one push under way at a time. Two kinds of
job, one after the other, `--repeat` times: MXNet's dist_async with plain SGD, and one with a store for every rule, each
with plain SGD. A job's rules take turns in blocks of pushes.

    server    in the server's one thread: the update callback, and until the weights it has changed can be sent
    worker    round trip: from pushpull, the gradient being ready, until the new weights can be read

The server's rules are made for `--rule-workers` workers, though one pushes: softsync with n = 1 collects that many.
"""
import argparse
import dataclasses
import io
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

STOCK = "dist_async"
RULES: Dict[str, Tuple[str, Dict[str, Any]]] = {
    "asgd": ("asgd", {}),
    "dcasgd_c": ("dcasgd_c", {}),
    "dcasgd_a": ("dcasgd_a", {}),
    "softsync n=M": ("softsync", {}),
    "softsync n=1": ("softsync", {"n": 1}),
    "downpour T=1": ("downpour", {}),
    "easgd T=1": ("easgd", {"T": 1, "beta": 0.2}),  # the one worker stands for several: with 0.9 it would diverge
}
BLOCK = 25  # pushes of one rule before the next one's turn
WARM_UP = 25  # pushes of each rule that do not count


def serve(way: str, floats: int, rule_workers: int, file: str) -> None:
    """Be the scheduler or the server of a job, with a clock round the update callback."""
    role = os.environ["DMLC_ROLE"]
    from kvstore.engine._mxnet import mx  # without entering MXNet's own server loop
    from kvstore.job import environment
    from kvstore.messages.header import HEADER
    from kvstore.weights.servers import roles, server
    taken: Dict[int, List[float]] = {}
    size = floats if way == STOCK else floats + HEADER
    install = mx.kvstore.KVStore._set_updater
    mx.kvstore.KVStore._set_updater = lambda store, updater: install(store, timed(updater, size, taken))

    def save() -> None:
        if role == "server":
            Path(file + "-server.json").write_text(json.dumps(taken))

    if way == STOCK:
        try:
            mx.kvstore.kvstore_server._init_kvstore_server_module()
        finally:
            save()
    else:
        change(server, rule_workers, save)
        environment.serving = True
        roles.main()


def timed(updater: Callable[..., None], size: int, taken: Dict[int, List[float]]) -> Callable[..., None]:
    def update(key: int, pushed: Any, stored: Any) -> None:
        if pushed.size != size:
            return updater(key, pushed, stored)
        start = time.perf_counter()
        updater(key, pushed, stored)
        stored.wait_to_read()  # as MXNet does before it answers
        taken.setdefault(key, []).append(1e6 * (time.perf_counter() - start))
    return update


def change(server: Any, rule_workers: int, save: Callable[[], None]) -> None:
    """Let rules be made for that many workers, and save before the launcher is told that the server has done."""
    class Shard(server.Shard):
        def _open(self, **payload: Any) -> None:
            counted: int = self.num_workers
            self.num_workers: int = rule_workers
            super()._open(**payload)
            self.num_workers = counted

    class Server(server.Server):
        def _leave(self, sender: int) -> None:
            save()
            super()._leave(sender)

    server.Shard, server.Server = Shard, Server


def work(way: str, floats: int, pushes: int, file: str) -> None:
    """The worker: time round trips."""
    import odsgd  # noqa: F401
    from kvstore.engine._mxnet import mx
    sides = {STOCK: stock(mx, floats)} if way == STOCK else {name: ours(mx, name, floats) for name in RULES}
    round_trips: Dict[str, List[float]] = {name: [] for name in sides}
    for start in range(0, WARM_UP + pushes, BLOCK):
        for name, (_, exchange) in sides.items():
            for _ in range(min(BLOCK, WARM_UP + pushes - start)):
                round_trips[name].append(exchange())
    Path(file + "-worker.json").write_text(json.dumps({
        name: {"key": sides[name][0], "round_trips": times} for name, times in round_trips.items()}))


def stock(mx: Any, floats: int) -> Tuple[int, Callable[[], float]]:
    store = mx.kv.create(STOCK)
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.01))
    grad, weight = mx.nd.ones(floats) * 1e-3, mx.nd.ones(floats)
    store.init(0, weight)
    return 0, lambda: round_trip(mx, store, 0, grad, weight)


def ours(mx: Any, name: str, floats: int) -> Tuple[int, Callable[[], float]]:
    import kvstore
    kind, options = RULES[name]
    store = kvstore.create(kind, bucket_nbytes=4 * floats, **options)
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.01))
    grad, weight = mx.nd.ones(floats) * 1e-3, mx.nd.ones(floats)
    store.broadcast(0, weight, weight)
    store.begin()
    bucket, = [lane.bucket for lane in store.lanes]
    return bucket.id, lambda: round_trip(mx, store, 0, grad, weight)


def round_trip(mx: Any, store: Any, key: int, grad: Any, weight: Any) -> float:
    mx.nd.waitall()
    start = time.perf_counter()
    store.pushpull(key, grad, out=weight)
    weight.wait_to_read()
    return 1e6 * (time.perf_counter() - start)


def run(way: str, options: argparse.Namespace) -> Dict[str, Dict[str, List[float]]]:
    """One job: rule -> `server` and `worker` -> microseconds of each push."""
    from odsgd.launch import command, supervisor
    from odsgd.launch.view import console
    with tempfile.TemporaryDirectory() as folder:
        file = folder + "/times"
        words = ["--way", way, "--floats", str(options.floats), "--pushes", str(options.pushes), "--file", file,
                 "--rule-workers", str(options.rule_workers)]
        job = dataclasses.replace(command.parse(["-n", "1", "-s", "1", __file__, "--be", "worker", *words]),
                                  server_command=(sys.executable, __file__, "--be", "server", *words))
        said = io.StringIO()
        code = supervisor.run(job, console.Console(said, said))
        if code or not Path(file + "-server.json").exists():
            sys.exit(f"bench_rules: the job of `{way}` ended with {code}:\n{said.getvalue()}")
        served = json.loads(Path(file + "-server.json").read_text())
        worked = json.loads(Path(file + "-worker.json").read_text())
        return {name: {"server": served[str(one["key"])][WARM_UP:], "worker": one["round_trips"][WARM_UP:]}
                for name, one in worked.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pushes", type=int, default=200, help="pushes per rule and job that count")
    parser.add_argument("--repeat", type=int, default=10, help="jobs of each kind, interleaved")
    parser.add_argument("--rule-workers", type=int, default=4, help="workers that the rules are made for")
    parser.add_argument("--floats", type=int, default=64 * 1024, help="size of the bucket")
    parser.add_argument("--json", type=Path, help="write every job's medians there")
    parser.add_argument("--be", choices=("worker", "server"), help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be == "server":
        return serve(options.way, options.floats, options.rule_workers, options.file)
    if options.be == "worker":
        return work(options.way, options.floats, options.pushes, options.file)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    measured: Dict[str, Dict[str, List[float]]] = {}
    for repetition in range(options.repeat):
        for way in (STOCK, "ours"):
            print(f"\rrun {repetition + 1} of {options.repeat}: {way:12}", end="", file=sys.stderr, flush=True)
            for name, times in run(way, options).items():
                into = measured.setdefault(name, {"server": [], "server p90": [], "server mean": [], "worker": []})
                into["server"].append(statistics.median(times["server"]))
                into["server p90"].append(statistics.quantiles(times["server"], n=10)[-1])
                into["server mean"].append(statistics.mean(times["server"]))
                into["worker"].append(statistics.median(times["worker"]))
    print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(measured, indent=1))
    show(measured, options)


def show(measured: Dict[str, Dict[str, List[float]]], options: argparse.Namespace) -> None:
    load = " ".join(f"{one:.1f}" for one in os.getloadavg())
    print(f"one push of {options.floats} floats, 1 server, 1 worker, loopback, {os.cpu_count()} cores, load {load};\n"
          f"rules for {options.rule_workers} workers; microseconds: median over {options.repeat} jobs (their range)\n"
          f"of a job's median, 90th percentile and mean of {options.pushes} pushes\n")
    print(f"{'':14}{'server':>24}{'x stock':>9}{'p90':>8}{'mean':>8}{'worker, round trip':>28}{'x stock':>9}")
    for name, one in measured.items():
        cells = []
        for side in ("server", "worker"):
            median = statistics.median(one[side])
            ratio = median / statistics.median(measured[STOCK][side])
            spread = f"{median:.0f} ({min(one[side]):.0f} – {max(one[side]):.0f})"
            cells.append(f"{spread:>{24 if side == 'server' else 28}}{ratio:9.2f}")
        tail = "".join(f"{statistics.median(one[part]):8.0f}" for part in ("server p90", "server mean"))
        print(f"{name:14}{cells[0]}{tail}{cells[1]}")


if __name__ == "__main__":
    main()
